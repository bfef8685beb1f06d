"""Two pure rules of device sharing: the size of micro-batches, and the time that training gets. Imports no torch."""

_LATE = 0.01
"""The part of the answers that may take longer than `serving.slo`: what a 99th percentile leaves out."""
_AT_FAULT = 0.1
"""Training is at fault for late answers if it took at least this part of `serving.slo` to yield."""
_LONGEST_INTERVALS = 120
"""Number of intervals after which late answers no longer count."""
_RISES = 64
"""Intervals in which micro-batches grow from 0 to a full step; an eighth of that while there are no requests."""
LEAST_ROWS = 2


class MicroBatchController:
    """The size of micro-batches: additive increase, multiplicative decrease (Chiu and Jain 1989).

    The size is halved when more than one answer in a hundred is late and training is at fault. It rises again once at
    most one answer in a hundred is late overall. Late answers that training did not cause change nothing.
    """

    def __init__(self, slo: float) -> None:
        """`slo`: in seconds, the bound on the 99th percentile of response times."""
        self._slo = slo
        self._too_many = 0.0
        self.rows: int | None = None
        """Largest micro-batch in events; None: all of a step."""

    def interval(self, step: int, answered: int, late: int, longest_wait: float) -> int | None:
        """Add an interval, and return the size from now on.

        Args:
            step: events of a step, or a smaller limit on micro-batches if there is one.
            answered: requests answered in it.
            late: answered requests that took longer than `slo`.
            longest_wait: the longest time that training took to yield, in seconds.
        """
        rows = step if self.rows is None else min(self.rows, step)
        limit = max(1.0, _LATE * answered * _LONGEST_INTERVALS)
        self._too_many = min(limit, max(0.0, self._too_many + late - _LATE * answered))
        if late > _LATE * answered and longest_wait >= _AT_FAULT * self._slo:
            rows //= 2
        elif not answered:
            rows += max(1, 8 * step // _RISES)
        elif not self._too_many:
            rows += max(1, step // _RISES)
        rows = max(LEAST_ROWS, rows)
        self.rows = rows if rows < step else None
        return self.rows


class TrainingBudget:
    """The time that training may still yield: without a limit, or so that training gets a fraction of all time."""

    def __init__(self, fraction: float, longest: float = 1.0) -> None:
        """`fraction`: the least of all time for training; `longest`: seconds that it yields at once at most."""
        self._per_second = (1 - fraction) / fraction if fraction else 0.0
        self._longest = longest if fraction else float("inf")
        self.left = self._longest
        """Seconds that training may still yield. Negative after yielding too long; training time pays it back."""

    def trained(self, seconds: float) -> None:
        """Add training time, which extends the time that training may yield."""
        self.left = min(self._longest, self.left + seconds * self._per_second)

    def yielded(self, seconds: float) -> None:
        """Subtract a stretch for which training has yielded."""
        self.left -= seconds
