"""Servers that follow an object store: what clients and operators see."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import httpx
import msgspec
import pytest

from anabranch.core.errors import SettingsError
from anabranch.core.object_store.bucket import Bucket, BucketAwayError, ReplacedError
from anabranch.learner.object_storage.fleet import FleetRollout, RolloutFile, read_servers
from anabranch.learner.status.report import LearnerReport, write_report
from anabranch.learner.versions.format import Verdict
from anabranch.serving.fleet.follower import VersionFollower
from anabranch.serving.reporting.health import judge
from tests.serving.conftest import wait_until
from tests.support.waiting import PATIENCE_SECONDS


@pytest.fixture(autouse=True)
def _members_poll_often(monkeypatch):
    monkeypatch.setattr("anabranch.serving.fleet.member._POLL_EVERY", timedelta(seconds=0.05))


@pytest.fixture
def pair(learning, followed, served):
    """Two servers of one fleet."""
    learning.publish(1)
    with served(followed("a")) as a, served(followed("b")) as b:
        yield a, b


def ask(server, body):
    reply = httpx.post(server.infer, json=body, timeout=PATIENCE_SECONDS)
    assert reply.status_code == 200, reply.text
    return reply.json()["model_version"]


def order(server, action, number):
    return httpx.post(f"{server.url}/api/versions/{number}:{action}", timeout=PATIENCE_SECONDS)


@pytest.mark.slow
def test_a_request_for_what_is_not_learned_yet_waits_at_the_server_that_lags(
    pair, learning, body_of, monkeypatch, eventually
):
    ahead, behind = pair
    poll, released = VersionFollower.poll, threading.Event()

    def lags(follower):
        return poll(follower) if released.is_set() or follower._versions.path.parts[-3] == "a" else False

    monkeypatch.setattr(VersionFollower, "poll", lags)
    learning.publish(2)
    body = body_of(1, parameters={"min_trained_through": "events:0=20"})
    assert ask(ahead, body) == "2"
    assert ask(behind, body_of(1)) == "1"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, behind, body)
        assert ask(behind, body_of(1)) == "1"  # others do not wait
        assert not waiting.done()
        released.set()
        assert waiting.result(PATIENCE_SECONDS) == "2"


@pytest.mark.slow
def test_a_command_at_one_server_reaches_the_other(pair, learning, body_of, eventually):
    a, b = pair
    learning.publish(2)
    learning.publish(3)
    eventually(lambda: [ask(server, body_of(1)) for server in pair] == ["3", "3"])
    reply = order(a, "rollback", 1)
    assert (reply.status_code, reply.json()["serving"]) == (200, 1)
    eventually(lambda: ask(b, body_of(1)) == "1")
    assert order(b, "promote", 3).status_code == 200
    eventually(lambda: ask(a, body_of(1)) == "3")
    assert order(b, "reject", 3).status_code == 200
    eventually(lambda: [ask(server, body_of(1)) for server in pair] == ["1", "1"])
    assert b.deployment.versions.state().rolled_back == a.deployment.versions.state().rolled_back == [2, 3]


@pytest.mark.slow
def test_a_command_copies_the_version_that_it_names(pair, learning, body_of, eventually):
    a, b = pair
    learning.publish(2, 3, 4)
    eventually(lambda: [ask(server, body_of(1)) for server in pair] == ["4", "4"])
    assert order(a, "pin", 2).status_code == 200
    assert ask(a, body_of(1)) == "2"
    eventually(lambda: ask(b, body_of(1)) == "2")


@pytest.mark.slow
def test_a_command_for_a_version_that_is_not_there_names_those_of_the_fleet(pair):
    reply = order(pair[0], "promote", 9)
    assert (reply.status_code, reply.json()["error"]) == (404, "there is no version 9; there are 1 to 1")


@pytest.mark.slow
def test_a_command_is_refused_while_the_object_store_is_away_and_changes_nothing(pair, body_of, monkeypatch):
    a, _ = pair

    def away(self, *_):
        raise BucketAwayError(f"{self.url}: connection refused")

    monkeypatch.setattr(Bucket, "read_changed", away)
    reply = order(a, "pin", 1)
    assert reply.status_code == 503
    assert reply.json()["error"].startswith(
        "rollout commands are for all servers, and are refused while the object store cannot be reached: memory://"
    )
    assert a.deployment.versions.state().pinned is None
    assert ask(a, body_of(1)) == "1"  # and what is here is served
    assert httpx.get(f"{a.url}/v2/health/ready").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(("error", "status"), [(ReplacedError("another"), 409), (BucketAwayError("away"), 503)])
def test_a_command_that_the_fleet_does_not_take_is_undone_here(
    pair, learning, body_of, monkeypatch, eventually, error, status
):
    a, _ = pair
    learning.publish(2)
    eventually(lambda: ask(a, body_of(1)) == "2")

    def fails(*_):
        raise error

    monkeypatch.setattr(RolloutFile, "replace", fails)
    assert order(a, "rollback", 1).status_code == status
    assert ask(a, body_of(1)) == "2"
    assert a.deployment.versions.state().promoted is None


@pytest.mark.slow
def test_a_command_that_is_refused_leaves_a_version_that_is_judged_on_canaries_unserved(
    learning, followed, served, body_of, monkeypatch, storage
):
    learning.publish(1)
    RolloutFile(storage.bucket).replace(FleetRollout(stable=1, canary=2, canaries=["other"]))
    with served(followed("a")) as a:
        learning.publish(2)
        assert ask(a, body_of(1)) == "1"

        def fails(*_):
            raise ReplacedError("another")

        monkeypatch.setattr(RolloutFile, "replace", fails)
        assert order(a, "promote", 2).status_code == 409
        assert ask(a, body_of(1)) == "1"
        assert a.deployment.versions.verdict(2).verdict == "fail"
        monkeypatch.undo()
        assert order(a, "promote", 2).status_code == 200
        assert ask(a, body_of(1)) == "2"


@pytest.mark.slow
def test_a_server_that_is_no_canary_any_more_returns_to_the_stable_version(
    pair, learning, storage, body_of, eventually
):
    a, _ = pair
    rollout = RolloutFile(storage.bucket)
    rollout.replace(FleetRollout(stable=1, canary=2, canaries=[a.report().server]))
    learning.publish(2)
    eventually(lambda: ask(a, body_of(1)) == "2")
    rollout.replace(FleetRollout(stable=1, canary=2, canaries=["other"]))
    eventually(lambda: ask(a, body_of(1)) == "1")


@pytest.mark.slow
def test_decisions_that_cannot_be_read_are_a_problem(learning, followed, served, storage, body_of, monkeypatch):
    learning.publish(1)
    with served(followed("a")) as running:
        assert ask(running, body_of(1)) == "1"
    monkeypatch.setattr("anabranch.serving.fleet.member._PATIENCE", timedelta(0))
    storage.bucket.write("rollout.json", b"{")
    with served(followed("a")) as running:
        wait_until(lambda: any("rollout.json cannot be used" in each for each in running.report().problems))
        assert running.report().follow_lag_seconds > 0
        assert ask(running, body_of(1)) == "1"


@pytest.mark.slow
def test_servers_report_themselves_and_leave_when_they_stop(learning, followed, served, storage, eventually):
    learning.publish(1)
    with served(followed("a")) as running:
        port = running.url.rpartition(":")[2]
        (server,) = eventually(lambda: [each for each in read_servers(storage.bucket) if each.version == 1])
        assert server.id.endswith(f"-{port}")
        assert (server.address, server.ready) == (running.url, True)
        assert running.report().server == server.id
        eventually(lambda: running.report().follow_lag_seconds == 0.0)  # a copy ends after its version is there
        metrics = httpx.get(f"{running.url}/metrics").text
        assert "anabranch_serving_follow_lag_seconds 0.0" in metrics
    assert read_servers(storage.bucket) == []


@pytest.mark.slow
def test_a_server_on_a_host_without_a_learner_is_well(pair):
    assert judge(None, pair[0].report(), silent=False).state == "well"
    alone = msgspec.structs.replace(pair[0].report(), server=None)
    assert judge(None, alone, silent=False).state == "starting"


@pytest.mark.slow
def test_what_is_published_is_served_on_every_server_until_the_gate_withdraws_it(pair, learning, body_of, eventually):
    assert [ask(server, body_of(1)) for server in pair] == ["1", "1"]
    learning.publish(2)
    eventually(lambda: [ask(server, body_of(1)) for server in pair] == ["2", "2"])
    learning.uploader.judge(2, Verdict("fail", ["it was worse"]))
    eventually(lambda: [ask(server, body_of(1)) for server in pair] == ["1", "1"])


@pytest.mark.slow
def test_the_canary_answers_at_the_canaries_alone(learning, followed, served, storage, body_of, eventually):
    learning.publish(1)
    rollout = RolloutFile(storage.bucket)
    rollout.replace(FleetRollout(stable=1))  # before a server could take version 2 because nothing is decided
    with served(followed("a")) as a, served(followed("b")) as b:
        rollout.replace(FleetRollout(stable=1, canary=2, canaries=[a.report().server]))
        learning.publish(2)
        eventually(lambda: ask(a, body_of(1)) == "2")
        assert ask(b, body_of(1)) == "1"
        rollout.replace(FleetRollout(stable=2))
        eventually(lambda: ask(b, body_of(1)) == "2")


def test_a_state_directory_that_a_learner_writes_is_refused(followed, served):
    publisher = followed("a")
    publisher.deployment.state_dir.mkdir(parents=True)
    write_report(publisher.deployment.state_dir, LearnerReport(pid=1, generation=1, started=0.0, time=0.0, steps=0))
    with pytest.raises(SettingsError, match=r"give this server its own state_dir"), served(publisher):
        pass


@pytest.mark.slow
def test_a_server_that_starts_without_the_object_store_serves_what_it_has(
    learning, followed, served, body_of, monkeypatch
):
    learning.publish(1)
    with served(followed("a")) as running:
        assert ask(running, body_of(1)) == "1"

    def away(self, *_):
        raise BucketAwayError(f"{self.url}: connection refused")

    monkeypatch.setattr(Bucket, "read_changed", away)
    monkeypatch.setattr("anabranch.serving.fleet.follower._PATIENCE", timedelta(0))
    with served(followed("a")) as running:
        assert ask(running, body_of(1)) == "1"
        wait_until(lambda: any("new versions cannot be followed" in each for each in running.report().problems))
        assert running.report().ready
