"""How much training device sharing leaves: two rules that know no clock, no process and no device. Imports no torch."""

_LATE = 0.01
"""The part of the answers that may take longer than `serving.slo`: what a 99th percentile leaves out."""
_AT_FAULT = 0.1
"""Training is at fault for late answers where it took at least so much of `serving.slo` to give way."""
_LONGEST_INTERVALS = 120
"""Intervals in which late answers are made up for at most."""
_RISES = 64
"""Intervals in which micro-batches rise from nothing to all of a step; an eighth of that where nobody asks."""
LEAST_ROWS = 2


class Pace:
    """The size of micro-batches: additive increase, multiplicative decrease (Chiu and Jain 1989).

    It is halved when more than one answer of a hundred is late and training took part in that. It rises again once so
    many others were in time that no more than one of a hundred is late, all in all. Late answers that are not
    training's doing make nothing smaller.
    """

    def __init__(self, slo: float) -> None:
        """`slo` in seconds: the 99th percentile of the time that an answer may take."""
        self._slo = slo
        self._too_many = 0.0
        self.rows: int | None = None
        """Events of a micro-batch at most; None: all of a step."""

    def interval(self, step: int, answered: int, late: int, longest_wait: float) -> int | None:
        """Take note of an interval, and return the size from now on.

        Args:
            step: events of a step, or what a micro-batch may have at most for other reasons.
            answered: requests answered in it.
            late: those of them that took longer than `slo`.
            longest_wait: seconds that training took at most to give way.
        """
        rows = step if self.rows is None else min(self.rows, step)
        most = max(1.0, _LATE * answered * _LONGEST_INTERVALS)
        self._too_many = min(most, max(0.0, self._too_many + late - _LATE * answered))
        if late > _LATE * answered and longest_wait >= _AT_FAULT * self._slo:
            rows //= 2
        elif not answered:
            rows += max(1, 8 * step // _RISES)
        elif not self._too_many:
            rows += max(1, step // _RISES)
        rows = max(LEAST_ROWS, rows)
        self.rows = rows if rows < step else None
        return self.rows


class Allowance:
    """How long training may still give way: all the time, or so that it gets at least a fraction of it."""

    def __init__(self, fraction: float, most: float = 1.0) -> None:
        """`fraction` of the time that training gets at least; it gives way for at most `most` seconds at a stretch."""
        self._per_second = (1 - fraction) / fraction if fraction else 0.0
        self._most = most if fraction else float("inf")
        self.left = self._most
        """Seconds that training may give way from now on, if it does not train in between; below 0 where it gave way
        for longer than it was to, which it then makes up for."""

    def trained(self, seconds: float) -> None:
        """Take note of training, which earns the requests their time."""
        self.left = min(self._most, self.left + seconds * self._per_second)

    def gave_way(self, seconds: float) -> None:
        """Take note of a stretch in which requests had the device."""
        self.left -= seconds
