"""Curves of a learner: each tracker has them as they were; one that hangs, raises or is away costs points alone."""

import json
import os
import signal
import sqlite3
import sys
import threading
from datetime import timedelta

import pytest

from anabranch.core.errors import SettingsError
from anabranch.core.shutdown import Deadline
from anabranch.learner.errors import TrackerError, TrackerRefusedError
from anabranch.learner.extensions.track import curves as module
from anabranch.learner.extensions.track import extension
from anabranch.learner.extensions.track.client import CLIENTS
from anabranch.learner.extensions.track.curves import Curves, numbers_of
from anabranch.learner.extensions.track.extension import TrackExtension
from anabranch.learner.extensions.track.process import Opening, Point, TrackedRun, Tracker
from anabranch.learner.settings.track import TrackSettings
from anabranch.learner.status.report import BaselineReport, LearnerReport, MeasureReport, write_report
from tests.support.waiting import PATIENCE_SECONDS, wait_until

NAME = "generation-3-0a1b2c3d"
CURVES = {"loss/now": [0.5, 0.25, 0.125], "accuracy/now": [0.5, 0.75, 1.0]}
POINTS = [Point(10 * n, 1.7e9 + n, {name: values[n] for name, values in CURVES.items()}) for n in range(3)]
LONG = timedelta(seconds=PATIENCE_SECONDS)


def report(step, **fields):
    return LearnerReport(pid=1, generation=3, started=1.0, time=1000.0 + step, steps=step, **fields)


class Recorder:
    """A tracker in memory, that fails as a test says."""

    def __init__(self):
        self.points = []
        self.fault = None
        self.asked, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.is_finished = False

    def log(self, points):
        self.asked.set()
        self.go_on.wait(PATIENCE_SECONDS)
        if self.fault is not None:
            raise self.fault
        self.points += points

    def finish(self, points, longest):
        assert longest <= extension._LONGEST_FINISH
        self.log(points)
        self.is_finished = True

    def close(self):
        self.go_on.set()


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def track(recorder, tmp_path, clock):
    """The extension, which a test polls, with a point every ten seconds of a clock that it moves."""
    curves = Curves(recorder, tmp_path, 3, timedelta(seconds=10), clock)
    return TrackExtension(recorder, [curves], clock)


def steps(recorder):
    return [point.step for point in recorder.points]


def test_a_point_comes_when_it_is_due_and_there_was_a_step(track, recorder, tmp_path, clock):
    track.poll()  # before the first report
    for step, now in ((0, 10), (5, 20), (7, 21), (9, 30), (9, 40)):
        write_report(tmp_path, report(step))
        clock.now = now
        track.poll()
    write_report(tmp_path, LearnerReport(pid=1, generation=4, started=1.0, time=1.0, steps=99))  # by another learner
    clock.now = 50
    track.poll()
    (tmp_path / "learner.json").write_bytes(b"{")
    clock.now = 60
    track.poll()
    assert (steps(recorder), track.warning) == ([5, 9], None)


def test_curves_have_the_finite_numbers_of_a_report():
    measure = MeasureReport({"now": 0.5, "held_out": float("nan")}, {"now": 0.4}, {"now": 0.6}, {"now": 0.1})
    rule = BaselineReport(rule="the last label", scores={"now": 0.25})
    found = report(
        1,
        loss={"now": 2.0, "overall": float("inf")},
        accuracy={"now": 0.75},
        measures={"average_precision": measure},
        baselines={"last_label": rule},
        outcomes={"trained": 7},
    )
    assert dict(numbers_of(found)) == {
        "loss/now": 2.0,
        "accuracy/now": 0.75,
        "baseline/last_label/now": 0.25,
        "measure/average_precision/now": 0.5,
        "measure_constant/average_precision/now": 0.1,
        "learner/events": 7,
        "learner/lag_seconds": 0,
        "learner/replay_ratio": 0,
        "learner/window_rows": 0,
        "learner/drifts": 0,
    }


def test_the_newest_points_wait_while_a_tracker_is_away(track, recorder, tmp_path, clock, monkeypatch):
    monkeypatch.setattr(module, "_MOST_SENT", 2)
    recorder.fault = TrackerError("curves cannot be sent to http://m: no route")
    for step in range(1, module._MOST_WAITING + 6):
        write_report(tmp_path, report(step))
        clock.now += 10
        track.poll()
    assert track.warning == "curves cannot be sent to http://m: no route"
    recorder.fault = None
    clock.now += 1000
    track.poll()
    assert steps(recorder) == list(range(6, module._MOST_WAITING + 6))
    assert track.warning is None


def test_points_that_are_refused_are_left_out(track, recorder, tmp_path, clock, caplog):
    recorder.fault = TrackerRefusedError("the name is refused")
    write_report(tmp_path, report(1))
    track.poll()
    assert (track.warning, "the name is refused; these 1 points are left out" in caplog.text) == (None, True)
    recorder.fault = None
    clock.now += 10
    write_report(tmp_path, report(2))
    track.poll()
    assert steps(recorder) == [2]


def test_the_end_sends_the_last_point_and_ends_the_run(track, recorder, tmp_path):
    write_report(tmp_path, report(1))
    track.poll()
    write_report(tmp_path, report(2))
    track.finish(Deadline(LONG))
    assert (steps(recorder), recorder.is_finished) == ([1, 2], True)


def test_the_end_waits_for_no_tracker_that_hangs_or_is_away(track, recorder, tmp_path, monkeypatch):
    track.thread._patience = timedelta(milliseconds=10)
    recorder.go_on.clear()
    write_report(tmp_path, report(1))
    track.thread.start()
    assert recorder.asked.wait(PATIENCE_SECONDS)
    track.finish(Deadline(LONG))
    assert (track.thread.alive, recorder.is_finished) == (True, False)
    recorder.fault = TrackerError("away")
    track.close()  # which ends the call
    track.thread.join(PATIENCE_SECONDS)
    assert not track.thread.alive


def test_a_bug_ends_the_curves_and_is_a_sentence_of_the_status(track, recorder, tmp_path):
    recorder.fault = ZeroDivisionError("one by nothing")
    write_report(tmp_path, report(1))
    track.thread.start()
    track.thread.join(PATIENCE_SECONDS)
    assert track.warning == "nothing is sent to the tracker of [track] any more, after a bug: one by nothing"


@pytest.fixture
def open_tracker(tmp_path):
    made: list[Tracker] = []

    def make(kind, name=NAME, **settings):
        if kind != "mlflow":
            pytest.importorskip(kind)
        run = TrackedRun("digits", name, {"lr": "0.1"}, str(tmp_path / "track"))
        made.append(Tracker(TrackSettings(kind=kind, **settings), run))
        return made[-1]

    yield make
    for each in made:
        each.close()


def of_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / NAME)).Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def of_wandb(folder):
    """Read the records of the run's log, which is LevelDB's: all of them are in its first block."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob(f"wandb/offline-run-*-{NAME}/run-{NAME}.wandb")
    content, at, found = file.read_bytes(), 7, {}
    assert len(content) < 32768
    while at < len(content):
        size = int.from_bytes(content[at + 4 : at + 6], "little")
        record = Record.FromString(content[at + 7 : at + 7 + size])
        at += 7 + size
        values = {"/".join(each.nested_key) or each.key: each.value_json for each in record.history.item}
        for name in CURVES.keys() & values.keys():
            found.setdefault(name, []).append((int(values["_step"]), float(values[name])))
    return found


def of_trackio(folder):
    with sqlite3.connect(folder / "digits.db") as database:
        rows = database.execute("select step, metrics, run_name from metrics order by step").fetchall()
    assert {row[2] for row in rows} == {NAME}
    return {name: [(row[0], json.loads(row[1])[name]) for row in rows] for name in CURVES}


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_has_the_curves_of_one_run(open_tracker, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = open_tracker(kind)
    tracker.log(POINTS[:1])
    tracker.log(POINTS[1:2])
    tracker.finish(POINTS[2:], LONG)
    read = {"tensorboard": of_tensorboard, "wandb": of_wandb, "trackio": of_trackio}[kind]
    expected = {name: [(10 * n, value) for n, value in enumerate(values)] for name, values in CURVES.items()}
    wait_until(lambda: read(tmp_path / "track") == expected, lambda: read(tmp_path / "track"))  # wandb writes later


@pytest.mark.slow
@pytest.mark.process
def test_mlflow_has_the_curves_of_one_run_also_after_its_client_was_killed(open_tracker, mlflow):
    tracker = open_tracker("mlflow", url=mlflow.url)
    tracker.log(POINTS[:1])
    os.kill(tracker._process.pid, signal.SIGKILL)
    with pytest.raises(TrackerError, match="the process of its client has ended with code -9"):
        tracker.log(POINTS[1:])
    tracker.log(POINTS[1:])
    tracker.finish([], LONG)
    (run,) = mlflow.runs.values()
    assert (run["name"], run["info"]["status"], mlflow.models) == (NAME, "FINISHED", [])
    assert {"key": "anabranch.lr", "value": "0.1"} in run["tags"]
    found = [(each["key"], each["step"], each["value"]) for each in run["metrics"]]
    assert sorted(found) == sorted((key, point.step, value) for point in POINTS for key, value in point.values.items())


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("tensorboard", {}), ("wandb", {"url": "http://127.0.0.1:9"}), ("trackio", {"url": "http://127.0.0.1:9"})],
)
def test_what_a_tracker_raises_is_one_sentence(open_tracker, tmp_path, monkeypatch, kind, settings):
    (tmp_path / "track").write_text("no folder")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(TrackerError, match=r"curves cannot be sent to \[track\]: [^\n]+$"):
        open_tracker(kind, **settings).log(POINTS)


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_package_that_is_missing_is_a_wrong_setting(monkeypatch, kind):
    for name in [name for name in sys.modules if name.partition(".")[0] == kind]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, kind, None)
    for name in ("TRACKIO_DIR", "WANDB_ERROR_REPORTING"):
        monkeypatch.setenv(name, "unchanged")
    settings = {"kind": kind} | ({"url": "http://m"} if kind == "mlflow" else {})
    sentence = rf"\[track\] kind = \"{kind}\" needs .*: pip install 'anabranch\[{kind}\]'"
    with pytest.raises(SettingsError, match=sentence):
        CLIENTS[kind](Opening(settings, TrackedRun("", "", {}, ""), "", ""))
