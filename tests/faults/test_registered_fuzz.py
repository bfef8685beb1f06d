"""Damaged messages with a schema id are events with the right values, or rejects."""

import pytest

from tests.faults.registered_fuzz import FORMATS, dead_lettered, decoded


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_damaged_messages_never_become_events_with_other_values(form):
    fuzzed = decoded(form, 1000, seed=0)
    assert (fuzzed.crashes, fuzzed.passed) == ([], [])
    assert fuzzed.cases >= 1000


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", ["protobuf", "json-schema"])
def test_each_message_that_must_be_rejected_is_dead_lettered_once(kafka, tmp_path, form):
    fuzzed = dead_lettered(tmp_path, kafka.bootstrap, form, 300, seed=1)
    assert (fuzzed.crashes, fuzzed.passed) == ([], [])
