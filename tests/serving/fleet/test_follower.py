import errno
import hashlib
import json
from datetime import timedelta

import msgspec
import pytest

from anabranch.core.object_store.bucket import Bucket, BucketAwayError
from anabranch.learner.object_storage.fleet import FleetRollout, FleetServer, RolloutFile, read_servers, write_server
from anabranch.learner.object_storage.head import base_path
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.versions.format import RegistryState, Verdict, Versions
from anabranch.serving.errors import ConflictError, UnavailableError
from anabranch.serving.fleet import version_cache
from anabranch.serving.fleet.commands import FleetCommands
from anabranch.serving.fleet.follower import VersionFollower
from anabranch.serving.rollout.hot_swap import FreshnessTracker
from tests.support.object_versions import VersionUploader


def test_a_version_is_copied_with_its_files(learning, hosts):
    learning.publish(1)
    host = hosts("a")
    assert host.follower.poll()
    there, here = learning.publisher.versions, host.versions
    assert here.contents(here.manifest(1)) == there.contents(there.manifest(1))
    assert here.verdict(1) == there.verdict(1)
    assert not host.follower.poll()


def test_versions_that_were_superseded_are_not_copied_but_for_their_manifests(learning, hosts):
    host = hosts("a")
    learning.publish(1)
    host.follow()
    learning.publish(2, 3, 4)
    host.follow()
    assert host.complete() == host.judged() == [1, 4]
    assert host.versions.numbers() == [1, 2, 3, 4]  # their events count for freshness


def test_a_fresh_host_copies_the_newest_version_first_and_one_more(learning, hosts):
    host = hosts("a")
    learning.publish(1, 2, 3)
    assert host.follower.poll()
    assert host.complete() == [3]
    host.follow()
    assert host.complete() == [2, 3]


def test_a_failed_version_is_not_copied(learning, hosts):
    host = hosts("a")
    learning.publish(1)
    learning.publish(2, verdict="fail")
    host.follow()
    assert host.complete() == [1]
    assert host.follower.lag_seconds == 0.0


def test_a_withdrawn_version_is_withdrawn_here(learning, hosts):
    host = hosts("a")
    learning.publish(1)
    learning.publish(2)
    host.follow()
    learning.uploader.judge(2, Verdict("fail", ["it was worse"]))
    host.follow()
    assert host.versions.verdict(2) == Verdict("fail", ["it was worse"])
    assert host.versions.verdict(1).verdict == "inconclusive"


def test_a_damaged_version_is_not_served_and_the_next_one_is(learning, hosts):
    host = hosts("a")
    learning.publish(1)
    host.follow()
    learning.publish(2)
    learning.uploader.bucket.write(learning.uploader.path(2, "model.safetensors"), b"damaged")
    assert not host.follower.poll()
    (problem,) = host.follower.problems
    assert problem.endswith("model.safetensors does not have its digest")
    assert host.judged() == [1]
    host.now[0] = 3.0
    assert host.follower.lag_seconds == 3.0
    assert list(host.versions.path.glob(".tmp*")) == []
    learning.publish(3)
    host.follow()
    assert host.judged() == [1, 3]
    assert host.follower.problems == []


@pytest.mark.parametrize("number", [-1, 0, 10**18, 10**19, 2**70])
def test_a_head_that_lists_what_no_learner_writes_does_not_keep_versions_away(learning, hosts, number, caplog):
    learning.publish(1)
    bucket, path = learning.uploader.bucket, f"versions/{number}-1/"
    for each in ("manifest.json", "model.safetensors", "verdict.json"):
        bucket.write(path + each, bucket.read(learning.uploader.path(1, each)))
    head = json.loads(bucket.read("head.json"))
    head["versions"] |= {str(number): 1, "7": -1, "8": 2**70}
    bucket.write("head.json", json.dumps(head).encode())
    host = hosts("a")
    host.follow()
    assert host.judged() == [1]
    assert host.follower.problems == []
    assert "lists what no learner writes, which is left out: versions " in caplog.text


@pytest.mark.parametrize("name", ["../../escape", "manifest.json", "a" * 201, "a" * 10_000])
def test_a_manifest_cannot_name_files_elsewhere(learning, hosts, name):
    learning.publish(1)
    path = learning.uploader.path(1, "manifest.json")
    content = learning.uploader.bucket.read(path).replace(b"model.safetensors", name.encode())
    learning.uploader.bucket.write(path, content)
    host = hosts("a")
    assert not host.follower.poll()
    assert host.follower.problems[0].startswith("version 1 cannot be copied: ")
    assert host.versions.numbers() == []
    learning.publish(2)
    host.follow()
    assert host.judged() == [2]


def test_a_version_that_a_new_learner_numbers_alike_replaces_the_old_one(learning, hosts):
    host = hosts("a")
    learning.publish(1)
    host.follow()
    learning.uploader.delete(1)
    learning.publisher.versions.delete(1)
    learning.publish(1, step=77)
    again = hosts("a")
    again.follow()
    assert again.versions.manifest(1).step == 77


def test_the_cache_has_a_bound_and_keeps_what_this_server_needs(learning, hosts, monkeypatch):
    monkeypatch.setattr(version_cache, "_KEPT_MANIFESTS", 6)
    host = hosts("a")
    for number in range(1, 13):
        learning.publish(number)
        host.follow()
        if number == 2:
            host.versions.write_state(RegistryState(serving=2, previous=1))
    assert host.complete() == [1, 2, 9, 10, 11, 12]


def test_what_a_crash_left_half_copied_is_removed(learning, hosts):
    host = hosts("a")
    host.versions.path.mkdir(parents=True)
    (host.versions.path / ".tmp-1-2").mkdir()
    (host.versions.path / ".tmp-7-model.safetensors").write_bytes(b"half")
    host.follower._cache.clean()
    assert list(host.versions.path.iterdir()) == []


def test_a_full_disk_keeps_the_served_version_and_leaves_nothing_half_copied(learning, hosts, monkeypatch):
    host = hosts("a")
    learning.publish(1)
    host.follow()
    learning.publish(2)

    def fill(_bucket, _path, to):
        to.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Bucket, "download", fill)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                host.follower.poll()
    assert host.judged() == [1]
    assert list(host.versions.path.glob(".tmp-*")) == []
    host.follow()
    assert host.judged() == [1, 2]


def test_the_lag_is_the_age_of_the_first_version_that_is_not_here(learning, hosts, monkeypatch):
    host = hosts("a")
    learning.publish(1)
    host.follow()
    assert host.follower.lag_seconds == 0.0
    copy = host.follower._cache.complete

    def fail(*_):
        raise BucketAwayError("away")

    monkeypatch.setattr(host.follower._cache, "complete", fail)
    host.now[0] = 10.0
    learning.publish(2)
    with pytest.raises(BucketAwayError):
        host.follower.poll()
    host.now[0] = 13.0
    learning.publish(3)
    with pytest.raises(BucketAwayError):
        host.follower.poll()
    assert host.follower.lag_seconds == 3.0
    monkeypatch.setattr(host.follower._cache, "complete", copy)
    host.follow()
    assert host.follower.lag_seconds == 0.0


def test_an_object_store_that_is_away_for_long_is_a_problem_until_it_is_back(learning, hosts):
    host = hosts("a")
    host.follower._fail(BucketAwayError("storage.example: connection refused"))
    assert host.follower.problems == []
    host.now[0] = 6.0
    assert host.follower.problems == ["new versions cannot be followed: storage.example: connection refused"]
    assert host.follower.lag_seconds == 6.0


def test_before_the_first_learner_there_is_nothing_to_follow(hosts, storage):
    with pytest.raises(BucketAwayError, match=r"no learner has written to memory://.*/state yet"):
        hosts("a").follower.poll()


def test_only_canaries_may_serve_the_canary(learning, hosts):
    a, b = hosts("a"), hosts("b")
    learning.publish(1)
    a.rollout[0] = b.rollout[0] = FleetRollout(stable=1, canary=3, canaries=["a"])
    a.follow()
    b.follow()
    learning.publish(2)
    learning.publish(3)
    learning.publish(4)
    a.follow()
    b.follow()
    assert (a.judged(), b.judged()) == ([1, 3], [1])
    assert b.follower.lag_seconds == 0.0
    a.rollout[0] = b.rollout[0] = FleetRollout(stable=3)
    a.follow()
    b.follow()
    assert (a.judged(), b.judged()) == ([1, 3], [1, 3])


def test_a_version_that_a_person_chose_is_copied_whatever_its_verdict(learning, hosts):
    host = hosts("a")
    learning.publish(1, verdict="fail")
    learning.publish(2, 3, 4)
    host.follow()
    assert host.complete() == [3, 4]
    host.rollout[0] = FleetRollout(promoted=1, rolled_back=[2, 3, 4])
    host.follow()
    assert host.complete() == [1, 3, 4]


def test_events_of_skipped_versions_count_for_freshness(learning, hosts):
    host = hosts("a")
    learning.publish(1)
    host.follow()
    tracker = FreshnessTracker(host.versions)
    tracker.read_new(host.versions.numbers())
    learning.publish(2, 3, 4)
    host.follow()
    tracker.read_new(host.versions.numbers())
    rows, _ = tracker.served(4, 0.0)
    assert rows == 3


def test_a_fleet_works_over_s3(s3, deploy_in, tmp_path):
    storage = StorageSettings(url=s3.url, options=s3.options)
    publisher = deploy_in("number", tmp_path / "learner")
    uploader = VersionUploader(storage.bucket, publisher.versions)
    versions = Versions(tmp_path / "host" / "versions")
    rollout = RolloutFile(storage.quick_bucket)
    follower = VersionFollower(storage, versions, "a", lambda: rollout.contents, lambda _: None)
    for number in (1, 2):
        publisher.publish(number)
        uploader.upload(number)
        assert follower.poll()
        assert not follower.poll()
    assert versions.contents(versions.manifest(2)) == publisher.versions.contents(publisher.versions.manifest(2))
    command = FleetCommands(storage, versions, "a").begin(1, served=True)
    command.commit(RegistryState(pinned=1))
    other = FleetCommands(storage, versions, "a").begin(1, served=False)
    assert other.rollout.pinned == 1
    assert rollout.poll()
    assert not rollout.poll()
    with pytest.raises(ConflictError, match="given at the same time"):
        command_at_once(storage, versions, other)
    write_server(storage.quick_bucket, FleetServer(id="a", beat=1, time=0.0, address="", ready=True))
    assert [server.id for server in read_servers(storage.quick_bucket)] == ["a"]


def command_at_once(storage, versions, late):
    FleetCommands(storage, versions, "a").begin(1, served=False).commit(RegistryState(pinned=2))
    late.commit(RegistryState())


def test_nothing_is_served_before_the_decisions_of_the_fleet_are_known(learning, hosts):
    host = hosts("a")
    learning.publish(1)
    host.rollout[0] = None
    assert not host.follower.poll()
    assert host.versions.numbers() == []
    assert host.member.rollout is None
    host.member.poll()
    assert host.member.rollout == FleetRollout()


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_what_a_power_cut_has_damaged_is_copied_again_at_the_next_start(learning, hosts, name):
    learning.publish(1)
    before = hosts("a")
    before.follow()
    (before.versions.directory(1) / name).write_bytes(b"")
    host = hosts("a")
    host.follow()
    assert host.versions.contents(host.versions.manifest(1))
    assert host.judged() == [1]


def test_a_fresh_host_serves_the_version_before_a_damaged_one(learning, hosts, monkeypatch):
    learning.publish(1, 2)
    path = learning.uploader.path(2, "model.safetensors")
    intact = learning.uploader.bucket.read(path)
    learning.uploader.bucket.write(path, b"damaged")
    host, downloads = hosts("a"), []
    download = Bucket.download
    monkeypatch.setattr(Bucket, "download", lambda self, *at: downloads.append(at[0]) or download(self, *at))
    for host.now[0] in range(5):
        host.follow()
    assert host.judged() == [1]
    assert downloads.count(path) == 1
    learning.uploader.bucket.write(path, intact)
    host.now[0] = 20.0
    host.follow()
    assert host.judged() == [1, 2]
    assert host.follower.problems == []


def test_the_pause_before_a_damaged_version_is_tried_again_grows(learning, hosts, monkeypatch):
    learning.publish(1, 2)
    path = learning.uploader.path(2, "model.safetensors")
    learning.uploader.bucket.write(path, b"damaged")
    host, tries = hosts("a"), []
    download = Bucket.download
    monkeypatch.setattr(Bucket, "download", lambda self, *at: tries.append(at[0]) or download(self, *at))
    for host.now[0] in range(0, 3600, 5):
        host.follow()
    assert 6 <= tries.count(path) <= 20


@pytest.mark.parametrize("name", ["manifest.json", "verdict.json"])
def test_a_damaged_old_version_does_not_keep_newer_ones_away(learning, hosts, name):
    learning.publish(1)
    host = hosts("a")
    host.follow()
    learning.publish(2, 3)
    learning.uploader.bucket.write(learning.uploader.path(2, name), b"{")
    host.follow()
    assert host.judged() == [1, 3]
    assert host.follower.problems == []


def test_a_local_version_whose_original_is_damaged_does_not_keep_newer_ones_away(learning, hosts):
    learning.publish(1)
    hosts("a").follow()
    up = learning.uploader
    for name in ("manifest.json", "verdict.json"):
        up.bucket.write(up.path(1, name), b"{")
    up.lease.update(lambda head: msgspec.structs.replace(head, verdicts={**head.verdicts, 1: "x"}))
    learning.publish(2)
    host = hosts("a")
    host.follow()
    assert host.judged() == [1, 2]


def test_versions_of_a_learner_whose_state_was_lost_are_replaced_by_those_of_the_next(
    learning, hosts, deploy_in, tmp_path
):
    host = hosts("a")
    for number in (105, 106, 107, 108):
        learning.publish(number)
        host.follow()
    host.versions.write_state(RegistryState(serving=108, previous=107))
    for path in (*learning.storage.bucket.sizes("versions"), "head.json"):
        learning.storage.bucket.delete([path])
    publisher = deploy_in("number", tmp_path / "next")
    uploader = VersionUploader(learning.storage.bucket, publisher.versions)
    for number in (1, 2):
        publisher.publish(number)
        uploader.upload(number)
    polls = 0
    while host.follower.poll():
        polls += 1
    assert polls == 2
    assert host.versions.numbers() == [1, 2, 107, 108]
    assert [host.versions.verdict(number).verdict for number in (1, 2, 108)] == ["inconclusive", "inconclusive", "fail"]


@pytest.mark.parametrize(
    "before", [FleetRollout(stable=1, canary=2, canaries=["a"]), FleetRollout(stable=1, pinned=2)], ids=str
)
def test_a_server_that_may_not_serve_a_version_any_more_withdraws_it(learning, hosts, before):
    host = hosts("a")
    learning.publish(1)
    host.rollout[0] = FleetRollout(stable=1)
    host.follow()
    learning.publish(2)
    host.rollout[0] = before
    host.follow()
    assert host.versions.verdict(2).verdict == "inconclusive"
    host.rollout[0] = FleetRollout(stable=1, canary=2, canaries=["b"])
    host.follow()
    assert host.versions.verdict(2).verdict == "fail"
    again = hosts("a")  # after a restart
    again.rollout[0] = host.rollout[0]
    again.follow()
    assert again.versions.verdict(2).verdict == "fail"
    host.rollout[0] = FleetRollout(stable=2)
    host.follow()
    assert host.versions.verdict(2).verdict == "inconclusive"


def test_nothing_is_withdrawn_before_there_is_another_version(learning, hosts):
    host = hosts("a")
    learning.publish(1, 2)
    learning.uploader.bucket.write(learning.uploader.path(1, "model.safetensors"), b"damaged")
    host.follow()
    host.rollout[0] = FleetRollout(stable=1)
    host.follow()
    assert host.judged() == [2]
    assert host.versions.verdict(2).verdict == "inconclusive"


def test_a_command_does_not_wait_for_a_copy_that_takes_long(learning, hosts, storage, monkeypatch):
    monkeypatch.setattr("anabranch.serving.fleet.commands._PATIENCE", timedelta(0))
    learning.publish(1)
    host = hosts("a")
    host.follow()
    with host.follower._cache.locked(), pytest.raises(UnavailableError, match="was not applied, since another process"):
        FleetCommands(storage, host.versions, "a").begin(1, served=True)


def test_a_result_whose_reply_is_lost_was_written(storage, hosts, monkeypatch):
    command = FleetCommands(storage, hosts("a").versions, "a").begin(1, served=False)
    write = Bucket.create

    def lost(self, *args):
        write(self, *args)
        raise BucketAwayError("the reply was lost")

    monkeypatch.setattr(Bucket, "create", lost)
    command.commit(RegistryState(pinned=1))
    assert command.rollout.pinned == 1


def on_base(learning, content):
    """Put a base into the object store, and return its SHA-256."""
    sha256 = hashlib.sha256(content).hexdigest()
    uploader = learning.uploader
    uploader.bucket.write(base_path(sha256, uploader.lease.generation), content)
    listed = {**uploader.lease.head.bases, sha256: uploader.lease.generation}
    uploader.lease.update(lambda head: msgspec.structs.replace(head, bases=listed))
    return sha256


def downloads(monkeypatch):
    """Return the list that the paths of downloads are added to."""
    paths, download = [], Bucket.download
    monkeypatch.setattr(Bucket, "download", lambda self, path, to: paths.append(path) or download(self, path, to))
    return paths


def test_a_base_is_fetched_once_and_before_the_first_version_on_it(learning, hosts, monkeypatch):
    host, paths = hosts("a"), downloads(monkeypatch)
    base = on_base(learning, b"frozen")
    for number in (1, 2, 3):
        learning.publish(number, base=base)
        host.follow()

    assert host.complete() == [1, 2, 3]
    assert [path.partition("/")[0] for path in paths] == ["bases", "versions", "versions", "versions"]
    assert bases_in(host.versions.path.parent).checked(base).read_bytes() == b"frozen"


def test_a_version_without_its_base_is_not_served(learning, hosts):
    host = hosts("a")
    learning.publish(1)
    learning.publish(2, base="a" * 64)
    host.follow()

    assert host.judged() == [1]
    assert host.follower.problems == [
        f"version 2 cannot be copied: {learning.uploader.bucket.url} has no base '{'a' * 64}'"
    ]


@pytest.mark.parametrize("name", ["../../../../etc/passwd", "/etc/passwd", "0" * 65])
def test_a_version_that_names_a_path_as_its_base_is_not_served(learning, hosts, name):
    host = hosts("a")
    learning.publish(1)
    listed = {name: 1}
    learning.uploader.lease.update(lambda head: msgspec.structs.replace(head, bases=listed))
    learning.publish(2, base=name)
    host.follow()

    assert host.judged() == [1]
    assert "is not a SHA-256" in host.follower.problems[0]


def test_a_base_that_a_power_cut_has_damaged_is_fetched_again_at_the_next_start(learning, hosts, monkeypatch):
    base = on_base(learning, b"frozen")
    learning.publish(1, base=base)
    host = hosts("a")
    host.follow()
    bases = bases_in(host.versions.path.parent)
    bases.file(base).write_bytes(b"damaged")

    again = hosts("a")
    again.follow()

    assert bases.is_intact(base)
    assert again.judged() == [1]


def test_a_base_is_deleted_here_after_the_last_version_on_it(learning, hosts):
    host = hosts("a")
    old, new = on_base(learning, b"old"), on_base(learning, b"new")
    learning.publish(1, base=old)
    host.follow()
    for number in range(2, 8):
        learning.publish(number, base=new)
        host.follow()

    assert bases_in(host.versions.path.parent).digests() == {new}
