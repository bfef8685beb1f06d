"""Test-then-train accuracy over the newest events."""

from collections import deque
from collections.abc import Iterable


class Prequential:
    """Mean score of the predictions made before training, over the last `window` events or a few more."""

    def __init__(self, window: int = 1000) -> None:
        self._window = window
        self._batches: deque[tuple[int, float]] = deque()
        self._rows = 0
        self._score = 0.0

    def add(self, rows: int, score: float) -> None:
        """Add a batch: how many events, and the sum of their scores."""
        self._batches.append((rows, score))
        self._rows += rows
        while self._rows - self._batches[0][0] >= self._window:
            self._rows -= self._batches.popleft()[0]
        self._score = sum(score for _, score in self._batches)

    def state(self) -> list[tuple[int, float]]:
        """The window, for a cut."""
        return list(self._batches)

    def restore(self, state: Iterable[tuple[int, float]]) -> None:
        """Take up the window of a cut."""
        for rows, score in state:
            self.add(rows, score)

    @property
    def mean(self) -> float | None:
        """The mean, or None before the first event."""
        return self._score / self._rows if self._rows else None
