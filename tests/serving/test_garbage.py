"""Requests leave no garbage in cycles, so the collector rarely has to look for any."""

import contextlib
import gc
import json
from http.client import HTTPConnection

import pytest


@pytest.fixture
def no_collections():
    """Collect garbage only where the test does."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.usefixtures("no_collections")
def test_requests_leave_no_garbage_whether_they_are_answered_or_refused(numbers, served, body_of):
    numbers.publish(1)
    bodies = [json.dumps(each) for each in (body_of(1), body_of(2), {"inputs": []}, {"inputs": [{"name": "x"}]})]
    with served(numbers) as server, contextlib.closing(HTTPConnection(server.address)) as client:

        def ask(requests):
            found = set()
            for number in range(requests):
                client.request("POST", server.infer.removeprefix(server.url), bodies[number % len(bodies)])
                with client.getresponse() as response:
                    found.add(response.status)
                    response.read()
            return found

        ask(len(bodies))
        gc.disable()  # the server enables it at its start
        gc.collect()
        assert ask(600) == {200, 400}
        assert gc.collect() < 600  # objects, of others, such as the server's start: not one for each request


@pytest.mark.slow
def test_a_server_collects_less_often_while_it_runs(numbers, served):
    before = gc.get_threshold()
    numbers.publish(1)
    with served(numbers):
        assert gc.get_threshold() == (10_000, *before[1:])
    assert gc.get_threshold() == before
