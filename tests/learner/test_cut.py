"""Cuts: whole or not at all, and the same learner afterwards, bit for bit."""

import json
import shutil
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import nn

from ingest.block import Block, Coverage, TopicPartition
from ingest.fake import fake_columns
from ingest.metrics import IngestMetrics
from ingest.schema import Schema
from ingest.source import Partition, Source
from learner.config import CutsSettings, LearnerSettings, ModelSettings, VersionsSettings
from learner.cut import MANIFEST, Cuts
from learner.cutter import Cutter
from learner.deadline import Deadline
from learner.errors import CutError
from learner.guard import GuardSet
from learner.loop import Loop, Metrics, Parts
from learner.metrics import LearnerMetrics
from learner.precision import choose_precision
from learner.publisher import Publisher
from learner.strategy import STRATEGIES
from learner.task import Classification
from learner.trainer import Trainer
from learner.version import Versions
from replay.config import ReplaySettings
from replay.metrics import ReplayMetrics
from replay.store import build_store

CPU = torch.device("cpu")
NAME = TopicPartition("events", 0)
ROWS = 32
"""Events of a block, of which one is held out and the rest are a batch."""


class Stream:
    """A topic of `blocks` blocks, read from any block on; ends the run with the last one."""

    def __init__(self, schema: Schema, blocks: int, stop: threading.Event) -> None:
        self.schema = schema
        self.blocks = blocks
        self.stop = stop
        self.next = 0
        self.ill: str | None = None
        self.unknown_fields = 0
        self.partitions = [Partition(NAME, 0, blocks * ROWS)]

    def poll(self, timeout: timedelta) -> Block | None:
        if self.next == self.blocks:
            self.stop.set()
            return None
        begin = self.next * ROWS
        self.next += 1
        columns = fake_columns(self.schema, range(begin, begin + ROWS), label=[0, 1, 2, 1])
        columns["outcome"][5] = 3  # held out
        columns["feature.x"] += torch.randn(
            columns["feature.x"].shape, generator=torch.Generator().manual_seed(begin)
        ).numpy()
        return Block(columns, (Coverage(0, begin, begin + ROWS),))

    def release(self, block: Block) -> None:
        """Nothing is shared here."""

    def commit(self, offsets: dict[int, int]) -> None:
        """There is no broker."""


class Bench:
    """A learner over a fake stream and a real state directory."""

    def __init__(self, path: Path, schema: Schema, model: nn.Module, blocks: int, every: str = "1h") -> None:
        self.stop = threading.Event()
        self.stream = Stream(schema, blocks, self.stop)
        settings = LearnerSettings.model_validate({"batch_size": ROWS - 1, "replay_ratio": 1.3, "max_delay": "1ms"})
        registry = CollectorRegistry()
        self.metrics = Metrics(IngestMetrics(registry), ReplayMetrics(registry), LearnerMetrics(registry))
        task = Classification()
        trainer = Trainer(model, task, STRATEGIES["er"](), schema, settings, CPU, choose_precision("auto", CPU))
        self.store = build_store(ReplaySettings(capacity=300), schema, CPU, 0)
        self.cuts = Cuts(path / "cuts", schema.digest, 1)
        self.cutter = Cutter(self.cuts, CutsSettings.model_validate({"every": every}), self.store, self.metrics.learner)
        publisher = Publisher(
            *(Versions(path / "versions"), VersionsSettings.model_validate({"publish_every": "1h"})),
            *(ModelSettings(factory="m:build"), schema, model, task, CPU, 1, self.metrics.learner),
        )
        guard = GuardSet(schema, 100)
        source = cast("Source", self.stream)
        self.loop = Loop(settings, Parts(source, trainer, self.store, guard, publisher, self.cutter), self.metrics)
        self.trainer, self.guard = trainer, guard

    def run(self) -> None:
        self.loop.run(self.stop, lambda: None)

    def resume(self) -> None:
        found = self.cuts.newest()
        assert found is not None
        self.loop.restore(found[1])
        self.stream.next = self.loop.ledger.partitions[0].position.offset // ROWS

    def finish(self) -> None:
        self.loop.finish(Deadline(timedelta(seconds=30)))


@pytest.fixture
def make_bench(tmp_path: Path, schema: Schema) -> Callable[..., Bench]:
    def make(blocks: int, model: Callable[[], nn.Module] | None = None, **options: Any) -> Bench:
        torch.manual_seed(0)
        return Bench(tmp_path, schema, (model or _model)(), blocks, **options)

    return make


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(make_bench: Callable[..., Bench], tmp_path: Path) -> None:
    """Weights, running statistics, optimizer, dropout's generator, draws, guard set, ledger and windows."""
    whole = make_bench(60)
    whole.run()
    half = make_bench(25)
    half.run()
    half.finish()
    resumed = make_bench(60)
    resumed.resume()
    assert resumed.loop.steps == 25
    resumed.run()
    for name, value in whole.trainer.snapshot().items():
        assert torch.equal(resumed.trainer.snapshot()[name], value), name
    for name, value in whole.trainer.tensors()["optimizer"].items():
        assert torch.equal(resumed.trainer.tensors()["optimizer"][name], value), name
    assert resumed.loop.ledger.state() == whole.loop.ledger.state()
    assert resumed.loop.prequential.state() == whole.loop.prequential.state()
    assert (resumed.loop.rows_new, resumed.loop.rows_replay) == (whole.loop.rows_new, whole.loop.rows_replay)
    assert all((resumed.guard.held.columns[name] == column).all() for name, column in whole.guard.held.columns.items())


def test_cuts_are_made_while_the_steps_go_on(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(400, every="1ms")
    bench.run()
    bench.finish()
    numbers = bench.cuts.numbers()
    assert len(numbers) == 3, "more or fewer than cuts.keep are there"
    assert numbers[-1] == bench.cutter.number > 3
    found = bench.cuts.newest()
    assert found is not None
    assert found[1].step == bench.loop.steps
    assert bench.store.reserve == bench.store._tier.slots - len(bench.store), "slots are kept after the last cut"


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove a file", "tear the manifest"])
def test_a_cut_that_is_not_whole_is_refused_and_the_one_before_it_taken(
    make_bench: Callable[..., Bench], harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench(4)
    bench.run()
    bench.finish()
    bench.stream.blocks, bench.stop = 8, threading.Event()
    bench.stream.stop = bench.stop
    bench.run()
    bench.finish()
    newest = bench.cuts.path / "2"
    payload = newest / "rank-0" / "replay.safetensors"
    if harm == "flip":
        content = bytearray(payload.read_bytes())
        content[len(content) // 2] ^= 1
        payload.write_bytes(content)
    elif harm == "truncate":
        payload.write_bytes(payload.read_bytes()[:-1])
    elif harm == "remove a file":
        payload.unlink()
    else:
        (newest / MANIFEST).write_bytes((newest / MANIFEST).read_bytes()[:40])
    found = bench.cuts.newest()
    assert found is not None
    assert (found[0], found[1].step) == (1, 4)
    assert "the one before it is taken" in caplog.text


def test_half_a_cut_does_not_exist_and_is_cleaned_away(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(4)
    bench.run()
    bench.finish()
    shutil.copytree(bench.cuts.path / "1", bench.cuts.path / "7")
    (bench.cuts.path / "7" / MANIFEST).unlink()
    (bench.cuts.path / ".tmp-1-9").mkdir()
    assert bench.cuts.numbers() == [1]
    bench.cuts.clean()
    assert sorted(entry.name for entry in bench.cuts.path.iterdir()) == ["1"]


def test_a_full_disk_costs_the_cut_and_neither_the_training_nor_the_cuts_before(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(4)
    bench.run()
    bench.finish()
    with monkeypatch.context() as patch:
        patch.setattr("learner.files.os.fsync", _no_space)
        bench.cutter.cut_last(bench.loop._moment, Deadline(timedelta(seconds=20)))
    assert bench.cutter.ill is not None
    assert "No space left" in bench.cutter.ill
    assert bench.cuts.numbers() == [1]
    bench.cutter.cut_last(bench.loop._moment, Deadline(timedelta(seconds=20)))
    assert bench.cutter.ill is None
    assert bench.cuts.numbers() == [1, 3], "the number of a cut that failed is given again"


def test_old_cuts_that_cannot_be_deleted_keep_no_new_one_from_being_written(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(4)
    bench.run()
    monkeypatch.setattr(Cuts, "prune", lambda *_: _no_space(0))
    for _ in range(2):
        bench.finish()
    assert bench.cuts.numbers() == [1, 2]
    assert bench.cutter.ill is not None
    assert "old cuts cannot be deleted" in bench.cutter.ill


def test_a_bug_while_a_cut_is_written_stops_the_loop(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(4)
    bench.run()
    monkeypatch.setattr(Cuts, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.finish()


def test_a_cut_of_another_schema_is_refused(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(4)
    bench.run()
    bench.finish()
    path = bench.cuts.path / "1" / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": "0" * 64}))
    with pytest.raises(CutError, match=r"cut 1 in .* was made under another \[schema\]"):
        bench.cuts.newest()


def test_a_cut_of_another_model_is_refused(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(4)
    bench.run()
    bench.finish()
    other = make_bench(4, model=lambda: nn.Linear(3, 3))
    with pytest.raises(CutError, match="does not fit the model"):
        other.resume()


def test_a_new_learning_rate_holds_after_a_restart(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(4)
    bench.run()
    bench.finish()
    resumed = make_bench(4)
    for group in resumed.trainer._optimizer.param_groups:
        group["lr"] = 0.5
    resumed.resume()
    assert [group["lr"] for group in resumed.trainer._optimizer.param_groups] == [0.5]


def _no_space(_descriptor: int) -> None:
    raise OSError(28, "No space left on device")
