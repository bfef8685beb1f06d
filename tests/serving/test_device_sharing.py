"""Serving's side of device sharing: what a server marks for the learner."""

import importlib
import threading
from datetime import timedelta

import httpx
import pytest

from anabranch.learner.device.lease import Field, Servers

MODULE = "anabranch_serving_test_models"


@pytest.mark.slow
def test_a_server_marks_a_request_for_as_long_as_it_waits(numbers, served, body_of, eventually):
    numbers.publish(1)
    with served(numbers, slo="1ms") as running:
        models = importlib.import_module(MODULE)
        seen = Servers(running.deployment.state_dir, timedelta(seconds=60))
        seen.refresh()
        assert (seen.alive, seen.since(Field.WAITING), seen.since(Field.RUNNING)) == (1, 0, 0)
        models.go_on.clear()
        try:
            codes: list[int] = []
            asking = threading.Thread(
                target=lambda: codes.append(httpx.post(running.infer, json=body_of(1), timeout=30).status_code)
            )
            asking.start()
            since = eventually(lambda: seen.since(Field.RUNNING))
            assert 0 < seen.since(Field.WAITING) <= since
        finally:
            models.go_on.set()
        asking.join()
        assert codes == [200]
        eventually(lambda: (seen.since(Field.WAITING), seen.since(Field.RUNNING)) == (0, 0))
        assert (seen.total(Field.ANSWERED), seen.total(Field.LATE)) == (1, 1)
        seen.close()


@pytest.mark.slow
def test_a_request_that_is_refused_leaves_no_mark(numbers, served, body_of):
    numbers.publish(1)
    with served(numbers, max_queue=2) as running:
        seen = Servers(running.deployment.state_dir, timedelta(seconds=60))
        seen.refresh()
        assert httpx.post(running.infer, json=body_of(3)).status_code >= 400
        assert (seen.since(Field.WAITING), seen.total(Field.ANSWERED)) == (0, 0)
        seen.close()
    after = Servers(running.deployment.state_dir, timedelta(seconds=60))
    after.refresh()
    assert after.alive == 0
    after.close()
