"""A share of held-out events that is far from the settings."""

from types import SimpleNamespace

import pytest

from anabranch.learner.evaluate.holdout import HeldOutShare


@pytest.mark.parametrize(
    ("held_out", "trained", "shown"),
    [
        (100, 9_900, None),
        (280, 9_720, None),
        (400, 9_600, "4.00%"),
        (30, 9_970, "0.30%"),
        (0, 10_000, "0.00%"),
        (0, 1000, None),
        (100, 900, None),
        (200, 0, "100.00%"),
    ],
)
def test_a_minute_with_far_more_or_fewer_held_out_events_is_a_warning(held_out, trained, shown):
    clock = SimpleNamespace(now=0.0)
    measured = HeldOutShare(0.01, lambda: clock.now)
    measured.update({"held_out": 7, "trained": 100})
    clock.now = 59.0
    measured.update({"held_out": 7 + held_out, "trained": 100 + trained})
    assert measured.warning is None
    clock.now = 61.0
    measured.update({"held_out": 7 + held_out, "trained": 100 + trained})
    assert (measured.warning is None) == (shown is None)
    assert shown is None or str(measured.warning).startswith(
        f"{shown} of the labelled events of a minute were held out"
    )
    clock.now = 125.0
    measured.update({"held_out": 7 + held_out, "trained": 100 + trained})
    assert measured.warning is None, "no event came since"


def test_without_held_out_events_nothing_is_expected():
    clock = SimpleNamespace(now=0.0)
    measured = HeldOutShare(0.0, lambda: clock.now)
    for minute in range(3):
        clock.now = 61.0 * minute
        measured.update({"held_out": 0, "trained": 100_000 * minute})
    assert measured.warning is None
