"""Which of several ingest processes reads which partitions: by their measured rates."""

from collections.abc import Sequence

_FAR_OFF = 1.5


def share_out(rates: Sequence[float], readers: int) -> list[int]:
    """Return the reader of each partition, so that all read nearly as much: the busiest first, to who has least.

    Graham 1969, "Bounds on multiprocessing timing anomalies": the most that a reader has is within 4/3 of what is
    possible. Where nothing is measured they are dealt in turn.
    """
    load, count, found = [0.0] * readers, [0] * readers, [0] * len(rates)
    for place in sorted(range(len(rates)), key=lambda each: (-rates[each], each)):
        reader = min(range(readers), key=lambda each: (load[each], count[each], each))
        found[place] = reader
        load[reader] += rates[place]
        count[reader] += 1
    return found


def far_off(rates: Sequence[float], shares: Sequence[int], readers: int) -> bool:
    """Whether the busiest reader has half as much again as it would have if partitions were dealt anew."""
    return busiest(rates, shares) > _FAR_OFF * busiest(rates, share_out(rates, readers))


def busiest(rates: Sequence[float], shares: Sequence[int]) -> float:
    """Return the rate of the reader that has most."""
    load: dict[int, float] = {}
    for rate, reader in zip(rates, shares, strict=True):
        load[reader] = load.get(reader, 0.0) + rate
    return max(load.values(), default=0.0)
