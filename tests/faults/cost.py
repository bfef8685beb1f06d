"""What checkpoints and versions cost the steps of a learner, step by step.

A learner notes when each step ends, how long checkpoints and versions had it wait, and which steps have a checkpoint or
a version written beside them. A version costs what it had the loop wait, and what the steps beside it took longer than
those around them, by their median. As much is found where nothing was written, since a machine that others use has slow
steps at all times: the same sum over as many steps, at moments without any, is taken off. Checkpoints are counted
likewise.

`checkpoint_cost_fraction` goes by the clock, so that on a machine whose cores are all taken it counts what the writing
thread takes from the steps of its core. `checkpoint_cost_fraction_busy` is the same by the processor's time of the
loop's thread, and `checkpoint_cost_fraction_queued` by the time for which the kernel gave it no core though it could
have worked; what is left of the first is what it slept, such as for the interpreter's lock.
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
_POOL_ROWS = 20_000
_AROUND_SECONDS = 1.0
_CLOCKS = {
    "checkpoint_cost_fraction": "end",
    "checkpoint_cost_fraction_busy": "busy",
    "checkpoint_cost_fraction_queued": "queued",
}
_SHAMS = 4
"""Moments without a write for each one with."""
_RESAMPLED = 2000


@dataclass(frozen=True)
class Lost:
    """Seconds that writes cost the steps, one number a write, and what the same sums are where nothing is written.

    `waited` is the part of them in which the loop stood still.
    """

    seconds: Floats
    shams: Floats
    waited: Floats

    def mean(self, dice: np.random.Generator | None = None) -> float:
        """Return what a write costs; with dice, by writes and moments that are sampled anew with replacement."""
        if dice is None:
            return float(self.seconds.mean() - self.shams.mean())
        return float(
            dice.choice(self.seconds, self.seconds.size).mean() - dice.choice(self.shams, self.shams.size).mean()
        )


def lost(notes: NDArray[np.void], kind: str, clock: str = "end", seed: int = 0) -> Lost:
    """Sum up what the writes of a kind, `version` or `checkpoint`, cost by a clock; what has others beside it is left
    out."""
    dice, other = np.random.default_rng(seed), "checkpoint" if kind == "version" else "version"
    end, took, blocked = notes["end"][1:], np.diff(notes[clock]), notes["blocked"][1:]
    # The write that was at work at the end of a step, or at its beginning, was beside it.
    beside = np.maximum(notes[kind][1:], notes[kind][:-1])
    others = notes[other] + notes["watching"] > 0
    others = others[1:] | others[:-1]
    quiet = (beside == 0) & ~others
    more = took - _usual(end, took, quiet)
    writes = [np.flatnonzero(beside == number) for number in np.unique(beside[beside > 0])]
    clean = [places for places in writes if not others[places].any()]
    shams = []
    for places in clean * _SHAMS:
        begins = np.flatnonzero(np.convolve(quiet, np.ones(places.size), "valid") == places.size)
        if begins.size:
            begin = dice.choice(begins)
            shams.append(more[begin : begin + places.size].sum())
    waited = [blocked[places].sum() for places in clean]
    return Lost(np.array([more[places].sum() for places in clean]), np.array(shams), np.array(waited))


def _usual(end: Floats, took: Floats, quiet: NDArray[np.bool_]) -> Floats:
    """Return for each step the median of the quiet steps within a second of it."""
    ends, steps = end[quiet], took[quiet]
    low, high = (np.searchsorted(ends, end + shift) for shift in (-_AROUND_SECONDS, _AROUND_SECONDS))
    return np.array([np.median(steps[a:b]) if b > a else np.nan for a, b in zip(low, high, strict=True)])


def noted(folder: Path, bootstrap: str, seconds: float, checkpoint_seconds: float) -> NDArray[np.void]:
    """Let a learner learn for so long once its store is full, and return what it noted."""
    generator = np.random.default_rng(0)
    columns = {"x": generator.random((_POOL_ROWS, 784), np.float32)}
    described = schema_of(columns, 10)
    stream = Stream(bootstrap, "cost", described, 0)
    make_topic(stream)
    payload = list(messages(packed(described, columns, generator.integers(0, 10, _POOL_ROWS))))
    sections = {
        "learner": {"batch_size": BATCH, "max_grad_norm": float("inf")},
        "replay": {"capacity": _STORED},
        "versions": {"publish_every": f"{VERSION_SECONDS:.0f}s"},
        "checkpoints": {"every": f"{checkpoint_seconds:.0f}s"},
    }
    notes = folder / "notes.npy"
    document = pipeline(stream, MODEL, 0, sections)
    with (
        EventFeed(stream, payload, _POOL_ROWS / len(payload), None) as feed,
        LearnerProcess(folder, document, program=(cost_program.__file__, str(notes))) as process,
    ):
        feed.watch(process.state_dir)
        first = process.wait_for(lambda report: sum(report.outcomes.values()) > 2 * _STORED)
        last = process.wait_for(lambda report: report.time > first.time + seconds)
        process.stop()
    found: NDArray[np.void] = np.load(notes)
    return found[(found["steps"] >= first.steps) & (found["steps"] <= last.steps)]


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Say which share of its steps a learner loses."""
    seconds, checkpoint_seconds = (60.0, _QUICK_CHECKPOINT_SECONDS) if quick else (60 * minutes, CHECKPOINT_SECONDS)
    figures.part(
        "cost",
        f"steps of {BATCH} events for {seconds:.0f} s, a version a second, a checkpoint every {checkpoint_seconds:.0f} "
        f"s",
    )
    notes = noted(folder, bootstrap, seconds, checkpoint_seconds)
    for key, clock in _CLOCKS.items():
        if np.isnan(notes[clock]).any():
            continue
        versions, checkpoints = lost(notes, "version", clock), lost(notes, "checkpoint", clock)
        dice = np.random.default_rng(0)
        many = sorted(_share(versions.mean(dice), checkpoints.mean(dice)) for _ in range(_RESAMPLED))
        low, high = many[_RESAMPLED // 40], many[-_RESAMPLED // 40]
        told = " and ".join(_told(each, name) for each, name in ((versions, "versions"), (checkpoints, "checkpoints")))
        figures.add(key, _share(versions.mean(), checkpoints.mean()), f"95 %: [{low:.4f} .. {high:.4f}]; {told}")
        figures.add(f"{key}_high", high)
    waited = _share(float(versions.waited.mean()), float(checkpoints.waited.mean()))
    figures.add("checkpoint_cost_fraction_waited", waited, "of it the loop stood still")
    figures.add(
        "checkpoint_cost_steps", len(notes), f"of {1e3 * float(np.median(np.diff(notes['end']))):.1f} ms by the median"
    )


def _share(version_seconds: float, checkpoint_seconds: float) -> float:
    """Return the share of the time that is lost by a version every second and a checkpoint every 30 s."""
    return version_seconds / VERSION_SECONDS + checkpoint_seconds / CHECKPOINT_SECONDS


def _told(each: Lost, name: str) -> str:
    return f"{each.seconds.size} {name} of {1e3 * each.mean():.1f} ms"
