"""Which versions the publisher publishes, skips and deletes, and how it continues after errors of the disk."""

import itertools
import math
import os
import threading
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from anabranch.core.shutdown import Deadline
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.errors import SecondLearnerError
from anabranch.learner.evaluate.calibration import AnswerLearner, calibrated
from anabranch.learner.evaluate.holdout import HoldoutSet
from anabranch.learner.evaluate.outcomes import Predictions, predictions_of
from anabranch.learner.evaluate.scoring import Scorer
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import GateSettings, VersionsSettings
from anabranch.learner.settings.model import ModelSettings, TaskSettings
from anabranch.learner.state_dir.lock import GENERATION, check_generation
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.learner.stream.record_times import RecordTimes
from anabranch.learner.stream.trained_through import NewlyTrained, PartitionProgress
from anabranch.learner.versions.format import STATE, ModelReference, RegistryState, Verdict, Versions, reference_to
from anabranch.learner.versions.gate import QualityGate
from anabranch.learner.versions.publisher import Publisher, Snapshot, VersionWriter
from tests.support.waiting import PATIENCE_SECONDS, Patience

SOON = timedelta(seconds=20)

MEASURES = {"balanced_accuracy", "macro_f1", "log_loss", "ece"}


class Bench:
    """A publisher over a directory."""

    def __init__(self, path, schema, model, gate=None, task=None, **settings):
        state_dir = path.parent
        self.versions = Versions(path)
        self.model = model
        self.holdout = HoldoutSet(schema, 100, 0)
        self.holdout.add(fake_columns(schema, range(100), label=[0, 1, 2]), [TopicPartition("events", 0)])
        reference = reference_to(ModelSettings(factory="m:build"))
        scorer = Scorer(model, Classification(), schema, torch.device("cpu"))
        self.publisher = Publisher(
            VersionWriter(self.versions, reference, schema, 7),
            QualityGate(self.versions, GateSettings.model_validate(gate or {}), scorer, reference),
            VersionsSettings.model_validate({"publish_every": "1ms", **settings}),
            LearnerMetrics(CollectorRegistry()).gate_verdicts,
            lambda: check_generation(state_dir, 7),
            answering=AnswerLearner(TaskSettings.model_validate(task or {}), 3),
        )
        self.recent: tuple[Predictions, ...] = ()
        self.step = 0
        self.newly_trained = RecordTimes()

    def publish(self):
        """Make a step and publish its version at once."""
        self.step += 1
        self.publisher.publish_last((self.step, ()), self.snapshot, Deadline(SOON))

    def snapshot(self):
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        progress = {"events:0": PartitionProgress(self.step)}
        return Snapshot(self.step, weights, progress, self.holdout.held, 0.5, self.newly_trained, recent=self.recent)


@pytest.fixture
def make_bench(tmp_path, schema, make_model):
    return lambda **settings: Bench(tmp_path / "versions", schema, make_model(), **settings)


def test_a_version_is_scored_on_later_events(make_bench, schema):
    bench = make_bench()
    bench.publish()
    assert bench.publisher.scoring.retention.near == (), "there is no later event yet"
    with torch.no_grad():
        for name, value in bench.model.named_parameters():
            value.zero_()
            if name == "3.bias":
                value[1] = 1.0
    bench.publish()  # trained on class 1 only
    assert bench.publisher.scoring.retention.near == ()
    bench.holdout.add(fake_columns(schema, range(100, 110), label=[1]), [TopicPartition("events", 0)])
    with torch.no_grad():
        dict(bench.model.named_parameters())["3.bias"][2] = 2.0
    bench.publish()  # the newest version, which would score 0, is not the one that is scored
    assert bench.publisher.scoring.retention.near == ((10, 10.0),)
    assert bench.publisher.scoring.retention.windows["near_future"] == 1
    bench.holdout.add(fake_columns(schema, range(110, 115), label=[1]), [TopicPartition("events", 0)])
    bench.publish()
    assert bench.publisher.scoring.retention.near == ((10, 10.0), (5, 0.0))


def test_a_manifest_describes_its_version(make_bench, schema):
    bench = make_bench()
    bench.publish()
    manifest = bench.versions.manifest(1)
    assert (manifest.number, manifest.generation, manifest.parent, manifest.step) == (1, 7, None, 1)
    assert manifest.trained_through == {"events:0": PartitionProgress(1)}
    assert manifest.schema == schema.digest
    assert manifest.metrics.keys() == {"now", "new", "old", "worst"} | MEASURES
    assert 0 <= manifest.metrics["balanced_accuracy"] <= 1
    assert manifest.measure == "accuracy"
    assert manifest.constant.keys() == {"new", "old"} | MEASURES
    verdict = bench.versions.verdict(1)
    assert verdict is not None
    assert verdict.verdict == "inconclusive"
    weights = bench.versions.weights(manifest)
    assert all(torch.equal(weights[name], value) for name, value in bench.model.state_dict().items())


def predicted(rows):
    """Return outputs that are four times too sure, and their labels."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, 3, generator=generator)
    label = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0].numpy()
    return predictions_of(Classification(), [4 * logits], label)


def test_a_version_has_its_calibration_and_is_judged_with_it(make_bench, schema):
    plain = make_bench()
    plain.publish()
    assert plain.versions.manifest(1).rule is None
    bench = make_bench(task={"calibrate": "platt", "costs": [[0, 1, 1], [1, 0, 1], [9, 9, 0]]})
    bench.publish()
    first = bench.versions.manifest(2).rule
    assert first is not None
    assert "not calibrated: only 0 new events" in first.sentence
    assert bench.publisher.answering.answers is None
    bench.recent = predicted(2000)
    bench.publish()
    manifest = bench.versions.manifest(3)
    assert manifest.rule is not None
    assert manifest.rule.calibration.scale == pytest.approx(0.25, rel=0.2)
    assert manifest.rule.costs[2] == [9, 9, 0]
    columns = bench.holdout.held.columns
    with torch.no_grad():
        output = bench.model.eval()(torch.from_numpy(columns["feature.x"]))
    log_GC = calibrated(manifest.rule.calibration, output.log_softmax(1).numpy())
    expected = -log_GC[np.arange(len(log_GC)), columns["label"]].mean()
    assert manifest.metrics["log_loss"] == pytest.approx(expected, rel=1e-5)
    again = make_bench(task={"calibrate": "platt", "alert_budget": 0.1})  # as after a restart
    again.publish()
    rule = again.versions.manifest(4).rule
    assert rule is not None
    assert rule.calibration == manifest.rule.calibration, "no event has come yet"
    assert rule.odds is None
    served = again.publisher.gate.read(4, again.holdout.held)
    assert served is not None
    assert served.rule == rule


def test_a_manifest_has_what_decides_the_ids_of_strings(make_bench, monkeypatch):
    encoders = {"text": {"tokenizer": "a" * 64, "length": 8}}
    monkeypatch.setattr(Schema, "encoders", encoders)
    monkeypatch.setattr(Schema, "digest", "d" * 64)
    bench = make_bench()
    bench.publish()
    assert bench.versions.manifest(1).encoders == encoders


def test_a_manifest_has_no_score_that_is_not_finite(make_bench, monkeypatch):
    bench, snapshot = make_bench(), Bench.snapshot
    monkeypatch.setattr(Bench, "snapshot", lambda self: replace(snapshot(self), accuracy_now=math.nan))
    bench.publish()
    assert bench.versions.manifest(1).metrics.keys() == {"new", "old", "worst"} | MEASURES


def test_no_version_is_published_before_the_first_step(make_bench):
    bench = make_bench()
    bench.publisher.publish_if_due((0, ()), bench.snapshot)
    bench.publisher.publish_last((0, ()), bench.snapshot, Deadline(SOON))
    assert bench.versions.numbers() == []


def test_a_version_that_is_due_while_another_is_written_is_skipped_and_counted(make_bench, monkeypatch):
    bench = make_bench()
    go = threading.Event()
    write = Versions.write
    monkeypatch.setattr(Versions, "write", lambda *arguments: (go.wait(PATIENCE_SECONDS), write(*arguments))[1])
    while bench.publisher.skipped < 2:
        bench.step += 1
        bench.publisher.publish_if_due((bench.step, ()), bench.snapshot)
    go.set()
    bench.publish()
    assert bench.versions.numbers() == [1, 2]
    assert bench.versions.manifest(2).step == bench.step


def test_a_slow_gate_makes_versions_rarer_and_judges_each(make_bench, monkeypatch):
    bench = make_bench()
    took = itertools.count(0.0, 1000.0)
    monkeypatch.setattr("anabranch.learner.versions.publisher.time.thread_time", lambda: next(took))
    patience = Patience()
    bench.publish()
    while bench.publisher.skipped < 3:
        patience.check("there is no pause after scoring")
        bench.step += 1
        bench.publisher.publish_if_due((bench.step, ()), bench.snapshot)
    assert bench.versions.numbers() == [1]
    bench.publish()  # the last version does not wait for the pause
    assert bench.versions.numbers() == [1, 2]


def test_numbers_continue_from_the_highest_known_one(make_bench):
    first = make_bench()
    first.publish()
    first.versions.write_state(RegistryState(serving=41))
    second = make_bench()
    second.publish()
    assert second.versions.numbers() == [1, 42]
    assert second.versions.manifest(42).parent == 1


def test_a_restart_reads_the_progress_of_the_newest_version(make_bench):
    first = make_bench()
    assert first.publisher.published_through() == {}
    first.publish()
    assert make_bench().publisher.published_through() == {"events:0": PartitionProgress(1)}
    (first.versions.directory(1) / "manifest.json").write_text("torn")
    assert make_bench().publisher.published_through() == {}


@pytest.mark.parametrize(
    ("step", "trained", "published"),
    [
        (3, {"events:0": PartitionProgress(3)}, True),
        (2, {"events:0": PartitionProgress(1)}, True),
        (4, {"events:0": PartitionProgress(3)}, False),
        (3, {"events:0": PartitionProgress(4)}, False),
        (3, {"events:0": PartitionProgress(-1, 1)}, False),
        (3, {"events:0": PartitionProgress(3), "events:1": PartitionProgress(-1)}, False),
    ],
)
def test_a_restart_publishes_the_progress_of_the_checkpoint_unless_the_newest_version_has_it(
    make_bench, step, trained, published
):
    first = make_bench()
    for _ in range(3):
        first.publish()
    second, progress = make_bench(), (step, (Position(7),))
    second.step = step
    second.publisher.skip_published(progress, trained)
    second.publisher.publish_last(progress, second.snapshot, Deadline(SOON))
    assert second.versions.numbers() == ([1, 2, 3] if published else [1, 2, 3, 4])


@pytest.mark.parametrize("change", [{"schema": "other"}, {"model": ModelReference("m:other", {}, "classification")}])
def test_a_restart_with_another_model_publishes_a_version(make_bench, change):
    first = make_bench()
    first.publish()
    manifest = msgspec.structs.replace(first.versions.manifest(1), number=2, **change)
    first.versions.write(first.model.state_dict(), manifest, Verdict("pass"))
    second = make_bench()
    second.step = 1
    second.publisher.skip_published((1, ()), {"events:0": PartitionProgress(1)})
    second.publisher.publish_last((1, ()), second.snapshot, Deadline(SOON))
    assert second.versions.numbers() == [1, 2, 3]


def test_old_versions_are_deleted_except_those_that_serving_needs(make_bench):
    bench = make_bench(keep=2, keep_hourly=0)
    for _ in range(3):
        bench.publish()
    bench.versions.write_state(RegistryState(serving=3, previous=2))
    for _ in range(4):
        bench.publish()
    assert bench.versions.numbers() == [1, 2, 3, 6, 7]


def test_versions_of_a_stale_learner_do_not_count_as_kept(make_bench):
    bench = make_bench(keep=2, keep_hourly=0)
    for _ in range(3):
        bench.publish()
    manifest = bench.versions.manifest(3)
    for number in (20, 21):
        stale = msgspec.structs.replace(manifest, number=number, generation=6)
        bench.versions.write(bench.model.state_dict(), stale, Verdict("pass"))
    bench.publish()
    assert bench.versions.numbers() == [1, 3, 4]


def test_a_learner_starts_with_an_unreadable_state(make_bench, caplog):
    first = make_bench()
    first.publish()
    (first.versions.path / STATE).write_text("torn")
    bench = make_bench()
    assert "numbers continue from those of the existing versions" in caplog.text
    bench.publish()
    assert bench.versions.numbers() == [1, 2]


def test_the_last_version_of_an_hour_is_kept(make_bench, monkeypatch):
    bench = make_bench(keep=2, keep_hourly=2)
    clock = iter(range(1_000_000, 1_100_000, 1800))
    monkeypatch.setattr("anabranch.learner.versions.publisher.time.time", lambda: float(next(clock)))
    for _ in range(10):
        bench.publish()
    hours = [bench.versions.manifest(number).time // 3600 for number in bench.versions.numbers()[1:-2]]
    assert len(hours) == len(set(hours)) == 2
    assert bench.versions.numbers()[0] == 1, "the best version was deleted"
    assert bench.versions.numbers()[-2:] == [9, 10]


def test_the_manifest_of_an_old_version_is_read_once(make_bench, monkeypatch):
    bench, read, manifest = make_bench(keep=2, keep_hourly=2), list[int](), Versions.manifest
    bench.versions.write_state(RegistryState(serving=2, previous=3))
    monkeypatch.setattr(Versions, "manifest", lambda self, number: (read.append(number), manifest(self, number))[1])
    for _ in range(6):
        bench.publish()
    assert {1, 2, 3} < set(read)
    assert len(read) == len(set(read))


def test_a_failing_disk_skips_the_version_and_not_the_training(make_bench, monkeypatch):
    bench = make_bench()
    bench.newly_trained.add(np.array([10, 20], np.int64))
    with monkeypatch.context() as patch:
        patch.setattr("anabranch.core.atomic_files.os.fsync", _no_space)
        bench.publish()
    bench.newly_trained = RecordTimes()
    bench.newly_trained.add(np.array([30], np.int64))
    assert bench.versions.numbers() == []
    assert bench.publisher.problem is not None
    assert "No space left" in bench.publisher.problem
    assert list(bench.versions.path.iterdir()) == []
    bench.publish()
    assert bench.publisher.problem is None
    assert bench.versions.numbers() == [2], "the number of a failed version was used again"
    assert bench.versions.manifest(2).learned == NewlyTrained(3, [10, 20, 30])
    bench.newly_trained = RecordTimes()
    bench.publish()
    assert bench.versions.manifest(3).learned == NewlyTrained(0, [])


def test_a_hanging_disk_is_a_problem_until_the_version_is_written(make_bench, monkeypatch):
    now, go, sync = [1000.0], threading.Event(), os.fsync
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr("anabranch.core.job_thread.time", clock)
    monkeypatch.setattr(
        "anabranch.core.atomic_files.os.fsync", lambda descriptor: (go.wait(PATIENCE_SECONDS), sync(descriptor))[1]
    )
    bench = make_bench()
    bench.step += 1
    bench.publisher.publish_if_due((bench.step, ()), bench.snapshot)
    now[0] += 60
    assert bench.publisher.problem is None
    now[0] += 1
    assert bench.publisher.problem is not None
    assert f"{bench.versions.path} has taken more than 60 s" in bench.publisher.problem
    go.set()
    bench.publish()
    assert bench.publisher.problem is None


def test_a_failed_version_is_written_again_without_progress(make_bench, monkeypatch):
    bench, progress = make_bench(), (1, (Position(5),))
    with monkeypatch.context() as patch:
        patch.setattr("anabranch.core.atomic_files.os.fsync", _no_space)
        bench.publisher.publish_last(progress, bench.snapshot, Deadline(SOON))
    assert bench.versions.numbers() == []
    for _ in range(2):
        bench.publisher.publish_last(progress, bench.snapshot, Deadline(SOON))
    assert bench.versions.numbers() == [2]
    assert bench.publisher.problem is None


def test_progress_without_a_step_is_published(make_bench):
    bench = make_bench()
    bench.publish()
    for offset in (5, 5, 6):
        bench.publisher.publish_last((1, (Position(offset),)), bench.snapshot, Deadline(SOON))
    assert bench.versions.numbers() == [1, 2, 3]


def test_versions_are_published_next_to_a_damaged_older_one(make_bench):
    bench = make_bench(keep=2, keep_hourly=1)
    bench.publish()
    (bench.versions.directory(1) / "manifest.json").write_text("torn")
    for _ in range(3):
        bench.publish()
    assert bench.versions.numbers() == [1, 2, 3, 4]
    for _ in range(3):
        bench.publish()
    assert bench.versions.numbers() == [1, 5, 6, 7], "older versions are deleted as well"
    assert bench.publisher.problem is None


def test_a_learner_that_lost_its_lock_publishes_no_more_versions(make_bench, tmp_path):
    bench = make_bench()
    (tmp_path / GENERATION).write_text("7")
    bench.publish()
    (tmp_path / GENERATION).write_text("8")
    with pytest.raises(SecondLearnerError):
        bench.publish()
    assert bench.versions.numbers() == [1]


def test_a_bug_in_the_thread_stops_the_loop(make_bench, monkeypatch):
    bench = make_bench()
    monkeypatch.setattr("anabranch.learner.versions.scores.evaluation_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.publish()


def _no_space(_descriptor):
    raise OSError(28, "No space left on device")


def test_a_version_adds_at_least_min_events(make_bench):
    bench, published = make_bench(min_events=100), []
    for trained in range(0, 400, 20):
        bench.step += 1
        bench.publisher.publish_last((bench.step, ()), bench.snapshot, Deadline(SOON), trained)
        published.append(bench.publisher.published)
    assert published == [trained // 100 for trained in range(0, 400, 20)]
    bench.publisher.publish_if_due((bench.step + 1, ()), bench.snapshot, 399)
    assert not bench.publisher._background.busy
    assert bench.publisher.skipped == 0


def test_after_a_restart_min_events_count_from_the_start(make_bench):
    make_bench().publish()
    again = make_bench(min_events=100)
    for step, trained, published in ((2, 5000, 0), (3, 5099, 0), (4, 5100, 1)):
        again.step = step
        again.publisher.publish_last((step, ()), again.snapshot, Deadline(SOON), trained)
        assert again.publisher.published == published
