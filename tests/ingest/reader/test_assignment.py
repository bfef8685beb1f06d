"""Which reader has which partitions."""

from hypothesis import given
from hypothesis import strategies as st

from ingest.reader.assignment import busiest, far_off, share_out

RATES = st.lists(st.floats(0, 1e6), max_size=40)


@given(RATES, st.integers(1, 6))
def test_every_partition_is_dealt_and_the_busiest_reader_has_little_more_than_it_must(
    rates: list[float], readers: int
) -> None:
    shares = share_out(rates, readers)
    assert len(shares) == len(rates)
    assert set(shares) <= set(range(readers))
    least = max([sum(rates) / readers, *rates, 0])
    assert busiest(rates, shares) <= sum(rates) / readers + max(rates, default=0) * (1 - 1 / readers) + 1e-6
    assert busiest(rates, shares) >= least - 1e-6 or busiest(rates, shares) >= sum(rates) / readers - 1e-6


@given(RATES, st.integers(1, 6))
def test_a_new_assignment_is_not_far_off(rates: list[float], readers: int) -> None:
    assert not far_off(rates, share_out(rates, readers), readers)


def test_nine_to_one_is_dealt_by_rate_and_not_by_number() -> None:
    rates = [900.0, 100.0, 900.0, 100.0]
    assert busiest(rates, share_out(rates, 2)) == 1000
    assert share_out([0.0] * 4, 2) == [0, 1, 0, 1]
    assert far_off(rates, [0, 1, 0, 1], 2)
    assert not far_off(rates, [0, 0, 1, 1], 2)
    assert not far_off([0.0, 0.0], [0, 0], 2)
