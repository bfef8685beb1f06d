"""Assigns partitions to ingest processes by their measured rates."""

from collections.abc import Sequence

_UNBALANCED = 1.5


def assign(rates: Sequence[float], readers: int) -> list[int]:
    """Return the reader of each partition: the busiest partition first, each to the reader with the lowest rate.

    Graham 1969, "Bounds on multiprocessing timing anomalies": the highest rate of a reader is within 4/3 of the
    optimum. Partitions without a measured rate are assigned in turn.
    """
    load, count, assigned = [0.0] * readers, [0] * readers, [0] * len(rates)
    for partition in sorted(range(len(rates)), key=lambda each: (-rates[each], each)):
        reader = min(range(readers), key=lambda each: (load[each], count[each], each))
        assigned[partition] = reader
        load[reader] += rates[partition]
        count[reader] += 1
    return assigned


def is_unbalanced(rates: Sequence[float], assignment: Sequence[int], readers: int) -> bool:
    """Return whether the busiest reader has over 1.5 times the rate that `assign` would give it."""
    return highest_rate(rates, assignment) > _UNBALANCED * highest_rate(rates, assign(rates, readers))


def highest_rate(rates: Sequence[float], assignment: Sequence[int]) -> float:
    """Return the rate of the busiest reader."""
    load: dict[int, float] = {}
    for rate, reader in zip(rates, assignment, strict=True):
        load[reader] = load.get(reader, 0.0) + rate
    return max(load.values(), default=0.0)
