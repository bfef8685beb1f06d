"""CapyMOA's successive halving of models on a stream, over the networks of River's selection.

CapyMOA needs a Java machine, which it starts in this process when it is imported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capymoa.automl import SuccessiveHalvingClassifier
from capymoa.base import Classifier
from capymoa.stream import Schema
from typing_extensions import override

from benchmarks.harness.river_selection import Member, halving_budget
from ingest.events.block import Array


@dataclass
class _Event:
    """What CapyMOA's selection reads of an instance, and the members of it."""

    x: Mapping[str, Array]
    y_index: int | None


class _Network(Classifier):  # type: ignore[misc]  # CapyMOA is not installed where types are checked
    def __init__(self, member: Member, schema: Schema) -> None:
        super().__init__(schema=schema)
        self._member = member

    @override
    def predict(self, instance: _Event) -> int:
        return self._member.predict_one(instance.x)

    @override
    def predict_proba(self, instance: _Event) -> Any:
        raise NotImplementedError("the selection reads predictions alone")

    @override
    def train(self, instance: _Event) -> None:
        assert instance.y_index is not None
        self._member.learn_one(instance.x, instance.y_index)

    @override
    def __str__(self) -> str:
        return "network"


class _Accuracy:
    """Counts what CapyMOA's own evaluator does, which calls Java for 2 ms each time."""

    def __init__(self) -> None:
        self._right = self._all = 0

    def update(self, label: int, predicted: int) -> None:
        self._right += label == predicted
        self._all += 1

    def accuracy(self) -> float:
        return 100 * self._right / self._all if self._all else 0.0


class Halving:
    """CapyMOA's successive halving with River's interface, and with as many updates as River's."""

    def __init__(self, members: Sequence[Member], classes: int, events: int, saved: int) -> None:
        names = [str(label) for label in range(classes)]
        schema = Schema.from_custom(features=["x", "y"], target="y", categories={"y": names})
        models = [_Network(member, schema) for member in members]
        budget = halving_budget(len(members), events, saved)
        self._selector = SuccessiveHalvingClassifier(schema, base_classifiers=models, budget=budget, eta=2.0)
        self._selector.metrics = [_Accuracy() for _ in models]

    def predict_one(self, x: Mapping[str, Array]) -> int:
        """Return the class that the best model predicts."""
        return int(self._selector.predict(_Event(x, None)))

    def learn_one(self, x: Mapping[str, Array], y: int) -> None:
        """Train the models that are left."""
        self._selector.train(_Event(x, y))
