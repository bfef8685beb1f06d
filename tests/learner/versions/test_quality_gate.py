"""Which versions fail and for how long, and which ones monitoring withdraws, with models that are truly worse."""

import logging
from collections.abc import Mapping
from datetime import timedelta
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor, nn

from anabranch.core.shutdown import Deadline
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.evaluate.holdout import HoldoutSet
from anabranch.learner.evaluate.scoring import EventScores, Scorer
from anabranch.learner.model.task import Classification, MultiLabel
from anabranch.learner.settings.learner import GateSettings, VersionsSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.learner.stream.record_times import RecordTimes
from anabranch.learner.stream.trained_through import PartitionProgress
from anabranch.learner.versions.format import RegistryState, Verdict, Versions, reference_to
from anabranch.learner.versions.gate import MONITOR_ENOUGH, MONITOR_ROWS, QualityGate
from anabranch.learner.versions.publisher import Publisher, Snapshot, VersionWriter
from anabranch.learner.versions.verdict import compare

Weights = Mapping[str, Tensor]
NO_SCORES = EventScores(np.empty(0), np.empty((0, 4), np.float32), np.empty(0, np.uint64))
GOOD = {"weight": torch.eye(3), "bias": torch.zeros(3)}
"""Predicts the index of the feature that is 1."""
BAD = {"weight": torch.eye(3)[[2, 0, 1]], "bias": torch.zeros(3)}
"""Predicts the next class, which is always wrong."""
WORSE = {"weight": torch.diag(torch.tensor([1.0, 1.0, -1.0])), "bias": torch.zeros(3)}
"""Is wrong for a third of the events."""


class Bench:
    """A publisher with its gate, and a stream of held-out events of three alternating classes."""

    def __init__(self, path, schema, task=None, **gate):
        self.versions = Versions(path)
        self.holdout = HoldoutSet(schema, 400, 0)
        self.schema = schema
        self.offset = self.step = 0
        reference = reference_to(ModelSettings(factory="m:build"))
        scorer = Scorer(nn.Linear(3, 3), task or Classification(), schema, torch.device("cpu"))
        settings = GateSettings.model_validate({"min_rows": 100, **gate})
        self.gate = QualityGate(self.versions, settings, scorer, reference)
        self.registry = CollectorRegistry()
        self.writer = VersionWriter(self.versions, reference, schema, 1)
        verdicts = LearnerMetrics(self.registry).gate_verdicts
        self.publisher = Publisher(self.writer, self.gate, VersionsSettings(), verdicts)

    def hold_out(self, events, shift=0):
        """Add held-out events, whose label is the index of the feature that is 1, plus `shift`."""
        columns = fake_columns(self.schema, range(self.offset, self.offset + events))
        label = np.arange(events) % 3
        columns["feature.x"] = np.eye(3, dtype=np.float32)[label]
        label = (label + shift) % 3
        columns["label"] = np.eye(3)[label].astype(np.bool_) if self.schema.label.multi else label
        self.holdout.add(columns, [TopicPartition("events", 0)])
        self.offset += events

    def publish(self, weights):
        """Publish weights, and return the verdict."""
        self.step += 1
        snapshot = Snapshot(
            self.step, weights, {"events:0": PartitionProgress(self.step)}, self.holdout.held, None, RecordTimes()
        )
        self.publisher.publish_last((self.step, ()), lambda: snapshot, Deadline(timedelta(seconds=60)))
        return self.verdict(self.publisher.number or 0)

    def watch(self):
        self.publisher._watch(self.holdout.held)

    def verdict(self, number):
        verdict = self.versions.verdict(number)
        assert verdict is not None
        return verdict.verdict

    def reasons(self, number):
        verdict = self.versions.verdict(number)
        assert verdict is not None
        return "; ".join(verdict.reasons)


def set_clock(monkeypatch, clock):
    monkeypatch.setattr("anabranch.learner.versions.gate.time", clock)


@pytest.fixture
def make_bench(tmp_path, schema):
    return lambda **gate: Bench(tmp_path / "versions", schema, **gate)


@pytest.fixture
def bench(make_bench):
    """A bench with a good served version."""
    found = make_bench()
    found.hold_out(200)
    assert found.publish(GOOD) == "inconclusive", "the first version has no baseline"
    assert found.publish(GOOD) == "pass"
    return found


def test_a_worse_version_fails_and_the_next_good_one_passes(bench, caplog):
    with caplog.at_level(logging.INFO):
        assert bench.publish(WORSE) == "fail"
        assert bench.publish(BAD) == "fail"
        assert bench.gate.hold.since is not None
        assert bench.publish(GOOD) == "pass"
    assert bench.gate.hold.since is None
    assert "on old events" in bench.reasons(3)
    verdict = bench.versions.verdict(3)
    assert verdict is not None
    assert (verdict.numbers["worst"], verdict.numbers["class_2_drop"]) == (0, 1)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"], "each hold is logged once"
    sample = bench.registry.get_sample_value
    assert sample("anabranch_gate_verdicts_total", {"verdict": "fail"}) == 2
    assert sample("anabranch_gate_verdicts_total", {"verdict": "pass"}) == 2


def test_versions_of_a_multi_label_model_are_judged_like_others(tmp_path):
    label = {"name": "y", "classes": ["a", "b", "c"], "multi": True}
    fields = {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": label}
    bench = Bench(tmp_path / "versions", Schema(SchemaSettings.model_validate(fields)), MultiLabel())
    good, worse = ({**each, "bias": torch.full((3,), -0.5)} for each in (GOOD, WORSE))
    bench.hold_out(200)
    assert [bench.publish(weights) for weights in (good, worse, good)] == ["inconclusive", "fail", "pass"]
    verdict = bench.versions.verdict(2)
    assert verdict is not None
    assert verdict.numbers["class_c_drop"] == 1


def test_a_hold_longer_than_max_hold_is_a_problem(make_bench):
    bench = make_bench(max_hold="1ms")
    bench.hold_out(200)
    bench.publish(GOOD)
    assert bench.gate.hold.problem is None
    for _ in range(3):
        assert bench.publish(BAD) == "fail"
    assert bench.gate.hold.problem is not None
    assert "no version has passed the gate since" in bench.gate.hold.problem
    assert "worse than the served version" in bench.gate.hold.problem
    bench.publish(GOOD)
    assert bench.gate.hold.problem is None


def test_a_hold_ends_after_max_hold_if_on_hold_is_serve(make_bench, monkeypatch):
    now = [1e9]
    set_clock(monkeypatch, SimpleNamespace(time=lambda: 1e9, monotonic=lambda: now[0]))
    bench = make_bench(max_hold="10m", on_hold="serve")
    bench.hold_out(200)
    bench.publish(GOOD)
    assert bench.publish(BAD) == "fail"
    now[0] += 599
    assert bench.publish(BAD) == "fail"
    now[0] += 1
    assert bench.publish(BAD) == "inconclusive"
    assert "served although it failed" in bench.reasons(4)
    assert bench.publish(BAD) == "pass", "it was compared with a version that is no longer served"
    for _ in range(2):
        assert bench.publish({**GOOD, "bias": torch.full((3,), torch.nan)}) == "fail", (
            "a version without finite scores is served"
        )
        now[0] += 600


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_a_hold_does_not_depend_on_the_wall_clock(make_bench, monkeypatch, jump):
    now, wall = [1000.0], [1e9]
    set_clock(monkeypatch, SimpleNamespace(time=lambda: wall[0], monotonic=lambda: now[0]))
    bench = make_bench(max_hold="10m", on_hold="serve")
    bench.hold_out(200)
    bench.publish(GOOD)
    assert bench.publish(BAD) == "fail"
    now[0], wall[0] = now[0] + 599, wall[0] + jump
    assert (bench.publish(BAD), bench.gate.hold.problem) == ("fail", None)
    now[0] += 1
    assert bench.gate.hold.problem is not None
    assert "since 2001-09-09 01:46:40Z" in bench.gate.hold.problem
    assert bench.publish(BAD) == "inconclusive"


def test_a_hold_continues_after_several_restarts(make_bench, monkeypatch):
    now = [1000.0]
    set_clock(monkeypatch, SimpleNamespace(time=lambda: 1e9, monotonic=lambda: now[0]))
    bench = make_bench(max_hold="10m", on_hold="serve")
    bench.hold_out(200)
    bench.publish(GOOD)
    verdicts = []
    for _ in range(3):
        verdicts.append(bench.publish(BAD))
        now[0] += 240
        kept, now[0] = msgspec.json.decode(msgspec.json.encode(bench.gate.hold.state())), 5.0
        bench = make_bench(max_hold="10m", on_hold="serve")
        bench.hold_out(200)
        bench.gate.hold.restore(kept)
    assert [*verdicts, bench.publish(BAD)] == ["fail"] * 3 + ["inconclusive"]


def test_a_hold_that_ended_after_the_checkpoint_is_not_restored(bench, make_bench, monkeypatch):
    now = [1000.0]
    set_clock(monkeypatch, SimpleNamespace(time=lambda: 1e9, monotonic=lambda: now[0]))
    bench.publish(BAD)
    now[0] += 1e5
    kept = bench.gate.hold.state()
    assert [bench.publish(GOOD), bench.publish(BAD)] == ["pass", "fail"]
    again = make_bench()
    again.hold_out(200)
    again.gate.hold.restore(kept)
    again.watch()
    assert again.gate.hold.since is not None
    assert again.gate.hold.problem is None


def test_events_of_a_poisoned_stream_do_not_become_old_ones_during_a_hold(bench):
    for _ in range(20):
        bench.hold_out(60, shift=1)
        assert bench.publish(BAD) == "fail", "it is right about the poisoned events"
    assert bench.publish(GOOD) != "fail"


def test_small_drops_do_not_accumulate(make_bench):
    bench = make_bench(max_drop_old=0.4, max_drop_new=1.0)
    bench.hold_out(200)
    assert [bench.publish(GOOD), bench.publish(GOOD), bench.publish(WORSE)] == ["inconclusive", "pass", "pass"]
    assert bench.publish(BAD) == "fail"
    assert "the best version served lately" in bench.reasons(4)


def test_small_drops_do_not_accumulate_after_a_plateau(make_bench, monkeypatch):
    """On a plateau no version is certainly better than the best, which is replaced after `max_hold`."""
    now = [1e9]
    set_clock(monkeypatch, SimpleNamespace(time=lambda: 1e9, monotonic=lambda: now[0]))
    bench = make_bench(max_drop_old=0.4, max_drop_new=1.0, max_hold="10m")
    bench.hold_out(200)
    for _ in range(15):
        assert bench.publish(GOOD) != "fail"
        now[0] += 60
    assert [bench.publish(WORSE), bench.publish(BAD)] == ["pass", "fail"]
    assert "the best version served lately" in bench.reasons(17)


def test_the_best_version_is_replaced_after_max_hold(make_bench):
    bench = make_bench(max_drop_old=0.8, max_drop_new=1.0, max_hold="1ms")
    bench.hold_out(200)
    for weights in (GOOD, WORSE, WORSE, BAD):
        assert bench.publish(weights) != "fail"


def test_monitoring_withdraws_a_worse_version_and_restores_the_one_before_as_baseline(make_bench, caplog):
    bench = make_bench(min_rows=10_000)
    bench.hold_out(30)
    assert [bench.publish(weights) for weights in (GOOD, WORSE, WORSE)] == ["inconclusive"] * 3
    bench.hold_out(MONITOR_ROWS - 1)
    bench.watch()
    assert bench.verdict(3) == "inconclusive", "so few events are inconclusive"
    bench.hold_out(1)
    with caplog.at_level(logging.WARNING):
        bench.watch()
    assert [bench.verdict(number) for number in (1, 2, 3)] == ["inconclusive", "fail", "fail"]
    assert f"worse than version 1 on {MONITOR_ROWS} events" in bench.reasons(3)
    assert "versions 2, 3 are withdrawn" in caplog.text
    assert bench.gate.withdrawn == 1
    assert bench.publish(WORSE) == "fail", "a withdrawn version passes because of gate.min_rows"
    assert bench.publish(GOOD) == "pass"


def test_monitoring_does_not_return_to_a_version_that_had_learned_too_little(make_bench):
    """On wrong labels a version that has learned nothing beats the one that is right."""
    bench = make_bench(min_rows=10_000)
    bench.hold_out(6)
    assert bench.publish(WORSE) == "inconclusive"
    bench.hold_out(100)
    assert bench.publish(GOOD) == "inconclusive"
    bench.hold_out(MONITOR_ROWS, shift=1)
    bench.watch()
    assert bench.verdict(2) == "inconclusive"
    bench.hold_out(MONITOR_ENOUGH, shift=1)
    bench.watch()
    assert bench.verdict(2) == "inconclusive"
    assert bench.gate.monitored.first == 2, "it counts as good although it is worse on all new events"


def test_memory_is_bounded_while_many_versions_are_on_probation(make_bench):
    """Without held-out events probation does not end."""
    bench = make_bench(holdout_fraction=0.0)
    for number in range(1, 1001):
        bench.gate.record_published(number, {}, NO_SCORES, bench.holdout.held, Verdict("inconclusive"))
        bench.gate.monitor(bench.holdout.held)
    sizes = {name: len(value) for name, value in vars(bench.gate.monitored).items() if hasattr(value, "__len__")}
    assert max(sizes.values()) < 10, sizes


def test_versions_that_failed_before_are_not_withdrawn(make_bench):
    bench = make_bench(min_rows=10_000)
    bench.hold_out(30)
    assert [bench.publish(weights) for weights in (GOOD, WORSE, WORSE)] == ["inconclusive"] * 3
    bench.versions.write_verdict(2, Verdict("fail", ["its own reason"]))
    bench.hold_out(MONITOR_ROWS)
    bench.watch()
    assert [bench.verdict(number) for number in (1, 2, 3)] == ["inconclusive", "fail", "fail"]
    assert bench.reasons(2) == "its own reason"


def test_monitoring_passes_an_equally_good_version(make_bench):
    bench = make_bench(min_rows=10_000)
    bench.hold_out(30)
    for _ in range(4):
        bench.publish(GOOD)
        bench.hold_out(40)
        bench.watch()
    assert [bench.verdict(number) for number in (1, 2, 3, 4)] == ["inconclusive"] * 4


@pytest.mark.slow
def test_monitoring_withdraws_no_version_by_chance(make_bench):
    """Two equally good models that differ on one event in five, in a thousand runs of all comparisons."""
    noise, rivals = np.random.default_rng(0), np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    checks_at = [50, 75, 112, 168, 252, 378, 500]
    for _ in range(1000):
        now_G, before_G = rivals[noise.choice(3, 500, p=[0.1, 0.1, 0.8])].T
        assert not any(compare(now_G[:n], before_G[:n], bounded=True).certain(0.02) for n in checks_at)
    bench = make_bench(min_rows=10_000)
    bench.holdout = HoldoutSet(bench.schema, 2000, 0)
    bench.hold_out(30)
    assert [bench.publish(GOOD), bench.publish(GOOD)] == ["inconclusive"] * 2
    seen = []
    for _ in range(MONITOR_ENOUGH):
        bench.hold_out(1)
        before = bench.gate.monitored.next_check_at
        bench.watch()
        if bench.gate.monitored.next_check_at != before:
            seen.append(before)
    assert seen == checks_at[:-1]
    assert bench.gate.monitored.first is None


def test_probation_ends_with_the_youngest_quarter_of_a_small_holdout_set(make_bench):
    bench = make_bench(min_rows=10_000, holdout_rows=400)
    bench.hold_out(400)
    assert [bench.publish(GOOD), bench.publish(GOOD)] == ["inconclusive"] * 2
    bench.hold_out(100)
    for _ in range(2):
        bench.watch()
    assert bench.gate.monitored.first is None


def test_there_is_no_monitoring_with_a_holdout_set_that_is_too_small(make_bench):
    bench = make_bench(min_rows=10_000, holdout_rows=100)
    bench.hold_out(30)
    assert [bench.publish(GOOD), bench.publish(BAD)] == ["inconclusive"] * 2
    bench.hold_out(MONITOR_ROWS - 1)
    bench.watch()
    assert bench.verdict(2) == "inconclusive"
    assert bench.gate.monitored.first is None


def test_a_promoted_version_is_the_baseline(bench):
    assert bench.publish(BAD) == "fail"
    bench.versions.write_state(RegistryState(serving=3, previous=2, promoted=3))
    assert bench.publish(BAD) == "pass"
    assert bench.publish(GOOD) == "pass"
    assert bench.publish(BAD) == "fail"


def test_the_version_served_after_a_rollback_is_the_baseline(make_bench):
    bench = make_bench(min_rows=10_000)
    bench.hold_out(200)
    for weights in (GOOD, BAD):
        assert bench.publish(weights) == "inconclusive"
    bench.versions.write_state(RegistryState(serving=1, previous=2, rolled_back=[2]))
    assert bench.publish(BAD) == "fail"
    assert bench.publish(GOOD) == "pass"


def test_the_newest_version_that_has_not_failed_is_the_baseline_after_a_restart(bench, make_bench):
    bench.publish(WORSE)
    again = make_bench(max_hold="1ms")
    again.hold_out(200)
    again.watch()
    assert again.gate.hold.since is not None, "the hold was not restored"
    assert again.publish(WORSE) == "fail"
    assert again.publish(GOOD) == "pass"


def test_a_version_of_a_stale_learner_is_no_baseline_after_a_restart(bench, make_bench):
    stale = msgspec.structs.replace(bench.versions.manifest(2), number=3, generation=0)
    bench.versions.write(BAD, stale, Verdict("pass"))
    again = make_bench()
    again.hold_out(200)
    assert again.publish(BAD) == "fail"
    assert "than the served version" in again.reasons(4)


def test_a_learner_without_held_out_events_restores_no_hold(bench, make_bench):
    bench.publish(WORSE)
    again = make_bench()
    assert again.publish(WORSE) == "inconclusive"
    assert again.gate.hold.since is None


def test_no_version_fails_without_held_out_events(make_bench):
    bench = make_bench()
    for weights in (GOOD, BAD):
        assert bench.publish(weights) == "inconclusive"
    bench.versions.write_state(RegistryState(serving=1, previous=2, rolled_back=[2]))
    assert bench.publish(BAD) == "inconclusive"


@pytest.mark.parametrize("damage", ["manifest.json", "model.safetensors"])
def test_an_unreadable_or_deleted_version_is_no_baseline(bench, make_bench, damage):
    bench.versions.delete(2)
    path = bench.versions.directory(1) / damage
    path.write_bytes(path.read_bytes()[:-1])
    again = make_bench()
    again.hold_out(200)
    assert again.publish(BAD) == "inconclusive"
    assert "no served version" in again.reasons(again.publisher.number or 0)


def test_a_version_of_another_model_is_no_baseline(make_bench):
    first = make_bench()
    first.publish(GOOD)
    manifest = first.versions.manifest(1)
    first.versions.delete(1)
    first.versions.write({"weight": torch.zeros(5, 3)}, manifest, Verdict("pass"))
    again = make_bench()
    again.hold_out(200)
    assert again.publish(BAD) == "inconclusive"


def test_the_served_version_is_not_deleted_while_versions_fail(bench):
    for _ in range(30):
        assert bench.publish(BAD) == "fail"
    assert 2 in bench.versions.numbers()


def test_the_baselines_score_each_event_once(bench, monkeypatch):
    scored: list[int] = []
    score = Scorer.score_and_find

    def count(self, weights, columns, rule=None):
        scored.append(len(columns["label"]))
        return score(self, weights, columns)

    monkeypatch.setattr(Scorer, "score_and_find", count)
    bench.hold_out(8)
    bench.publish(BAD)
    assert sorted(scored) == [8, 8, 8, 208], "near future, served version, best version, and candidate"


@pytest.mark.parametrize("multi", [False, True])
def test_a_version_does_not_fail_against_itself_when_held_out_events_get_other_labels(tmp_path, multi):
    label = {"name": "y", "classes": 3, "multi": multi}
    schema = Schema(
        SchemaSettings.model_validate({"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": label})
    )
    bench = Bench(tmp_path / "versions", schema, MultiLabel() if multi else Classification())
    bench.hold_out(200)
    for _ in range(2):
        bench.publish(GOOD)
    late = np.arange(0, 200, 10)
    again = {name: column[late] for name, column in bench.holdout.held.columns.items()}
    again["row"] = np.zeros(len(late), np.int32)
    again["label"] = ~again["label"] if multi else (again["label"] + 1) % 3
    bench.holdout.relabel(again, [TopicPartition("events", 0)])
    assert [bench.publish(GOOD) for _ in range(2)] == ["pass", "pass"]
    assert bench.publish(BAD) == "fail"
    served = bench.gate._served
    assert served is not None
    fresh = bench.gate.scorer.score(GOOD, bench.holdout.held.columns)
    assert served.scores(bench.gate.scorer, bench.holdout.held.columns).tolist() == fresh.tolist()
    assert fresh.mean() < 0.95
