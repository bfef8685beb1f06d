import contextlib
import threading
from datetime import timedelta

import pytest

from anabranch.core.object_store.bucket import Bucket
from anabranch.learner.object_storage.fleet import (
    REPORT_EVERY,
    SILENT,
    FleetReader,
    FleetRollout,
    FleetServer,
    RolloutFile,
    read_servers,
    write_server,
)
from anabranch.learner.versions.format import RegistryState
from tests.support.waiting import PATIENCE_SECONDS


def test_a_command_of_the_fleet_reaches_the_state_of_each_host_and_leaves_what_it_serves(hosts, storage):
    host = hosts("a")
    host.versions.write_state(RegistryState(serving=7, previous=6, rolled_back=[3]))
    host.member.poll()
    RolloutFile(storage.bucket).replace(FleetRollout(pinned=5, rolled_back=[9, 8]))
    host.member.poll()
    assert host.versions.state() == RegistryState(serving=7, previous=6, pinned=5, rolled_back=[8, 9])


def test_a_server_reports_what_it_needs(hosts, storage):
    host = hosts("a")
    host.versions.write_state(RegistryState(serving=7, previous=6))
    host.member.poll()
    (server,) = read_servers(storage.bucket)
    assert (server.id, server.needed) == ("a", {7, 6})


def test_a_server_that_ends_in_order_is_no_longer_listed(hosts, storage):
    host = hosts("a")
    with host.member:
        while not read_servers(storage.bucket):
            pass
    assert read_servers(storage.bucket) == []


def test_a_server_that_ends_because_of_an_error_has_crashed(hosts, storage):
    host = hosts("a")
    host.versions.write_state(RegistryState(serving=7))
    host.member._has_failed = lambda: True
    with host.member:
        while not read_servers(storage.bucket):
            pass
    hosts("a").member.poll()
    (server,) = read_servers(storage.bucket)
    assert server.crashes == {7: 1}


def test_a_process_that_ended_without_a_last_report_is_a_crash_of_its_version(hosts, storage):
    first = hosts("a")
    first.versions.write_state(RegistryState(serving=7))
    first.member.poll()
    hosts("a").member.poll()
    hosts("a").member.poll()
    (server,) = read_servers(storage.bucket)
    assert server.crashes == {7: 2}
    assert server.beat == 3


def test_a_process_that_dies_of_a_canary_while_it_loads_it_is_a_crash_of_the_canary(hosts, storage):
    first = hosts("a")
    first.versions.write_state(RegistryState(serving=10))
    first.member.poll()
    RolloutFile(storage.bucket).replace(FleetRollout(stable=10, canary=11, canaries=["a"]))
    first.member.poll()
    (server,) = read_servers(storage.bucket)
    assert (server.version, server.taking) == (10, 11), "it is reported at once, and before the follower takes it"
    for _ in range(2):
        hosts("a").member.poll()
    (server,) = read_servers(storage.bucket)
    assert server.crashes == {11: 2}


def test_a_canary_is_not_taken_before_it_is_reported(hosts, storage, monkeypatch):
    host = hosts("a")
    RolloutFile(storage.bucket).replace(FleetRollout(stable=10, canary=11, canaries=["a"]))

    def away(*_):
        raise OSError("away")

    with monkeypatch.context() as patch:
        patch.setattr("anabranch.serving.fleet.member.write_server", away)
        with pytest.raises(OSError, match="away"):
            host.member.poll()
        assert host.member.rollout is None
    host.member.poll()
    assert host.member.rollout.canary == 11


def test_a_server_is_silent_when_its_report_stays_the_same(storage):
    bucket, now = storage.bucket, [0.0]
    reader = FleetReader(bucket, lambda: now[0])
    for name in ("a", "b"):
        write_server(bucket, FleetServer(id=name, beat=1, time=0.0, address="", ready=True))
    assert [server.id for server in reader.read()] == ["a", "b"]

    def read_until(seconds):
        for second in range(int(now[0]) + 5, seconds + 1, 5):
            now[0] = second
            servers = reader.read()
        return [server.id for server in servers]

    assert read_until(int(SILENT.total_seconds()) - 5) == ["a", "b"]
    write_server(bucket, FleetServer(id="b", beat=2, time=0.0, address="", ready=True))
    assert read_until(int(SILENT.total_seconds())) == ["b"]
    read_until(3600)
    assert [server.id for server in read_servers(bucket)] == ["b"]
    assert REPORT_EVERY * 3 < SILENT


def test_a_damaged_report_of_a_server_is_ignored(storage):
    storage.bucket.write("servers/a.json", b"{")
    assert read_servers(storage.bucket) == []


@pytest.mark.parametrize(
    ("state", "after"),
    [
        (RegistryState(promoted=4), FleetRollout(promoted=4, stable=4)),
        (RegistryState(rolled_back=[5]), FleetRollout(rolled_back=[5], stable=3)),
        (
            RegistryState(rolled_back=[2]),
            FleetRollout(rolled_back=[2], stable=3, canary=5, canaries=["a"]),
        ),
        (RegistryState(pinned=2), FleetRollout(pinned=2, stable=3, canary=5, canaries=["a"])),
    ],
)
def test_a_command_ends_the_comparison_with_a_canary_that_it_decides(state, after):
    before = FleetRollout(stable=3, canary=5, canaries=["a"])
    assert before.changed_to(state, range(1, 7)) == after


@pytest.mark.parametrize(
    ("rolled_back", "stable", "canary"),
    [
        ([6, 7, 8, 9], 5, None),  # promoted again
        ([8], 8, 9),  # the stable version was rejected
        ([], 8, 9),  # pinned, say
    ],
)
def test_promoting_a_version_again_makes_it_the_stable_one(rolled_back, stable, canary):
    before = FleetRollout(promoted=5, stable=8, canary=9, canaries=["a"])
    after = before.changed_to(RegistryState(promoted=5, rolled_back=rolled_back), range(4, 10))
    assert (after.stable, after.canary) == (stable, canary)


def test_an_object_store_that_is_away_ends_no_thread(hosts, monkeypatch):
    host = hosts("a")
    errors = []
    host.member._on_error = errors.append
    polled = []

    def away(*_):
        polled.append(1)
        raise OSError("away")

    monkeypatch.setattr(Bucket, "read_changed", away)
    host.member._backoff.next = lambda: 0.0
    with contextlib.ExitStack() as stack:
        stack.enter_context(host.member)
        while len(polled) < 3:
            pass
    assert errors == []


def test_two_servers_with_one_id_are_a_problem_of_both(hosts, storage, monkeypatch):
    monkeypatch.setattr("anabranch.serving.fleet.member.REPORT_EVERY", timedelta(0))
    first, second = hosts("a"), hosts("a")
    first.versions.write_state(RegistryState(serving=7))
    for _ in range(2):
        first.member.poll()
        second.member.poll()
    assert first.member.problems == second.member.problems == []
    first.member.poll()
    second.member.poll()
    for host in (first, second):
        assert host.member.problems == [
            "another server reports under the id a too, and only one of them counts: give each host its own name"
        ]
    for _ in range(2):
        second.member.poll()
    assert second.member.problems == []
    (server,) = read_servers(storage.bucket)
    assert server.crashes == {7: 0}


def test_decisions_that_cannot_be_used_are_a_problem_and_a_lag(hosts, storage, monkeypatch):
    monkeypatch.setattr("anabranch.serving.fleet.member._PATIENCE", timedelta(0))
    storage.bucket.write("rollout.json", b"{")
    host = hosts("a")
    found = threading.Event()
    next_pause = host.member._backoff.next
    monkeypatch.setattr(host.member._backoff, "next", lambda: found.set() or next_pause())
    with host.member:
        assert found.wait(PATIENCE_SECONDS)
        while not host.member.problems:
            pass
        (problem,) = host.member.problems
        assert problem.startswith("the decisions of the fleet cannot be followed: memory://")
        assert host.member.rollout is None
        assert host.member.lag_seconds > 0
