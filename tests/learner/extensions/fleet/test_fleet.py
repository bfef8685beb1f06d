"""What servers of a fleet need stays in the object store."""

import threading
from datetime import timedelta

import msgspec
import pytest

from anabranch.core.object_store.bucket import BucketAwayError
from anabranch.learner.errors import StorageError
from anabranch.learner.extensions.fleet.extension import FleetWatch
from anabranch.learner.object_storage.fleet import (
    REPORT_EVERY,
    FleetReader,
    FleetRollout,
    FleetServer,
    RolloutFile,
    read_servers,
    write_server,
)
from anabranch.learner.settings.storage import StorageSettings
from tests.learner.object_storage.uploading import FaultyBucket, UploadBench
from tests.support.waiting import wait_until


@pytest.mark.parametrize(("needed", "kept"), [({2}, [2]), (set(), []), (None, [1, 2, 3])])
def test_a_learner_on_a_fresh_host_does_not_delete_what_servers_need(tmp_path, needed, kept):
    bucket = FaultyBucket(f"memory://{tmp_path.name}/state")
    first = UploadBench(tmp_path, bucket)
    for number in (1, 2, 3):
        first.version(number)
        first.version_uploads.advance()
    first.lease.update(lambda head: msgspec.structs.replace(head, released=True))
    other = UploadBench(tmp_path, bucket, "other")
    other.version_uploads._needed = lambda: needed
    for number in range(4, 12):
        other.version(number)
        other.version_uploads.advance()
    assert [number for number in sorted(other.lease.head.versions) if number <= 3] == kept


def test_an_object_store_that_is_away_leaves_what_was_read_last(tmp_path, monkeypatch):
    storage = StorageSettings(url=f"memory://{tmp_path.name}/state")
    fleet = FleetWatch(storage)
    assert fleet.needed_versions() is None
    write_server(storage.bucket, FleetServer(id="a", beat=1, time=0.0, address="", ready=True, version=7))
    fleet.poll()
    assert fleet.needed_versions() == {7}

    def away(*_):
        raise BucketAwayError("away")

    monkeypatch.setattr("anabranch.learner.object_storage.fleet.read_server", away)
    with pytest.raises(BucketAwayError):
        fleet.poll()
    assert fleet.needed_versions() == {7}


def report_of(name, **changes):
    changes = {"beat": 1, "time": 0.0, "address": "", "ready": True, **changes}
    return msgspec.convert({"id": name, **changes}, FleetServer)


def test_objects_of_servers_that_have_ended_are_deleted(tmp_path):
    bucket, now = StorageSettings(url=f"memory://{tmp_path.name}/state").bucket, [0.0]
    reader = FleetReader(bucket, lambda: now[0])
    write_server(bucket, report_of("ended", stopped=True))
    write_server(bucket, report_of("silent"))
    bucket.write("servers/garbage.json", b"{")
    bucket.write("servers/other.txt", b"")
    bucket.write("servers/taken.json", msgspec.json.encode(report_of("silent", beat=9)))
    bucket.write("servers/large.json", b" " * 200_000)

    def left_after(seconds):
        until = now[0] + seconds
        while now[0] < until:
            now[0] += REPORT_EVERY.total_seconds()
            reader.read()
        return sorted(path.removeprefix("servers/") for path in bucket.sizes("servers"))

    assert [server.id for server in reader.read()] == ["silent"]
    assert left_after(30) == ["garbage.json", "large.json", "other.txt", "silent.json", "taken.json"]
    assert left_after(3600) == []


def test_of_too_many_objects_those_of_known_servers_stay(tmp_path, monkeypatch):
    monkeypatch.setattr("anabranch.learner.object_storage.fleet._MOST_SERVERS", 4)
    bucket, now = StorageSettings(url=f"memory://{tmp_path.name}/state").bucket, [0.0]
    reader = FleetReader(bucket, lambda: now[0])
    for name in ("x", "y", "z"):
        write_server(bucket, report_of(name))
    assert [server.id for server in reader.read()] == ["x", "y", "z"]
    for number in range(20):
        bucket.write(f"servers/{number:02}.json", b"{")
        write_server(bucket, report_of(f"a{number:02}"))
    assert [server.id for server in reader.read()] == ["x", "y", "z"]
    assert sorted(bucket.sizes("servers")) == [f"servers/{name}.json" for name in ("00", "x", "y", "z")]
    write_server(bucket, report_of("new"))
    bucket.delete(["servers/00.json"])
    assert [server.id for server in reader.read()] == ["new", "x", "y", "z"]
    write_server(bucket, report_of("a"))
    assert [server.id for server in read_servers(bucket)] == ["a", "new", "x", "y"]


@pytest.mark.parametrize("name", ["a//b", "../head", "\x1b[31m", "x\x00y", "other", "[/red]"])
def test_a_report_under_another_id_is_ignored(tmp_path, name):
    bucket = StorageSettings(url=f"file://{tmp_path}/b").bucket
    bucket.write("servers/evil.json", msgspec.json.encode(report_of(name)))
    write_server(bucket, report_of("good"))
    assert [server.id for server in read_servers(bucket)] == ["good"]
    assert [server.id for server in FleetReader(bucket).read()] == ["good"]


def test_servers_are_not_taken_for_dead_after_an_outage(tmp_path):
    bucket, now = StorageSettings(url=f"memory://{tmp_path.name}/state").bucket, [0.0]
    reader = FleetReader(bucket, lambda: now[0])
    write_server(bucket, report_of("a"))
    reader.read()
    for now[0] in (120.0, 125.0):
        assert [server.id for server in reader.read()] == ["a"]
    now[0] = 8000.0
    reader.read()
    assert list(bucket.sizes("servers")) == ["servers/a.json"]
    for now[0] in range(8005, 8040, 5):
        servers = reader.read()
    assert servers == []


def test_a_version_that_does_not_exist_yet_is_not_believed(tmp_path):
    storage = StorageSettings(url=f"memory://{tmp_path.name}/state")
    bench = UploadBench(tmp_path, FaultyBucket(storage.url))
    bench.version(1)
    bench.version_uploads.advance()
    fleet = FleetWatch(storage)
    write_server(storage.bucket, report_of("a", version=1))
    write_server(storage.bucket, report_of("b", version=10**15))
    fleet.poll()
    assert {server.id: server.version for server in fleet.servers} == {"a": 1, "b": None}


def test_a_learner_without_canaries_lets_every_server_serve_every_version(tmp_path):
    storage = StorageSettings(url=f"memory://{tmp_path.name}/state")
    RolloutFile(storage.bucket).replace(FleetRollout(pinned=3, stable=1, canary=2, canaries=["a"]))
    FleetWatch(storage).poll()
    fleet = FleetWatch(storage, canaries=False)
    fleet.poll()
    written = RolloutFile(storage.bucket)
    written.poll()
    assert written.contents == fleet.rollout == FleetRollout(pinned=3)


@pytest.mark.parametrize("error", [BucketAwayError("the store is away"), TypeError("a path of obstore")])
def test_a_fleet_that_cannot_be_read_is_a_problem_until_it_can(tmp_path, monkeypatch, error):
    fleet = FleetWatch(StorageSettings(url=f"memory://{tmp_path.name}/state"))
    monkeypatch.setattr("anabranch.learner.extensions.fleet.extension.REPORT_EVERY", timedelta(seconds=0.001))
    monkeypatch.setattr("anabranch.learner.extensions.fleet.extension.SILENT", timedelta(0))
    polled, poll = threading.Event(), fleet.poll

    def fail():
        if polled.is_set():
            poll()
            return
        polled.set()
        raise error

    monkeypatch.setattr(fleet, "poll", fail)
    found: list[str | None] = []
    run = fleet.thread._work
    monkeypatch.setattr(fleet.thread, "_work", lambda: (run(), found.append(fleet.problem))[0])
    with fleet.thread:
        wait_until(lambda: len(found) > 1, "another read")
    assert str(error) in str(found[0])
    assert found[1] is None
    assert fleet.is_read


def test_a_rollout_file_that_cannot_be_used_is_read_once(tmp_path, monkeypatch):
    bucket = StorageSettings(url=f"memory://{tmp_path.name}/state").bucket
    bucket.write("rollout.json", b"{")
    file = RolloutFile(bucket)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"rollout.json cannot be used"):
            file.poll()
    assert bucket.read_changed("rollout.json", file.tag) is None
    bucket.write("rollout.json", b"{}")
    assert file.poll()
    bucket.write("rollout.json", b" " * 2_000_000)
    with pytest.raises(StorageError, match="has 2000000 bytes, and at most 1000000 are read"):
        file.poll()
