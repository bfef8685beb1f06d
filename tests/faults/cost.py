"""The cost of checkpoints and versions for the steps of a learner, step by step.

A learner records when each step ends, how long checkpoints and versions block it, and which steps run during the write
of a checkpoint or a version. The cost of a version is the time that it blocks the loop, and the additional time of the
steps during its write, compared with the median of the steps around them. On a shared machine other steps are slow
as well: the same sum over as many steps without a write is subtracted. Checkpoints are measured in the same way.

`checkpoint_cost_fraction` is in wall-clock time; on a machine without a free core it includes the time that the writing
thread takes from the steps on their core. `checkpoint_cost_fraction_busy` is the same in CPU time of the loop's thread,
and `checkpoint_cost_fraction_queued` in the time that the thread was runnable without a core. The rest of the first one
is sleep, such as waits for the interpreter's lock.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.event_feed import EventFeed
from benchmarks.harness.pipeline import LearnerProcess, Stream, make_topic, messages, packed, pipeline, schema_of
from tests.faults import cost_program
from tests.faults.figures import Figures

Floats = NDArray[np.float64]

MODEL = {"factory": "mlp", "args": {"widths": [784, 900, 320, 10]}}
BATCH = 96
VERSION_SECONDS = 1.0
CHECKPOINT_SECONDS = 30.0
_QUICK_CHECKPOINT_SECONDS = 4.0
_STORED = 10_000
_AROUND_SECONDS = 1.0
_CLOCKS = {
    "checkpoint_cost_fraction": "end",
    "checkpoint_cost_fraction_busy": "busy",
    "checkpoint_cost_fraction_queued": "queued",
}
_SHAMS = 4
"""Samples without a write for each write."""
_RESAMPLED = 2000


@dataclass(frozen=True)
class Lost:
    """Seconds that each write cost the steps, the same sums without a write, and the part that blocked the loop."""

    seconds: Floats
    shams: Floats
    waited: Floats

    def mean(self, dice: np.random.Generator | None = None) -> float:
        """Return the mean cost of a write; with `dice` that of a bootstrap sample."""
        if dice is None:
            return float(self.seconds.mean() - self.shams.mean())
        return float(
            dice.choice(self.seconds, self.seconds.size).mean() - dice.choice(self.shams, self.shams.size).mean()
        )


def lost(records: NDArray[np.void], kind: str, clock: str = "end", seed: int = 0) -> Lost:
    """Return the costs of all writes of a kind, `version` or `checkpoint`, by one clock.

    Writes that overlap with one of the other kind are left out.
    """
    dice, other = np.random.default_rng(seed), "checkpoint" if kind == "version" else "version"
    end, took, blocked = records["end"][1:], np.diff(records[clock]), records["blocked"][1:]
    # A step has the write that was running at its end or at its beginning.
    writing = np.maximum(records[kind][1:], records[kind][:-1])
    others = records[other] + records["watching"] > 0
    others = others[1:] | others[:-1]
    quiet = (writing == 0) & ~others
    more = took - _usual(end, took, quiet)
    writes = [np.flatnonzero(writing == number) for number in np.unique(writing[writing > 0])]
    clean = [steps for steps in writes if not others[steps].any()]
    shams = []
    for steps in clean * _SHAMS:
        begins = np.flatnonzero(np.convolve(quiet, np.ones(steps.size), "valid") == steps.size)
        if begins.size:
            begin = dice.choice(begins)
            shams.append(more[begin : begin + steps.size].sum())
    waited = [blocked[steps].sum() for steps in clean]
    return Lost(np.array([more[steps].sum() for steps in clean]), np.array(shams), np.array(waited))


def _usual(end: Floats, took: Floats, quiet: NDArray[np.bool_]) -> Floats:
    """Return for each step the median of the quiet steps within a second of it."""
    ends, steps = end[quiet], took[quiet]
    low, high = (np.searchsorted(ends, end + shift) for shift in (-_AROUND_SECONDS, _AROUND_SECONDS))
    return np.array([np.median(steps[a:b]) if b > a else np.nan for a, b in zip(low, high, strict=True)])


def recorded(
    folder: Path, bootstrap: str, seconds: float, checkpoint_seconds: float, stored: int = _STORED
) -> NDArray[np.void]:
    """Run a learner with a full store of `stored` events for `seconds`, and return its records."""
    generator, pool = np.random.default_rng(0), 2 * stored
    columns = {"x": generator.random((pool, 784), np.float32)}
    described = schema_of(columns, 10)
    stream = Stream(bootstrap, "cost", described, 0)
    make_topic(stream)
    payload = list(messages(packed(described, columns, generator.integers(0, 10, pool))))
    sections = {
        "learner": {"batch_size": BATCH, "max_grad_norm": float("inf")},
        "replay": {"capacity": stored},
        "versions": {"publish_every": f"{VERSION_SECONDS:.0f}s"},
        "checkpoints": {"every": f"{checkpoint_seconds:.0f}s"},
    }
    records = folder / "records.npy"
    document = pipeline(stream, MODEL, 0, sections)
    with (
        EventFeed(stream, payload, pool / len(payload), None) as feed,
        LearnerProcess(folder, document, program=(cost_program.__file__, str(records))) as process,
    ):
        feed.watch(process.state_dir)
        first = process.wait_for(lambda report: sum(report.outcomes.values()) > 2 * stored)
        last = process.wait_for(lambda report: report.time > first.time + seconds)
        process.stop()
    rows: NDArray[np.void] = np.load(records)
    return rows[(rows["steps"] >= first.steps) & (rows["steps"] <= last.steps)]


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Measure the part `cost`."""
    seconds, checkpoint_seconds = (60.0, _QUICK_CHECKPOINT_SECONDS) if quick else (60 * minutes, CHECKPOINT_SECONDS)
    figures.part(
        "cost",
        f"steps of {BATCH} events for {seconds:.0f} s, a version a second, a checkpoint every {checkpoint_seconds:.0f} "
        f"s",
    )
    records = recorded(folder, bootstrap, seconds, checkpoint_seconds)
    for key, clock in _CLOCKS.items():
        if np.isnan(records[clock]).any():
            continue
        versions, checkpoints = lost(records, "version", clock), lost(records, "checkpoint", clock)
        dice = np.random.default_rng(0)
        many = sorted(_fraction(versions.mean(dice), checkpoints.mean(dice)) for _ in range(_RESAMPLED))
        low, high = many[_RESAMPLED // 40], many[-_RESAMPLED // 40]
        summary = " and ".join(
            _summary(each, name) for each, name in ((versions, "versions"), (checkpoints, "checkpoints"))
        )
        figures.add(key, _fraction(versions.mean(), checkpoints.mean()), f"95 %: [{low:.4f} .. {high:.4f}]; {summary}")
        figures.add(f"{key}_high", high)
    waited = _fraction(float(versions.waited.mean()), float(checkpoints.waited.mean()))
    figures.add("checkpoint_cost_fraction_waited", waited, "of it the loop was blocked")
    figures.add(
        "checkpoint_cost_steps",
        len(records),
        f"of {1e3 * float(np.median(np.diff(records['end']))):.1f} ms by the median",
    )


def _fraction(version_seconds: float, checkpoint_seconds: float) -> float:
    """Return the fraction of the time for a version every second and a checkpoint every 30 s."""
    return version_seconds / VERSION_SECONDS + checkpoint_seconds / CHECKPOINT_SECONDS


def _summary(costs: Lost, name: str) -> str:
    return f"{costs.seconds.size} {name} of {1e3 * costs.mean():.1f} ms"
