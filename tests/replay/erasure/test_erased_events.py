"""What is erased, and the log that says so: whole after a crash, refused when it is damaged."""

import base64
import contextlib
import json
import os
import stat
import tempfile
import threading
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.identity import identity_hash, partition_base, partition_name
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.replay.build import build_store
from anabranch.replay.erasure.erased_events import ByKey, ByRange, ErasedEvents, Packed, hash_of_key
from anabranch.replay.erasure.erasure_log import Applied, ErasureLog, decode, encode
from anabranch.replay.reservoir.event_table import FREE
from anabranch.replay.settings import ReplaySettings
from anabranch.replay.tiers.disk import DiskTier
from anabranch.replay.tiers.memory import MemoryTier
from anabranch.replay.tiers.redis_tier import RedisTier
from anabranch.replay.tiers.staged_rows import StagedRows
from anabranch.testing.stores import FakeCheckpoints, add_now, plan_ahead, plan_of, sample_of

PARTITIONS = [TopicPartition("events", 0), TopicPartition("events", 1), TopicPartition("events", 0, 1)]
NAMES = [partition_name(name) for name in PARTITIONS]
BASES = np.array([partition_base(name) for name in PARTITIONS], np.uint64)

positions = st.tuples(st.integers(0, 2), st.integers(-1, 40), st.integers(1, 5))
ends_of_some = st.lists(st.integers(0, 45), max_size=3).map(lambda ends: dict(zip(NAMES, ends, strict=False)))
by_keys = st.builds(
    lambda key, up_to, beyond: ByKey(time=0, by="command", key_hash=f"{key:016x}", up_to=up_to, beyond=beyond),
    st.integers(1, 6),
    ends_of_some,
    ends_of_some,
)
by_ranges = st.builds(
    lambda name, first, length: ByRange(time=0, by="command", partition=name, first=first, last=first + length),
    st.sampled_from(NAMES),
    st.integers(0, 40),
    st.integers(0, 10),
)


def is_covered(record, partition, offset, key):
    """The plain definition."""
    if isinstance(record, ByRange):
        return record.partition == NAMES[partition] and record.first <= offset <= record.last
    end = max(each.get(NAMES[partition], 0) for each in (record.up_to, record.beyond))
    return int(record.key_hash, 16) == key and 0 <= offset < end


@settings(max_examples=60)
@given(st.lists(by_keys | by_ranges, max_size=8), st.lists(positions, max_size=30), st.booleans())
def test_an_event_is_covered_when_any_record_says_so(records, events, many):
    events = events * 20 if many else events
    partition, offset, key = (np.array([each[i] for each in events], np.int64) for i in range(3))
    columns = {"partition": partition.astype(np.int32), "offset": offset, "key_hash": key.astype(np.uint64)}
    erased = ErasedEvents()
    for record in records:
        erased.add([record])
        erased.covers(BASES, columns)
    expected = [any(is_covered(record, *event) for record in records) for event in events]
    assert erased.covers(BASES, columns).tolist() == expected
    assert bool(erased) == bool(records)
    packed = msgspec.json.decode(msgspec.json.encode(erased.copy().packed()), type=Packed)
    assert ErasedEvents.unpacked(packed).covers(BASES, columns).tolist() == expected


@settings(max_examples=60)
@given(st.lists(by_keys | by_ranges, min_size=1, max_size=6), st.floats(0, 1), st.binary(max_size=20))
def test_a_torn_end_is_cut_off_and_everything_before_it_is_there(records, share, garbage):
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync"):
        path = Path(folder) / "erasures.log"
        lengths: list[int] = []
        for record in records:
            ErasureLog(path).append([record])
            lengths.append(path.stat().st_size)
        torn = int(share * lengths[-1])
        path.write_bytes(path.read_bytes()[:torn] + garbage.replace(b"\n", b""))
        whole = sum(length <= torn for length in lengths)
        reader = ErasureLog(path)
        reader.refresh()
        assert [each.number for each in reader.since(0)] == list(range(1, whole + 1))
        (added,) = ErasureLog(path).append([records[0]])
        assert added.number == whole + 1
        reader.refresh()
        assert reader.count == len(reader.since(0)) == whole + 1


@pytest.mark.parametrize("byte", [3, 20, 60, -60, -3])
def test_a_flipped_bit_is_refused(tmp_path, byte):
    path = tmp_path / "erasures.log"
    ErasureLog(path).append([ByRange(time=0, by="command", partition=NAMES[0], first=1, last=2)])
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=r"does not have its checksum at byte [0-9]+; put the file back"):
        ErasureLog(path).refresh()


def test_readers_see_what_others_append_and_a_log_that_shrinks_is_refused(tmp_path):
    path = tmp_path / "erasures.log"
    ours, theirs = ErasureLog(path), ErasureLog(path)
    key = hash_of_key(b"anna")
    record = ByKey(time=0, by=f"{NAMES[0]}@7", key_hash=key, up_to={NAMES[0]: 7}, beyond={NAMES[0]: 7})
    assert not ours.is_behind()
    (first,) = theirs.append([record])
    assert ours.is_behind()
    (second,) = ours.append([record])
    assert (first.number, second.number, ours.contains(record)) == (1, 2, True)
    ours.append(Applied(time=0, through=2, store=3, holdout=4))
    theirs.refresh()
    assert (theirs.through, theirs.store, theirs.holdout) == (2, 3, 4)
    path.write_bytes(b"")
    with pytest.raises(SettingsError, match="lost lines"):
        ours.append([record])


def tombstone(key, offset, up_to):
    by = f"{NAMES[0]}@{offset}"
    return ByKey(time=1.5, by=by, key_hash=f"{key:016x}", up_to=up_to, beyond={NAMES[0]: offset})


def covered(log):
    """Whether events of keys 1 to 6 are erased, by offset, in the first two partitions."""
    keys, positions, offsets = (each.ravel() for each in np.meshgrid(range(1, 7), range(2), range(45), indexing="ij"))
    columns = {"partition": positions.astype(np.int32), "offset": offsets, "key_hash": keys.astype(np.uint64)}
    found: list[list[bool]] = log.erased.covers(BASES, columns).reshape(6, -1).tolist()
    return found


def lines_of(path):
    return [json.loads(line[9:]) for line in path.read_bytes().splitlines()]


@settings(max_examples=30)
@given(
    st.lists(st.lists(by_keys | by_ranges, min_size=1, max_size=4), min_size=1, max_size=6),
    st.integers(0, 20),
    st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_a_log_that_was_compacted_says_the_same_to_whoever_reads_it_and_whenever(batches, applied, compacts):
    """With a reader that has read all, one that has missed some, and one that begins afterwards."""
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync"):
        log, plain = (ErasureLog(Path(folder) / name / "erasures.log") for name in ("a", "b"))
        for each in (log, plain):
            each.path.parent.mkdir()
        late = ErasureLog(log.path)
        for index, (records, compact) in enumerate(zip(batches, compacts, strict=False)):
            for each in (log, plain):
                each.append(records)
                if index % 2:
                    each.append(Applied(time=0, through=min(applied, each.count), store=2, holdout=1))
            if compact:
                ErasureLog(log.path).compact()
            if index == 2:
                late.refresh()
        for reader in (log, late, ErasureLog(log.path)):
            reader.refresh()
            assert (reader.count, reader.through, reader.store) == (plain.count, plain.through, plain.store)
            assert covered(reader) == covered(plain)
            assert reader.since(plain.through) == plain.since(plain.through)
            assert not reader.is_behind()
        again = [each.append(batches[0])[0].number for each in (log, plain)]
        assert again[0] == again[1] == plain.count - len(batches[0]) + 1


@settings(max_examples=60)
@given(
    st.lists(st.lists(by_keys | by_ranges, min_size=1, max_size=4), min_size=1, max_size=6),
    *(st.integers(0, 20), st.integers(0, 20)),
    st.lists(st.integers(0, 45), max_size=3).map(lambda starts: dict(zip(NAMES, starts, strict=False))),
)
def test_a_dropped_record_is_of_no_event_that_may_still_come_from_kafka_or_a_checkpoint(
    batches, applied, clean, log_starts
):
    with tempfile.TemporaryDirectory() as folder, mock.patch("os.fsync"):
        log = ErasureLog(Path(folder) / "erasures.log")
        for records in batches:
            log.append(records)
        applied = min(applied, log.count)
        log.append(Applied(time=0, through=applied, store=0, holdout=0))
        before, late = covered(log), ErasureLog(log.path)
        needed = ErasedEvents([each for each in log.copy()._unapplied if each.number > min(applied, clean)])
        ErasureLog(log.path).compact(log_starts, clean)
        log.refresh()
        late.refresh()
        assert covered(late) == covered(log)
        assert (late.dropped, late.count) == (log.dropped, log.count)
        assert late.dropped <= min(applied, clean)
        after, all_of = np.array(covered(log)), np.array(before)
        assert not (after & ~all_of).any()
        readable = np.concatenate([np.arange(45) >= log_starts.get(name, 0) for name in NAMES[:2]])
        assert (after[:, readable] == all_of[:, readable]).all()
        log.erased = needed
        assert not (np.array(covered(log)) & ~after).any()
        again = ErasureLog(log.path)
        again.refresh()
        again.compact()  # before the broker is known after a restart
        again.refresh()
        assert (covered(again), again.dropped) == (after.tolist(), late.dropped)


def test_a_record_stays_until_it_is_applied_everywhere_and_no_log_and_no_checkpoint_goes_back_to_its_ends(tmp_path):
    log = ErasureLog(tmp_path / "erasures.log")
    first, gone = {NAMES[0]: 30, NAMES[1]: 9}, {NAMES[0]: 30, NAMES[1]: 9, NAMES[2]: 1}
    log.append([tombstone(1, 30, first), tombstone(2, 31, first), ByKey(time=0, by="command", key_hash="3", up_to={})])
    log.append([ByRange(time=0, by="command", partition=NAMES[0], first=2, last=4)])

    def left(log_starts, through):
        ErasureLog(log.path).compact(log_starts, through)
        log.refresh()
        return len(log.erased)

    assert left(gone, 4) == 4, "not applied"
    log.append(Applied(time=0, through=4, store=0, holdout=0))
    assert left(gone, 0) == 4, "a checkpoint is older"
    assert left({}, 4) == 3, "the broker has returned no offsets, and one record has no event"
    assert left({NAMES[0]: 30}, 4) == 3, "a partition is away"
    assert left({**gone, NAMES[1]: 8}, 4) == 3, "a partition goes back to what it says"
    assert log.dropped == 3
    assert left(gone, 4) == 2, "one is of more"
    assert left({**gone, NAMES[0]: 31}, 4) == 1, "ranges stay"
    assert (log.dropped, log.count, log.through) == (3, 4, 4)
    log.append([tombstone(1, 40, {})])
    assert log.count == 5


def test_what_forgetting_takes_is_bounded_by_keys_of_which_kafka_still_has_events(tmp_path):
    log, sizes = ErasureLog(tmp_path / "erasures.log"), []
    for turn in range(1, 17):
        up_to = dict.fromkeys(NAMES, 1000 * turn)
        log.append([tombstone(1000 * turn + key, 1000 * turn + key, up_to) for key in range(1, 201)])
        log.append(Applied(time=0, through=log.count, store=0, holdout=0))
        log.copy().compact(dict.fromkeys(NAMES, 1000 * (turn - 2)), log.count)
        log.refresh()
        sizes.append((log.path.stat().st_size // 1000, len(log.erased), log.erased.nbytes // 1000))
    assert sizes[3:] == sizes[3:4] * 13
    assert sizes[3][1] == 3 * 200


def test_a_log_of_another_format_is_refused(tmp_path):
    path = tmp_path / "erasures.log"
    ErasureLog(path).append([tombstone(1, 10, {})])
    head, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(encode(msgspec.structs.replace(decode(head + b"\n"), format=3)) + rest)
    with pytest.raises(SettingsError, match="a first line of another release at byte 0; put the file back"):
        ErasureLog(path).refresh()


def test_records_share_the_ends_of_partitions_over_a_compaction_too(tmp_path):
    log = ErasureLog(tmp_path / "erasures.log")
    one, two = ({f"events#0[{index}]": 10**6 + ends for index in range(64)} for ends in (0, 1))
    log.append([tombstone(1, 10, one)])
    first = log.path.stat().st_size
    log.append([tombstone(2, 11, dict(one))])
    assert log.path.stat().st_size - first < 200
    log.append([ByKey(time=0, by="command", key_hash=f"{3:016x}", up_to=two)])
    log.compact()
    log.append([tombstone(4, 12, one)])
    log.append([tombstone(5, 13, two)])
    reader = ErasureLog(log.path)
    reader.refresh()
    records = [each for each in reader.since(0) if isinstance(each, ByKey)]
    assert [each.up_to == one for each in records] == [True, True, False, True, False]
    assert all(reader.contains(each) for each in records if each.by != "command")
    assert not reader.contains(tombstone(5, 14, one))
    assert not reader.contains(tombstone(6, 13, one))


@pytest.mark.parametrize("dies_at", ["write", "fsync", "replace", "directory"])
def test_a_compaction_that_dies_anywhere_loses_nothing(tmp_path, monkeypatch, dies_at):
    log = ErasureLog(tmp_path / "erasures.log")
    for key in range(1, 6):
        log.append([tombstone(key, 20 + key, {})])
    expected = covered(log)

    def die(*_arguments):
        raise OSError("the end")

    index = {
        "write": "anabranch.replay.erasure.erasure_log.write_at",
        "fsync": "anabranch.replay.erasure.erasure_log.os.fsync",
        "replace": "pathlib.Path.replace",
        "directory": "anabranch.replay.erasure.erasure_log.sync_directory",
    }[dies_at]
    with monkeypatch.context() as context:
        context.setattr(index, die)
        with pytest.raises(OSError, match="the end"):
            ErasureLog(log.path).compact()
    reader = ErasureLog(log.path)
    for each in (log, reader):
        each.refresh()
        assert (each.count, covered(each)) == (5, expected)
    log.append([tombstone(6, 7, {})])
    ErasureLog(log.path).compact()
    reader.refresh()
    assert reader.count == 6


def test_what_is_appended_while_the_log_is_compacted_is_in_the_new_one(tmp_path, monkeypatch):
    log = ErasureLog(tmp_path / "erasures.log")
    log.append([tombstone(1, 20, {})])
    pack = ErasureLog._compacted

    def pack_late(whole, secret):
        content = pack(whole, secret)
        log.append([tombstone(2, 21, {NAMES[1]: 3})])
        log.append(Applied(time=0, through=2, store=1, holdout=0))
        return content

    monkeypatch.setattr(ErasureLog, "_compacted", pack_late)
    ErasureLog(log.path).compact()
    monkeypatch.undo()
    log.append([tombstone(3, 22, {NAMES[1]: 3})])
    reader = ErasureLog(log.path)
    reader.refresh()
    assert (reader.count, reader.through, reader.store) == (log.count, log.through, log.store) == (3, 2, 1)
    assert covered(reader) == covered(log)


def test_a_record_is_on_the_disk_before_append_returns(tmp_path, monkeypatch):
    """A machine that loses power keeps what was synced and nothing else: of files, and of names in folders."""
    synced: dict[int, int] = {}
    fsync, path = os.fsync, tmp_path / "erasures.log"

    def record_call(descriptor):
        fsync(descriptor)
        found = os.fstat(descriptor)
        synced[found.st_ino] = found.st_size

    monkeypatch.setattr(os, "fsync", record_call)
    log = ErasureLog(path)
    for turn in range(3):
        log.append([tombstone(turn + 1, 20, {})])
        assert synced[path.stat().st_ino] == path.stat().st_size
        assert synced[path.with_name("erasures.key").stat().st_ino] == 32
        assert (synced.pop(tmp_path.stat().st_ino, None) is not None) == (turn == 0), "the new name in the folder"
    pack = ErasureLog._compacted

    def pack_late(whole, secret):
        content = pack(whole, secret)
        log.append([tombstone(4, 20, {})])
        return content

    with monkeypatch.context() as patch:
        patch.setattr(ErasureLog, "_compacted", pack_late)
        log.copy().compact()
    assert synced[path.stat().st_ino] == path.stat().st_size, "what was appended meanwhile, too"
    assert tmp_path.stat().st_ino in synced


def test_nothing_of_a_torn_record_stays_under_one_that_is_shorter(tmp_path):
    log = ErasureLog(tmp_path / "erasures.log")
    log.append([tombstone(1, 20, {})])
    log.path.write_bytes(log.path.read_bytes() + b"torn" * 200)
    ErasureLog(log.path).append(Applied(time=0, through=1, store=0, holdout=0))
    assert log.path.read_bytes().endswith(b"}\n")
    assert b"torn" not in log.path.read_bytes()


def test_a_record_does_not_reveal_its_key_without_the_secret(tmp_path):
    log = ErasureLog(tmp_path / "erasures.log")
    hashes = [int(hash_of_key(str(name).encode()), 16) for name in range(200)]
    log.append([tombstone(key, 20, {NAMES[0]: 3}) for key in hashes])
    for _ in range(2):
        content, lines = log.path.read_bytes(), lines_of(log.path)
        packed = b"".join(base64.b64decode(line["keys"]) for line in lines if line["what"] == "packed")
        hidden = [line["key"] for line in lines if line["what"] == "key"]
        assert len(packed) // 8 + len(set(hidden)) == len(hashes)
        for key in hashes:
            assert f"{key:016x}".encode() not in content
            assert key.to_bytes(8, "little") not in packed
        log.append(Applied(time=0, through=200, store=0, holdout=0))
        log.compact()
    secret = log.path.with_name("erasures.key")
    assert [stat.S_IMODE(each.stat().st_mode) for each in (secret, log.path)] == [0o600, 0o600]
    reader = ErasureLog(log.path)
    reader.refresh()
    assert all(reader.contains(tombstone(key, 20, {})) for key in hashes)
    for lost in (secret.unlink, lambda: secret.write_bytes(bytes(32))):
        lost()
        with pytest.raises(SettingsError, match=r"erasures.key is missing, or not the secret of .*; put it back"):
            ErasureLog(log.path).refresh()


def test_what_forgetting_takes_is_bounded_by_keys_and_not_by_how_often(tmp_path):
    log, sizes = ErasureLog(tmp_path / "erasures.log"), []
    for turn in range(1, 9):
        up_to = dict.fromkeys(NAMES, 1000 * turn)
        log.append([tombstone(key, 1000 * turn + key, up_to) for key in range(200)])
        log.append(Applied(time=0, through=log.count, store=0, holdout=0))
        log.compact()
        log.refresh()
        sizes.append(log.path.stat().st_size)
    assert log.since(log.through) == []
    assert max(sizes) <= 1.05 * sizes[1]
    reader = ErasureLog(log.path)
    reader.refresh()
    assert len(reader.erased) == 200
    assert reader.erased.nbytes < 24 * 200 + 1000


def written_slots(tier):
    """Return the slots that hold anything but zeros."""
    records = np.frombuffer(tier.path.read_bytes()[4096:], np.uint8).reshape(-1, tier.slot_bytes)
    return np.flatnonzero(records.any(axis=1)).tolist()


def add(store, schema, offsets, key=1):
    columns = fake_columns(schema, offsets)
    columns["key_hash"][:] = key
    add_now(store, columns, PARTITIONS)


def offsets_held(store):
    return sorted(store.event_table.copy()["offset"].tolist())


def key_record(key, end):
    return ErasedEvents([ByKey(time=0, by="command", key_hash=f"{key:016x}", up_to={NAMES[0]: end})])


def test_erased_events_leave_the_store_and_its_plans(schema, make_store):
    store = make_store(100)
    add(store, schema, range(60))
    add(store, schema, range(60, 80), key=2)
    plan_ahead(store, 0, 80)
    assert store.erase(key_record(2, 70)) == 10
    assert offsets_held(store) == [*range(60), *range(70, 80)]
    for step in range(3):
        sample = store.planner.sample(step, 80)
        assert sorted(sample.records["offset"].tolist()) == [*range(60), *range(70, 80)]
        assert sorted(sample.columns["feature.n"].tolist()) == sorted(offset % 100 for offset in offsets_held(store))
    assert store.erase(key_record(2, 70)) == 0
    add(store, schema, range(80, 90))
    assert len(store) == 80
    assert store.lost == 0


def bytes_of(tier):
    """Return all that a tier holds."""
    if isinstance(tier, DiskTier):
        return tier.path.read_bytes()
    if isinstance(tier, RedisTier):
        size = tier.row_bytes + 8
        return b"".join(each or b"" for each in tier.server.get(tier._keys(np.arange(tier.slots)), size))
    if tier.name == "host":
        return bytes(vars(tier)["_rows_SR"])
    assert isinstance(tier, MemoryTier)
    return tier._words.numpy().tobytes()


def test_what_had_left_the_store_before_is_overwritten_in_every_tier(schema, make_store):
    store = make_store(50)
    checkpoints = FakeCheckpoints(store)
    secret = fake_columns(schema, range(400))
    secret["key_hash"][:], secret["feature.x"][:] = 2, 12345.678
    add_now(store, secret, PARTITIONS)
    add(store, schema, range(400, 1200))
    checkpoints.checkpoint(1)
    store.tiers.sync()
    pattern = secret["feature.x"][0].tobytes()
    assert any(pattern in bytes_of(tier) for tier in store.tiers.all)
    store.erase(key_record(2, 400))
    store.tiers.sync()
    assert min(offsets_held(store)) >= 400
    assert not any(pattern in bytes_of(tier) for tier in store.tiers.all)
    assert not store.tiers.erasure.failed
    assert len(sample_of(store, 0, 50)) == len(store) == len(offsets_held(store))


def test_what_is_on_its_way_into_memory_when_it_is_erased_is_overwritten_there(schema, tmp_path, monkeypatch):
    settings = ReplaySettings.model_validate(
        {"capacity": 40, "device_bytes": "600B", "disk": {"bytes": "1MB"}, "sampling": "loss"}
    )
    with contextlib.closing(build_store(settings, schema, torch.device("cpu"), 0, tmp_path)) as store:
        add(store, schema, range(400, 420))
        secret = fake_columns(schema, range(20))
        secret["key_hash"][:], secret["feature.x"][:] = 2, 12345.678
        add_now(store, secret, PARTITIONS)
        store.tiers.sync()
        (memory,) = (tier for tier in store.tiers.all if isinstance(tier, MemoryTier))
        assert 0 < len(store.tiers._cache or ()) == memory.slots < 20
        (disk,), asked = store.tiers.slow, threading.Event()
        read, wait = disk.read_into, StagedRows.wait
        monkeypatch.setattr(disk, "read_into", lambda *args: asked.wait() and read(*args))
        monkeypatch.setattr(StagedRows, "wait", lambda staged: asked.set() or wait(staged))
        missing = plan_of(store, 0, 20).rows.missing
        reserved = 0 if missing is None else len(missing.reserved)
        store.erase(key_record(2, 400))
        asked.set()
        store.tiers.sync()
        assert reserved, "sampled rows replace others in the memory tier"
        assert secret["feature.x"][0].tobytes() not in bytes_of(memory)


@pytest.mark.services
def test_what_a_tier_cannot_erase_is_erased_once_it_can(schema, tmp_path, shared_redis, monkeypatch):
    options = {"capacity": 50, "redis": {"url": shared_redis.url, "bytes": "1MB"}, "disk": {"bytes": "1MB"}}
    settings = ReplaySettings.model_validate(options)
    with contextlib.closing(build_store(settings, schema, torch.device("cpu"), 0, tmp_path, keys="test")) as store:
        add(store, schema, range(40), key=2)
        store.tiers.sync()
        (redis,) = (tier for tier in store.tiers.all if isinstance(tier, RedisTier))
        with failing(monkeypatch, [redis], "erase"):
            store.erase(key_record(2, 30))
            store.tiers.sync()
        assert store.tiers.erasure.failed
        before = len(bytes_of(redis))
        erase_stale(store)
        assert not store.tiers.erasure.failed
        assert len(bytes_of(redis)) == before // 4
        assert offsets_held(store) == [*range(30, 40)]


SECRET = 12345.678


def add_secrets(store, schema, offsets):
    """Add events of key 2 whose content can be found in any tier."""
    columns = fake_columns(schema, offsets)
    columns["key_hash"][:], columns["feature.x"][:] = 2, SECRET
    add_now(store, columns, PARTITIONS)
    store.tiers.sync()


def has_secret(tier):
    """Whether a tier has anything of a secret event."""
    return np.float32(SECRET).tobytes() in bytes_of(tier)


def erase_stale(store):
    first, most = 0, max(16, store.tiers.slots // 8)
    while store.tiers.erasure.erase_stale(first, most):
        first += most
    store.tiers.sync()


@contextlib.contextmanager
def failing(monkeypatch, tiers, what):
    """Let tiers fail to write, or to erase."""

    def fail(*_arguments):
        raise OSError("away")

    with monkeypatch.context() as context:
        for tier in tiers:
            context.setattr(tier, what, fail)
        yield


@pytest.mark.parametrize("also_primary", [False, True])
def test_rows_under_events_that_could_not_be_written_are_erased_too(schema, make_store, monkeypatch, *, also_primary):
    store = make_store(50)
    tiers = store.tiers.slow if also_primary else store.tiers.slow[:-1]
    add_secrets(store, schema, range(400))
    assert all(map(has_secret, tiers))
    with failing(monkeypatch, tiers, "write"):
        add(store, schema, range(400, 3000))
        store.tiers.sync()
    plan_ahead(store, 0, 1)  # those that were lost leave
    store.erase(key_record(2, 400))
    erase_stale(store)
    assert not store.tiers.erasure.failed
    assert not any(map(has_secret, store.tiers.all))


def test_a_slot_that_could_not_be_erased_is_not_erased_once_an_event_of_a_checkpoint_is_in_it(
    schema, make_store, monkeypatch
):
    store = make_store(50)
    if not store.tiers.slow:
        return
    add_secrets(store, schema, range(40))
    with failing(monkeypatch, store.tiers.slow, "erase"):
        store.erase(key_record(2, 40))
        store.tiers.sync()
    assert store.tiers.erasure.failed
    add(store, schema, range(40, 90))
    index = FakeCheckpoints(store).checkpoint(1).index
    add(store, schema, range(90, 3000))
    erase_stale(store)
    assert not store.tiers.erasure.failed
    identity = identity_hash(store.event_table.bases[index["partition"]], index["offset"], index["row"])
    _, whole = store.tiers.primary.read(index["slot"].astype(np.int64), identity)
    assert len(index) == 50
    assert whole.all()
    assert not any(map(has_secret, store.tiers.all))


def test_what_an_earlier_process_could_not_overwrite_in_a_cache_is_erased_if_there_was_something_to_erase(
    schema, make_store, monkeypatch
):
    first = make_store(50)
    add_secrets(first, schema, range(400))
    with failing(monkeypatch, first.tiers.slow[:-1], "write"):
        add(first, schema, range(400, 3000))
        contents = FakeCheckpoints(first).checkpoint(1)
    store = make_store(50, contents=contents)
    store.erase(key_record(2, 400))
    erase_stale(store)
    assert not any(map(has_secret, store.tiers.slow[:-1]))
    assert sorted(sample_of(store, 0, 50).records["offset"].tolist()) == offsets_held(store)


def test_slots_of_unknown_contents_are_erased_except_those_that_a_checkpoint_names(schema, make_store):
    first = make_store(50)
    checkpoints = FakeCheckpoints(first)
    add(first, schema, range(600))
    contents = checkpoints.checkpoint(1)
    store = make_store(50, contents=contents)
    named = np.zeros(store.tiers.slots, np.bool_)
    kept = np.flatnonzero(store.event_table.by_slot["offset"] == FREE)[:3]
    named[kept] = True
    rounds = 0
    while store.erase_unknown(named, max(64, store.tiers.slots // 8)):
        rounds += 1
    assert (rounds > 0) == store.tiers.durable
    if store.tiers.slow and isinstance(disk := store.tiers.slow[-1], DiskTier):
        store.tiers.sync()
        written = np.array(written_slots(disk))
        assert set(written.tolist()) <= {*store.event_table.slots.tolist(), *kept.tolist()}
        assert set(store.event_table.slots.tolist()) <= set(written.tolist())
    assert len(sample_of(store, 0, 50)) == 50
