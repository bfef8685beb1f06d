"""`--sweep`: a backtest for each value of a setting, on the same events.

Legend: N events that all values have scored, M parts of them.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType

from anabranch.commands.backtest.measure import BacktestProgress, BacktestResult, run_backtest
from anabranch.commands.backtest.render import table_of
from anabranch.commands.backtest.rows import EventRows
from anabranch.commands.backtest.runs import PredictedEvents
from anabranch.core.errors import SettingsError
from anabranch.learner.evaluate.measures import Measure, Outcomes, measure_of
from anabranch.learner.evaluate.outcomes import predicted_by
from anabranch.learner.settings.pipeline import PipelineSettings

_PARTS = 50
"""Consecutive parts of the events, whose means are taken as independent: single events may depend on each other."""
_Z_95 = 1.96


@dataclass(frozen=True)
class SweptValue:
    """The run of one value, on the events that all values have scored."""

    value: str
    score: float
    lower: float
    """Of the 95 % interval, as `upper`."""
    upper: float
    loss: float
    worse: float
    """By how much the best value is better."""
    worse_lower: float
    """Of the 95 % interval of the paired difference, as `worse_upper`: where it has 0, no difference is shown."""
    worse_upper: float
    versions: int
    held_back: int
    best: bool


@dataclass(frozen=True)
class SweepResult:
    """The runs of all values."""

    key: str
    measure: str
    """What the scores are: `accuracy`, `absolute error`, or the measure by which the gate judges."""
    events: int
    """On which all values were scored."""
    values: list[SweptValue]
    stopped: bool

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


class _SweptEvents(NamedTuple):
    """What is kept of N events, in order."""

    number_N: NDArray[np.int64]
    score_N: NDArray[np.float32]
    loss_N: NDArray[np.float32]
    odds_N: NDArray[np.float32]
    """The log-odds of class 1; NaN where there are not two classes."""
    label_N: NDArray[Any]
    group_N: NDArray[Any]

    def where(self, marks_N: NDArray[np.bool_]) -> "_SweptEvents":
        return _SweptEvents._make(column[marks_N] for column in self)

    @property
    def outcomes(self) -> Outcomes:
        group = self.group_N if self.group_N.any() else None
        return Outcomes("two-classes", self.odds_N[:, None], self.label_N, group)


class _Kept:
    """Keeps what is compared of the events of a run."""

    def __init__(self) -> None:
        self._parts: list[tuple[NDArray[Any], ...]] = []

    def add(self, events: PredictedEvents) -> None:
        output, label = events.output_B, events.columns["label"]
        odds_B = np.full(len(label), np.nan, np.float32)
        if output.ndim == 2 and output.shape[1] == 2 and label.ndim == 1:
            odds_B = predicted_by("two-classes", output, output).numpy(force=True)[:, 0]
        label_B = label if label.ndim == 1 else np.zeros(len(label), np.int64)
        columns = events.columns["offset"], events.score_B, events.loss_B, odds_B, label_B, events.columns["group_hash"]
        self._parts.append(columns)

    def events(self) -> _SweptEvents:
        return _SweptEvents._make(np.concatenate(column) for column in zip(*self._parts, strict=True))


def run_sweep(
    key: str,
    specs: Mapping[str, PipelineSettings],
    rows: EventRows,
    *,
    label_time: str | None = None,
    progress: Callable[[BacktestProgress], object] = bool,
    stop: threading.Event | None = None,
) -> SweepResult:
    """Run a backtest for each value of a setting, and compare them on the events that all have scored.

    Args:
        key: of the setting.
        specs: the settings with each value.
        rows: the events, which are read once for each.
        label_time: as of `run_backtest`.
        progress: as there, over all runs.
        stop: once it is set, the values so far are compared.

    Raises:
        SettingsError: as `run_backtest`, with the value; or no event was scored by all values.
    """
    stop, found = stop or threading.Event(), dict[str, tuple[BacktestResult, _SweptEvents]]()
    for number, (value, spec) in enumerate(specs.items(), start=1):
        kept = _Kept()

        def report(each: BacktestProgress, number: int = number) -> None:
            progress(BacktestProgress(number, len(specs), each.events, each.part))

        try:
            result = run_backtest(spec, rows, label_time=label_time, progress=report, stop=stop, sinks=(kept,))
        except SettingsError as exc:
            if stop.is_set() and found:
                break
            raise SettingsError(f"--sweep {key} = {value}: {exc}") from exc
        found[value] = result, kept.events()
        if stop.is_set():
            break
    return _compared(key, found, stopped=stop.is_set())


def _compared(key: str, found: Mapping[str, tuple[BacktestResult, _SweptEvents]], *, stopped: bool) -> SweepResult:
    first, _ = next(iter(found.values()))
    common = None
    for _, events in found.values():
        common = events.number_N if common is None else np.intersect1d(common, events.number_N)
    assert common is not None
    if len(common) < 2:
        raise SettingsError(f"--sweep {key}: fewer than two events were scored with all values")
    each = {value: events.where(np.isin(events.number_N, common)) for value, (_, events) in found.items()}
    measure = None
    if first.measure and all(np.isfinite(events.odds_N).all() for events in each.values()):
        measure = measure_of(first.measure, "two-classes", groups=any(e.group_N.any() for e in each.values()))
    sign = 1.0 if (measure.higher if measure else first.score == "accuracy") else -1.0
    values = {value: _value(events, measure, first.score) for value, events in each.items()}
    best = max(values, key=lambda value: sign * values[value][0])
    return SweepResult(
        key,
        measure.name if measure else first.score,
        len(common),
        [
            SweptValue(
                value,
                *values[value],
                float(events.loss_N.mean(dtype=np.float64)),
                *((0.0, 0.0, 0.0) if value == best else _worse(events, each[best], measure)),
                len(found[value][0].versions),
                sum(version.verdict == "fail" for version in found[value][0].versions),
                value == best,
            )
            for value, events in each.items()
        ],
        stopped,
    )


def _value(events: _SweptEvents, measure: Measure | None, score: str) -> tuple[float, float, float]:
    """Return a measure, or the mean score, with its 95 % interval."""
    if measure is not None:
        estimate = measure.estimate(events.outcomes)
        return (np.nan, np.nan, np.nan) if estimate is None else (estimate.value, estimate.low, estimate.high)
    return _interval(events.score_N if score == "accuracy" else -events.score_N)


def _worse(events: _SweptEvents, best: _SweptEvents, measure: Measure | None) -> tuple[float, float, float]:
    """Return by how much the best value is better on the same events, with the 95 % interval."""
    if measure is None:
        return _interval(best.score_N - events.score_N)
    difference = measure.compare(events.outcomes, best.outcomes)
    if difference is None:
        return np.nan, np.nan, np.nan
    error = _Z_95 * difference.error
    return difference.drop, difference.drop - error, difference.drop + error


def _interval(value_N: NDArray[np.float32]) -> tuple[float, float, float]:
    """Return the mean and its 95 % interval, from the means of M consecutive parts (Schmeiser 1982, "Batch size effects
    in the analysis of simulation output")."""
    mean = float(value_N.mean(dtype=np.float64))
    parts_M = [part.mean(dtype=np.float64) for part in np.array_split(value_N, min(_PARTS, len(value_N)))]
    error = _Z_95 * float(np.std(parts_M, ddof=1)) / len(parts_M) ** 0.5
    return mean, mean - error, mean + error


def render_sweep(result: SweepResult) -> RenderableType:
    """Return one row for each value."""
    shown = "{:.1%}" if result.measure == "accuracy" else "{:.4g}"
    names = ("95 % interval", "loss", "worse than the best by", "versions", "held back")
    table = table_of(result.key, result.measure, *names)
    for each in result.values:
        interval = f"{shown.format(each.lower)} to {shown.format(each.upper)}"
        worse = "best"
        if not each.best:
            low, high = shown.format(each.worse_lower), shown.format(each.worse_upper)
            worse = f"{shown.format(each.worse)} ({low} to {high})"
            worse += ", no difference is shown" if each.worse_lower <= 0 else ""
        cells = (shown.format(each.score), interval, f"{each.loss:.4f}", worse, str(each.versions), str(each.held_back))
        table.add_row(each.value, *cells)
    return table


def values_of(text: str) -> tuple[str, list[str]]:
    """Return the key and the values of `section.key=a,b,c`; commas within brackets and quotes separate nothing.

    Raises:
        SettingsError: it has another form, or fewer than two values, or one twice.
    """
    key, sign, rest = (part.strip() for part in text.partition("="))
    values, depth, quote = [""], 0, ""
    for each in rest:
        if each == "," and not depth and not quote:
            values.append("")
            continue
        if quote or each in "\"'":
            quote = "" if each == quote else quote or each
        else:
            depth += (each in "[{") - (each in "]}")
        values[-1] += each
    values = [value.strip() for value in values]
    if not key or not sign or len(values) < 2 or not all(values) or len({*values}) < len(values):
        raise SettingsError(f"--sweep {text}: write SECTION.KEY=VALUE,VALUE,... with two or more different values")
    return key, values
