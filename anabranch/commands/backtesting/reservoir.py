"""A uniform sample, in memory, of the events that a backtest has trained on."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from learner.strategies.examples import Examples

_CAPACITY = 10_000


class UniformSample:
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
        """Return distinct events, `counts[i]` for sample i; fewer where the reservoir does not hold enough."""
        held = min(self._seen, self._capacity)
        if self._held is None or not sum(counts) or held < len(counts):
            return []
        fair = [min(count, held // len(counts)) for count in counts]
        slots = torch.from_numpy(self._random.choice(held, sum(fair), replace=False))
        return [self._held[some.to(self._held.label_B.device)] for some in torch.split(slots, fair)]


def _tensors(examples: Examples) -> list[Tensor]:
    output = [] if examples.output_B is None else [examples.output_B]
    return [*examples.features.values(), examples.label_B, examples.weight_B, *output]


def _map(change: Callable[[Tensor], Tensor], examples: Examples) -> Examples:
    output = None if examples.output_B is None else change(examples.output_B)
    features = {name: change(value) for name, value in examples.features.items()}
    return Examples(features, change(examples.label_B), change(examples.weight_B), output)
