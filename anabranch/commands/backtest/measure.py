"""`anabranch backtest`: the learner's training step on the events of a file, without Kafka.

Each batch is scored before the model is trained on it, so that every accuracy is that on events not seen before. The
step and the store are those of the learner, with all settings of `[learner]` and `[replay]`. With the time of each
label, an event is scored when it comes and trained on when its label comes, or as `[stream.labels]` says. No version is
published, and nothing is written.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from anabranch.commands.backtest.batches import Numbering, rows_of
from anabranch.commands.backtest.delayed_labels import POLICIES, DelayedRun, LabelDelay, Policy
from anabranch.commands.backtest.runs import (
    BacktestBaseline,
    BacktestMeasure,
    BacktestPoint,
    BacktestRun,
    LabelledRun,
    training_of,
    without_replay,
)
from anabranch.commands.backtest.training import BacktestTraining, without_teacher
from anabranch.commands.event_files.files import EventFile, FileRecord, SourceFormat, open_source
from anabranch.config.loader import Config
from anabranch.core.errors import SettingsError
from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.base import Decoded
from anabranch.ingest.formats.event_fields import document_of
from anabranch.ingest.formats.json import JsonFormat
from anabranch.ingest.settings.features import FeatureSettings
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.ingest.worker.value_decoder import ValueDecoder
from anabranch.learner.model.device import choose_device, without_denormals
from anabranch.learner.settings.pipeline import PipelineSettings

_FEATURE = "feature."


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
    """Events that were neither scored nor trained on: with replay_ratio = "auto" they measure forgetting."""
    skipped: int = 0
    """Events without a label, or that the pipeline cannot use."""
    first_fault: str | None = None
    """Why the first unusable event could not be used."""
    baselines: list[BacktestBaseline] = field(default_factory=list)
    """What needs no model, on the events of the run of the settings."""
    measures: list[BacktestMeasure] = field(default_factory=list)
    """The measures of the task, of the run of the settings."""
    runs: list[BacktestComparison] = field(default_factory=list)
    """The run of the settings, whose points these are, and those that it is compared with."""

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class _ComparedRun:
    run: BacktestRun
    policy: str
    replay: bool

    def comparison(self) -> BacktestComparison:
        """Return its score over all events."""
        last = self.run.score.points[-1]
        ended = (self.run.labelled, self.run.timed_out) if isinstance(self.run, DelayedRun) else ()
        return BacktestComparison(self.policy, self.replay, last.overall, last.overall_loss, *ended)


def run_backtest(
    config: Config,
    path: Path,
    *,
    every: int | None = None,
    kind: SourceFormat | None = None,
    delimiter: str | None = None,
    label_time: str | None = None,
    compare: bool = False,
) -> BacktestResult:
    """Train on the events of a file in their order, and score each before it is trained on.

    Args:
        config: the pipeline.
        path: JSON lines, CSV or Parquet; `-` is stdin.
        every: events between two points; by default about 20 points.
        kind: format of the file; by default from its suffix.
        delimiter: of CSV.
        label_time: the column with the time at which the label is known, in seconds since 1970; None: labels come with
            their events.
        compare: train other models on the same events: without replay, and by other policies for late labels.

    Raises:
        SettingsError: the file cannot be read, or has no labelled event that can be used; or labels cannot be delayed.
    """
    device = choose_device(config.pipeline.learner.device)
    with without_denormals(device):
        spec = without_teacher(config.pipeline)
        schema = Schema(spec.events if label_time is None else _with_label_time(config, label_time))
        held_out = _held_out(spec)
        result = BacktestResult("absolute error" if schema.label.classes is None else "accuracy")
        with contextlib.ExitStack() as stack:
            training = partial(training_of, device=device, name=path.name, stack=stack)
            runs = _runs(config, spec, training, label_time, compare=compare)
            envelope = config.pipeline.stream.envelope
            source = stack.enter_context(open_source(path, kind, delimiter, schema, checked=True, envelope=envelope))
            for columns in _batches(source, schema, spec.learner.batch_size, result):
                held_B = held_out(len(columns["label"]))
                new, held = (columns, {}) if not held_B.any() else (rows_of(columns, ~held_B), rows_of(columns, held_B))
                for each in runs:
                    each.run.add(new, held)
                result.held_out += int(held_B.sum())
                result.events += int((~held_B).sum())
    points = runs[0].run.score.points
    if not points:
        if result.events:
            raise SettingsError(f"no event of {path} could be scored: {runs[0].run.training.problem}")
        why = f"; the first that cannot be used: {result.first_fault}" if result.first_fault else ""
        raise SettingsError(f"{path} has no event with a label that the pipeline can use{why}")
    result.points = _thinned(points, every or max(1, result.events // 20))
    result.baselines, result.measures = runs[0].run.score.compared(), runs[0].run.score.measures()
    result.runs = [each.comparison() for each in runs]
    return result


def render_backtest(result: BacktestResult) -> RenderableType:
    """Return the table of accuracy over time, below one of the runs where there are several."""
    shown = "{:.4g}" if result.score == "absolute error" else "{:.1%}"
    constant = ("constant",) if result.baselines else ()
    table = _table("events", f"recent {result.score}", *constant, f"overall {result.score}", *constant, "loss")
    for point in result.points:
        scores = (point.recent, point.constant_recent, point.overall, point.constant_overall)
        cells = [shown.format(score) for score in scores if score is not None]
        table.add_row(f"{point.events:,}", *cells, f"{point.loss:.4g}")
    lines = [
        f"{each.rule}: recent {shown.format(each.recent)}, overall {shown.format(each.overall)}"
        + (f"; of late the model is {each.comparison}" if each.comparison else "")
        for each in result.baselines
    ]
    measures = _table("measure", "window", "value", "95 % interval", "constant")
    for each in result.measures:
        interval = f"{each.lower:.3g} to {each.upper:.3g}"
        measures.add_row(each.name, each.window, f"{each.value:.3g}", interval, f"{each.constant:.3g}")
    found = Group(table, "", *(Text(line) for line in lines), *(("", measures) if result.measures else ()))
    if len(result.runs) == 1:
        return found
    compared = _table("labels", "replay", f"overall {result.score}", "overall loss")
    for run in result.runs:
        compared.add_row(
            run.policy, "yes" if run.replay else "no", shown.format(run.overall), f"{run.overall_loss:.4f}"
        )
    return Group(compared, "", found)


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _runs(
    config: Config,
    spec: PipelineSettings,
    training: Callable[[PipelineSettings], BacktestTraining],
    label_time: str | None,
    *,
    compare: bool,
) -> list[_ComparedRun]:
    """Return the run of the settings, and with `compare` the others."""
    replays = spec.learner.strategy.kind.replays
    specs = [spec, without_replay(spec)] if compare and replays else [spec]
    labels = config.pipeline.stream.labels
    if label_time is None or labels is None:
        return [_ComparedRun(LabelledRun(training(each)), "labelled", replays and each is spec) for each in specs]
    delay = LabelDelay(f"{_FEATURE}{label_time}", labels.wait.total_seconds(), labels.unmatched)
    own: Policy = "wait" if labels.early == "none" else labels.early
    binary = Schema(spec.events).label.one_of == 2
    others = [policy for policy in POLICIES if policy != own] if compare and binary else []
    return [
        _ComparedRun(
            DelayedRun(training(each), each.learner.strategy.name, policy, delay), policy, replays and each is spec
        )
        for policy in (own, *others)
        for each in specs
    ]


def _held_out(spec: PipelineSettings) -> Callable[[int], NDArray[np.bool_]]:
    """Return what chooses which of the next events are held out, bool `[B]`, as many as of a stream."""
    measures = spec.learner.strategy.kind.replays and spec.learner.replay_ratio == "auto"
    random, fraction = np.random.default_rng(spec.seed), spec.gate.holdout_fraction if measures else 0.0
    return lambda rows: random.random(rows) < fraction


def _with_label_time(config: Config, column: str) -> SchemaSettings:
    """Return the schema with the time of the label as one more column of each event."""
    events, option = config.pipeline.events, f"--label-time {column}"
    if events.time is None:
        raise SettingsError(f"{option}: name the field with the time of an event as well, in [schema.time]")
    if config.pipeline.stream.labels is None:
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


def _batches(source: EventFile, schema: Schema, rows: int, result: BacktestResult) -> Iterator[Mapping[str, Array]]:
    """Yield the columns of `rows` labelled events at a time, at the end of those that are left."""
    left: dict[str, Array] = {}
    numbering = Numbering()
    for decoded in _decoded(source, schema, rows, result):
        labelled = np.asarray(decoded.columns["labelled"], np.bool_)
        result.skipped += int((~labelled).sum())
        new = numbering.add({name: column[labelled] for name, column in decoded.columns.items()})
        left = {name: np.concatenate([left[name], column]) for name, column in new.items()} if left else new
        while len(left["label"]) >= rows:
            yield {name: column[:rows] for name, column in left.items()}
            left = {name: column[rows:] for name, column in left.items()}
    if left and len(left["label"]):
        yield left


def _decoded(source: Iterable[FileRecord], schema: Schema, rows: int, result: BacktestResult) -> Iterator[Decoded]:
    decoder, records = ValueDecoder(JsonFormat(schema), schema, sys.maxsize), iter(source)
    while some := list(itertools.islice(records, rows)):
        usable = [record for record in some if not record.fault]
        contents = [record.content for record in usable]
        values = [
            each if isinstance(each, bytes) else msgspec.json.encode(document_of(schema, each)) for each in contents
        ]
        decoded, _ = decoder.decode(values, [()] * len(values), {})
        faults = [f"{record.location}: {record.fault}" for record in some if record.fault]
        faults += [f"{usable[reject.message].location}: {reject.reason}" for reject in decoded.rejects]
        result.skipped += len(faults)
        if faults and result.first_fault is None:
            result.first_fault = faults[0]
        yield decoded
