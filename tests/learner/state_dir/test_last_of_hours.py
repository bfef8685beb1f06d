"""Which versions and checkpoints are kept for their hour."""

import pytest

from anabranch.learner.state_dir.folders import last_of_hours

NOW = 100 * 3600.0


@pytest.mark.parametrize(
    ("hours", "keep", "kept"),
    [
        ([1, 1, 2, 3, 3, 3], 2, {3, 6}),
        ([1, 1, 2, 3, 3, 3], 9, {2, 3, 6}),
        ([1, 2, 3], 0, set()),
        ([], 3, set()),
    ],
)
def test_the_last_of_each_of_the_newest_hours_is_kept(hours, keep, kept):
    assert last_of_hours(dict(enumerate(hours, start=1)), keep, NOW) == kept


def test_hours_of_a_clock_that_was_ahead_do_not_count():
    hours = dict(enumerate([1, 2, 500, 501, 502, 3, 4, 5], start=1))
    assert last_of_hours(hours, 3, 6 * 3600) == {6, 7, 8}
    assert last_of_hours(hours, 9, 6 * 3600) == {1, 2, 6, 7, 8}


def test_a_clock_that_is_far_behind_excludes_none():
    assert last_of_hours(dict(enumerate([10, 11, 12], start=1)), 2, 0.0) == {2, 3}
