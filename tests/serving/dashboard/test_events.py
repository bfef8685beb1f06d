"""Events: found by comparing reports, merged where they are close, and kept in fixed memory."""

import msgspec
import pytest

from anabranch.learner.status.report import ChallengerReport, LearnerReport, SearchReport, UndoReport
from anabranch.serving.dashboard.events import KINDS, Event, EventDetector, EventLog
from anabranch.serving.reporting.report import ServingReport
from anabranch.serving.rollout.version_list import VersionLine

BEGAN = 1000.0


def learner(**changes):
    return LearnerReport(**{"pid": 1, "generation": 1, "started": 1.0, "time": BEGAN, "steps": 7} | changes)


def serving(version=None, since=None):
    members = {"pid": 2, "started": BEGAN, "time": BEGAN, "address": "", "ready": True}
    return ServingReport(**members, version=version, version_since=since)


@pytest.fixture
def detect():
    """Takes the reports of one moment after the other, and returns the events so far as (kind, time, text)."""
    log = EventLog()
    detector = EventDetector(log, BEGAN)

    def update(now, learner_report=None, serving_report=None, versions=()):
        detector.update(now, learner_report, serving_report or serving(), versions)
        return [(event.kind, event.time, event.text) for event in log.since(0)]

    return update


def test_events_of_a_kind_that_are_close_are_one_with_a_count():
    log = EventLog()
    for time in (100.0, 105.0, 114.0, 130.0):
        log.add("swap", time, f"at {time:g}")
    assert log.since(0) == [
        Event(kind="swap", time=100.0, until=114.0, count=3, text="at 114"),
        Event(kind="swap", time=130.0, until=130.0, text="at 130"),
    ]


def test_frequent_events_do_not_push_out_those_of_another_kind():
    log = EventLog(kept=5)
    log.add("drift", 1.0, "rare")
    for number in range(100):
        log.add("swap", 20.0 * number, "frequent")
    kinds = [event.kind for event in log.since(0)]
    assert (kinds.count("drift"), kinds.count("swap")) == (1, 5)


def test_an_event_that_lasts_is_returned_until_it_has_ended():
    log = EventLog()
    for second in range(30):
        log.extend("lag", 100.0 + second, "lags")
    (event,) = log.since(120)
    assert (event.time, event.until, event.count) == (100.0, 129.0, 1)
    assert log.since(130) == []
    log.extend("lag", 500.0, "lags again")
    assert len(log.since(0)) == 2


def test_a_swap_is_an_event_and_the_same_version_none(detect):
    detect(BEGAN, serving_report=serving(1, BEGAN))
    detect(BEGAN + 1, serving_report=serving(1, BEGAN))
    assert detect(BEGAN + 20, serving_report=serving(2, BEGAN + 19)) == [
        ("swap", BEGAN, "Version 1 was swapped in."),
        ("swap", BEGAN + 19, "Version 2 was swapped in."),
    ]


def test_drift_restart_checkpoint_and_lag_policy_are_events(detect):
    assert detect(BEGAN, learner(checkpoint=4, checkpoint_time=BEGAN - 5)) == [], "it was written before"
    detect(BEGAN + 1, learner(drifts=1, drift_step=1234, time=BEGAN + 1))
    detect(BEGAN + 2, learner(drifts=1, checkpoint=5, checkpoint_time=BEGAN + 2))
    detect(BEGAN + 3, learner(drifts=1, checkpoint=5, checkpoint_time=BEGAN + 2, behind=True))
    found = detect(BEGAN + 9, learner(started=BEGAN + 8, drifts=1, checkpoint=5, checkpoint_time=BEGAN + 2))
    assert found == [
        ("drift", BEGAN + 1, "The stream drifted at step 1,234."),
        ("checkpoint", BEGAN + 2, "Checkpoint 5 was written."),
        ("lag", BEGAN + 3, "The learner lags, and the lag policy holds."),
        ("restart", BEGAN + 8, "The learner was restarted."),
    ]


def test_a_promotion_of_a_search_is_an_event_once(detect):
    search = SearchReport(values={}, given={}, pinned=False, challengers=[], history=[], outcomes={}, steps=0)
    ended = ChallengerReport(
        number=7,
        values={"learner.optimizer.lr": 0.02},
        steps=87,
        difference=0.0794,
        log_wealth=7.8,
        log_threshold=7.6,
        outcome="promoted",
        step=91,
    )
    others = [msgspec.structs.replace(ended, number=number, outcome="no_better") for number in (5, 6)]
    detect(BEGAN, learner(search=msgspec.structs.replace(search, history=others)))
    promoted = msgspec.structs.replace(search, history=[*others, ended])
    said = "Challenger 7 with learner.optimizer.lr = 0.02 is better, by +0.0794 over 87 steps: "
    expected = [("search", BEGAN + 1, f"{said}its settings are the model's now.")]
    assert detect(BEGAN + 1, learner(search=promoted, time=BEGAN + 1)) == expected
    assert detect(BEGAN + 2, learner(search=promoted, time=BEGAN + 2)) == expected


def test_a_refused_version_is_an_event_once_with_its_reason(detect):
    old = VersionLine(number=7, time=BEGAN - 50, fate="refused", verdict="fail", reason="too old")
    new = VersionLine(number=8, time=BEGAN + 2, fate="refused", verdict="fail", reason="worse on old events")
    later = VersionLine(number=9, time=BEGAN + 4, fate="served")
    expected = [("refused", BEGAN + 2, "Version 8 was refused: worse on old events.")]
    assert detect(BEGAN + 3, versions=[old, new, later]) == expected
    assert detect(BEGAN + 4, versions=[old, new, later]) == expected
    rejected = msgspec.structs.replace(later, fate="rolled back")
    assert detect(BEGAN + 90, versions=[rejected, new])[1:] == [
        ("refused", BEGAN + 90, "Version 9 was rejected by a person.")
    ]


def test_an_undo_is_an_event_that_lasts_until_the_stream_is_learned_again(detect):
    def undo(number, left):
        return learner(undo=UndoReport(number=number, checkpoint=4, offsets=1200, left=left, fraction=1 - left / 50))

    assert detect(BEGAN, undo(1, 0)) == [], "it was over before"
    assert detect(BEGAN + 1, undo(1, 0)) == []
    again = ("undo", BEGAN + 5, "The learner learns again from checkpoint 4: undo 2, without 1,200 offsets.")
    assert detect(BEGAN + 5, undo(2, 50)) == [again]
    detect(BEGAN + 6, undo(2, 20))
    over = ("undo", BEGAN + 5, "The stream was learned again: undo 2, without 1,200 offsets.")
    assert detect(BEGAN + 7, undo(2, 0)) == detect(BEGAN + 30, undo(2, 0)) == [over]
    assert detect(BEGAN + 31, undo(3, 0))[1:] == [
        ("undo", BEGAN + 31, "The stream was learned again: undo 3, without 1,200 offsets.")
    ]


def test_every_kind_can_be_added():
    log = EventLog()
    for kind in KINDS:
        log.add(kind, 5.0, kind)
    assert {event.kind for event in log.since(0)} == set(KINDS)
