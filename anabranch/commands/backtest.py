"""`anabranch backtest`: the learner's training step on the events of a file, without Kafka.

Each batch is scored before the model is trained on it, so that every accuracy is that on events not seen before. Old
events are replayed from a uniform sample in memory, at `learner.replay_ratio` (1 for "auto"), whatever
`replay.admission` and `replay.sampling` are. No version is published, and nothing is written.

Legend: B new events, C slots of the reservoir.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from rich.console import RenderableType
from rich.table import Table
from torch import Tensor

from anabranch.commands.event_files.files import EventFile, FileRecord, SourceFormat, open_source
from anabranch.config.loader import Config
from anabranch.core.errors import SettingsError
from ingest.events.block import Array
from ingest.events.schema import Schema
from ingest.formats.base import Decoded
from ingest.formats.json import JsonFormat
from learner.__main__ import deployment_of
from learner.build import TrainingSetup, build_training_setup
from learner.evaluation.prequential import Prequential, Scored
from learner.model.device import choose_device, without_denormals
from learner.strategies.examples import Examples
from learner.training.trainer import Trainer

_CAPACITY = 10_000


@dataclass(frozen=True)
class BacktestPoint:
    """The score up to a number of events: accuracy for classification, absolute error for regression."""

    events: int
    recent: float
    """Over the window since the last change that ADWIN detected."""
    overall: float
    """Since the first event."""
    loss: float


@dataclass
class BacktestResult:
    """What a backtest measured."""

    score: str
    """What the numbers are: `accuracy` or `absolute error`."""
    points: list[BacktestPoint] = field(default_factory=list)
    events: int = 0
    """Events that the model was trained on."""
    skipped: int = 0
    """Events without a label, or that the pipeline cannot use."""
    first_fault: str | None = None
    """Why the first unusable event could not be used."""

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def backtest(
    config: Config,
    path: Path,
    *,
    every: int | None = None,
    kind: SourceFormat | None = None,
    delimiter: str | None = None,
) -> BacktestResult:
    """Train on the events of a file in their order, and score each before it is trained on.

    Args:
        config: the pipeline.
        path: JSON lines, CSV or Parquet; `-` is stdin.
        every: events between two points; by default about 20 points.
        kind: format of the file; by default from its suffix.
        delimiter: of CSV.

    Raises:
        SettingsError: the file cannot be read, or has no labelled event that can be used.
    """
    device = choose_device(config.pipeline.learner.device)
    with without_denormals(device):
        setup = build_training_setup(deployment_of(config), device)
        trainer, settings = Trainer(**setup.arguments), setup.settings
        regression = setup.schema.label.classes is None
        result = BacktestResult("absolute error" if regression else "accuracy")
        measured, sign = Prequential(bounded=not regression), -1 if regression else 1
        replayed = _Reservoir(config.pipeline.seed) if setup.strategy.replays else None
        points = []
        with open_source(path, kind, delimiter, setup.schema, checked=True) as source:
            for columns in _batches(source, setup, settings.batch_size, result):
                new = trainer.examples(columns)
                ratio = 1.0 if settings.replay_ratio == "auto" else settings.replay_ratio
                counts = setup.strategy.samples(round(ratio * len(new)))
                step = trainer.step(new, replayed.sample(counts) if replayed is not None else ())
                if replayed is not None:
                    kept = step.output_B if setup.strategy.keeps_output else None
                    replayed.add(dataclasses.replace(new, output_B=kept))
                if step.finite:
                    measured.add(Scored(len(new), step.score, step.loss_new))
                result.events += len(new)
                if measured.mean is not None and measured.overall is not None:
                    loss = measured.loss or 0.0
                    points.append(BacktestPoint(result.events, sign * measured.mean, sign * measured.overall, loss))
    if not points:
        why = f"; the first that cannot be used: {result.first_fault}" if result.first_fault else ""
        raise SettingsError(f"{path} has no event with a label that the pipeline can use{why}")
    result.points = _thinned(points, every or max(1, result.events // 20))
    return result


def render_backtest(result: BacktestResult) -> RenderableType:
    """Return the table of accuracy over time."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("events", f"recent {result.score}", f"overall {result.score}", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    shown = "{:.4g}" if result.score == "absolute error" else "{:.1%}"
    for point in result.points:
        table.add_row(f"{point.events:,}", shown.format(point.recent), shown.format(point.overall), f"{point.loss:.4g}")
    return table


def _thinned(points: Sequence[BacktestPoint], every: int) -> list[BacktestPoint]:
    """Return the last point of each `every` events."""
    last = {(point.events - 1) // every: point for point in points}
    return list(last.values())


def _batches(
    source: EventFile, setup: TrainingSetup, rows: int, result: BacktestResult
) -> Iterator[Mapping[str, Array]]:
    """Yield the columns of `rows` labelled events at a time, at the end of those that are left."""
    left: dict[str, Array] = {}
    for decoded in _decoded(source, setup.schema, rows, result):
        labelled = np.asarray(decoded.columns["labelled"], np.bool_)
        result.skipped += int((~labelled).sum())
        new = {name: column[labelled] for name, column in decoded.columns.items()}
        left = {name: np.concatenate([left[name], column]) for name, column in new.items()} if left else new
        while len(left["label"]) >= rows:
            yield {name: column[:rows] for name, column in left.items()}
            left = {name: column[rows:] for name, column in left.items()}
    if left and len(left["label"]):
        yield left


def _decoded(source: Iterable[FileRecord], schema: Schema, rows: int, result: BacktestResult) -> Iterator[Decoded]:
    decoder, records = JsonFormat(schema), iter(source)
    while some := list(itertools.islice(records, rows)):
        usable = [record for record in some if not record.fault]
        values = [
            record.content if isinstance(record.content, bytes) else msgspec.json.encode(record.content)
            for record in usable
        ]
        decoded = decoder.decode(values)
        faults = [f"{record.location}: {record.fault}" for record in some if record.fault]
        faults += [f"{usable[reject.message].location}: {reject.reason}" for reject in decoded.rejects]
        result.skipped += len(faults)
        if faults and result.first_fault is None:
            result.first_fault = faults[0]
        yield decoded


class _Reservoir:
    """A uniform sample of all events added so far (Vitter 1985, algorithm R). Used by one thread."""

    def __init__(self, seed: int, capacity: int = _CAPACITY) -> None:
        self._random = np.random.default_rng(seed)
        self._capacity = capacity
        self._seen = 0
        self._held: Examples | None = None

    def add(self, new: Examples) -> None:
        """Add events."""
        if self._held is None:
            self._held = _map(lambda value: value.new_zeros((self._capacity, *value.shape[1:])), new)
        slots: dict[int, int] = {}
        for row in range(len(new)):
            slot = self._seen if self._seen < self._capacity else int(self._random.integers(self._seen + 1))
            self._seen += 1
            if slot < self._capacity:
                slots[slot] = row
        to, taken = torch.tensor(list(slots), dtype=torch.int64), torch.tensor(list(slots.values()), dtype=torch.int64)
        for held, value in zip(_tensors(self._held), _tensors(new), strict=True):
            held[to.to(held.device)] = value.detach()[taken.to(value.device)].to(held.dtype)

    def sample(self, counts: Sequence[int]) -> list[Examples]:
        """Return distinct events, as many for each sample as `counts` says; fewer where there are not so many."""
        held = min(self._seen, self._capacity)
        if self._held is None or not sum(counts) or held < len(counts):
            return []
        fair = [min(count, held // len(counts)) for count in counts]
        slots = torch.from_numpy(self._random.choice(held, sum(fair), replace=False))
        return [self._held[some.to(self._held.label_B.device)] for some in torch.split(slots, fair)]


def _tensors(examples: Examples) -> list[Tensor]:
    output = [] if examples.output_B is None else [examples.output_B]
    return [*examples.features.values(), examples.label_B, examples.weight_B, *output]


def _map(change: Any, examples: Examples) -> Examples:
    output = None if examples.output_B is None else change(examples.output_B)
    features = {name: change(value) for name, value in examples.features.items()}
    return Examples(features, change(examples.label_B), change(examples.weight_B), output)
