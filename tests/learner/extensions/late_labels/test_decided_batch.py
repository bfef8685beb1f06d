"""How events that have waited for their label end."""

import numpy as np
import pytest

from anabranch.ingest.events.block import Outcome, SkipReason
from anabranch.ingest.settings.labels import LabelStreamSettings
from anabranch.learner.extensions.late_labels.decided_batch import decided_batch
from anabranch.learner.extensions.late_labels.decisions import Ready, Resolution
from anabranch.learner.model.examples import EARLY, Early
from anabranch.replay.reservoir.reservoir import WAITED

LABELLED, TIMED_OUT, CORRECTED = Resolution
EMPTY = np.empty(0, np.int64)


def ready(resolutions, labels, early=(), taken_back=(), stored=(), damaged=0, *, damaged_again=False):
    """Return events, and `damaged` further ones, which have a label."""
    n = len(labels) + damaged
    resolutions, labels = [*resolutions, *[LABELLED] * damaged], [*labels, *[1] * damaged]
    taken_back = [*taken_back, *[False] * (n - damaged - len(taken_back)), *[damaged_again] * damaged]
    resolution = np.array(resolutions, np.uint8)
    columns = {
        "feature.x": np.arange(n, dtype=np.float32),
        "label": np.array(labels, np.int64),
        "labelled": resolution != TIMED_OUT,
        "weight": np.ones(n, np.float32),
        "partition": np.zeros(n, np.int32),
        "offset": np.arange(n),
        "row": np.zeros(n, np.int32),
        "time_ms": np.full(n, 1000),
        "key_hash": np.arange(n, dtype=np.uint64) + 1,
        "group_hash": np.zeros(n, np.uint64),
        "outcome": np.zeros(n, np.uint8),
        "reason": np.zeros(n, np.uint8),
    }
    return Ready(
        columns=columns,
        resolution=resolution,
        predictions=np.zeros((n, 2), np.float32),
        waited_ms=np.full(n, 50),
        early=np.array([*early, *[False] * (n - len(early))], np.bool_),
        stored=np.array([*stored, *[False] * (n - len(stored))], np.bool_),
        taken_back=np.array(taken_back, np.bool_),
        damaged=np.arange(n) >= n - damaged,
    )


STEP = 4


def decide(events, held_out=(), *, stores_only=False, **settings):
    """Return the batch of events; those with the offsets `held_out` would be held out."""
    labels = LabelStreamSettings.model_validate({"topics": ["labels"], "wait": "1h", **settings})
    held = np.isin(np.arange(len(events)), held_out)
    return decided_batch(events, labels, held, STEP, stores_only=stores_only)


def offsets(columns):
    return columns["offset"].tolist() if columns else []


def decided(batch):
    assert batch.decided is not None
    return batch.decided


def outcomes(batch):
    """The outcome of each event, if the step is taken."""
    each = decided(batch)
    return [
        Outcome(final if trained else outcome)
        for final, trained, outcome in zip(each.outcome, each.span.trained, each.span.columns["outcome"], strict=True)
    ]


def test_events_with_their_label_are_trained_on_at_the_time_of_the_label():
    batch = decide(ready([LABELLED, LABELLED], [1, 0]))
    assert offsets(batch.new) == [0, 1]
    assert batch.new[WAITED].all()
    assert EARLY not in batch.new
    assert outcomes(batch) == [Outcome.TRAINED] * 2
    assert decided(batch).span.columns["time_ms"].tolist() == [1050, 1050]
    assert batch.new["time_ms"].tolist() == [1000, 1000]
    assert decided(batch).scored.all()


def test_held_out_events_with_a_label_go_to_the_holdout_set_and_are_not_scored():
    batch = decide(ready([LABELLED, LABELLED, TIMED_OUT], [1, 0, -1]), held_out=[1, 2])
    assert (offsets(batch.new), offsets(batch.held_out)) == ([0], [1])
    assert outcomes(batch) == [Outcome.TRAINED, Outcome.HELD_OUT, Outcome.SKIPPED]
    assert decided(batch).scored.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("unmatched", "trained", "stored", "outcome"),
    [
        ("drop", [0], [], Outcome.SKIPPED),
        ("store", [0], [1], Outcome.STORED_ONLY),
        ("negative", [0, 1], [], Outcome.TIMED_OUT),
    ],
)
def test_what_becomes_of_an_event_without_a_label(unmatched, trained, stored, outcome):
    batch = decide(ready([LABELLED, TIMED_OUT], [1, -1]), unmatched=unmatched)
    assert (offsets(batch.new), offsets(batch.stored_only)) == (trained, stored)
    assert outcomes(batch) == [Outcome.TRAINED, outcome]
    assert decided(batch).span.columns["reason"][1] == (SkipReason.TIMED_OUT if unmatched == "drop" else 0)
    if unmatched == "negative":
        assert batch.new["label"].tolist() == [1, 0]
        assert batch.new["labelled"].all()
    if unmatched == "store":
        assert not batch.stored_only["labelled"].any()


def test_while_the_learner_is_behind_and_stores_only_no_event_is_trained_on():
    batch = decide(ready([LABELLED, TIMED_OUT], [1, -1]), stores_only=True)
    assert (offsets(batch.new), offsets(batch.stored_only)) == ([], [0])
    assert outcomes(batch) == [Outcome.STORED_ONLY, Outcome.SKIPPED]


def test_while_events_are_stored_only_early_negatives_are_corrected_all_the_same():
    events = ready([CORRECTED, CORRECTED, LABELLED, TIMED_OUT], [1, 0, 1, -1], [True, True, False, True])
    batch = decide(events, stores_only=True, unmatched="negative", early="negative-then-correct")
    assert (offsets(batch.new), batch.new[EARLY].tolist()) == ([0], [Early.CORRECTED])
    assert offsets(batch.stored_only) == [1, 2, 3]


def test_an_event_that_was_trained_on_early_is_not_held_out_where_the_choice_has_changed_since():
    events = ready([CORRECTED, CORRECTED], [1, 0], [True, True])
    batch = decide(events, held_out=[0, 1], unmatched="negative", early="negative-then-correct")
    assert (offsets(batch.new), offsets(batch.held_out), offsets(batch.stored_only)) == ([0], [], [1])


def test_an_early_negative_that_is_one_is_stored_and_a_positive_is_corrected():
    events = ready([CORRECTED, CORRECTED, TIMED_OUT, LABELLED], [1, 0, -1, 1], early=[True, True, True, False])
    batch = decide(events, unmatched="negative", early="negative-then-correct")
    assert offsets(batch.new) == [0, 3]
    assert batch.new[EARLY].tolist() == [Early.CORRECTED, Early.PLAIN]
    assert offsets(batch.stored_only) == [1, 2]
    assert batch.stored_only["label"].tolist() == [0, 0]
    assert outcomes(batch) == [Outcome.TRAINED, Outcome.TRAINED, Outcome.TIMED_OUT, Outcome.TRAINED]
    assert decided(batch).scored.all()


def test_a_negative_that_is_taken_back_does_not_end_a_second_time():
    events = ready([CORRECTED, CORRECTED], [1, 0], taken_back=[True, True])
    batch = decide(events, unmatched="negative", take_back=True)
    assert offsets(batch.new) == [0]
    assert batch.new[EARLY].tolist() == [Early.TAKEN_BACK]
    assert offsets(batch.stored_only) == []
    assert not decided(batch).ended.any()
    assert not decided(batch).scored.any()


def test_damaged_events_end_as_skipped():
    batch = decide(ready([LABELLED], [1], damaged=2))
    assert offsets(batch.new) == [0]
    assert outcomes(batch) == [Outcome.TRAINED, Outcome.SKIPPED, Outcome.SKIPPED]
    assert decided(batch).span.columns["reason"].tolist() == [0, SkipReason.DAMAGED, SkipReason.DAMAGED]
    assert decided(batch).ended.all()
    assert decided(batch).scored.tolist() == [True, False, False]


def test_damaged_events_that_are_taken_back_do_not_end_a_second_time():
    batch = decide(ready([LABELLED], [1], damaged=2, damaged_again=True), unmatched="negative", take_back=True)
    assert decided(batch).ended.tolist() == [True, False, False]


def test_a_held_out_negative_gets_its_label_when_that_comes_after_all():
    events = ready([CORRECTED] * 4, [1, 0, 1, 1], taken_back=[True, True, True, False])
    batch = decide(events, held_out=[0, 1, 3], unmatched="negative", take_back=True)
    assert offsets(batch.relabelled) == [0]
    assert batch.relabelled["label"].tolist() == [1]
    assert (offsets(batch.new), offsets(batch.held_out)) == ([2], [3])
