"""A run of a backtest: a learner whose stream is a file, in a state directory that is removed afterwards.

Legend: B events of a step.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from anabranch.commands.backtest.rows import BlocksReader
from anabranch.core.shutdown import Deadline
from anabranch.core.stream_secret import StreamSecret
from anabranch.core.temporary_files import temporary_folder
from anabranch.ingest.events.block import Array
from anabranch.ingest.settings.stream import HoldOut, LagPolicySettings, SchemaSettings
from anabranch.learner.assembly import Assembly
from anabranch.learner.evaluate.outcomes import TaskMeasures
from anabranch.learner.evaluate.stream_monitor import StreamMonitor
from anabranch.learner.extension import Extension, overriding
from anabranch.learner.model.task import Task
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.status.report import SliceReport
from anabranch.learner.stream.batch import Batch
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.step_result import StepResult
from anabranch.learner.train.trainer import Trainer
from anabranch.learner.versions.format import Versions

_FOLDER = "anabranch-backtest-"
"""Prefix of the temporary folders of backtests."""
_NEVER = timedelta(days=36_500)

Blocks = Callable[[HoldOut], Iterator[Mapping[str, Array]]]
"""Returns the columns of the blocks of a stream, given which events are held out."""


@dataclass(frozen=True)
class BacktestPoint:
    """The score up to a number of events: accuracy for classification, absolute error for regression."""

    events: int
    recent: float
    """Over the window since the last change that ADWIN detected."""
    overall: float
    """Since the first event."""
    loss: float
    """Over its own window."""
    overall_loss: float
    """Since the first event."""
    constant_recent: float | None
    """What always answering the most frequent class, or the mean, has on the same events; None where a label is neither
    one class nor one number."""
    constant_overall: float | None


@dataclass(frozen=True)
class BacktestBaseline:
    """A rule that needs no features, on the same events and windows."""

    rule: str
    recent: float
    overall: float
    comparison: str
    """How the model compares in the recent window; empty where that is not known."""


@dataclass(frozen=True)
class BacktestMeasure:
    """A measure of the task at the end, with the limits of its 95 % interval."""

    name: str
    window: str
    """As of the stream: `now`, the newest 5,000 events, or `faded`."""
    events: int
    value: float
    lower: float
    upper: float
    constant: float
    """What one answer for all these events has at best."""


@dataclass(frozen=True)
class BacktestVersion:
    """A version that the pipeline would have published, as the gate has judged it."""

    number: int
    events: int
    """Events that were scored before it."""
    verdict: str
    """`pass`, `inconclusive`, or `fail`, which is held back."""
    reasons: list[str]
    serving: int | None
    """The version that servers would have had from then on."""


@dataclass(frozen=True)
class PredictedEvents:
    """B events that were scored, in their order.

    Attributes:
        task: what the output means.
        columns: of the events, as those of a block; `offset` is their number in the file, from 0 on.
        output_B: what the model returned for them before it was trained on them.
        score_B: the task's scores, float32 `[B]`; `loss_B` its losses.
        version: the version that servers would have had.
    """

    task: Task
    columns: Mapping[str, Array]
    output_B: Tensor
    score_B: NDArray[np.float32]
    loss_B: NDArray[np.float32]
    version: int | None


class EventSink(Protocol):
    """What takes each event that was scored."""

    def add(self, events: PredictedEvents) -> None:
        """Take the next ones."""
        ...


class RunLog(Extension):
    """What is measured of a run. Used by the loop's thread."""

    def __init__(self, sinks: Sequence[EventSink] = ()) -> None:
        self._sinks = sinks
        self.points: list[BacktestPoint] = []
        """One for each round that was scored."""
        self.scored_events = self.held_out = 0
        """Events that were scored, and that were held out."""
        self.versions: list[BacktestVersion] = []
        self.scores_arrivals = False
        """Whether events are scored when they come, and not by the steps that train on them."""

    def begin(self, spec: PipelineSettings, setup: TrainingSetup, monitor: StreamMonitor) -> None:
        """Take what measures the events; raises SettingsError where the task has no measure of a name."""
        self._task, named = setup.task, spec.gate.measures
        self._sign = 1 if monitor.bounded else -1
        self._monitor = monitor
        self._measures = TaskMeasures.of(setup.task, setup.schema, () if named == "auto" else named)

    @property
    def serving(self) -> int | None:
        """The version that servers would have now."""
        return self.versions[-1].serving if self.versions else None

    @override
    def trained(self, batch: Batch, result: StepResult) -> None:
        if not self.scores_arrivals and result.output_B is not None:
            labelled = batch.new["labelled"].astype(np.bool_)
            columns = {name: column[labelled] for name, column in batch.new.items()}
            self.predicted(columns, result.output_B[torch.from_numpy(labelled).to(result.output_B.device)])

    def predicted(self, columns: Mapping[str, Array], output_B: Tensor) -> None:
        """Take the predictions of events, by the model before it was trained on them."""
        self.scored_events += len(columns["label"])
        if self._sinks:
            with torch.no_grad():
                label_B = torch.from_numpy(columns["label"]).to(output_B.device)
                score_B, loss_B = (
                    each(output_B, label_B).float().numpy(force=True) for each in (self._task.score, self._task.loss)
                )
            events = PredictedEvents(self._task, columns, output_B.detach(), score_B, loss_B, self.serving)
            for sink in self._sinks:
                sink.add(events)

    @override
    def settle(self, batch: Batch) -> None:
        if batch.held_out:
            self.held_out += len(batch.held_out["offset"])
        if batch.new and not self.scores_arrivals:
            self.add_point()

    def add_point(self) -> None:
        """Add the scores of all events so far."""
        score, loss = self._monitor.prequential.score, self._monitor.prequential.loss
        if score.now is not None and score.overall is not None:
            now, overall = self._sign * score.now, self._sign * score.overall
            others = score.other_windows(0) if self._monitor.baselines.names else {}
            constants = [self._sign * others[name] if others else None for name in ("now", "overall")]
            self.points.append(
                BacktestPoint(self.scored_events, now, overall, loss.now or 0.0, loss.overall or 0.0, *constants)
            )

    def baselines(self) -> list[BacktestBaseline]:
        """Return what the baselines have at the end."""
        found, measured = [], self._monitor.prequential
        for index, rule in enumerate(self._monitor.baselines.rules.values()):
            if windows := measured.score.other_windows(index):
                recent, overall = self._sign * windows["now"], self._sign * windows["overall"]
                words, _ = measured.against(index, rule)
                found.append(BacktestBaseline(rule, recent, overall, words))
        return found

    def measures(self) -> list[BacktestMeasure]:
        """Return the measures of the task at the end, those of each window together."""
        windows = ("now", "faded") if self._measures.kind == "two-classes" else ("now",)
        each = [(name, window, measure) for window in windows for name, measure in self._measures.each.items()]
        found = [(name, window, self._monitor.outcomes.estimate(window, measure)) for name, window, measure in each]
        return [
            BacktestMeasure(name, window, known.rows, known.value, known.low, known.high, known.constant)
            for name, window, known in found
            if known is not None
        ]


class LateArrivals(Extension):
    """Returns the batches of a run whose labels come later than its events; see `DelayedLabels`."""

    @property
    def pending(self) -> bool:
        """Whether it has batches that do not wait for the stream."""
        raise NotImplementedError

    def begin(self, setup: TrainingSetup, trainer: Trainer, monitor: StreamMonitor, log: RunLog) -> None:
        """Take what is built: `monitor` measures the events, and `log` takes their predictions."""
        raise NotImplementedError


@dataclass(frozen=True)
class RunEnd:
    """What is known at the end of a run besides its log."""

    drifts: int
    """Rises of the error."""
    warnings: list[str]
    """What the pipeline would have said, such as which features have drifted."""
    problem: str | None
    """Why steps were not taken."""
    measure: str
    """By which the gate has judged besides the score; empty: by none."""
    slices: Mapping[str, SliceReport]
    """The last version by the slices of `gate.slices`, on held-out events."""


Tick = Callable[[int], bool]
"""Gets the events so far, and returns whether a version is due; raises nothing."""


def run_pipeline(
    spec: PipelineSettings,
    events: SchemaSettings,
    blocks: Blocks,
    log: RunLog,
    tick: Tick,
    stop: threading.Event,
    arrivals: LateArrivals | None = None,
) -> RunEnd:
    """Run a learner on events to their end, or until `stop` is set: the loop, store, gate and extensions of a pipeline.

    Args:
        spec: all settings.
        events: the schema of the blocks: that of `spec`, maybe with a further feature.
        blocks: the events.
        log: measures them.
        tick: called after each round.
        stop: ends it after a round.
        arrivals: lets labels come later; None: each comes with its event.

    Raises:
        SettingsError: something of the settings does not fit, or the events cannot be read.
    """
    ends = threading.Event()
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(temporary_folder(_FOLDER))
        spec = _on_a_file(spec, late=arrivals is not None).with_changes(state_dir=scratch)
        # A file has no senders who must not know it, and equal runs are to be equal.
        StreamSecret.fixed(spec.seed).write(scratch)
        more = (log,) if arrivals is None else (arrivals, log)
        assembly = Assembly(spec, threading.Event(), None, stack, more, in_memory=True)
        assembly.build_loop(BlocksReader(spec.stream, events, blocks, ends))
        loop, publisher, holdout = assembly.loop, assembly.parts.publisher, assembly.parts.holdout
        monitor = loop.monitor if arrivals is None else StreamMonitor(spec.learner, assembly.setup.schema)
        log.begin(spec, assembly.setup, monitor)
        if arrivals is not None:
            log.scores_arrivals = True
            arrivals.begin(assembly.setup, assembly.trainer, monitor, log)
        versions = Versions(scratch / "versions")

        def publish() -> None:
            publisher.gate.monitor(holdout.held)
            before = publisher.published
            publisher.publish_last(loop.state.progress(), loop.state.snapshot, Deadline(_NEVER), loop.state.rows_new)
            if publisher.published > before and publisher.number is not None:
                verdict = versions.verdict(publisher.number)
                assert verdict is not None
                serving = publisher.gate.served
                log.versions.append(
                    BacktestVersion(publisher.number, log.scored_events, verdict.verdict, [*verdict.reasons], serving)
                )

        def after_round() -> None:
            if tick(log.scored_events):
                publish()
            if stop.is_set():
                ends.set()

        between = (*overriding(assembly.extensions, "run_if_due"), loop.clean_holdout, after_round)
        loop.run(ends, between)
        while arrivals is not None and arrivals.pending and not stop.is_set():
            ends.clear()
            loop.run(ends, between)
        publish()
        warnings = [
            assembly.trainer.warning,
            publisher.gate.scorer.measures.warning,
            *(each for extension in assembly.extensions for each in extension.warnings),
        ]
        problem = loop.raising_events.problem or loop.non_finite.problem
        chosen = publisher.gate.choice.now
        measure = chosen[0][0].name if chosen else ""
        said = [each for each in warnings if each]
        return RunEnd(loop.monitor.drift.count, said, problem, measure, publisher.slices)


def _on_a_file(spec: PipelineSettings, *, late: bool) -> PipelineSettings:
    """Return the settings without what a file has not: a broker, senders, servers, other hosts and a tomorrow."""
    stream, learner, drift = spec.stream, spec.learner, spec.learner.drift
    actions = tuple(each for each in drift.actions if each != "checkpoint")
    return spec.with_changes(
        stream=stream.model_copy(
            update={
                "backfill": None,
                "labels": stream.labels if late else None,
                "lag_policy": LagPolicySettings(high=_NEVER),
                "unlabelled": "skip" if stream.unlabelled == "distil" else stream.unlabelled,
            }
        ),
        model=spec.model.model_copy(update={"teacher": None}),
        learner=learner.model_copy(
            update={
                "drift": drift.model_copy(update={"actions": actions}),
                # One step a round, and no choice by trials: what a clock decides is not the same twice.
                "round": timedelta(0),
                "compile": learner.compile is True,
                "replicas": 1,
                "mesh": None,
                "profile": None,
            }
        ),
        checkpoints=spec.checkpoints.model_copy(update={"every": _NEVER}),
        device_sharing=spec.device_sharing.model_copy(update={"policy": "exclusive"}),
        gate=spec.gate.model_copy(update={"live": False}),
        serving=spec.serving.model_copy(update={"canary": 0.0}),
        storage=None,
        tracing=None,
        track=None,
    )
