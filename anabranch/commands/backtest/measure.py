"""`anabranch backtest`: a pipeline on the events of a file, without Kafka.

Each step is scored before the model is trained on it, so that every accuracy is that on events not seen before. The
loop, the store, the gate and the extensions are those of the learner, with all settings. With the time of each label,
an event is scored when it comes and trained on when its label comes, or as `[stream.labels]` says. Nothing is written
but into a temporary folder.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from pydantic import ValidationError

from anabranch.commands.backtest.delayed_labels import POLICIES, DelayedLabels, LabelDelay, Policy
from anabranch.commands.backtest.rows import EventRows, RowsRead, blocks_of
from anabranch.commands.backtest.runs import (
    BacktestBaseline,
    BacktestMeasure,
    BacktestPoint,
    BacktestVersion,
    EventSink,
    RunEnd,
    RunLog,
    run_pipeline,
)
from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.features import FeatureSettings
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.settings.strategies import StrategySettings
from anabranch.learner.status.report import SliceReport

_FEATURE = "feature."
_LINES = 20
_FIRST_VERSION = 1000
"""Events before the first version where their number is not known."""


@dataclass(frozen=True)
class BacktestProgress:
    """How far a backtest is."""

    run: int
    """The number of the run, from 1 on."""
    runs: int
    events: int
    """Events of this run that were scored."""
    part: float | None
    """The part of its events that was read, 0 to 1; None where their number is not known."""


@dataclass
class BacktestComparison:
    """The score of one run over all events."""

    policy: str
    """How it treats labels that come late: a policy, or `labelled` where they come with their events."""
    replay: bool
    """Whether old events were replayed."""
    overall: float
    overall_loss: float
    labelled: int = 0
    """Events whose label came in time."""
    timed_out: int = 0
    """Events that waited for it in vain."""


@dataclass
class BacktestResult:
    """What a backtest measured."""

    score: str
    """What the numbers are: `accuracy` or `absolute error`."""
    points: list[BacktestPoint] = field(default_factory=list)
    events: int = 0
    """Events that the model was scored on."""
    held_out: int = 0
    """Events that were neither scored nor trained on: by them versions are judged, and forgetting is measured."""
    skipped: int = 0
    """Events without a label, or that the pipeline cannot use."""
    first_fault: str | None = None
    """Why the first unusable event could not be used."""
    baselines: list[BacktestBaseline] = field(default_factory=list)
    """What needs no model, on the events of the run of the settings."""
    measures: list[BacktestMeasure] = field(default_factory=list)
    """The measures of the task, of the run of the settings."""
    measure: str = ""
    """By which the gate has judged besides the score; empty: by none."""
    versions: list[BacktestVersion] = field(default_factory=list)
    """The versions that the run of the settings would have published."""
    slices: dict[str, SliceReport] = field(default_factory=dict)
    """The last of them by the slices of `gate.slices`, on held-out events."""
    drifts: int = 0
    """How often the error rose because the stream had changed."""
    warnings: list[str] = field(default_factory=list)
    """What the pipeline would have said at the end, such as which features have drifted."""
    runs: list[BacktestComparison] = field(default_factory=list)
    """The run of the settings, whose points these are, and those that it is compared with."""
    stopped: bool = False
    """Whether it was stopped before the end of the events."""

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


@dataclass(frozen=True)
class _PlannedRun:
    spec: PipelineSettings
    replay: bool
    policy: Policy | None = None


def run_backtest(
    spec: PipelineSettings,
    rows: EventRows,
    *,
    every: int | None = None,
    label_time: str | None = None,
    compare: bool = False,
    progress: Callable[[BacktestProgress], object] = bool,
    stop: threading.Event | None = None,
    sinks: Sequence[EventSink] = (),
) -> BacktestResult:
    """Run a pipeline on events in their order, and score each before it is trained on.

    Args:
        spec: all settings.
        rows: the events: `EventsOfFile` or `EventsInMemory`. With `compare` they are read several times.
        every: events between two points, and between two versions; by default there are about 20.
        label_time: the field with the time at which the label is known, in seconds since 1970; None: labels come with
            their events.
        compare: run other settings on the same events: without replay, and by other policies for late labels.
        progress: called after each round of steps.
        stop: once it is set, the result is that of the events so far.
        sinks: take each event that the run of the settings has scored.

    Raises:
        SettingsError: the events cannot be read, or none has a label and can be used; or labels cannot be delayed; or
            something of the settings does not fit.
    """
    stop = stop or threading.Event()
    events = spec.events if label_time is None else _with_label_time(spec, label_time)
    schema = Schema(events)
    result = BacktestResult("absolute error" if schema.label.classes is None else "accuracy")
    runs = _runs(spec, late=label_time is not None, compare=compare)
    for number, run in enumerate(runs, start=1):
        log, labels = RunLog(sinks if number == 1 else ()), None
        if run.policy is not None and (settings := run.spec.stream.labels) is not None:
            delay = LabelDelay(f"{_FEATURE}{label_time}", settings.wait.total_seconds(), settings.unmatched)
            labels = DelayedLabels(run.policy, delay, spec.learner.batch_size)
        with rows.open(schema, spec.stream.envelope) as source:
            read, pace = RowsRead(source), _Pace(every)

            def tick(scored: int, number: int = number, read: RowsRead = read, pace: _Pace = pace) -> bool:
                progress(BacktestProgress(number, len(runs), scored, read.part))
                return pace.due(scored, read)

            blocks = partial(blocks_of, read, spec.stream, schema)
            end = run_pipeline(run.spec, events, blocks, log, tick, stop, labels)
        if number == 1:
            result.stopped = stop.is_set()
            _add_first(result, rows, read, log, end, every)
        if not log.points:
            break
        last, ended = log.points[-1], () if labels is None else (labels.labelled, labels.timed_out)
        result.runs.append(
            BacktestComparison(run.policy or "labelled", run.replay, last.overall, last.overall_loss, *ended)
        )
        if stop.is_set():
            break
    return result


def _add_first(
    result: BacktestResult, rows: EventRows, read: RowsRead, log: RunLog, end: RunEnd, every: int | None
) -> None:
    """Add what is known of the run of the settings; raises SettingsError where nothing was scored."""
    result.events, result.held_out = log.scored_events, log.held_out
    result.skipped, result.first_fault = read.unusable, read.first_fault
    if not log.points:
        if result.stopped:
            raise SettingsError("stopped before an event was scored")
        if end.problem is not None:
            raise SettingsError(f"no event of {rows.name} could be scored: {end.problem}")
        why = f"; the first that cannot be used: {result.first_fault}" if result.first_fault else ""
        raise SettingsError(f"{rows.name} has no event with a label that the pipeline can use{why}")
    result.points = _thinned(log.points, every or max(1, log.scored_events // _LINES))
    result.baselines, result.measures, result.versions = log.baselines(), log.measures(), log.versions
    result.drifts, result.warnings, result.measure = end.drifts, end.warnings, end.measure
    result.slices = dict(end.slices)


class _Pace:
    """When versions are due: after `every` events, or else about 20 times. Used by one thread."""

    def __init__(self, every: int | None) -> None:
        self._every, self._next = every, 0

    def due(self, scored: int, read: RowsRead) -> bool:
        """Return whether a version is due after so many events."""
        part = read.part
        step = self._every or (_FIRST_VERSION if not part else max(1, int(read.records / part / _LINES)))
        self._next = self._next or step
        if scored < self._next:
            return False
        self._next = scored + (step if self._every or part else scored)
        return True


def _runs(spec: PipelineSettings, *, late: bool, compare: bool) -> list[_PlannedRun]:
    """Return the run of the settings, and with `compare` the others."""
    replays = spec.learner.strategy.kind.replays
    specs = [spec, without_replay(spec)] if compare and replays else [spec]
    labels = spec.stream.labels
    if not late or labels is None:
        return [_PlannedRun(each, replays and each is spec) for each in specs]
    own: Policy = "wait" if labels.early == "none" else labels.early
    binary = Schema(spec.events).label.one_of == 2
    others = [policy for policy in POLICIES if policy != own] if compare and binary else []
    return [
        _PlannedRun(with_policy(each, policy), replays and each is spec, policy)
        for policy in (own, *others)
        for each in specs
    ]


def with_policy(spec: PipelineSettings, policy: Policy) -> PipelineSettings:
    """Return the settings for a policy for late labels: importance weights are those of one alone."""
    assert spec.stream.labels is not None
    early = policy if policy == "negative-then-correct" else "none"
    labels = spec.stream.labels.model_copy(update={"early": early, "take_back": False})
    return spec.with_changes(stream=spec.stream.model_copy(update={"labels": labels}))


def without_replay(spec: PipelineSettings) -> PipelineSettings:
    """Return the same settings with the strategy that replays nothing."""
    strategy = StrategySettings.model_validate({"name": "none"})
    return spec.with_changes(learner=spec.learner.model_copy(update={"strategy": strategy}))


def _with_label_time(spec: PipelineSettings, column: str) -> SchemaSettings:
    """Return the schema with the time of the label as one more column of each event."""
    events, option = spec.events, f"--label-time {column}"
    if events.time is None:
        raise SettingsError(f"{option}: name the field with the time of an event as well, in [schema.time]")
    if spec.stream.labels is None:
        raise SettingsError(f"{option}: the settings have no [stream.labels], whose wait says how long an event waits")
    taken = f'{option}: name a column of the file that has letters, digits and "_", and is not in [schema]'
    if column in Schema(events).names:
        raise SettingsError(taken)
    time = FeatureSettings.model_validate({"dtype": "float64", "default": 0.0})
    try:
        return SchemaSettings.model_validate({**dict(events), "features": {**events.features, column: time}})
    except ValidationError as exc:
        raise SettingsError(taken) from exc


def _thinned(points: Sequence[BacktestPoint], every: int) -> list[BacktestPoint]:
    """Return the last point of each `every` events."""
    last = {(point.events - 1) // every: point for point in points}
    return list(last.values())
