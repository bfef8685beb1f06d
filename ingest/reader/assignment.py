"""Assigns partitions to ingest processes by their measured rates."""

from collections.abc import Sequence

_FAR_OFF = 1.5


def share_out(rates: Sequence[float], readers: int) -> list[int]:
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


def far_off(rates: Sequence[float], shares: Sequence[int], readers: int) -> bool:
    """Return whether the busiest reader has over 1.5 times the rate that `share_out` would give it."""
    return busiest(rates, shares) > _FAR_OFF * busiest(rates, share_out(rates, readers))


def busiest(rates: Sequence[float], shares: Sequence[int]) -> float:
    """Return the rate of the busiest reader."""
    load: dict[int, float] = {}
    for rate, reader in zip(rates, shares, strict=True):
        load[reader] = load.get(reader, 0.0) + rate
    return max(load.values(), default=0.0)
