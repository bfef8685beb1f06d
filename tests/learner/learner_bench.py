"""A whole learner in this process, over a fake stream and a real state directory."""

import functools
import threading
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import cast

import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import nn

from anabranch.core.shutdown import Deadline
from anabranch.ingest.events.block import Block, Coverage
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import Columns, fake_columns
from anabranch.ingest.metrics import IngestMetrics
from anabranch.ingest.reader.cursors import Partition
from anabranch.ingest.reader.reader import BlockReader
from anabranch.ingest.settings.stream import HoldOut, LagPolicySettings, StreamSettings
from anabranch.learner.assembly import between_steps
from anabranch.learner.checkpoints.background_erasure import BackgroundErasure
from anabranch.learner.checkpoints.checkpointer import Checkpointer
from anabranch.learner.checkpoints.format import RANK, Checkpoints
from anabranch.learner.checkpoints.parts import StorePart, unpack
from anabranch.learner.evaluate.event_time import EventTimePredictor
from anabranch.learner.evaluate.holdout import HoldoutSet
from anabranch.learner.evaluate.scoring import Scorer
from anabranch.learner.evaluate.stream_monitor import StreamMonitor
from anabranch.learner.extension import Extension
from anabranch.learner.extensions.late_labels.extension import LateLabels
from anabranch.learner.extensions.late_labels.join_part import open_join
from anabranch.learner.extensions.late_labels.stream_times import LabelClock
from anabranch.learner.extensions.search.extension import ChallengerSearch
from anabranch.learner.extensions.teacher.extension import TeacherFeed
from anabranch.learner.loop.erasure import Erasure
from anabranch.learner.loop.loop_state import LoopComponents, LoopMetrics
from anabranch.learner.loop.replay_feed import make_feed
from anabranch.learner.loop.stored_events import most_added
from anabranch.learner.loop.training_loop import TrainingLoop
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.embedding import Embedding
from anabranch.learner.model.examples import output_fields
from anabranch.learner.model.task import Classification
from anabranch.learner.parallel.leader import Leader
from anabranch.learner.settings.learner import CheckpointSettings, GateSettings, LearnerSettings, VersionsSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.settings.search import SearchSettings
from anabranch.learner.state_dir.lock import check_generation
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.strategies.teacher_loss import TeacherLoss, kept_outputs
from anabranch.learner.stream.lag import LagPolicy
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.learner.versions.format import Versions, reference_to
from anabranch.learner.versions.gate import QualityGate
from anabranch.learner.versions.publisher import Publisher, VersionWriter
from anabranch.replay.background_store import BackgroundStore
from anabranch.replay.build import build_store
from anabranch.replay.erasure.erasure_log import ErasureLog
from anabranch.replay.metrics import ReplayMetrics
from anabranch.replay.settings import ReplaySettings
from anabranch.testing.strategies import extended

CPU = torch.device("cpu")
NAME = TopicPartition("events", 0)
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

    history = hold_out = None

    def __init__(self, schema, blocks, stop):
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

    def poll(self, timeout):
        if self.next == self.blocks:
            return self.end(timeout)
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

    def end(self, timeout):
        """Stop the learner where it waits for more: before that it may have blocks left."""
        if timeout:
            self.stop.set()

    def receive(self):
        """`poll` returns all blocks."""

    def release(self, block):
        """Blocks share no memory."""

    def commit(self, offsets):
        """There is no broker."""


class OpenStream(Stream):
    """A topic that is opened as the reader of a learner is."""

    def open(self, positions, *_args, **_named):
        self.next = sum(position.offset for position in positions.values()) // ROWS

    def close(self):
        """There is nothing to close."""


class LearnerBench:
    """A learner over a fake stream and a real state directory."""

    def __init__(
        self,
        path,
        schema,
        model,
        blocks,
        every="1h",
        replay=None,
        strategy=None,
        learner=None,
        task=None,
        device=CPU,
        *,
        complete=False,
        teacher=None,
        distil=False,
        stream=None,
        checkpoints=None,
        undo=None,
        search=None,
        networks=None,
        keyed=True,
        labels=None,
        group=None,
        graphs=False,
    ):
        self.stop, self.closed = threading.Event(), False
        self.stream = Stream(schema, blocks, self.stop) if stream is None else stream(self.stop)
        settings = LearnerSettings.model_validate(
            # Each step is a round: a clock does not decide how many blocks one has.
            {"batch_size": ROWS - 1, "replay_ratio": 1.3, "max_delay": "1ms", "round": "0.001ms", **(learner or {})}
        )
        registry = CollectorRegistry()
        self.metrics = LoopMetrics(IngestMetrics(registry), ReplayMetrics(registry), LearnerMetrics(registry))
        task = task or Classification()
        strategy = extended(strategy or STRATEGIES["er"](), model, schema, device)
        embedding = Embedding(model, "3") if strategy.kind.embeds else None
        precision = choose_precision(settings.precision, device)
        teaching = [TeacherLoss(task, 0.5, 2.0)] if teacher is not None else []
        setup = TrainingSetup(
            model.to(device), task, strategy, schema, settings, device, precision, embedding, teaching, graphs=graphs
        )
        wrappers = []
        if search is not None:
            chosen = SearchSettings.model_validate(search)
            wrappers.append(ChallengerSearch(chosen, 0, path, setup, type(strategy), networks))
        channel, replicas = group or (None, None)
        wrappers += [] if channel is None else [Leader(channel, replicas)]
        trainer = Trainer(setup, ranks=replicas, wrappers=wrappers)
        duration = self.metrics.learner.teacher_duration
        self.feed = (
            None if teacher is None else TeacherFeed(teacher, (3,), duration, settings.batch_size, unlabelled=distil)
        )
        self.checkpoints = Checkpoints(path / "checkpoints", schema.digest, 1)
        self.checkpoints.storage.clean()
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
            self.checkpoints,
            settings_of_checkpoints,
            self.metrics.learner.checkpoint,
            self.metrics.learner.checkpoint_stall,
            [StorePart(self.background_store, segments)],
            check,
        )
        versions, reference = Versions(path / "versions"), reference_to(ModelSettings(factory="m:build"))
        self.versions = versions
        scorer = Scorer(model, task, schema, device)
        publisher = Publisher(
            VersionWriter(versions, reference, schema, 1),
            QualityGate(versions, GateSettings(), scorer, reference),
            VersionsSettings.model_validate({"publish_every": "1h"}),
            self.metrics.learner.gate_verdicts,
        )
        holdout = HoldoutSet(schema, 100, 0)
        source = cast("BlockReader", self.stream)
        self.log = ErasureLog(path / "erasures.log")
        self.log.refresh()
        files = BackgroundErasure(self.log, self.checkpoints, self.checkpointer)
        erasure = Erasure(self.log, files, holdout, keyed=keyed, at_once=settings.deterministic)
        lag = LagPolicy(LagPolicySettings(), 0, source, unlabelled=distil)
        monitor = StreamMonitor(settings, schema)
        sampling = self.metrics.replay.sample
        ranks = 1 if replicas is None else replicas.size
        feed = make_feed(self.background_store, settings, ranks, monitor, holdout, trainer, sampling)
        late = list[Extension]()
        if labels is not None:
            rules = monitor.baselines
            predictor = EventTimePredictor(model, task, schema, device, precision, (3,), baselines=rules)
            part = open_join(labels, schema, (predictor.width,), path / "labels", None, first=True)
            still = LabelClock(*[lambda: 1000.0] * 3)
            hold_out, delay = HoldOut(fraction=0, seed=0), settings.max_delay
            link = LateLabels(part, labels, hold_out, predictor, lag, settings.batch_size, delay, still)
            late = [link, link.arrivals]
        self.parts = parts = LoopComponents(
            *(source, trainer, monitor, feed, holdout, publisher, self.checkpointer, erasure, lag),
            extensions=[each for each in (undo, self.feed, *late) if each is not None],
            unlabelled=distil,
        )
        self.loop = TrainingLoop(settings, parts, self.metrics, ranks=ranks)
        self.trainer, self.holdout, self.publisher, self.erasure = trainer, holdout, publisher, erasure

    def run(self, *tasks):
        """Train to the end of the stream; `tasks` run after all that a learner does between steps."""
        self.loop.run(self.stop, between_steps(self.loop, tasks))

    def resume(self):
        assert self.found is not None
        self.loop.restore(self.found[1])
        # A slow machine makes a checkpoint before the first batch, which has no partition yet.
        self.stream.next = sum(each.position.offset for each in self.loop.ledger.partitions) // ROWS

    def finish(self):
        self.loop.finish(Deadline(timedelta(seconds=30)))

    def close(self):
        if not self.closed:
            # The next learner of this state directory begins when nothing of this one is at work any more.
            for part in (self.publisher, self.checkpointer):
                part._background.wait(Deadline(timedelta(seconds=60)))
            self.background_store.close()
            if self.feed is not None:
                self.feed.close()
        self.closed = True

    @property
    def store(self):
        return self.background_store.flush()


def small_model():
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def no_space(_descriptor):
    raise OSError(28, "No space left on device")
