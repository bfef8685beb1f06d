"""Erased events are removed from checkpoints, which can be read at all times and still share files."""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.checkpoints import parts
from anabranch.learner.checkpoints.checkpointer import complete
from anabranch.learner.checkpoints.erase_checkpoints import Eraser, named_slots, without_erased
from anabranch.learner.checkpoints.format import Checkpoints, part_of
from anabranch.learner.checkpoints.part_formats import STORE
from anabranch.learner.checkpoints.parts import pack, unpack
from anabranch.learner.evaluate.holdout import HoldoutSet
from anabranch.learner.state_dir import folders as storage
from anabranch.replay.build import build_store
from anabranch.replay.erasure.erased_events import ByKey, ErasedEvents
from anabranch.replay.segments import Segment
from anabranch.replay.settings import ReplaySettings
from anabranch.replay.store import Store
from anabranch.replay.tiers.disk import DiskTier
from anabranch.replay.tiers.disk_files import make_way
from anabranch.testing.stores import add_now, plan_ahead

NAMES = [TopicPartition("events", 0)]
ERASED = ErasedEvents([ByKey(time=0, by="command", key_hash=f"{9:016x}", up_to={"events#0[0]": 10_000})])
TIERS = {"device": {}, "disk": {"disk": {"bytes": "1MB"}}, "complete": {"disk": {"bytes": "1MB"}, "complete": True}}


class Pipeline:
    """A store and a holdout set with checkpoints on the disk."""

    def __init__(self, path, schema, replay, contents=None):
        self.schema, self.path = schema, path
        replay = dict(replay)
        complete = replay.pop("complete", False)
        options = ReplaySettings.model_validate({"capacity": 400, "sampling": "loss", **replay})
        self.store: Store = build_store(
            *(options, schema, torch.device("cpu"), 0, STORE.folder(path), contents), complete=complete
        )
        self.holdout = HoldoutSet(schema, 100, 0)
        self.checkpoints = Checkpoints(path / "checkpoints", schema.digest, 1)
        self.segments: Sequence[Segment] = ()
        self.erased_offsets: Collection[int] = range(0, 10_000, 10)

    def add(self, offsets):
        """Add events, of which every tenth has the key to erase and every seventh is held out."""
        columns = fake_columns(self.schema, offsets, label=[0, 1, 2])
        columns["key_hash"][:] = np.where(np.isin(columns["offset"], list(self.erased_offsets)), 9, 1)
        out = columns["offset"] % 7 == 0
        self.holdout.add({name: column[out] for name, column in columns.items()}, NAMES)
        add_now(self.store, {name: column[~out] for name, column in columns.items()}, NAMES)
        plan_ahead(self.store, 0, 20)

    def checkpoint(self, number):
        contents = self.store.begin_snapshot(number).contents()
        packed, self.segments = pack(*contents, self.segments, self.checkpoints)
        state = {"ledger": [{"topic": "events", "partition": 0, "incarnation": 0, "history": 0}]}
        tensors = {"holdout": self.holdout.tensors(), "model": {"weight": torch.arange(3.0)}}
        self.checkpoints.write(number, complete(number, tensors, state, [packed]), 0.0)
        self.store.end_snapshot(1)

    def erase(self):
        return Eraser(self.checkpoints, ERASED).run().checkpoints

    def newest(self):
        found = self.checkpoints.newest()
        assert found is not None
        unpacked = unpack(found[1])
        assert unpacked is not None
        return unpacked[0]


@pytest.fixture(params=TIERS.values(), ids=TIERS)
def pipeline(tmp_path, schema, request):
    made = Pipeline(tmp_path, schema, request.param)
    for number, (begin, end) in enumerate([(0, 300), (300, 340), (340, 350)], start=1):
        made.add(range(begin, end))
        made.checkpoint(number)
    yield made
    made.store.close()


def keys(contents):
    return set(contents.index["key_hash"].tolist())


def test_weights_stay_as_they_are(pipeline):
    assert pipeline.erase() == 3
    found = pipeline.checkpoints.newest()
    assert found is not None
    assert found[1].tensors["model"]["weight"].tolist() == [0, 1, 2]


def test_erased_events_are_removed_from_all_checkpoints_which_stay_intact(pipeline):
    before = pipeline.newest()
    kept = before.index[before.index["key_hash"] != 9]
    rows_before = None if before.rows is None else before.rows.read(np.arange(len(before.index)))[0]
    assert 0 < len(kept) < len(before.index)
    assert pipeline.erase() == 3
    after = pipeline.newest()
    assert after.index.tobytes() == kept.tobytes()
    assert len(after.state.sampler["positions"]) == len(after.state.sampler["weights"]) == len(kept)
    if before.payload is not None and after.payload is not None:
        assert torch.equal(after.payload, before.payload[torch.from_numpy(before.index["key_hash"] != 9)])
    assert (after.rows is None) == (before.rows is None)
    if after.rows is not None and rows_before is not None:
        rows, valid = after.rows.read(np.arange(len(kept)))
        assert valid.all()
        assert torch.equal(rows, rows_before[torch.from_numpy(before.index["key_hash"] != 9)])
    for number in pipeline.checkpoints.numbers():
        manifest = pipeline.checkpoints.manifest(number)
        for name in manifest.files:
            pipeline.checkpoints.read(manifest, name)
        there = {f"rank-0/{path.name}" for path in (pipeline.path / "checkpoints" / str(number) / "rank-0").iterdir()}
        assert there == set(manifest.files)
        tensors, _ = pipeline.checkpoints.open(manifest)
        assert not (tensors["holdout"]["key_hash"] == 9).any()
    for name in ("segment-1", "rows-1"):
        one = {path.stat().st_ino for path in (pipeline.path / "checkpoints").glob(f"*/rank-0/{name}.*")}
        assert len(one) <= 1, "a file that checkpoints share was written more than once"
    assert pipeline.erase() == 0


def test_a_loaded_checkpoint_equals_the_rewritten_one(pipeline):
    found = pipeline.checkpoints.newest()
    assert found is not None
    checkpoint, (store, holdout) = without_erased(found[1], ERASED)
    loaded = unpack(checkpoint)
    assert loaded is not None
    assert store == len(pipeline.newest().index) - len(loaded[0].index) > 0
    assert holdout == len(range(0, 350, 70))
    assert loaded[0].state.plans == [], "a plan has erased events"
    pipeline.erase()
    rewritten = pipeline.newest()
    assert loaded[0].index.tobytes() == rewritten.index.tobytes()
    assert set(loaded[0].state.sampler) == set(rewritten.state.sampler)


def test_new_checkpoints_are_intact_after_earlier_ones_were_rewritten(pipeline):
    pipeline.erase()
    erased = pipeline.store.erase(ERASED)
    assert erased > 0
    pipeline.holdout.erase(ERASED, pipeline.store.event_table.bases)
    for number, begin in enumerate(range(350, 550, 50), start=4):
        columns = range(begin + 1, begin + 10)
        pipeline.add(columns)
        pipeline.checkpoint(number)
        contents = pipeline.newest()
        assert len(contents.index) == len(pipeline.store)
        assert keys(contents) == {1}
    assert pipeline.erase() == 0


@pytest.mark.slow
@pytest.mark.parametrize("crash", range(6))
def test_checkpoints_can_be_read_after_a_crash_at_any_write(pipeline, monkeypatch, crash):
    before = pipeline.newest()
    writes: list[Path] = []

    def dying(write):
        def act(path, *pieces):
            if len(writes) == crash:
                raise OSError(28, "No space left on device")
            writes.append(path)
            write(path, *pieces)

        return act

    with monkeypatch.context() as patched:
        patched.setattr(storage, "write_durably", dying(storage.write_durably))
        patched.setattr(storage, "replace_file", dying(storage.replace_file))
        with pytest.raises(OSError, match="No space"):
            pipeline.erase()
    for number in pipeline.checkpoints.numbers():
        manifest = pipeline.checkpoints.manifest(number)
        for name in manifest.files:
            pipeline.checkpoints.read(manifest, name)
    assert len(pipeline.newest().index) == len(before.index)
    pipeline.erase()
    assert keys(pipeline.newest()) == {1}
    assert pipeline.erase() == 0


def test_a_damaged_checkpoint_is_deleted_and_a_damaged_segment_is_removed(pipeline):
    folder = pipeline.path / "checkpoints"
    flip(folder / "2" / "rank-0" / "holdout.safetensors")
    segment = max((folder / "3" / "rank-0").glob("segment-*"), key=lambda path: path.stat().st_size)
    flip(segment)
    pipeline.erase()
    assert 2 not in pipeline.checkpoints.numbers()
    assert not segment.exists()
    assert keys(pipeline.newest()) == {1}


@pytest.mark.parametrize("damage", ["header", "contents", "segment"])
@pytest.mark.parametrize("pipeline", [TIERS["complete"]], indirect=True)
def test_rows_in_which_erased_events_cannot_be_found_are_removed(pipeline, damage):
    """Their checkpoints can still be restored: without them where the disk tier is, else without their events."""
    folder = pipeline.path / "checkpoints" / "3" / "rank-0"
    segment = max(folder.glob("segment-*"), key=lambda path: path.stat().st_size)
    rows = segment.with_name(segment.name.replace("segment-", "rows-"))
    if damage == "segment":
        flip(segment, -300)
    else:
        for path in (pipeline.path / "checkpoints").glob(f"*/rank-0/{rows.name}"):
            flip(path, 5 if damage == "header" else -300)
    pipeline.erase()
    assert not list(folder.glob(f"{rows.stem}.*"))
    assert bool(list(folder.glob(f"{segment.stem}.*"))) == (damage != "segment")
    assert keys(pipeline.newest()) == {1}


def test_an_erased_event_costs_the_segment_that_has_it_and_its_rows(tmp_path, schema, monkeypatch):
    made = Pipeline(tmp_path, schema, TIERS["complete"])
    monkeypatch.setattr(parts, "most_events", lambda *_: 40)
    made.erased_offsets = {100}
    made.add(range(300))
    made.checkpoint(1)
    before = dict(made.checkpoints.manifest(1).files)
    assert len([name for name in before if part_of(name).startswith("segment-")]) == 7
    assert made.erase() == 1
    changed = {part_of(name) for name in before.keys() - made.checkpoints.manifest(1).files.keys()}
    assert changed == {"replay", "segment-1-2", "rows-1-2"}
    assert keys(made.newest()) == {1}
    made.store.close()


@pytest.mark.parametrize("pipeline", [TIERS["complete"]], indirect=True)
def test_rows_that_checkpoints_share_are_read_once_and_a_damaged_copy_is_replaced(pipeline, monkeypatch):
    folder, opened = pipeline.path / "checkpoints", list[tuple[int, str]]()
    open_rows = pipeline.checkpoints.rows

    def counted(number, part):
        opened.append((number, part))
        return open_rows(number, part)

    monkeypatch.setattr(pipeline.checkpoints, "rows", counted)
    flip(folder / "3" / "rank-0" / "rows-1.safetensors", -300)
    pipeline.erase()
    assert sum(part == "rows-1" for _, part in opened) == 1
    manifest = pipeline.checkpoints.manifest(3)
    (name,) = (name for name in manifest.files if part_of(name) == "rows-1")
    pipeline.checkpoints.read(manifest, name)


def test_slots_that_no_checkpoint_refers_to_are_erased_in_the_file(pipeline):
    file = pipeline.store.tiers.slow[-1] if pipeline.store.tiers.slow else None
    if not isinstance(file, DiskTier):
        pytest.skip("there is no disk tier")
    pipeline.store.tiers.sync()
    pipeline.erase()
    records = np.frombuffer(file.path.read_bytes()[4096:], np.uint8).reshape(-1, file.slot_bytes)
    written = np.flatnonzero(records.any(axis=1))
    named = [
        named_slots(*pipeline.checkpoints.open(pipeline.checkpoints.manifest(number)))[file.id]
        for number in pipeline.checkpoints.numbers()
    ]
    assert set(written.tolist()) == set(np.concatenate(named).tolist())


def test_a_file_that_was_moved_aside_is_erased_once_its_checkpoints_are_back(tmp_path, schema):
    made = Pipeline(tmp_path, schema, TIERS["disk"])
    made.add(range(300))
    made.checkpoint(1)
    made.store.tiers.slow[-1].mark_named()
    made.store.close()
    make_way(STORE.folder(tmp_path))
    aside, checkpoints = STORE.folder(tmp_path) / "1.rows.before", tmp_path / "checkpoints"
    before = aside.read_bytes()
    checkpoints.rename(tmp_path / "checkpoints.before")
    checkpoints.mkdir()
    made.erase()
    assert aside.read_bytes() == before
    checkpoints.rmdir()
    (tmp_path / "checkpoints.before").rename(checkpoints)
    assert made.erase() == 1
    records = np.frombuffer(aside.read_bytes()[4096:], np.uint8).reshape(-1, made.store.tiers.slow[-1].slot_bytes)
    (named,) = named_slots(*made.checkpoints.open(made.checkpoints.manifest(1))).values()
    assert 0 < len(named) < 300
    assert set(np.flatnonzero(records.any(axis=1)).tolist()) == set(named.tolist())


def flip(path, at=-1):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.unlink()  # other checkpoints may share it
    path.write_bytes(content)


def test_events_that_are_erased_while_a_checkpoint_is_written_are_removed_from_it(pipeline, monkeypatch):
    pipeline.add(range(350, 360))
    plan = pipeline.store.planner.plans[0]
    named = np.flatnonzero(plan.records["key_hash"] == 9)
    plan.rows.wait()
    payload = [torch.as_tensor(plan.rows.rows())[row].numpy().tobytes() for row in named.tolist()]
    assert payload, "no plan has an event that is erased"
    write, lost = storage.Folder.write, list[int]()

    def write_and_erase(folder, name, *pieces):
        write(folder, name, *pieces)
        if name.endswith("replay.safetensors"):
            lost.append(pipeline.store.erase(ERASED))

    with monkeypatch.context() as patch:
        patch.setattr(storage.Folder, "write", write_and_erase)
        pipeline.checkpoint(4)
    assert lost[0] > 0
    found = pipeline.checkpoints.newest()
    assert found is not None
    assert found[0] == 4
    pipeline.erase()
    assert pipeline.checkpoints.numbers() == [1, 2, 3, 4]
    assert 9 not in keys(pipeline.newest())
    files = [path.read_bytes() for path in pipeline.path.rglob("*") if path.is_file()]
    assert not [each for each in payload for file in files if each in file]
