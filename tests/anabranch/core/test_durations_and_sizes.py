"""Durations and sizes as people write and read them."""

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.durations import format_duration, parse_duration
from anabranch.core.sizes import size_text


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("250ms", timedelta(milliseconds=250)),
        ("0.5ms", timedelta(microseconds=500)),
        ("30s", timedelta(seconds=30)),
        ("1.5m", timedelta(seconds=90)),
        ("2h", timedelta(hours=2)),
        ("1d", timedelta(days=1)),
        (" 3 s ", timedelta(seconds=3)),
        ("0s", timedelta(0)),
    ],
)
def test_a_duration_is_a_number_and_a_unit(text, duration):
    assert parse_duration(text) == duration
    assert parse_duration(duration) == duration


@pytest.mark.parametrize("value", ["", "3", "s", "-1s", "3 weeks", "1e3s", "3s 4s", 3, 3.0, True, None, ["3s"]])
def test_what_has_no_unit_is_refused(value):
    with pytest.raises(ValueError, match=r'write a duration as a number and a unit .*, such as "30s"'):
        parse_duration(value)


def test_a_duration_that_no_clock_can_hold_is_refused():
    with pytest.raises(ValueError, match="longer than a duration can be"):
        parse_duration("999999999999d")


@pytest.mark.parametrize(
    ("text", "written"),
    [("90s", "90s"), ("120s", "2m"), ("86400s", "1d"), ("1.5h", "90m"), ("0s", "0ms"), ("0.5ms", "0.5ms")],
)
def test_a_duration_is_written_in_the_largest_unit_that_leaves_it_whole(text, written):
    assert format_duration(parse_duration(text)) == written


@given(st.integers(0, 10**12).map(lambda n: timedelta(milliseconds=n)))
def test_what_is_written_is_read_back(duration):
    assert parse_duration(format_duration(duration)) == duration


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (999_499, "999 kB"), (999_600, "1 MB"), (1e6, "1 MB"), (5e15, "5,000 TB")],
)
def test_a_size_has_three_digits_and_the_unit_that_needs_no_exponent(value, text):
    assert size_text(value) == text
