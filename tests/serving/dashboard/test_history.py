"""The dashboard's history: versions, means at each resolution, and events found by comparing reports."""

import math
from collections import defaultdict

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.learner.status.report import ChallengerReport, LearnerReport, SearchReport, UndoReport
from anabranch.serving.dashboard.events import KINDS, Event, EventDetector, EventLog
from anabranch.serving.dashboard.time_series import RESOLUTIONS, History
from anabranch.serving.dashboard.version_history import FAILED, MINUTES, NEWEST, VersionHistory
from anabranch.serving.reporting.report import ServingReport
from anabranch.serving.rollout.version_list import VersionLine


def line(number, fate="swapped", verdict="pass", every=1.0):
    return VersionLine(number=number, time=6000 + number * every, fate=fate, verdict=verdict)


def on_disk(newest, fates=None, verdicts=None, every=1.0):
    """The 20 newest versions, the newest of them served but for `fates`."""
    fates = fates or {newest: "served"}
    numbers = range(newest, max(0, newest - 20), -1)
    return [line(n, fates.get(n, "swapped"), (verdicts or {}).get(n, "pass"), every) for n in numbers]


def test_one_a_minute_is_listed_of_those_that_are_neither_new_nor_special():
    history = VersionHistory()
    for newest in range(1, 301):
        rows = history.update(on_disk(newest))
    numbers = [row.number for row in rows]
    assert numbers[:NEWEST] == list(range(300, 300 - NEWEST, -1))
    assert numbers[NEWEST:] == [240, 180, 120, 60, 1]
    assert [row.removed for row in rows] == [False] * NEWEST + [True] * 5


@pytest.mark.slow
def test_memory_is_fixed():
    history = VersionHistory()
    for newest in range(1, 5000):
        rows = history.update(on_disk(newest, verdicts={n: "fail" for n in range(newest) if n % 7 == 0}, every=30.0))
        assert len(rows) <= NEWEST + FAILED + MINUTES + 3


def test_a_failed_version_stays_listed_when_newer_ones_have_passed():
    history = VersionHistory()
    for newest in range(1, 100):
        rows = history.update(on_disk(newest, verdicts={30: "fail"}))
    assert [(row.number, row.verdict) for row in rows if row.number == 30] == [(30, "fail")]


def test_the_pinned_version_and_the_one_before_stay_listed():
    history = VersionHistory()
    history.update(on_disk(9))
    for newest in range(10, 25):
        rows = history.update(on_disk(newest, {8: "pinned"}))
    fates = {row.number: row.fate for row in rows}
    assert fates[8] == "pinned"
    assert fates[9] == "swapped"
    rows = history.update(on_disk(25, {25: "served"}))
    assert {row.number: row.fate for row in rows}[8] == "swapped"


def test_a_version_that_waits_when_its_files_go_is_superseded():
    history = VersionHistory()
    history.update([line(1, "waiting")])
    rows = history.update([line(3, "served"), line(2)])
    assert [(row.number, row.fate, row.removed) for row in rows] == [
        (3, "served", False),
        (2, "swapped", False),
        (1, "superseded", True),
    ]


SMALL = ((1, 5), (10, 4))
SAMPLES = st.lists(st.tuples(st.floats(0, 30), st.none() | st.floats(-1e3, 1e3)), max_size=60)


@given(SAMPLES, st.integers(0, 400))
def test_every_resolution_holds_the_means_of_its_newest_points(samples, since):
    history = History(["a"], SMALL)
    added, now = defaultdict(list), 0.0
    for pause, value in samples:
        now += pause
        history.add(now, {"a": value})
        for step, _ in SMALL:
            added[step, int(now // step)].append(value)
    for step, points in SMALL:
        newest = int(now // step)
        expected = {
            bucket * step: [value for value in values if value is not None]
            for (resolution, bucket), values in added.items()
            if resolution == step and bucket > newest - points and bucket >= since // step
        }
        found = history.since(since, step)
        assert found["step"] == step
        assert found["time"] == sorted(expected)
        for time, mean in zip(found["time"], found["series"]["a"], strict=True):
            known = expected[time]
            assert math.isnan(mean) if not known else mean == pytest.approx(np.mean(known), abs=1e-4)


def test_a_clock_that_is_set_back_takes_with_it_what_came_later():
    history = History(["a"], SMALL)
    for moment in (100, 101, 102, 100.5):
        history.add(moment, {"a": moment})
    assert history.since(0, 1)["time"] == [100]
    history.add(101, {"a": 7.0})
    assert history.since(0, 1)["series"]["a"] == [100.25, 7.0]


def test_ten_minutes_two_hours_and_a_week_are_kept():
    assert [step * points for step, points in RESOLUTIONS] == [600, 7200, 7 * 86400]


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
