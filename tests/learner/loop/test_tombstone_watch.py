"""Tombstones whose keys no event has are warned of, and others are not."""

import pytest

from anabranch.ingest.events.key_forms import PLAIN
from anabranch.learner.loop.tombstones import TombstoneWatch


@pytest.mark.parametrize(
    ("forms", "erased", "beginning"),
    [
        ({}, 0, None),
        ({PLAIN: 9}, 0, None),  # of events that have left the store
        ({PLAIN: 10}, 0, "none of 10 tombstones has erased an event that is stored: is their key, byte for byte"),
        ({PLAIN: 10}, 1, None),
        ({"a JSON object": 1}, 0, "1 of 1 tombstones have a key in another form than the text of [schema.key], and"),
        ({"a JSON object": 1}, 10, None),  # events have such keys
        (
            {PLAIN: 1, "a JSON object": 2, "a binary number": 3},
            10,
            "5 of 6 tombstones have a key in another form than the text of [schema.key], and erase nothing: a JSON ",
        ),
    ],
)
def test_the_forms_are_named_where_nothing_says_that_events_have_them(forms, erased, beginning):
    warning = TombstoneWatch(lambda: forms, lambda: erased).warning
    assert (warning is None) if beginning is None else str(warning).startswith(beginning)
