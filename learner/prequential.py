"""Test-then-train accuracy over the newest events."""

from collections import deque


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

    @property
    def mean(self) -> float | None:
        """The mean, or None before the first event."""
        return self._score / self._rows if self._rows else None
