"""Which reader has which partitions."""

from hypothesis import given
from hypothesis import strategies as st

from ingest.reader.assignment import assign, highest_rate, is_unbalanced

RATES = st.lists(st.floats(0, 1e6), max_size=40)


@given(RATES, st.integers(1, 6))
def test_every_partition_is_assigned_and_the_busiest_reader_has_little_more_than_it_must(
    rates: list[float], readers: int
) -> None:
    assignment = assign(rates, readers)
    assert len(assignment) == len(rates)
    assert set(assignment) <= set(range(readers))
    least = max([sum(rates) / readers, *rates, 0])
    assert highest_rate(rates, assignment) <= sum(rates) / readers + max(rates, default=0) * (1 - 1 / readers) + 1e-6
    assert (
        highest_rate(rates, assignment) >= least - 1e-6
        or highest_rate(rates, assignment) >= sum(rates) / readers - 1e-6
    )


@given(RATES, st.integers(1, 6))
def test_a_new_assignment_is_balanced(rates: list[float], readers: int) -> None:
    assert not is_unbalanced(rates, assign(rates, readers), readers)


def test_nine_to_one_is_dealt_by_rate_and_not_by_number() -> None:
    rates = [900.0, 100.0, 900.0, 100.0]
    assert highest_rate(rates, assign(rates, 2)) == 1000
    assert assign([0.0] * 4, 2) == [0, 1, 0, 1]
    assert is_unbalanced(rates, [0, 1, 0, 1], 2)
    assert not is_unbalanced(rates, [0, 0, 1, 1], 2)
    assert not is_unbalanced([0.0, 0.0], [0, 0], 2)
