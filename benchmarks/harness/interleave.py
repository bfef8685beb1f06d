"""Arms measured in turns, so that the load of the machine affects all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A figure over rounds: the median, the smallest and the largest."""

    middle: float
    least: float
    most: float

    @classmethod
    def of(cls, figures: Sequence[float]) -> "Spread":
        """Return the spread of one figure a round."""
        return cls(statistics.median(figures), min(figures), max(figures))


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Return the spread of one figure over another of the same round."""
    return Spread.of([a / b for a, b in zip(above, below, strict=True)])


def interleave(arms: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """Call each arm once a round, starting with another arm each round; return their results by arm and round."""
    figures: dict[str, list[float]] = {name: [] for name in arms}
    order = list(arms)
    for turn in range(warm_up + rounds):
        order.append(order.pop(0))
        for name in order:
            figure = arms[name]()
            if turn >= warm_up:
                figures[name].append(figure)
    return figures


def seconds(call: Callable[[], object]) -> float:
    """Return the duration of one call, including the release of its result."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
