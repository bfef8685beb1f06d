"""The gate: whether a candidate may be served, told by the scores of its rivals on the same held-out events. Pure.

Legend: G held-out events.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.config import GateSettings
from learner.evaluation.scoring import Scores
from learner.state_dir.version import Verdict

Marks = NDArray[np.bool_]
"""Which events belong to something, `[G]`."""

_MAY_BE = 1.645
"""Standard errors of the one-sided 95 % limit."""
_IS = 2.326
"""Standard errors of the one-sided 99 % limit."""
_SURELY = 3.09
"""Standard errors of the one-sided 99.9 % limit, for who looks again and again."""
_NEVER_BY_CHANCE = 4.5
"""Standard errors that chance exceeds once in 300,000 looks: the watch takes thousands a day."""
_LEAST = 1e-12


@dataclass(frozen=True)
class Drop:
    """How much worse a candidate scores than a rival on the same events: absolute for accuracy, relative for errors."""

    rows: int
    candidate: float
    """Mean score."""
    rival: float
    """Mean score."""
    drop: float
    error: float
    """Its standard error, of the paired differences."""

    @property
    def upper(self) -> float:
        """Upper one-sided 95 % limit."""
        return self.drop + _MAY_BE * self.error

    def may_exceed(self, most: float) -> bool:
        """Whether there is a drop, and it may be more than `most`.

        That it may be more is not enough: two models that are as good differ on some events, and where those are few
        the limit is beyond `most` by chance alone, most of the time.
        """
        return self.upper > most and self.drop > _IS * self.error

    @property
    def surely_better(self) -> bool:
        """Whether it is the other way round, and no chance."""
        return -self.drop > _SURELY * self.error

    def surely_exceeds(self, most: float) -> bool:
        """Whether it is more than `most` and no chance, also when it is asked a thousand times a day."""
        return self.drop > most and self.drop > _NEVER_BY_CHANCE * self.error


@dataclass(frozen=True)
class GateInput:
    """All that a verdict is made from; scores and marks are of the same G events.

    Attributes:
        candidate: scores of the one to be judged.
        served: scores of the served version; None without one to compare with.
        best: scores of the best version served within `max_hold`; None where it is the served one.
        new: the youngest events.
        old: events by which old knowledge is told; those that came while nothing passed are in neither.
        classes: the events of each class that has enough of them, by its name.
        held: whether nothing has passed since a version failed: `min_rows` is no way out of that.
    """

    candidate: Scores
    served: Scores | None
    best: Scores | None
    new: Marks
    old: Marks
    classes: Mapping[str, Marks]
    held: bool = False


def compare(candidate_G: Scores, rival_G: Scores, *, bounded: bool) -> Drop:
    """Compare scores of the same G events, at least one, all finite; `bounded` says that they lie between 0 and 1."""
    difference_G = rival_G - candidate_G
    rows, rival = len(difference_G), float(rival_G.mean())
    unit = 1.0 if bounded else max(abs(rival), _LEAST)
    error = float(difference_G.std(ddof=1)) / math.sqrt(rows) if rows > 1 else math.inf
    return Drop(rows, float(candidate_G.mean()), rival, float(difference_G.mean()) / unit, error / unit)


def judge(hearing: GateInput, settings: GateSettings, *, bounded: bool) -> Verdict:
    """Return `fail`, `pass`, or `inconclusive` where too little is known, with numbers and reasons."""
    rows = len(hearing.candidate)
    if wrong := _not_finite(hearing):
        return Verdict("fail", [f"its score is not finite on {wrong} of {rows} held-out events"], {"rows": rows})
    if hearing.served is None:
        return Verdict("inconclusive", ["there is no served version to compare it with"], {"rows": rows})
    if not rows or (rows < settings.min_rows and not hearing.held):
        return Verdict(
            "inconclusive", [f"{rows} of {settings.min_rows} held-out events, fewer than gate.min_rows"], {"rows": rows}
        )
    failed, unsure, numbers = [], [], {"rows": float(rows)}
    for name, drop, most in _drops(hearing, hearing.served, settings, bounded=bounded):
        numbers |= {name: drop.candidate, f"{name}_rows": drop.rows, f"{name}_drop": drop.drop}
        numbers |= {f"{name}_rival": drop.rival, f"{name}_drop_upper": drop.upper}
        sentence = f"{_WORDS[name]}: {_amount(drop, bounded=bounded)}, of {most:g} that are allowed"
        if drop.may_exceed(most) or (name != "new" and drop.drop > most):
            failed.append(f"worse than {sentence}")
        elif not drop.upper <= most:
            unsure.append(f"too few events to tell it from {sentence}")
    numbers |= _classes(hearing, hearing.served, bounded=bounded)
    if hearing.held and not hearing.old.any():
        failed.append("no held-out event is left by which the served version was judged: promote one by hand")
    finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
    if failed:
        return Verdict("fail", failed, finite)
    return Verdict("inconclusive" if unsure else "pass", unsure, finite)


def _not_finite(hearing: GateInput) -> int:
    """Return on how many events the candidate alone has no finite score; such as no model can answer say nothing."""
    finite = np.isfinite(hearing.candidate)
    if len(finite) and not finite.any():
        return len(finite)
    return int(np.count_nonzero(~finite & np.isfinite(hearing.served))) if hearing.served is not None else 0


_WORDS = {
    "new": "the served version on new events",
    "old": "the served version on old events",
    "best": "the best version served lately on old events",
}


def _drops(
    hearing: GateInput, served_G: Scores, settings: GateSettings, *, bounded: bool
) -> list[tuple[str, Drop, float]]:
    """Return each comparison that there are events for: its name, the drop, and how much of one is allowed."""
    wanted = [
        ("new", served_G, hearing.new, settings.max_drop_new),
        ("old", served_G, hearing.old, settings.max_drop_old),
    ]
    if hearing.best is not None:
        wanted.append(("best", hearing.best, hearing.old, settings.max_drop_old))
    return [
        (name, compare(hearing.candidate[both], rival_G[both], bounded=bounded), most)
        for name, rival_G, marks, most in wanted
        if (both := marks & np.isfinite(rival_G) & np.isfinite(hearing.candidate)).any()
    ]


def surpasses(hearing: GateInput, *, bounded: bool) -> bool:
    """Whether a candidate is surely better on old events than the best before it; chance alone makes no new best."""
    best_G = hearing.best if hearing.best is not None else hearing.served
    if best_G is None:
        return True
    both = hearing.old & np.isfinite(best_G) & np.isfinite(hearing.candidate)
    if not both.any():
        return True
    return compare(hearing.candidate[both], best_G[both], bounded=bounded).surely_better


def _classes(hearing: GateInput, served_G: Scores, *, bounded: bool) -> dict[str, float]:
    """Return the score and drop of each class, and of the one that does worst; they are told, and not judged."""
    numbers: dict[str, float] = {}
    drops: list[Drop] = []
    if not hearing.classes:
        return numbers
    for name, marks in hearing.classes.items():
        drop = compare(hearing.candidate[marks], served_G[marks], bounded=bounded)
        drops.append(drop)
        numbers |= {f"class_{name}": drop.candidate, f"class_{name}_drop": drop.drop}
    worst = min(drop.candidate for drop in drops)
    return numbers | {"worst": worst, "worst_rival": min(drop.rival for drop in drops)}


def _amount(drop: Drop, *, bounded: bool) -> str:
    shown = drop.drop + 0.0
    what = f"{shown:.4f}" if bounded else f"{shown:.2%} of its error"
    return f"{what} (at most {drop.upper:.4f}, {drop.rows} events)"
