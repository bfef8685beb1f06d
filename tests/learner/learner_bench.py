"""A whole learner in this process, over a fake stream and a real state directory."""

import functools
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import nn

from ingest.config import LagPolicySettings, StreamSettings
from ingest.events.block import Block, Coverage
from ingest.events.partition import TopicPartition
from ingest.events.schema import Schema
from ingest.kafka.fake import Columns, fake_columns
from ingest.metrics import IngestMetrics
from ingest.reader.cursors import Partition
from ingest.reader.reader import BlockReader
from learner.adaptation.stream_monitor import StreamMonitor
from learner.checkpointing.checkpointer import Checkpointer
from learner.checkpointing.erasure import Erasure
from learner.checkpointing.replay_state import unpack
from learner.config import (
    CheckpointSettings,
    GateSettings,
    LearnerSettings,
    ModelSettings,
    VersionsSettings,
)
from learner.evaluation.holdout import HoldoutSet
from learner.evaluation.scoring import Scorer
from learner.loop import Task, TrainingLoop
from learner.loop_parts.loop_state import LoopComponents, LoopMetrics
from learner.metrics import LearnerMetrics
from learner.model.device import choose_precision
from learner.model.embedding import Embedding
from learner.model.task import Classification
from learner.publishing.gatekeeper import QualityGate
from learner.publishing.publisher import Publisher
from learner.replay_feed import make_feed
from learner.resume import most_added
from learner.run import between_steps
from learner.runtime.shutdown import Deadline
from learner.search.networks import NetworkSpec
from learner.search.trainer import SearchingTrainer
from learner.sections.search import SearchSettings
from learner.state_dir.checkpoint import RANK, Checkpoints
from learner.state_dir.lock import check_generation
from learner.state_dir.version import Versions, reference_to
from learner.strategies.base import Strategy
from learner.strategies.examples import output_fields
from learner.strategies.registry import STRATEGIES
from learner.strategies.teacher_loss import TeacherLoss, kept_outputs
from learner.stream.lag import LagPolicy
from learner.teacher.feed import Teacher, TeacherFeed
from learner.training.trainer import Trainer
from learner.undo.undone_events import UndoneEvents
from replay.background_store import BackgroundStore
from replay.build import build_store
from replay.config import ReplaySettings
from replay.erasure.erasure_log import ErasureLog
from replay.metrics import ReplayMetrics
from replay.store import Store
from tests.support.strategies import extended

CPU = torch.device("cpu")
NAME = TopicPartition("events", 0)
_ARGUMENTS = ("model", "task", "strategy", "schema", "settings", "device")
ROWS = 32
"""Events of a block, of which one is held out and the others are a batch."""

TIERS = {
    "device": {},
    "disk": {"disk": {"bytes": "1MB"}},
    "disk with a small cache": {"disk": {"bytes": "1MB"}, "device_bytes": "1kB"},
}
each_tier = pytest.mark.parametrize("replay", TIERS.values(), ids=TIERS)


class Stream:
    """A topic of `blocks` blocks, read from any block on; sets `stop` after the last one."""

    def __init__(self, schema: Schema, blocks: int, stop: threading.Event) -> None:
        self.schema = schema
        self.blocks = blocks
        self.stop = stop
        self.next = 0
        self.drifts_at: int | None = None
        """The first event with other labels."""
        self.problem: str | None = None
        self.unlabelled: set[int] = set()
        """Blocks whose events have no label."""
        self.change: Callable[[Columns], None] | None = None
        """Changes the events of a block."""
        self.unknown_fields = self.overweight = 0
        self.letters_dropped: Counter[str] = Counter()
        self.tombstones: Counter[str] = Counter()
        self.ends_time: float | None = None
        self.reads_history = False
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
        """`poll` returns all blocks."""

    def release(self, block: Block) -> None:
        """Blocks share no memory."""

    def commit(self, offsets: dict[int, int]) -> None:
        """There is no broker."""


class LearnerBench:
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
        device: torch.device = CPU,
        *,
        complete: bool = False,
        teacher: Teacher | None = None,
        distil: bool = False,
        stream: Callable[[threading.Event], Stream] | None = None,
        checkpoints: Mapping[str, Any] | None = None,
        undone: UndoneEvents | None = None,
        search: Mapping[str, Any] | None = None,
        networks: NetworkSpec | None = None,
        keyed: bool = True,
    ) -> None:
        self.stop, self.closed = threading.Event(), False
        self.stream = Stream(schema, blocks, self.stop) if stream is None else stream(self.stop)
        settings = LearnerSettings.model_validate(
            {"batch_size": ROWS - 1, "replay_ratio": 1.3, "max_delay": "1ms", **(learner or {})}
        )
        registry = CollectorRegistry()
        self.metrics = LoopMetrics(IngestMetrics(registry), ReplayMetrics(registry), LearnerMetrics(registry))
        task = task or Classification()
        strategy = extended(strategy or STRATEGIES["er"](), model, schema, device)
        embedding = Embedding(model, "3") if strategy.embeds else None
        precision = choose_precision(settings.precision, device)
        teaching = TeacherLoss(task, 0.5, 2.0) if teacher is not None else None
        kind: Callable[..., Trainer] = Trainer
        if search is not None:
            chosen = SearchSettings.model_validate(search)
            kind = functools.partial(SearchingTrainer, chosen, 0, path, type(strategy), networks)
        trainer = kind(
            **dict(zip(_ARGUMENTS, (model.to(device), task, strategy, schema, settings, device), strict=True)),
            precision=precision,
            embedding=embedding,
            teaching=teaching,
        )
        duration = self.metrics.learner.teacher_duration
        self.feed = None if teacher is None else TeacherFeed(teacher, (3,), duration, unlabelled=distil)
        self.checkpoints = Checkpoints(path / "checkpoints", schema.digest, 1)
        self.checkpoints.clean()
        self.found = self.checkpoints.newest()
        contents, segments = (unpack(self.found[1]) if self.found else None) or (None, ())
        options = ReplaySettings.model_validate({"capacity": 300, **(replay or {})})
        columns = output_fields(kept_outputs(strategy, (3,), taught=teacher is not None))
        step = most_added(settings, StreamSettings(topics=("events",)), 1)
        self.background_store = BackgroundStore(
            build_store(
                *(options, schema, device, 0, path / "replay" / RANK, contents, columns), step=step, complete=complete
            )
        )
        settings_of_checkpoints = CheckpointSettings.model_validate({"every": every, **(checkpoints or {})})
        check = functools.partial(check_generation, path, 1)
        self.checkpointer = Checkpointer(
            self.checkpoints, settings_of_checkpoints, self.background_store, self.metrics.learner, segments, check
        )
        versions, reference = Versions(path / "versions"), reference_to(ModelSettings(factory="m:build"))
        self.versions = versions
        scorer = Scorer(model, task, schema, device)
        publisher = Publisher(
            *(versions, VersionsSettings.model_validate({"publish_every": "1h"}), reference, schema, scorer),
            *(QualityGate(versions, GateSettings(), scorer, reference), 1, self.metrics.learner),
        )
        holdout = HoldoutSet(schema, 100, 0)
        source = cast("BlockReader", self.stream)
        self.log = ErasureLog(path / "erasures.log")
        self.log.refresh()
        erasure = Erasure(
            *(self.log, self.checkpoints, path / "replay" / RANK, self.background_store, holdout, self.checkpointer),
            keyed=keyed,
        )
        lag = LagPolicy(LagPolicySettings(), 0, source, unlabelled=distil)
        monitor = StreamMonitor(settings)
        sampling = self.metrics.replay.sample
        feed = make_feed(self.background_store, settings, 1, monitor, holdout, trainer, sampling)
        parts = LoopComponents(
            *(source, trainer, monitor, feed, holdout, publisher, self.checkpointer, erasure, lag),
            teacher=self.feed,
            undone=undone or UndoneEvents(),
        )
        self.loop = TrainingLoop(settings, parts, self.metrics)
        self.trainer, self.holdout, self.publisher, self.erasure = trainer, holdout, publisher, erasure

    def run(self, *tasks: Task) -> None:
        """Train to the end of the stream; `tasks` run after all that a learner does between steps."""
        self.loop.run(self.stop, between_steps(self.loop, tasks))

    def resume(self) -> None:
        assert self.found is not None
        self.loop.restore(self.found[1])
        # A slow machine makes a checkpoint before the first batch, which has no partition yet.
        self.stream.next = sum(each.position.offset for each in self.loop.ledger.partitions) // ROWS

    def finish(self) -> None:
        self.loop.finish(Deadline(timedelta(seconds=30)))

    def close(self) -> None:
        if not self.closed:
            # The next learner of this state directory begins when nothing of this one is at work any more.
            for part in (self.publisher, self.checkpointer):
                part._background.wait(Deadline(timedelta(seconds=60)))
            self.background_store.close()
            if self.feed is not None:
                self.feed.close()
        self.closed = True

    @property
    def store(self) -> Store:
        return self.background_store.flush()


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def no_space(_descriptor: int) -> None:
    raise OSError(28, "No space left on device")
