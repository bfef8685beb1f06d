"""What learned features have met that a person should see: values far from all others, and a scale that collapsed."""

import logging
from collections import Counter

from learner.model.features.learned import LearnedFeatures
from learner.model.features.numbers import FELL, LearnedNumber
from learner.stream.ledger import Ledger

_MOST_LOGGED = 20
_MANY = 0.05
"""Values beyond a fixed scale, of those of late."""

log = logging.getLogger(__name__)


class FeatureWatch:
    """Logs and reports outliers by the name of the feature and the offset. Used by the loop's thread; any may read."""

    def __init__(self, learned: LearnedFeatures, ledger: Ledger) -> None:
        """Take what learns, and the ledger, by whose partitions events are named."""
        self._learned = learned
        self._ledger = ledger
        self._logged = Counter[str]()
        self._sentences = dict[str, str]()

    @property
    def warning(self) -> str | None:
        """One sentence for each feature that has met such a value, or whose scale does not fit its values any more."""
        fits = (sentence for name, number in self._learned.numbers.items() if (sentence := _of_scale(name, number)))
        return "; ".join([*self._sentences.values(), *fits]) or None

    @property
    def clipped(self) -> dict[str, int]:
        """By feature, values since the start that statistics learned from as if they were nearer to the others."""
        return {name: number.clipped for name, number in self._learned.numbers.items()}

    def poll(self) -> None:
        """Log the outliers since the last call, of each feature the first ones of a process."""
        while self._learned.outliers:
            outlier = self._learned.outliers.popleft()
            name = outlier.feature
            partition = self._ledger.partitions[outlier.partition].name
            where, at = f"{partition.topic}[{partition.partition}]", outlier.offset
            command = f'"anabranch undo --offsets {where}@{at}..{at}"'
            sentence = (
                f"schema.features.{name} of {where}@{at} is {outlier.value:g}, far from all others: "
                f"its scale learned from it as from a nearer one. {command} takes the event out of the weights too; "
                f"schema.features.{name}.min and max refuse such values"
            )
            self._logged[name] += 1
            if self._logged[name] <= _MOST_LOGGED:
                log.warning("%s", sentence)
            self._sentences = {**self._sentences, name: sentence}  # which another thread may read meanwhile


def _of_scale(name: str, number: LearnedNumber) -> str | None:
    if number.fell >= FELL:
        return (
            f"schema.features.{name} has a scale {number.fell:.0f} times as wide as it has been since the start: "
            "either its values have another unit now, or some are wrong"
        )
    if number.beyond >= _MANY:
        return (
            f"schema.features.{name} has a scale that learner.strategy has fixed, and {number.beyond:.0%} "
            "of its values of late are beyond it, and cut off: scale it by constants in the model, "
            "or take another strategy"
        )
    return None
