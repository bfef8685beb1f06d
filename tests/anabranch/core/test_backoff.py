"""Waiting times that differ."""

import random

from anabranch.core.backoff import jittered


def test_jitter_is_half_of_a_time_to_all_of_it_and_takes_none_of_the_numbers_that_a_model_may_use() -> None:
    before = random.getstate()
    found = [jittered(8.0) for _ in range(1000)]
    assert random.getstate() == before
    assert 4 <= min(found) < 4.5 < 7.5 < max(found) <= 8
