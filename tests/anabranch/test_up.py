"""`anabranch up` with one's own config and broker: what was produced is in predictions, and parts come back."""

import contextlib
import http.client
import itertools
import json
import os
import signal
import threading
from functools import partial

import pytest

from anabranch.commands.demo.load_generator import request_body
from anabranch.learner.stream.trained_through import parse_trained_through
from tests.support.waiting import PATIENCE_SECONDS, slowness

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def anabranch(spawn, example, kafka, make_topic, free_port):
    """Starts a command of the example pipeline on its own topic and ports; has the port of serving as `port`."""
    environment = {
        "ANABRANCH__STREAM__BOOTSTRAP_SERVERS": kafka.bootstrap,
        "ANABRANCH__STREAM__TOPICS": json.dumps([make_topic(2)]),
        "ANABRANCH__LEARNER__STATUS": "127.0.0.1:0",
        "ANABRANCH__SERVING__PORT": str(free_port()),
        # Each refusal while there is no version would be a line, until nobody reads the pipe that they fill.
        "ANABRANCH__SERVING__REQUEST_LOG": "none",
    }

    def start(*arguments, **changes):
        return spawn("-m", "anabranch", *arguments, environment=environment | changes, cwd=example)

    start.port = int(environment["ANABRANCH__SERVING__PORT"])
    return start


@pytest.fixture
def trained_through(anabranch):
    """Asks for a prediction, and returns how far its model has learned; None when there is no good reply."""

    def ask():
        connection = http.client.HTTPConnection("127.0.0.1", anabranch.port, timeout=PATIENCE_SECONDS)
        try:
            connection.request("POST", "/v2/models/digits/infer", request_body([0.5] * 64))
            response = connection.getresponse()
            content = response.read()
        except OSError:
            return None
        finally:
            connection.close()
        return (
            parse_trained_through(json.loads(content)["parameters"]["trained_through"])
            if response.status == 200
            else None
        )

    return ask


@contextlib.contextmanager
def asked_all_the_while(ask):
    """Asks again and again until the end; each reply has to be a good one, and none may know less than one before."""
    done, replies = threading.Event(), []

    def run():
        while not done.wait(0.02):
            replies.append(ask())

    asker = threading.Thread(target=run)
    asker.start()
    try:
        yield
    finally:
        done.set()
        asker.join()
    assert len(replies) > 20
    assert None not in replies, f"reply {replies.index(None)} of {len(replies)} was none"
    assert all(reaches(later, earlier) for earlier, later in itertools.pairwise(replies))


def produced(anabranch):
    process = anabranch("produce", "events.jsonl")
    out, said = process.communicate(timeout=60 * slowness())
    assert process.returncode == 0, said
    return parse_trained_through(out.strip())


def reaches(learned, target):
    return learned is not None and all(learned.get(name, -1) >= offset for name, offset in target.items())


def pid_of(example, part):
    try:
        return json.loads((example / "var" / f"{part}.json").read_text())["pid"]
    except FileNotFoundError:
        return None


def scheduling_of(example):
    return json.loads((example / "var" / "learner.json").read_text())["device_sharing"]["scheduling"]


def test_what_is_produced_is_soon_in_predictions_also_after_a_part_was_killed(
    anabranch, trained_through, until, example
):
    first = produced(anabranch)
    process = anabranch("up")
    until(lambda: reaches(trained_through(), first), "a prediction that has learned the first events")
    pids = [until(partial(pid_of, example, part), f"a report of {part}") for part in ("learner", "serving")]
    with asked_all_the_while(trained_through):
        os.kill(pids[0], signal.SIGKILL)
        until(lambda: pid_of(example, "learner") != pids[0], "another learner")
        second = produced(anabranch)
        until(lambda: reaches(trained_through(), second), "a prediction that has learned the second events")
    assert pid_of(example, "serving") == pids[1]
    until(lambda: scheduling_of(example), "a learner that waits for serving")
    process.terminate()
    _, said = process.communicate(timeout=60 * slowness())
    assert process.returncode == 0, said
    assert f"learner (pid {pids[0]}) ended with SIGKILL; it is started again now" in said


def test_a_model_that_does_not_fit_ends_up_with_exit_code_2(anabranch):
    process = anabranch("up", ANABRANCH__MODEL__FACTORY="my_model:nothing")
    _, said = process.communicate(timeout=90 * slowness())
    assert process.returncode == 2, said
    assert "has no function or class nothing" in said


def test_a_missing_topic_ends_up_with_exit_code_3_and_the_way_out(anabranch):
    process = anabranch("up", ANABRANCH__STREAM__TOPICS='["none-such"]')
    _, said = process.communicate(timeout=90 * slowness())
    assert process.returncode == 3, said
    assert 'anabranch: topic "none-such" does not exist' in said
    assert "anabranch produce --create-topic" in said
