"""The process of MLflow's client: whatever a server answers, the learner goes on, and so does the registration."""

import contextlib
import gzip
import json
import os
import threading
from datetime import timedelta

import pytest

from anabranch.core.errors import SettingsError
from anabranch.learner.errors import TrackerError
from anabranch.learner.extensions.track import process as module
from anabranch.learner.extensions.track.process import Registration, TrackedRun, Tracker
from anabranch.learner.settings.track import TrackSettings
from tests.support.http_server import Handler, serving
from tests.support.waiting import PATIENCE_SECONDS, wait_until

pytestmark = [pytest.mark.process, pytest.mark.slow]
VERSION = Registration(1, "a" * 64, 1, 1.0, {"anabranch.pipeline": "digits"}, {"now": 0.5})
RUN = TrackedRun("digits", "generation-3-0a1b2c3d", {}, "")
BOMB = 300_000_000


@pytest.fixture
def open_registry():
    made: list[Tracker] = []

    def make(url):
        made.append(Tracker(TrackSettings(kind="mlflow", url=url), RUN, "digits", "s3://models/{number}"))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def hostile():
    """Serve answers that a function writes; returns the URL."""
    with contextlib.ExitStack() as stack:

        def serve(write):
            class Hostile(Handler):
                def do_GET(self):
                    self.rfile.read(int(self.headers.get("Content-Length", 0)))
                    self.send_response(200)
                    self.send_header("Content-Type", "application/json")
                    write(self)

                do_POST = do_GET

            return stack.enter_context(serving(Hostile))

        yield serve


def test_a_version_is_registered_and_the_process_stays(mlflow, open_registry):
    registry = open_registry(mlflow.url)
    registered = registry.register(VERSION)
    process = registry._process
    registry.move_alias(registered)
    registry.tag(registered, "a", "b")
    assert mlflow.aliases == {("digits", "served"): registered}
    assert mlflow.tags(0)["a"] == "b"
    assert registry._process is process


def test_an_answer_that_unpacks_to_more_than_is_allowed_is_an_error_and_the_learner_takes_no_memory(
    hostile, open_registry
):
    packed = gzip.compress(b'{"experiment":{"experiment_id":"' + b"1" * BOMB + b'"}}', 1)

    def write(handler):
        handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Content-Length", str(len(packed)))
        handler.end_headers()
        handler.wfile.write(packed)

    registry = open_registry(hostile(write))
    for _ in range(2):
        with pytest.raises(TrackerError, match=r"version 1 cannot be registered at http.* more than 256 MB"):
            registry.register(VERSION)


def test_an_answer_of_other_types_is_an_error_that_passes(hostile, open_registry):
    def write(handler):
        content = json.dumps({"experiment": {"experiment_id": [{}]}, "runs": 7, "registered_model": None}).encode()
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    with pytest.raises(TrackerError, match=r"version 1 cannot be registered at http.*: an answer cannot be used"):
        open_registry(hostile(write)).register(VERSION)


def test_a_server_that_answers_byte_after_byte_is_given_up_and_asked_again(hostile, open_registry, monkeypatch):
    ended, asked = threading.Event(), threading.Semaphore(0)

    def write(handler):
        handler.end_headers()
        asked.release()
        while not ended.wait(0.01):
            handler.wfile.write(b" ")

    monkeypatch.setattr(module, "_LONGEST_CALL", timedelta(seconds=1))
    registry = open_registry(hostile(write))
    try:
        for _ in range(2):
            with pytest.raises(TrackerError, match=r"mlflow at http.* does not answer within 1s"):
                registry.register(VERSION)
            assert asked.acquire(timeout=PATIENCE_SECONDS)
    finally:
        ended.set()


def test_the_process_may_be_killed_and_ends_during_a_call_with_the_registry(mlflow, open_registry):
    registry = open_registry(mlflow.url)
    assert registry._process is not None
    os.kill(registry._process.pid, 9)
    with pytest.raises(TrackerError, match="the process of its client has ended with code -9"):
        registry.register(VERSION)
    mlflow.go_on = threading.Event()
    failed: list[Exception] = []

    def register():
        try:
            registry.register(VERSION)
        except TrackerError as exc:
            failed.append(exc)

    thread = threading.Thread(target=register)
    thread.start()
    assert mlflow.asked.wait(PATIENCE_SECONDS)
    process = registry._process
    assert process is not None
    registry.close()
    mlflow.go_on.set()
    thread.join(PATIENCE_SECONDS)
    wait_until(lambda: process.poll() is not None)
    assert len(failed) == 1


def test_an_address_that_the_client_refuses_is_a_wrong_setting(open_registry):
    with pytest.raises(SettingsError, match=r'track.url = "nothing://m"'):
        open_registry("nothing://m")


def test_a_machine_that_is_too_busy_at_the_start_is_no_wrong_setting(mlflow, open_registry, monkeypatch):
    with monkeypatch.context() as busy:
        busy.setattr(module, "_LONGEST_START", timedelta(0))
        registry = open_registry(mlflow.url)
    assert registry.register(VERSION) == "1"
