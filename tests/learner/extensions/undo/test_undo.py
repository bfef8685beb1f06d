"""A learner that undoes events equals one whose topic never had them, bit for bit."""

import contextlib
import fcntl
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill.kafka_history import KafkaHistory
from anabranch.ingest.events.block import Block, SkipReason
from anabranch.ingest.events.identity import partition_name
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.reader.cursors import Partition
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from anabranch.ingest.worker.block_builder import BlockBuilder
from anabranch.learner.checkpoints.erase_checkpoints import without_erased
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.checkpoints.parts import unpack
from anabranch.learner.errors import MisfitError, UndoRequestedError
from anabranch.learner.extensions.undo.extension import Undo, UndoneEvents, go_back, undone_verdict
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.features.learned import FeatureLearning
from anabranch.learner.state_dir.folders import Folder, Storage
from anabranch.learner.state_dir.undo_file import LOCK, NAME, UndoRecord, WentBack, append_record, ranges_of, read_undo
from anabranch.learner.stream.partition_ledger import PartitionLedger
from anabranch.learner.stream.trained_through import PartitionProgress
from anabranch.learner.versions.format import WEIGHTS, ModelReference, Versions
from anabranch.learner.versions.tainted import seen_by_version
from anabranch.replay.erasure.erased_events import ByRange
from anabranch.replay.erasure.erasure_log import ErasureLog
from anabranch.testing.stores import sample_of
from tests.learner.extensions.undo.undo_bench import NAMES, Missing, UndoBench
from tests.learner.learner_bench import TIERS
from tests.support.manifests import manifest_of

COUNT = 1200
FLIPPED: Missing = {NAMES[0]: {*range(500, 620), 700, 702, 950}, NAMES[1]: {*range(640, 660)}}


@pytest.fixture
def make(tmp_path, schema):
    """Makes learners, `make(name, count, missing, **options)`, over the state directory of that name."""
    benches: list[UndoBench] = []

    def start(name, count=COUNT, missing=None, **options):
        (tmp_path / name).mkdir(exist_ok=True)
        benches.append(UndoBench(tmp_path / name, schema, count, missing, **options))
        return benches[-1]

    yield start
    for bench in benches:
        bench.close()


def record(state_dir, missing, until=COUNT):
    """Record to undo these offsets."""
    ranges = ranges_of({partition_name(name): [(each, each) for each in gone] for name, gone in missing.items()})
    ends = dict.fromkeys(map(partition_name, NAMES), until)
    return append_record(
        state_dir, lambda number: UndoRecord(number=number, time=time.time(), ranges=ranges, until=ends)
    )


def assert_same(one, other):
    """Assert that two learners have the same state, but for counts of outcomes."""
    for part, tensors in other.trainer.tensors().items():
        assert tensors.keys() == one.trainer.tensors()[part].keys()
        for name, value in tensors.items():
            assert torch.equal(one.trainer.tensors()[part][name], value), (part, name)
    assert one.loop.state.steps == other.loop.state.steps
    assert one.loop.ledger.positions == other.loop.ledger.positions
    assert one.loop.monitor.prequential.state() == other.loop.monitor.prequential.state()
    held = one.holdout.held.columns
    assert all((held[name] == column).all() for name, column in other.holdout.held.columns.items())
    stored, expected = (sample_of(each.store, 0, len(each.store)).columns for each in (one, other))
    assert all(torch.equal(stored[name], column) for name, column in expected.items())
    assert one.store.lost == other.store.lost == 0


@pytest.mark.slow
@pytest.mark.parametrize("replay", TIERS.values(), ids=TIERS)
def test_undone_events_leave_the_state_as_if_the_topic_never_had_them(make, tmp_path, replay):
    clean = make("clean", COUNT, FLIPPED)
    clean.run()
    first = make("undone", 400, replay=replay)
    first.run()
    before = first.checkpoint()
    first.close()
    second = make("undone", replay=replay)
    second.run()
    tainted = second.checkpoint()
    second.close()
    record(tmp_path / "undone", FLIPPED)
    again = make("undone", replay=replay)
    assert again.found is not None
    assert (again.found[0], again.checkpoints.numbers()) == (before, [before])
    assert (tmp_path / "undone" / "checkpoints" / f"{tainted}.set-aside").is_dir()
    again.run()
    assert_same(again, clean)
    skipped = again.loop.ledger.totals.skipped
    assert skipped == {"undone": sum(map(len, FLIPPED.values()))}


class Ids(nn.Module):
    """Takes numbers, and rows of an embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.body = nn.Embedding(12, 4), nn.Linear(7, 3)

    def forward(self, x, who):
        """Return logits `[B, 3]`."""
        output: Tensor = self.body(torch.cat([x, self.embedding(who)], dim=1))
        return output


@pytest.mark.slow
def test_features_learned_of_undone_events_are_learned_as_if_the_topic_never_had_them(tmp_path, monkeypatch):
    encode = {"learn": 12, "min_count": 2, "expire": "2s"}
    features = {
        "x": {"dtype": "float32", "shape": [3], "scale": "robust"},
        "who": {"dtype": "int64", "encode": encode},
    }
    label = {"name": "y", "classes": 3}
    schema = Schema(SchemaSettings.model_validate({"features": features, "label": label}))

    def model():
        made = Ids()
        FeatureLearning().convert(made, ModelContext(torch.device("cpu"), schema))
        return made

    def columns(*arguments, **named):
        found = fake_columns(*arguments, **named)
        found["feature.who"] = found["offset"].astype(np.int64) ** 2 % 97 // 8 + found["offset"].astype(np.int64) // 300
        return found

    def run(name, count, missing=None):
        (tmp_path / name).mkdir(exist_ok=True)
        bench = UndoBench(tmp_path / name, schema, count, missing)
        bench.run()
        bench.checkpoint()
        bench.close()
        return bench

    monkeypatch.setattr("tests.learner.extensions.undo.undo_bench.small_model", model)
    monkeypatch.setattr("tests.learner.extensions.undo.undo_bench.fake_columns", columns)
    clean = run("clean", COUNT, FLIPPED)
    run("undone", 400)
    tainted = run("undone", COUNT)
    record(tmp_path / "undone", FLIPPED)
    again = run("undone", COUNT)
    keys = "learned_features.feature_who.state.seen_ms"
    assert again.loop.ledger.totals.skipped == {"undone": sum(map(len, FLIPPED.values()))}
    for name, value in clean.trainer.tensors()["model"].items():
        assert torch.equal(again.trainer.tensors()["model"][name], value), name
    assert not torch.equal(tainted.trainer.tensors()["model"][keys], again.trainer.tensors()["model"][keys])


@pytest.mark.slow
@pytest.mark.parametrize("replay", [{}, {"disk": {"bytes": "28kB"}, "device_bytes": "1kB"}], ids=["device", "disk"])
def test_a_checkpoint_that_is_kept_by_the_hour_is_returned_to_though_its_slots_are_used_again(
    make, tmp_path, replay, monkeypatch, caplog
):
    options: dict[str, Any] = {
        "replay": {**replay, "capacity": 100},
        "checkpoints": {"keep": 2, "keep_hourly": 3},
        "complete": True,
    }
    hours, kept = [time.time() - 3600 * hour for hour in range(6, 0, -1)], []
    for hour, count in zip(hours, (200, 400, 600, 800, 1000, COUNT), strict=True):
        bench = make("undone", count, **options)
        monkeypatch.setattr(time, "time", lambda hour=hour: hour)
        bench.run()
        kept.append(bench.checkpoint())
        assert bench.checkpointer._oldest == kept[-2:][0], "the others name no slot"
        bench.close()
    assert bench.checkpoints.numbers() == kept[1:], "the last of three hours, and the two newest"
    monkeypatch.undo()
    late: Missing = {name: {each for each in gone if each >= 600} for name, gone in FLIPPED.items()}
    record(tmp_path / "undone", late)
    again = make("undone", **options)
    assert again.found is not None
    assert again.found[0] == kept[2]
    assert ("events are restored from checkpoint" in caplog.text) == ("disk" in replay)
    again.run()
    expected = make("clean of late ones", COUNT, late, replay={"capacity": 100})
    expected.run()
    assert_same(again, expected)


class KilledError(BaseException):
    """Stands for a SIGKILL."""


@pytest.fixture
def trained(make, tmp_path):
    """A state directory with three checkpoints, of which the first is from before what is undone, and a version."""
    for count in (400, 700, COUNT):
        bench = make("undone", count)
        bench.run()
        bench.checkpoint()
        bench.close()
    bench.finish()
    return tmp_path / "undone"


@pytest.mark.slow
def test_a_start_that_is_killed_at_any_step_is_repeated_by_the_next_one(trained, schema, monkeypatch):
    record(trained, FLIPPED)
    versions = Versions(trained / "versions")
    steps = [(Storage, "set_aside"), (Versions, "write_verdict"), (Path, "replace")]
    for owner, name in steps:
        for after in (False, True):
            act = getattr(owner, name)

            def killed(*arguments, act=act, after=after):
                if after:
                    act(*arguments)
                raise KilledError

            with monkeypatch.context() as patch, contextlib.suppress(KilledError):
                patch.setattr(owner, name, killed)
                go_back(trained, Checkpoints(trained / "checkpoints", schema.digest, 1), versions, torn=False)
    checkpoints = Checkpoints(trained / "checkpoints", schema.digest, 1)
    undone = go_back(trained, checkpoints, versions, torn=False)
    (number,) = checkpoints.numbers()
    assert [each.went_back.checkpoint for each in undone.records if each.went_back] == [number]
    through = {each: versions.manifest(each).trained_through["payments:0"].offset for each in versions.numbers()}
    failed = [each for each in versions.numbers() if versions.verdict(each) == undone_verdict(1)]
    assert failed == [each for each, offset in through.items() if offset >= 500]
    assert 0 < len(failed) < len(through)
    before = (trained / NAME).read_bytes()
    go_back(trained, checkpoints, versions, torn=False)
    assert (trained / NAME).read_bytes() == before


def test_rows_of_files_of_the_topics_are_skipped_as_their_events_are(tmp_path, schema):
    offsets = [*range(500, 520), *range(640, 662)]
    parts = [0] * 20 + [1] * 22
    features = pa.array([[0.0] * 3] * 42, pa.list_(pa.float32(), 3))
    columns = {"x": features, "y": pa.array([1] * 42), "p": pa.array(parts), "o": pa.array(offsets)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    identity = {"partition": "p", "offset": "o"}
    backfill = {"files": [str(tmp_path / "*.parquet")], "identity": identity}
    settings = StreamSettings.model_validate({"topics": ["payments"], "backfill": backfill}).resolved("test")
    history = KafkaHistory(settings, schema)
    history.list_files(None)
    everything = dict.fromkeys(NAMES, 1000)
    history.plan(dict.fromkeys(NAMES, 0), everything, everything, first=True)
    rows = None
    while rows is None:
        rows = history.poll(timedelta(seconds=20))
    history.close()
    partitions = [Partition(name, 0, 1000) for name in (TopicPartition("history", 0, 0, 1), *NAMES)]
    index = {each.name: at for at, each in enumerate(partitions)}
    builder = BlockBuilder(schema, settings, HoldOut(fraction=0, seed=0))
    assembled = builder.assemble_history(rows, [index[name] for name in rows.counts])
    block = Block(assembled.columns, ())
    UndoneEvents([record(tmp_path, FLIPPED)]).skip_in(block, partitions)
    gone = [offset in FLIPPED[NAMES[part]] for part, offset in zip(parts, offsets, strict=True)]
    assert block.columns["reason"].tolist() == [SkipReason.UNDONE if each else SkipReason.NONE for each in gone]


@pytest.mark.slow
def test_where_all_checkpoints_are_tainted_the_stream_is_begun_again(make, trained):
    first: Missing = {NAMES[0]: {*range(10, 40)}}
    record(trained, first)
    again = make("undone")
    assert again.found is not None
    assert again.found[1].begins
    again.run()
    clean = make("clean", COUNT, first)
    clean.run()
    assert_same(again, clean)


@pytest.mark.slow
def test_a_second_undo_skips_the_events_of_the_first_too(make, trained):
    record(trained, {NAMES[0]: FLIPPED[NAMES[0]]})
    again = make("undone")
    again.run()
    assert again.checkpoint() > 3
    again.close()
    record(trained, {NAMES[1]: FLIPPED[NAMES[1]]}, until=COUNT - 50)
    again = make("undone")
    again.run()
    clean = make("clean", COUNT, FLIPPED)
    clean.run()
    assert_same(again, clean)
    report = again.loop.state._parts.extensions[0].report()["undo"]
    assert report is not None
    assert (report.number, report.left, report.fraction) == (2, 0, 1.0)


def test_partitions_that_nobody_reads_any_more_are_not_left_to_learn_again():
    went_back = WentBack(checkpoint=3, time=0.0, positions=dict.fromkeys(map(partition_name, NAMES), 10))
    until = dict.fromkeys(map(partition_name, NAMES), 30)
    undone = UndoneEvents([UndoRecord(number=1, time=0.0, ranges={}, until=until, went_back=went_back)])
    accounts = [PartitionLedger(name, 0) for name in NAMES]
    accounts[0].position, accounts[1].position = Position(25), Position(10)
    report = undone.report(accounts)
    assert report is not None
    assert (report.left, report.fraction) == (25, 0.375)
    accounts[1].update(Partition(NAMES[1], 0, 10, read=False))
    report = undone.report(accounts)
    assert report is not None
    assert (report.left, report.fraction) == (5, 0.75)


@pytest.mark.slow
def test_what_was_erased_after_the_checkpoint_stays_erased(make, trained):
    name = partition_name(NAMES[0])
    ErasureLog(trained / "erasures.log").append([ByRange(time=0.0, by="command", partition=name, first=0, last=399)])
    record(trained, FLIPPED)
    again = make("undone")
    checkpoint = without_erased(again.found[1], again.log.erased)[0] if again.found else None
    assert checkpoint is not None
    assert again.log.erased
    parts = unpack(checkpoint)
    assert parts is not None
    index = parts[0].index
    assert not ((index["partition"] == 0) & (index["offset"] < 400)).any()
    assert len(index)


@pytest.mark.slow
def test_without_its_file_a_checkpoint_that_was_made_after_an_undo_is_refused(make, trained):
    record(trained, FLIPPED)
    again = make("undone")
    again.run()
    again.checkpoint()
    again.close()
    (trained / NAME).unlink()
    with pytest.raises(MisfitError, match=r"made after undo 1, which undo\.json in state_dir does not have"):
        make("undone")


def test_a_learner_that_runs_ends_when_an_undo_is_requested(tmp_path):
    watch = Undo(tmp_path, UndoneEvents())
    watch.check()
    record(tmp_path, FLIPPED)
    with pytest.raises(UndoRequestedError, match="undo 1 was requested"):
        watch.check()
    Undo(tmp_path, UndoneEvents(read_undo(tmp_path))).check()
    (tmp_path / NAME).write_text("{")
    with pytest.raises(SettingsError, match=r"undo.json cannot be used: .* put it back from a backup"):
        watch.check()


def test_no_checkpoint_is_deleted_once_an_undo_is_ordered_nor_while_one_is(make, tmp_path, monkeypatch):
    bench = make("undone", 400)
    watch = Undo(tmp_path / "undone", UndoneEvents())
    bench.checkpointer.keep, bench.checkpointer._deleting = 1, watch.excluded
    kept = [bench.checkpoint()]
    with watch.excluded(), (tmp_path / "undone" / LOCK).open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    write = Checkpoints.write

    def ordered(*arguments):
        path = write(*arguments)
        record(tmp_path / "undone", FLIPPED)
        return path

    monkeypatch.setattr(Checkpoints, "write", ordered)
    bench.run()
    with pytest.raises(UndoRequestedError):
        bench.checkpoint()
    assert bench.checkpoints.numbers() == [*kept, kept[-1] + 1]


def test_no_version_appears_once_an_undo_is_ordered_though_it_was_being_written(make, tmp_path, monkeypatch):
    bench, write = make("undone", 400), Folder.write
    monkeypatch.setattr(bench.publisher._writer, "_while_appearing", Undo(tmp_path / "undone", UndoneEvents()).excluded)

    def ordered(folder, name, pieces):
        write(folder, name, pieces)
        if name == WEIGHTS:
            record(tmp_path / "undone", FLIPPED)

    def learn():
        bench.run()
        bench.finish()

    monkeypatch.setattr(Folder, "write", ordered)
    with pytest.raises(UndoRequestedError):  # of the publisher's thread: at a later step, or at the end
        learn()
    assert bench.versions.numbers() == []
    assert not list((tmp_path / "undone" / "versions").glob(".tmp-*"))


@pytest.mark.parametrize(
    ("progress", "seen"),
    [
        (PartitionProgress(offset=499), False),
        (PartitionProgress(offset=500), True),
        (PartitionProgress(offset=3, incarnation=1), True),
    ],
)
def test_a_version_is_tainted_from_the_first_undone_offset_on(tmp_path, progress, seen):
    made = record(tmp_path, FLIPPED)
    reference = ModelReference("m:build", {}, "classification")
    manifest = manifest_of(1, schema="", model=reference, trained_through={"payments:0": progress})
    names = list(made.ranges)
    assert seen_by_version(manifest, names, torn=False).taints(made) == seen
    assert seen_by_version(manifest, names, torn=True).taints(made), "the message after may be seen in part"
    clean = msgspec.structs.replace(manifest, undone=1)
    assert not seen_by_version(clean, names, torn=True).taints(made)
