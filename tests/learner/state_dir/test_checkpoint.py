"""Checkpoints: whole or not at all, and the same learner afterwards, bit for bit."""

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import nn

from anabranch.core.errors import SettingsError
from ingest.config import LagPolicySettings, SchemaSettings, StreamSettings
from ingest.events.block import Block, Coverage
from ingest.events.partition import TopicPartition
from ingest.events.schema import Schema
from ingest.kafka.fake import Columns, fake_columns
from ingest.metrics import IngestMetrics
from ingest.reader.cursors import Partition
from ingest.reader.reader import BlockReader
from learner.adaptation.stream_monitor import StreamMonitor
from learner.build import LearnerSpec, TrainingSetup
from learner.checkpointing.checkpointer import Checkpointer
from learner.checkpointing.erasure import Erasure
from learner.checkpointing.replay_state import unpack
from learner.config import (
    CheckpointSettings,
    DeviceSharingSettings,
    GateSettings,
    LearnerSettings,
    ModelSettings,
    VersionsSettings,
)
from learner.device_sharing.sharing import DeviceSharingSpec
from learner.errors import CheckpointError, MisfitError, SecondLearnerError
from learner.evaluation.holdout import HoldoutSet
from learner.evaluation.scoring import Scorer
from learner.loop import LoopComponents, LoopMetrics, Task, TrainingLoop
from learner.metrics import LearnerMetrics
from learner.model.device import choose_precision
from learner.model.embedding import Embedding
from learner.model.task import Classification
from learner.publishing.gatekeeper import QualityGate
from learner.publishing.publisher import Publisher
from learner.replay_feed import make_feed
from learner.resume import ResumePoint, most_offered
from learner.run import between_steps, learn
from learner.runtime.shutdown import Deadline
from learner.state_dir.checkpoint import RANK, Checkpoints
from learner.state_dir.folders import MANIFEST
from learner.state_dir.lock import GENERATION, check_generation
from learner.state_dir.version import Versions, reference_to
from learner.strategies.base import Strategy
from learner.strategies.der import DarkReplayPlus
from learner.strategies.examples import Examples, output_field
from learner.strategies.registry import STRATEGIES
from learner.stream.lag import LagPolicy
from learner.training.trainer import Trainer
from replay.background_store import BackgroundStore
from replay.build import build_store
from replay.config import ReplaySettings
from replay.erasure.erased_events import ByKey
from replay.erasure.erasure_log import ErasureLog
from replay.erasure.log_file import Applied
from replay.metrics import ReplayMetrics
from replay.store import Store

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
        self.drifts_at: int | None = None
        """From this event on labels are others."""
        self.problem: str | None = None
        self.unlabelled: set[int] = set()
        """Blocks whose events have no label."""
        self.change: Callable[[Columns], None] | None = None
        """Makes other events of those of a block."""
        self.unknown_fields = 0
        self.letters_dropped: Counter[str] = Counter()
        self.told: float | None = None
        self.partitions = [Partition(NAME, 0, blocks * ROWS)]

    def poll(self, timeout: timedelta) -> Block | None:
        if self.next == self.blocks:
            self.stop.set()
            return None
        begin = self.next * ROWS
        self.next += 1
        columns = fake_columns(self.schema, range(begin, begin + ROWS), label=[0, 1, 2, 1])
        columns["outcome"][5] = 3  # held out
        if self.next - 1 in self.unlabelled:
            columns["labelled"] = columns["outcome"] == 3
            columns["label"][~columns["labelled"]] = -1
        columns["feature.x"] += torch.randn(
            columns["feature.x"].shape, generator=torch.Generator().manual_seed(begin)
        ).numpy()
        if self.drifts_at is not None and begin >= self.drifts_at:
            columns["label"] = (columns["label"] + 1) % 3
        if self.change is not None:
            self.change(columns)
        return Block(columns, (Coverage(0, begin, begin + ROWS),))

    def receive(self) -> None:
        """Nothing is told but by `poll`."""

    def release(self, block: Block) -> None:
        """Nothing is shared here."""

    def commit(self, offsets: dict[int, int]) -> None:
        """There is no broker."""


class Bench:
    """A learner over a fake stream and a real state directory."""

    def __init__(
        self,
        path: Path,
        schema: Schema,
        model: nn.Module,
        blocks: int,
        every: str = "1h",
        replay: Mapping[str, Any] | None = None,
        strategy: Strategy | None = None,
        learner: Mapping[str, Any] | None = None,
        task: Classification | None = None,
    ) -> None:
        self.stop, self.closed = threading.Event(), False
        self.stream = Stream(schema, blocks, self.stop)
        settings = LearnerSettings.model_validate(
            {"batch_size": ROWS - 1, "replay_ratio": 1.3, "max_delay": "1ms", **(learner or {})}
        )
        registry = CollectorRegistry()
        self.metrics = LoopMetrics(IngestMetrics(registry), ReplayMetrics(registry), LearnerMetrics(registry))
        task = task or Classification()
        strategy = strategy or STRATEGIES["er"]()
        embedding = Embedding(model, "3") if strategy.embeds else None
        trainer = Trainer(model, task, strategy, schema, settings, CPU, choose_precision("auto", CPU), embedding)
        self.checkpoints = Checkpoints(path / "checkpoints", schema.digest, 1)
        self.checkpoints.clean()
        self.found = self.checkpoints.newest()
        contents, segments = (unpack(self.found[1]) if self.found else None) or (None, ())
        options = ReplaySettings.model_validate({"capacity": 300, **(replay or {})})
        columns = output_field((3,)) if strategy.keeps_output else None
        step = most_offered(settings, StreamSettings(topics=("events",)), 1)
        self.background_store = BackgroundStore(
            build_store(options, schema, CPU, 0, path / "replay" / RANK, contents, columns, step=step)
        )
        settings_of_checkpoints = CheckpointSettings.model_validate({"every": every})
        check = functools.partial(check_generation, path, 1)
        self.checkpointer = Checkpointer(
            self.checkpoints, settings_of_checkpoints, self.background_store, self.metrics.learner, segments, check
        )
        versions, reference = Versions(path / "versions"), reference_to(ModelSettings(factory="m:build"))
        self.versions = versions
        scorer = Scorer(model, task, schema, CPU)
        publisher = Publisher(
            *(versions, VersionsSettings.model_validate({"publish_every": "1h"}), reference, schema, scorer),
            *(QualityGate(versions, GateSettings(), scorer, reference), 1, self.metrics.learner),
        )
        holdout = HoldoutSet(schema, 100)
        source = cast("BlockReader", self.stream)
        self.log = ErasureLog(path / "erasures.log")
        self.log.refresh()
        erasure = Erasure(
            self.log, self.checkpoints, path / "replay" / RANK, self.background_store, holdout, self.checkpointer
        )
        lag = LagPolicy(LagPolicySettings(), 0, source)
        monitor = StreamMonitor(settings)
        sampling = self.metrics.replay.sample
        feed = make_feed(self.background_store, settings, 1, monitor, holdout, trainer, sampling)
        parts = LoopComponents(source, trainer, monitor, feed, holdout, publisher, self.checkpointer, erasure, lag)
        self.loop = TrainingLoop(settings, parts, self.metrics)
        self.trainer, self.holdout, self.publisher, self.erasure = trainer, holdout, publisher, erasure

    def run(self, *tasks: Task) -> None:
        """Train to the end of the stream; `tasks` run after all that a learner does between steps."""
        self.loop.run(self.stop, between_steps(self.loop, self.erasure, tasks))

    def resume(self) -> None:
        assert self.found is not None
        self.loop.restore(self.found[1])
        # A slow machine makes a checkpoint before the first batch, which has no partition yet.
        self.stream.next = sum(each.position.offset for each in self.loop.ledger.partitions) // ROWS

    def finish(self) -> None:
        self.loop.finish(Deadline(timedelta(seconds=30)))

    def close(self) -> None:
        if not self.closed:
            self.background_store.close()
        self.closed = True

    @property
    def store(self) -> Store:
        return self.background_store.flush()


@pytest.fixture
def make_bench(tmp_path: Path, schema: Schema) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(blocks: int, model: Callable[[], nn.Module] | None = None, **options: Any) -> Bench:
        torch.manual_seed(0)
        benches.append(Bench(tmp_path, schema, (model or _model)(), blocks, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


TIERS = {
    "device": {},
    "disk": {"disk": {"bytes": "1MB"}},
    "disk with a small cache": {"disk": {"bytes": "1MB"}, "device_bytes": "1kB"},
}
each_arrangement = pytest.mark.parametrize("replay", TIERS.values(), ids=TIERS)


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


POLICIES = {
    **{sampling: {"sampling": sampling} for sampling in ("class-balanced", "recent", "loss")},
    **{f"{admission} kept": {"admission": admission} for admission in ("class-balanced", "recent")},
}


@pytest.mark.parametrize(
    ("replay", "policies"),
    [
        *(pytest.param(tiers, {}, id=name) for name, tiers in TIERS.items()),
        *(
            pytest.param(TIERS["disk with a small cache"], policies, id=f"{name}, disk with a small cache")
            for name, policies in POLICIES.items()
        ),
    ],
)
@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    make_bench: Callable[..., Bench], replay: dict[str, Any], policies: dict[str, Any]
) -> None:
    """Weights, running statistics, optimizer, dropout's generator, samples, holdout set, ledger and windows."""
    replay = {**replay, **policies}
    whole = make_bench(60, replay=policies)
    whole.run()
    half = make_bench(25, replay=replay)
    half.run()
    half.finish()
    half.close()
    resumed = make_bench(60, replay=replay)
    resumed.resume()
    assert resumed.loop.steps == 25
    resumed.run()
    for name, value in whole.trainer.snapshot().items():
        assert torch.equal(resumed.trainer.snapshot()[name], value), name
    for name, value in whole.trainer.tensors()["optimizer"].items():
        assert torch.equal(resumed.trainer.tensors()["optimizer"][name], value), name
    assert resumed.loop.ledger.state() == whole.loop.ledger.state()
    assert resumed.loop.monitor.prequential.state() == whole.loop.monitor.prequential.state()
    assert (resumed.loop.rows_new, resumed.loop.rows_replay) == (whole.loop.rows_new, whole.loop.rows_replay)
    assert all(
        (resumed.holdout.held.columns[name] == column).all() for name, column in whole.holdout.held.columns.items()
    )


def test_a_resumed_run_measures_and_decides_as_the_uninterrupted_one(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replay ratio, drift and what it has raised go on where they were."""
    monkeypatch.setattr(
        "learner.adaptation.replay_ratio._SURE", 0
    )  # old events are hardly harder here, and not for long
    learner = {
        "replay_ratio": "auto",
        "old_weight": 1.0,
        "drift": {"actions": ["raise-lr", "raise-replay"], "delta": 0.999, "steps": 20},
    }
    whole = make_bench(110, learner=learner)
    whole.run()
    half = make_bench(60, replay=TIERS["disk with a small cache"], learner=learner)
    half.run()
    half.finish()
    half.close()
    resumed = make_bench(110, replay=TIERS["disk with a small cache"], learner=learner)
    resumed.resume()
    assert resumed.loop.steps == 60
    resumed.run()
    assert whole.loop.rows_replay > 0, "nothing was decided that could differ"
    assert resumed.loop.rows_replay == whole.loop.rows_replay
    assert resumed.loop.monitor.ratio.state() == whole.loop.monitor.ratio.state()
    assert resumed.loop.monitor.drift.state() == whole.loop.monitor.drift.state()
    for name, value in whole.trainer.snapshot().items():
        assert torch.equal(resumed.trainer.snapshot()[name], value), name


def test_measuring_what_is_erased_changes_nothing_that_is_learned(make_bench: Callable[..., Bench]) -> None:
    """Old events are scored now and then while none is replayed; statistics of batch norm stay as they are."""
    bare = make_bench(60, learner={"replay_ratio": 0.0})
    bare.run()
    bare.close()
    measured = make_bench(60, learner={"replay_ratio": "auto", "old_weight": 0.0})
    measured.run()
    assert measured.loop.monitor.ratio.state()["old"][2] > 0, "nothing was scored"
    assert measured.loop.rows_replay == 0
    for name, value in bare.trainer.snapshot().items():
        assert torch.equal(measured.trainer.snapshot()[name], value), name


class Unsure(Classification):
    """Has no score for the events of some steps."""

    def __init__(self, steps: range) -> None:
        self.left = list(steps)

    def score(self, output_B: torch.Tensor, label_B: torch.Tensor) -> torch.Tensor:
        step = self.left.pop(0) if self.left else 0
        return super().score(output_B, label_B) * (torch.nan if step % 3 else 1.0)


def test_scores_that_are_not_finite_are_left_out_and_a_restart_goes_on(
    make_bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"replay_ratio": "auto", "drift": {"actions": ["raise-lr"]}}
    bench = make_bench(120, learner=settings, task=Unsure(range(60)))
    bench.run()
    bench.finish()
    assert sum("the task's score of its events is nan" in record.getMessage() for record in caplog.records) == 1
    overall = bench.loop.monitor.prequential.overall
    assert overall is not None
    assert 0 <= overall <= 1
    assert bench.loop.monitor.prequential.window < 100 * (ROWS - 1)
    assert bench.versions.manifest(bench.versions.numbers()[-1]).metrics["now"] == bench.loop.monitor.prequential.mean
    bench.close()
    resumed = make_bench(160, learner=settings)
    resumed.resume()
    assert resumed.loop.monitor.prequential.overall == overall
    resumed.run()
    assert resumed.loop.steps == 160


def test_what_a_checkpoint_has_learned_is_published_after_a_crash_before_its_version(
    make_bench: Callable[..., Bench],
) -> None:
    soon = Deadline(timedelta(seconds=20))
    bench = make_bench(25)
    bench.run()
    bench.checkpointer.checkpoint_last(bench.loop._capture, soon)
    bench.publisher._background.wait(soon)
    assert bench.versions.manifest(1).step < 25
    bench.close()
    resumed = make_bench(25)
    resumed.resume()
    resumed.run()
    resumed.finish()
    manifest = resumed.versions.manifest(2)
    assert (manifest.step, manifest.trained_through["events:0"].offset) == (25, 25 * ROWS - 1)
    resumed.close()
    again = make_bench(25)
    again.resume()
    again.run()
    again.finish()
    assert again.versions.numbers() == [1, 2]


def _ask_while_spoiled(bench: Bench) -> None:
    """Run with a checkpoint due at each step that finds the weights spoiled."""

    def at_boundary() -> None:
        if bench.loop.spoiled:
            assert not bench.checkpointer.busy
            bench.checkpointer.request()

    bench.stop.clear()
    bench.run(at_boundary)


def _blown_up(bench: Bench) -> Bench:
    """Run and checkpoint, and spoil the weights then."""
    bench.run()
    bench.finish()
    with torch.no_grad():
        for weight in bench.trainer.model.parameters():
            weight.fill_(torch.nan)
    return bench


def test_weights_that_have_blown_up_are_not_checkpoint_and_a_restart_goes_on_from_before(
    make_bench: Callable[..., Bench],
) -> None:
    bench = _blown_up(make_bench(20))
    bench.stream.blocks = 60
    _ask_while_spoiled(bench)
    bench.finish()
    assert bench.loop.non_finite_in_a_row == 40
    assert bench.checkpoints.numbers() == [1]
    bench.close()
    resumed = make_bench(60)
    resumed.resume()
    assert resumed.loop.steps == 20
    resumed.run()
    resumed.finish()
    assert resumed.loop.ledger.outcomes["trained"] == 60 * (ROWS - 1)
    assert resumed.checkpoints.numbers() == [1, 2]


def test_the_first_steps_that_are_not_finite_are_not_checkpointed_either(make_bench: Callable[..., Bench]) -> None:
    """They are too few for the learner to be unhealthy, and with long steps there would be as many checkpoints of bad
    weights."""
    bench = _blown_up(make_bench(20))
    bench.stream.blocks = 25
    bench.stop.clear()
    bench.run(lambda: bench.checkpointer.request() if bench.loop.non_finite_in_a_row else None)
    bench.checkpointer.wait(Deadline(timedelta(seconds=30)))
    assert 0 < bench.loop.non_finite_in_a_row < 10
    assert bench.checkpoints.numbers() == [1]


def _poison(bench: Bench, blocks: range) -> None:
    """Let the features of some blocks be infinite."""

    def change(columns: Columns) -> None:
        if bench.stream.next in blocks:
            columns["feature.x"][:] = np.inf

    bench.stream.change = change


def test_after_events_that_are_not_finite_checkpoints_are_made_again(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(60)
    _poison(bench, range(21, 41))
    _ask_while_spoiled(bench)
    bench.finish()
    found = bench.checkpoints.newest()
    assert found is not None
    assert found[1].step == 60
    assert bench.loop.ledger.skipped == {"non_finite": 20 * (ROWS - 1)}


def test_where_no_checkpoint_frees_slots_for_spoiled_weights_the_stream_is_read_on(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(200)
    bench.stream.unlabelled = set(range(32, 200))
    _poison(bench, range(21, 33))
    _ask_while_spoiled(bench)
    bench.finish()
    assert bench.loop.spoiled
    assert bench.loop.ledger.partitions[0].position.offset == 200 * ROWS


def test_a_drift_begins_a_checkpoint(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(400, learner={"drift": {"actions": ["checkpoint"]}})
    bench.stream.drifts_at = 300 * ROWS
    bench.run()
    assert bench.loop.monitor.drift.count == 1
    bench.checkpointer.wait(Deadline(timedelta(seconds=30)))
    assert bench.checkpointer.number == 1
    found = bench.checkpoints.newest()
    assert found is not None
    assert found[1].step == bench.loop.monitor.drift.step


def test_a_drift_raises_what_it_is_to_raise_and_tells_the_strategy(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    actions = {"actions": ["raise-lr", "raise-replay"], "lr_factor": 5.0, "replay_factor": 3.0, "steps": 50}
    bench = make_bench(400, learner={"drift": actions})
    bench.stream.drifts_at = 300 * ROWS
    told, seen = list[int](), list[tuple[float, float]]()
    monkeypatch.setattr(bench.trainer.strategy, "on_drift", lambda: told.append(bench.loop.steps))
    bench.run(lambda: seen.append((bench.trainer.update.rate(), bench.loop.replay_ratio)))
    assert told == [bench.loop.monitor.drift.step]
    before, after = seen[: told[0]], seen[told[0] :]
    assert set(before[:-1]) == {(1e-3, 1.3)}
    assert before[-1] == (1e-3, pytest.approx(1.3 * 3.0)), "the next step replays more"
    assert after[0][0] == pytest.approx(5e-3)
    assert after[49:] == [(pytest.approx(1e-3), pytest.approx(1.3))] * len(after[49:])


def test_a_checkpoint_that_a_drift_asks_for_comes_before_anything_that_it_changes(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the thread that writes checkpoints is busy; the learner that goes on from it does what was to be
    done."""
    settings = {"drift": {"actions": ["checkpoint", "raise-lr"], "lr_factor": 5.0, "steps": 50}}
    bench, gate, left = make_bench(400, learner=settings), threading.Event(), [20]
    bench.stream.drifts_at = 300 * ROWS
    told, rates = list[int](), list[float]()
    monkeypatch.setattr(bench.trainer.strategy, "on_drift", lambda: told.append(bench.loop.steps))
    assert bench.checkpointer.run(lambda: gate.wait(30))

    def at_boundary() -> None:
        rates.append(bench.trainer.update.rate())
        left[0] -= bool(bench.loop.monitor.drift.count)
        if not left[0] and bench.checkpointer.busy:
            gate.set()
            bench.checkpointer.wait(Deadline(timedelta(seconds=30)))

    bench.run(at_boundary)
    bench.checkpointer.wait(Deadline(timedelta(seconds=30)))
    found = bench.checkpoints.newest()
    assert found is not None
    assert bench.loop.monitor.drift.step is not None
    assert found[1].step == told[0] >= bench.loop.monitor.drift.step + 19
    assert found[1].state["trainer"]["groups"][0]["lr"] == 1e-3
    assert rates[: told[0]] == [1e-3] * told[0]
    assert max(rates) == rates[told[0]] == pytest.approx(5e-3)
    bench.close()
    resumed = make_bench(400, learner=settings)
    monkeypatch.setattr(resumed.trainer.strategy, "on_drift", lambda: told.append(resumed.loop.steps))
    resumed.resume()
    assert told == [found[1].step] * 2
    assert resumed.loop.monitor.drift.lr_factor == 5.0


@each_arrangement
@pytest.mark.slow
def test_checkpoints_are_made_while_the_steps_go_on(make_bench: Callable[..., Bench], replay: dict[str, Any]) -> None:
    bench = make_bench(400, every="1ms", replay=replay)
    bench.run()
    bench.finish()
    numbers = bench.checkpoints.numbers()
    assert len(numbers) == 3, "more or fewer than checkpoints.keep are there"
    assert numbers[-1] == bench.checkpointer.number > 3
    found = bench.checkpoints.newest()
    assert found is not None
    assert found[1].step == bench.loop.steps
    output_field = bench.store.tiers.slots - len(bench.store) - bench.store.slots.free
    assert output_field == 0 or replay, "slots are kept after the last checkpoint, which has the payload"


def test_a_restart_that_finds_few_slots_to_fill_makes_checkpoints_before_its_first_step(
    make_bench: Callable[..., Bench], schema: Schema
) -> None:
    """A checkpoint that is made for want of slots frees some when it is written; a crash right then comes before
    that."""
    replay = {"capacity": 3000, "disk": {"bytes": "177kB"}}
    bench = make_bench(120, replay=replay)
    bench.run()
    bench.finish()
    far = 10**6
    while bench.store.slots.free >= 5:
        bench.store.add_now(fake_columns(schema, range(far, far + 5)), [NAME])
        far += 5
    bench.finish()
    bench.close()
    resumed = make_bench(130, replay=replay)
    resumed.resume()
    assert resumed.store.slots.free < ROWS / 4
    resumed.run()
    assert resumed.store.lost == 0


@pytest.mark.parametrize("replay", [{"device_bytes": "170kB"}, {"disk": {"bytes": "250kB"}}], ids=["device", "disk"])
def test_steps_of_more_events_than_are_inserted_at_once_find_slots(
    make_bench: Callable[..., Bench], replay: dict[str, Any]
) -> None:
    """Where most are stored and few slots are beside: the learner waits for checkpoints instead of losing any."""
    replay = {"capacity": 100_000, "admission": "recent", "half_life": "10ms", **replay}
    learner = {"batch_size": 48 * (ROWS - 1), "max_delay": "1h"}
    bench = make_bench(288, every="1ms", replay=replay, learner=learner)
    bench.run()
    bench.finish()
    assert bench.loop.steps == 6
    assert bench.store.lost == 0


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove a file", "tear the manifest"])
def test_a_checkpoint_that_is_not_whole_is_refused_and_the_one_before_it_taken(
    make_bench: Callable[..., Bench], harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench(4)
    bench.run()
    bench.finish()
    bench.stream.blocks, bench.stop = 8, threading.Event()
    bench.stream.stop = bench.stop
    bench.run()
    bench.finish()
    newest = bench.checkpoints.path / "2"
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
    found = bench.checkpoints.newest()
    assert found is not None
    assert (found[0], found[1].step) == (1, 4)
    assert "; it is not used" in caplog.text
    assert bench.checkpoints.generation() == 1


def test_a_checkpoint_that_was_refused_takes_no_good_ones_place(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(4)
    bench.run()
    bench.finish()
    found = bench.checkpoints.newest()
    assert found is not None
    payload = bench.checkpoints.write(2, found[1], 0.0) / "rank-0" / "rng.safetensors"
    payload.write_bytes(payload.read_bytes()[:-1])
    checkpoints = Checkpoints(bench.checkpoints.path, bench.checkpoints._schema, 2)
    newest = checkpoints.newest()
    assert newest is not None
    assert newest[0] == 1
    checkpoints.write(3, found[1], 0.0)
    checkpoints.prune(2)
    assert checkpoints.numbers() == [1, 2, 3], "it may be of use until there are two newer ones"
    checkpoints.write(4, found[1], 0.0)
    checkpoints.prune(2)
    assert checkpoints.numbers() == [3, 4]


def test_what_a_learner_wrote_that_had_lost_its_lock_is_older_whatever_its_number(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(4)
    bench.run()
    bench.finish()
    path, schema = bench.checkpoints.path, bench.checkpoints._schema
    found = bench.checkpoints.newest()
    assert found is not None
    later, stale = Checkpoints(path, schema, 2), Checkpoints(path, schema, 1)
    later.write(2, found[1], 0.0)
    stale.write(7, found[1], 0.0)
    stale.write(8, found[1], 0.0)
    newest = later.newest()
    assert newest is not None
    assert newest[0] == 2
    later.prune(2)
    assert later.numbers() == [2, 8]


def test_a_learner_whose_place_was_taken_writes_no_more_checkpoints(
    make_bench: Callable[..., Bench], tmp_path: Path
) -> None:
    bench = make_bench(4)
    (tmp_path / GENERATION).write_text("1")
    bench.run()
    bench.finish()
    (tmp_path / GENERATION).write_text("2")
    with pytest.raises(SecondLearnerError):
        bench.checkpointer.checkpoint_last(bench.loop._capture, Deadline(timedelta(seconds=20)))
    assert bench.checkpoints.numbers() == [1]


def test_half_a_checkpoint_does_not_exist_and_is_cleaned_away(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(4)
    bench.run()
    bench.finish()
    shutil.copytree(bench.checkpoints.path / "1", bench.checkpoints.path / "7")
    (bench.checkpoints.path / "7" / MANIFEST).unlink()
    (bench.checkpoints.path / ".tmp-1-9").mkdir()
    assert bench.checkpoints.numbers() == [1]
    bench.checkpoints.clean()
    assert sorted(entry.name for entry in bench.checkpoints.path.iterdir()) == ["1"]


def test_a_full_disk_costs_the_checkpoint_and_neither_the_training_nor_the_checkpoints_before(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(4)
    bench.run()
    bench.finish()
    with monkeypatch.context() as patch:
        patch.setattr("anabranch.core.atomic_files.os.fsync", _no_space)
        bench.checkpointer.checkpoint_last(bench.loop._capture, Deadline(timedelta(seconds=20)))
    assert bench.checkpointer.problem is not None
    assert "No space left" in bench.checkpointer.problem
    assert bench.checkpoints.numbers() == [1]
    bench.checkpointer.checkpoint_last(bench.loop._capture, Deadline(timedelta(seconds=20)))
    assert bench.checkpointer.problem is None
    assert bench.checkpoints.numbers() == [1, 3], "the number of a checkpoint that failed is given again"
    (histogram,) = bench.metrics.learner.checkpoint.collect()
    assert [sample.value for sample in histogram.samples if sample.name.endswith("_count")] == [2]


def test_a_checkpoint_that_a_hung_disk_holds_up_is_told_of_until_it_goes_on(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(4, every="45s")
    bench.run()
    now, go, sync = [1000.0], threading.Event(), os.fsync
    with monkeypatch.context() as patch:
        patch.setattr("learner.runtime.background_worker.time", SimpleNamespace(monotonic=lambda: now[0]))
        patch.setattr("anabranch.core.atomic_files.os.fsync", lambda descriptor: (go.wait(20), sync(descriptor))[1])
        bench.checkpointer.request()
        bench.loop.checkpoint_if_due()
        now[0] += 90
        assert bench.checkpointer.problem is None
        now[0] += 1
        assert bench.checkpointer.problem is not None
        assert f"{bench.checkpoints.path} has taken more than 90 s" in bench.checkpointer.problem
        go.set()
        bench.checkpointer.wait(Deadline(timedelta(seconds=20)))
        assert bench.checkpointer.problem is None
    assert bench.checkpoints.numbers() == [1]


def test_a_learner_that_rests_makes_no_checkpoint_until_something_has_changed(make_bench: Callable[..., Bench]) -> None:
    """What was erased is a change, and so is what the ledger says, though no step was made."""
    bench = make_bench(4)

    def checkpoint_if_due() -> list[int]:
        bench.checkpointer.request()
        bench.loop.checkpoint_if_due()
        bench.checkpointer.wait(Deadline(timedelta(seconds=20)))
        return bench.checkpoints.numbers()

    bench.run()
    bench.finish()  # its version, which comes after its checkpoint, is scored
    assert checkpoint_if_due() == [1, 2]
    assert checkpoint_if_due() == [1, 2]
    bench.finish()
    assert bench.checkpoints.numbers() == [1, 2]
    bench.loop.ledger.partitions[0].passed += 1
    assert checkpoint_if_due() == [1, 2, 3]
    bench.log.append([ByKey(time=0.0, by="command", key_hash="0" * 16, up_to={})])
    bench.loop._parts.erasure.poll()
    assert checkpoint_if_due() == [2, 3, 4]
    assert checkpoint_if_due() == [2, 3, 4]


@pytest.mark.parametrize("waits", [False, True])
def test_a_start_with_something_left_to_erase_doubts_what_its_caches_have(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    bench = make_bench(1, replay={"disk": {"bytes": "2MB"}})
    doubted: list[bool] = []
    monkeypatch.setattr(bench.store.tiers, "mark_stale", lambda: doubted.append(True))
    bench.log.append([ByKey(time=0.0, by="command", key_hash="0" * 16, up_to={})])
    if not waits:
        bench.log.append(Applied(time=0.0, through=1, store=0, holdout=0))
    folder = bench.checkpoints.path.parent / "replay" / RANK
    Erasure(
        bench.log, bench.checkpoints, folder, bench.background_store, bench.holdout, bench.checkpointer
    ).record_erased(0, 0)
    assert doubted == [True] * waits


def test_what_could_not_be_written_over_is_erased_before_the_log_says_that_a_record_is_applied(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(1, replay={"disk": {"bytes": "2MB"}})
    looked: list[int] = []

    def erase_stale(first: int, most: int) -> bool:
        assert not bench.log.through
        looked.append(first)
        return len(looked) < 3

    monkeypatch.setattr(bench.store.tiers, "erase_stale", erase_stale)
    bench.log.append([ByKey(time=0.0, by="command", key_hash="0" * 16, up_to={})])
    bench.finish()
    assert bench.log.through == 1
    assert len(looked) == 3
    assert looked == sorted(set(looked))


def test_a_checkpoint_that_failed_is_made_again_though_nothing_has_changed(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(4)
    bench.run()
    with monkeypatch.context() as patch:
        patch.setattr("anabranch.core.atomic_files.os.fsync", _no_space)
        bench.finish()
    assert bench.checkpoints.numbers() == []
    bench.finish()
    assert bench.checkpoints.numbers() == [2]


def test_old_checkpoints_that_cannot_be_deleted_keep_no_new_one_from_being_written(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(4)
    bench.run()
    monkeypatch.setattr(Checkpoints, "prune", lambda *_: _no_space(0))
    for _ in range(2):
        bench.checkpointer.checkpoint_last(bench.loop._capture, Deadline(timedelta(seconds=20)))
    assert bench.checkpoints.numbers() == [1, 2]
    assert bench.checkpointer.problem is not None
    assert "old checkpoints cannot be deleted" in bench.checkpointer.problem


def test_a_bug_while_a_checkpoint_is_written_stops_the_loop(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(4)
    bench.run()
    monkeypatch.setattr(Checkpoints, "write", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.finish()


def test_a_checkpoint_of_another_schema_is_refused(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(4)
    bench.run()
    bench.finish()
    path = bench.checkpoints.path / "1" / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": "0" * 64}))
    with pytest.raises(CheckpointError, match=r"checkpoint 1 in .* was made under another \[schema\]"):
        bench.checkpoints.newest()


def test_a_checkpoint_of_another_model_is_refused(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(4)
    bench.run()
    bench.finish()
    other = make_bench(4, model=lambda: nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match="does not fit the model"):
        other.resume()


def test_a_new_learning_rate_holds_after_a_restart(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(4)
    bench.run()
    bench.finish()
    resumed = make_bench(4)
    for group in resumed.trainer.update.optimizer.param_groups:
        group["lr"] = 0.5
    resumed.resume()
    assert [group["lr"] for group in resumed.trainer.update.optimizer.param_groups] == [0.5]


def _no_space(_descriptor: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", sorted(STRATEGIES.keys() - {"er"}))
@pytest.mark.slow
def test_a_resumed_run_of_any_strategy_is_the_uninterrupted_one_bit_for_bit(
    make_bench: Callable[..., Bench], name: str
) -> None:
    def make() -> Strategy:
        return STRATEGIES[name](every=7) if name in {"ewc", "lwf"} else STRATEGIES[name]()

    whole = make_bench(40, strategy=make())
    whole.run()
    half = make_bench(17, strategy=make())
    half.run()
    half.finish()
    half.close()
    resumed = make_bench(40, strategy=make())
    resumed.resume()
    resumed.run()
    for part, tensors in whole.trainer.tensors().items():
        assert tensors.keys() == resumed.trainer.tensors()[part].keys()
        for key, value in tensors.items():
            assert torch.equal(resumed.trainer.tensors()[part][key], value), (part, key)
    assert resumed.trainer.state() == whole.trainer.state()
    assert resumed.loop.monitor.prequential.state() == whole.loop.monitor.prequential.state()


def test_a_checkpoint_of_a_strategy_with_other_columns_is_refused_before_the_first_step(
    make_bench: Callable[..., Bench], schema: Schema, tmp_path: Path
) -> None:
    bench = make_bench(4)
    bench.run()
    bench.finish()
    bench.close()
    (tmp_path / "refused_model.py").write_text("from torch import nn\n\n\ndef build():\n    return nn.Linear(3, 3)\n")
    deployment = _deployment(tmp_path, schema, strategy="der")
    sentence = (
        r'"der" wants an output of shape \[3\] kept with each stored event, and checkpoint 1 has no output of the'
    )
    with pytest.raises(SettingsError, match=sentence):
        learn(deployment, threading.Event())


def _deployment(path: Path, schema: Schema, strategy: str, replay: Mapping[str, Any] | None = None) -> LearnerSpec:
    return LearnerSpec(
        name="test",
        stream=StreamSettings.model_validate({"topics": ["events"]}),
        events=schema.settings,
        model=ModelSettings(factory="refused_model:build"),
        learner=LearnerSettings.model_validate({"strategy": strategy, "batch_size": ROWS - 1, "max_delay": "1ms"}),
        replay=ReplaySettings.model_validate({"capacity": 300, **(replay or {})}),
        versions=VersionsSettings(),
        checkpoints=CheckpointSettings(),
        gate=GateSettings(),
        seed=0,
        folder=path,
        state_dir=path,
        read_token="",
        device_sharing=DeviceSharingSpec(
            DeviceSharingSettings(policy="exclusive"), timedelta(milliseconds=20), timedelta(seconds=10)
        ),
    )


def test_checkpoints_that_were_moved_away_are_gone_on_from_once_they_are_back(
    make_bench: Callable[..., Bench], schema: Schema, tmp_path: Path
) -> None:
    disk = TIERS["disk with a small cache"]
    bench = make_bench(12, replay=disk)
    bench.run()
    bench.finish()
    held = _held(bench.store)
    bench.close()
    (tmp_path / "checkpoints").rename(tmp_path / "checkpoints.before")
    for _ in range(2):  # two starts that end before their first checkpoint
        _begin_anew(tmp_path, schema, disk).close()
    files = sorted(path.name for path in (tmp_path / "replay" / RANK).iterdir())
    assert files == ["1.rows.before", "2.rows"]
    (tmp_path / "checkpoints").rename(tmp_path / "checkpoints.anew")
    (tmp_path / "checkpoints.before").rename(tmp_path / "checkpoints")
    again = make_bench(14, replay=disk)
    again.resume()
    assert _held(again.store) == held
    assert again.store.lost == 0
    again.run()
    again.finish()
    assert again.loop.steps == 14


def test_a_checkpoint_from_before_what_the_log_has_dropped_is_refused_and_keeps_records_from_being_dropped(
    make_bench: Callable[..., Bench], tmp_path: Path
) -> None:
    key = f"{10**9:016x}"
    bench = make_bench(12)
    bench.run()
    bench.finish()
    assert bench.checkpoints.clean_of(5) == 0
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "backup")
    bench.close()
    bench.log.append([ByKey(time=0, by="command", key_hash=key, up_to={"events#0[0]": 3}) for _ in range(3)])
    bench.log.append(Applied(time=0, through=3, store=0, holdout=0))
    later = make_bench(14)
    later.resume()
    later.run()
    later.finish()
    later.close()
    assert [later.checkpoints.clean_of(through) for through in (5, 3, 2)] == [0, 0, 0], "the first checkpoint is there"
    later.checkpoints.prune(1)
    assert [later.checkpoints.clean_of(through) for through in (5, 3, 2)] == [3, 3, 2]
    written = ErasureLog(tmp_path / "erasures.log")
    written.refresh()
    written.compact({"events#0[0]": 3}, later.checkpoints.clean_of(written.through))
    written.refresh()
    assert (written.dropped, bool(written.erased)) == (3, False)
    assert ResumePoint.newest(later.checkpoints, written).found is not None
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "backup").rename(tmp_path / "checkpoints")
    with pytest.raises(
        MisfitError, match=r"checkpoint 1 was made before events were erased that .*erasures.log no longer lists"
    ):
        ResumePoint.newest(later.checkpoints, written)
    flip = later.checkpoints.path / "1" / RANK / "state.json"
    flip.write_bytes(flip.read_bytes().replace(b'"erased":0', b'"erased":9'))
    assert later.checkpoints.clean_of(3) == 0, "a damaged checkpoint says nothing"


def _begin_anew(path: Path, schema: Schema, replay: Mapping[str, Any]) -> Store:
    """Open the store as a learner does that finds no checkpoint."""
    checkpoints, written = Checkpoints(path / "checkpoints", schema.digest, 1), ErasureLog(path / "erasures.log")
    parts = SimpleNamespace(strategy=STRATEGIES["er"](), schema=schema, device=CPU, output_shape=(3,), embedding=None)
    resumed = ResumePoint.newest(checkpoints, written)
    store = resumed.store(_deployment(path, schema, "er", replay), cast("TrainingSetup", parts), 1)
    assert resumed.first
    assert store is not None
    checkpoints.path.mkdir(exist_ok=True)
    return store


def _held(store: Store) -> dict[int, bytes]:
    """Return the rows of the events held, by offset."""
    entries = store.event_table.copy()
    rows, whole = store.tiers.read(entries["slot"].astype(np.int64), store.event_table.identity(entries["slot"]))
    assert whole.all()
    return dict(zip(entries["offset"].tolist(), map(bytes, rows.numpy()), strict=True))


def test_a_strategy_begins_anew_at_the_checkpoint_of_another(
    make_bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    half = make_bench(17, strategy=STRATEGIES["ewc"]())
    half.run()
    half.finish()
    half.close()
    resumed = make_bench(20, strategy=STRATEGIES["lwf"]())
    with caplog.at_level("INFO"):
        resumed.resume()
    assert "made under the strategy ElasticWeights: Distillation begins with nothing" in caplog.text
    resumed.run()
    assert resumed.loop.steps == 20


class Listening(DarkReplayPlus):
    """DER++ that writes down what the model said of each event, by its features."""

    def __init__(self) -> None:
        super().__init__()
        self.said: dict[tuple[float, ...], list[float]] = {}

    def after_step(self, new: Examples, output_B: torch.Tensor) -> None:
        self.said |= {tuple(x.tolist()): output.tolist() for x, output in zip(new.features["x"], output_B, strict=True)}


@each_arrangement
def test_the_store_keeps_what_the_model_said_of_an_event_when_it_was_new(
    make_bench: Callable[..., Bench], replay: dict[str, Any]
) -> None:
    """Also after a restart; of events without a label the model has said nothing."""
    strategy = Listening()
    half = make_bench(8, replay=replay, strategy=strategy)
    half.stream.unlabelled = {2, 6}
    half.run()
    half.finish()
    half.close()
    resumed = make_bench(14, replay=replay, strategy=strategy)
    resumed.resume()
    resumed.run()
    sample = resumed.store.fetch(resumed.store.plan(0, len(resumed.store)))
    known = 0
    for x, output, labelled in zip(
        *(sample.columns[name] for name in ("feature.x", "output", "labelled")), strict=True
    ):
        assert bool(output.isnan().all()) != bool(labelled)
        assert not labelled or output.tolist() == strategy.said[tuple(x.tolist())]
        known += int(labelled)
    assert len(resumed.store) > known > 200


CRASHES = 20


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums of floats depend on how many threads share them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_store_on_disk_is_whole_after_kills_at_random_moments(
    schema: Schema, tmp_path: Path, one_thread: None
) -> None:
    """Twenty lives with checkpoints end by SIGKILL; the last one ends as a run that nothing has disturbed, bit for
    bit."""
    killed = tmp_path / "killed"
    moments = random.Random(20)
    with _nursery(killed) as nursery:
        newest, longest, crashes = 0, 0.5, 0
        while crashes < CRASHES:
            pid = nursery.begin()
            threading.Event().wait(moments.uniform(0.02, longest))
            os.kill(pid, signal.SIGKILL)
            nursery.await_end()
            before, newest = newest, max(Checkpoints(killed / "checkpoints", schema.digest, 1).numbers(), default=0)
            crashes += newest > before
            longest *= (
                1 if newest > before else 1.3
            )  # for a slow machine: a life that ends before a checkpoint shows nothing
    last = _crash_bench(killed, schema, 0)
    last.resume()
    last.stream.blocks = last.stream.next + 20
    last.run()
    torch.manual_seed(0)
    whole = Bench(tmp_path / "whole", schema, _model(), last.stream.blocks, replay={"capacity": 3000})
    whole.run()
    for name, value in whole.trainer.snapshot().items():
        assert torch.equal(last.trainer.snapshot()[name], value), name
    mine, undisturbed = last.loop.ledger.partitions[0], whole.loop.ledger.partitions[0]
    assert mine.position == undisturbed.position
    assert mine.outcomes.tolist() == undisturbed.outcomes.tolist()
    assert last.store.lost == whole.store.lost == 0
    for bench in (last, whole):
        bench.store.flush_pending()
    # Every event that is held has its own payload, wherever it lies.
    assert len(last.store) == len(whole.store) > 2000
    for column, expected in zip(_everything(last.store), _everything(whole.store), strict=True):
        assert torch.equal(column, expected)
    for bench in (last, whole):
        bench.close()


def _everything(store: Store) -> list[torch.Tensor]:
    sample = store.fetch(store.plan(0, len(store)))
    return [sample.columns[name] for name in sorted(sample.columns)]


def _crash_bench(path: Path, schema: Schema, blocks: int) -> Bench:
    """A store whose file has little room beside what is held, so that slots are soon written again; many
    checkpoints."""
    torch.manual_seed(0)
    replay = {"capacity": 3000, "disk": {"bytes": "177kB"}, "device_bytes": "8kB"}
    return Bench(path, schema, _model(), blocks, every="20ms", replay=replay)


class _Nursery:
    """A process that has imported everything, and forks one learner after the other."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def begin(self) -> int:
        """Start a learner, and return its pid."""
        return int(self._tell())

    def await_end(self) -> None:
        assert int(self._tell()) == -signal.SIGKILL, "it ended by itself"

    def _tell(self) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()


@contextlib.contextmanager
def _nursery(path: Path) -> Iterator[_Nursery]:
    process = subprocess.Popen(
        [sys.executable, __file__, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        yield _Nursery(process)


def _breed(path: Path) -> None:
    """Be the nursery: for every two lines that come in, a learner's pid and how it ended go out."""
    features = {"x": {"dtype": "float32", "shape": [3]}}
    settings = {"features": features, "label": {"name": "y", "classes": 3}}
    schema = Schema(SchemaSettings.model_validate(settings))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:  # the first step imports much, which a life would be too short for
        warm = _crash_bench(Path(scratch), schema, 3)
        warm.run()
        warm.finish()
        warm.close()
    for _ in sys.stdin:
        pid = os.fork()
        if not pid:
            bench = _crash_bench(path, schema, 10**6)
            if bench.found is not None:
                bench.resume()
            bench.run()
            os._exit(0)
        print(pid, flush=True)  # noqa: T201
        sys.stdin.readline()
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


if __name__ == "__main__":
    _breed(Path(sys.argv[1]))


def test_a_crash_before_the_first_step_begins_where_the_stream_was_begun(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(4)
    bench.stream.partitions = [Partition(NAME, 7 * ROWS, 9 * ROWS)]
    bench.loop.begin(bench.stop, [])
    bench.close()
    again = make_bench(4)
    again.stream.partitions = [Partition(NAME, 9 * ROWS, 9 * ROWS)]  # what stream.start would give by now
    assert again.found is not None
    assert again.found[1].begins
    again.loop.restore(again.found[1])
    assert {name: position.offset for name, position in again.loop.ledger.positions.items()} == {NAME: 7 * ROWS}
    again.loop.begin(again.stop, [])
    assert again.checkpoints.numbers() == [1]
    again.stream.next = 7
    again.stream.blocks = 9
    again.run()
    again.finish()
    assert again.checkpoints.numbers() == [1, 2]
    assert again.loop.ledger.positions[NAME].offset == 9 * ROWS
