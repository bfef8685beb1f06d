"""Watches what versions answer by the labels that come later, and withdraws those that are worse than the one before.

No two versions answer the same events, and a stream may become harder. So each is compared with what the learner itself
predicted of the same events when they came, and then with how others compared with that: the difference of two
differences, each of the same events. Versions may have few labels each, so that those up to a good one are compared
together with those after it.
"""

import math
from collections.abc import Callable

import numpy as np
from typing_extensions import override

from anabranch.learner.evaluate.holdout import HoldoutRows
from anabranch.learner.evaluate.measures import Outcomes
from anabranch.learner.extension import Extension
from anabranch.learner.extensions.served_answers.join import Rows
from anabranch.learner.versions.format import Verdict
from anabranch.learner.versions.gate import QualityGate
from anabranch.learner.versions.verdict import weight_of

_Z = 4.5
"""Standard errors, which chance exceeds about once in 300,000 comparisons."""
_ENOUGH = 25
"""Times the labels of a comparison, after which a version is good."""

OutcomesOf = Callable[[Rows, str], Outcomes]
"""Returns the outcomes of rows, by a field with outputs: `output` has what was served, `own` what the learner has."""


class ServedWatch(Extension):
    """Used by the publisher's thread; any thread may read `good`."""

    def __init__(self, gate: QualityGate, outcomes: OutcomesOf, rows: Callable[[], Rows]) -> None:
        """`rows` returns what was served, and its labels, as known now."""
        self._gate, self._outcomes, self._rows = gate, outcomes, rows
        self.good: int | None = None
        """Later versions are compared with those up to this one; a process that starts takes the first that have enough
        labels."""
        self._next_at = 0
        """With how many labels of later versions they are compared next."""

    @override
    def needed_versions(self) -> set[int]:
        return set() if (good := self.good) is None else {good}

    @override
    def monitor(self, rows: HoldoutRows) -> None:
        """Compare by the measures that decide, and withdraw all versions after the good one where they are worse."""
        self._compare(self._rows(), rows)

    def _compare(self, rows: Rows, held_out: HoldoutRows) -> None:
        measures = self._gate.choice.now
        rows = rows[np.isfinite(rows["own"]).all(axis=1)]
        versions = [each for each in np.unique(rows["version"]).tolist() if not self._gate.has_failed(each)]
        rows = rows[np.isin(rows["version"], versions)]
        if self.good not in versions:
            enough = (each for each in versions if self._weight(rows[rows["version"] <= each]) >= 1)
            self.good, self._next_at = next(enough, None), 0
        if self.good is None or not measures:
            return
        good, new = rows[rows["version"] <= self.good], rows[rows["version"] > self.good]
        weight = self._weight(new)
        if weight < 1 or len(new) < self._next_at:
            return
        self._next_at = len(new) + len(new) // 2
        for measure, limit in measures:
            drops = [
                measure.compare(self._outcomes(each, "output"), self._outcomes(each, "own")) for each in (new, good)
            ]
            if (found := drops[0]) is None or (before := drops[1]) is None:
                continue
            drop, error = found.drop - before.drop, math.hypot(found.error, before.error)
            if drop > limit and drop > _Z * error:
                reason = (
                    f"what versions after {self.good} have answered is worse than what those before have, by "
                    f"{measure.name}: {drop:.4f} further from the learner's own predictions of the same events, of "
                    f"{limit:g} that are allowed, on {len(new)} labels"
                )
                self._gate.withdraw(
                    Verdict("fail", [reason], {f"served_{measure.name}_drop": drop}), self.good, held_out
                )
                return
        if weight >= _ENOUGH:
            self.good, self._next_at = versions[-1], 0

    def _weight(self, rows: Rows) -> float:
        """Return how many times rows have the labels that a comparison needs."""
        if not len(rows):
            return 0.0
        weight, least = weight_of(self._outcomes(rows, "output"))
        return weight / least
