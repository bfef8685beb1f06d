"""A malformed message is rejected as a whole, and its neighbours are not."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.faults.fuzz import SCHEMA, case, dead_lettered, decoded, event, packed
from tests.support.formats import FORMATS


@pytest.mark.parametrize("form", sorted(FORMATS))
@given(dice=st.randoms(use_true_random=False))
def test_a_malformed_message_is_rejected_and_its_neighbours_are_not(form, dice):
    good = packed(form, event(random.Random(0)))
    events = FORMATS[form](SCHEMA).decode([good, case(form, dice), good])
    assert events.message.tolist() == [0, 2]
    assert {reject.message for reject in events.rejects} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("form", sorted(FORMATS))
def test_many_malformed_messages_at_once_are_rejected(form):
    fuzzed = decoded(form, 1000, seed=0)
    assert (fuzzed.crashes, fuzzed.passed) == ([], [])
    assert fuzzed.cases >= 1000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_malformed_message_is_dead_lettered_once(kafka, tmp_path):
    fuzzed = dead_lettered(tmp_path, kafka.bootstrap, "json", 300, seed=1)
    assert (fuzzed.crashes, fuzzed.passed) == ([], [])
