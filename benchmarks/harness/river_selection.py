"""River's selection of models on a stream, over the network of the search's benchmark: one for each learning rate.

River learns and predicts event by event. A member keeps what it learns until it has a whole batch, so that it takes the
same steps as the learner; it predicts each event with the weights before that batch, as the learner does.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from river import bandit, base, metrics, model_selection
from torch import nn
from typing_extensions import override

from ingest.events.block import Array
from learner.search.pool import STEP_COST
from learner.training.trainer import Trainer

RATES = tuple(10.0**power for power in range(-6, 1))
"""One for each power of ten of the range that `[search]` tries by default."""


class Member(base.Classifier):  # type: ignore[misc]  # River has no types
    """A network with its own trainer. An event is a mapping with one array, `x`."""

    def __init__(self, trainer: Trainer, batch: int) -> None:
        """Use the trainer's weights from now on."""
        self.trainer, self.batch = trainer, batch
        weights = [layer for layer in trainer.model.modules() if isinstance(layer, nn.Linear)]
        self._layers = [(each.weight.detach().numpy(), each.bias.detach().numpy()) for each in weights]
        """Arrays that share the memory of the weights: a pass of one event by torch takes ten times as long."""
        self._kept = list[tuple[Array, int]]()

    @property
    @override
    def _multiclass(self) -> bool:
        return True

    @override
    def predict_one(self, x: Mapping[str, Array], **kwargs: Any) -> int:
        *hidden, (weight, bias) = self._layers
        values = x["x"]
        for weights, biases in hidden:
            values = np.maximum(weights @ values + biases, 0)
        return int((weight @ values + bias).argmax())

    @override
    def predict_proba_one(self, x: Mapping[str, Array], **kwargs: Any) -> dict[int, float]:
        """Return all probability for the predicted class: what selects models counts right predictions alone."""
        return {self.predict_one(x): 1.0}

    @override
    def learn_one(self, x: Mapping[str, Array], y: int) -> None:
        self._kept.append((x["x"], y))
        if len(self._kept) == self.batch:
            columns = {"feature.x": np.stack([each for each, _ in self._kept])}
            columns["label"] = np.array([label for _, label in self._kept])
            columns["weight"] = np.ones(self.batch, np.float32)
            self.trainer.step(self.trainer.examples(columns))
            self._kept.clear()


def successive_halving(members: Sequence[Member], events: int, saved: int) -> Any:
    """Return River's successive halving, with so many updates in all as a search with `share = 0.2` has."""
    budget = halving_budget(len(members), events, saved)
    return model_selection.SuccessiveHalvingClassifier([*members], metrics.Accuracy(), budget=budget, eta=2)


def halving_budget(members: int, events: int, saved: int) -> int:
    """Return the updates of a successive halving that takes as many in all as a search with `share = 0.2`.

    A search gives challengers a quarter of the model's events by the cost of their steps, and `saved` more. A rung ends
    when the stream has advanced by `budget / (models * rungs)`, and after the last one model is left, which takes one
    update an event.
    """
    rungs, left, advanced, updates = (members - 1).bit_length(), members, 0.0, 0.0
    for _ in range(rungs):
        end = 1 / (left * rungs)
        updates += left * (end - advanced)
        left, advanced = -(-left // 2), end
    return int((events / 4 / STEP_COST + saved) / (updates - advanced))


def epsilon_greedy(members: Sequence[Member], seed: int, batch: int) -> Any:
    """Return River's bandit over the models: one learns of each event, after ten batches of each."""
    policy = bandit.EpsilonGreedy(epsilon=0.1, decay=1e-4, burn_in=10 * batch, seed=seed)
    return model_selection.BanditClassifier([*members], metrics.Accuracy(), policy)


def right(selector: Any, x: Array, y: Array) -> int:
    """Return how many events of a stream a selector predicts before it learns of them."""
    count = 0
    for row, label in zip(x, y.tolist(), strict=True):
        event = {"x": row}
        count += int(selector.predict_one(event) == label)
        selector.learn_one(event, label)
    return count
