"""Canaries: which servers they are, and how a version on them is promoted or rejected, with models that are worse."""

import time
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import MagicMock

import msgspec
import pytest

from anabranch.core.object_store.bucket import BucketAwayError
from anabranch.learner.checkpoints.format import Checkpoint
from anabranch.learner.errors import SecondLearnerError
from anabranch.learner.extensions.fleet.canary import CanaryJudge, CanaryServers, choose_canaries
from anabranch.learner.extensions.fleet.extension import FleetExtension, FleetWatch
from anabranch.learner.loop.loop_state import LoopState
from anabranch.learner.model.answer_rule import AnswerRule, Calibration
from anabranch.learner.object_storage.bucket_storage import BucketStorage
from anabranch.learner.object_storage.fleet import FleetRollout, FleetServer, RolloutFile, write_server
from anabranch.learner.object_storage.lease import Lease
from anabranch.learner.settings.learner import VersionsSettings
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.versions.format import RegistryState, Verdict, Versions
from anabranch.learner.versions.publisher import Publisher
from tests.learner.versions.test_quality_gate import BAD, GOOD, Bench
from tests.support.object_versions import VersionUploader

LEAST = 100


def server(name, **fields):
    return FleetServer(**{"id": name, "beat": 1, "time": 0.0, "address": "", "ready": True, **fields})


class FleetBench(Bench):
    """A learner with its gate, and the reports of a fleet of servers."""

    def __init__(self, path, schema, **gate):
        super().__init__(path / "versions", schema, **gate)
        self.storage = StorageSettings(url=f"memory://{path.name}/state")
        self.fleet = FleetWatch(self.storage)
        self.lease = Lease(self.storage.bucket, timedelta(seconds=20), "learner")
        self.lease.acquire(0)
        self.uploads = True
        self.outcomes: list[str] = []
        self.gate._served_by_all = self.fleet.served
        self.judge = CanaryJudge(
            *(self.fleet, self.versions, self.gate._settings, self.gate, 0.3),
            count=self.outcomes.append,
        )
        extensions = [FleetExtension(self.fleet, self.judge)]
        verdicts = self.publisher._verdicts
        self.publisher = Publisher(self.writer, self.gate, VersionsSettings(), verdicts, extensions=extensions)

    def report(self, name, **fields):
        write_server(self.storage.bucket, server(name, **fields))

    def serve(self, version):
        """Let the canary report that it has served a version for a minute and more; returns its id."""
        (canary,) = self.update().canaries
        for beat in (2, 16):
            self.report(canary, version=version, beat=beat)
            if beat == 2:
                self.update()
        return canary

    def update(self):
        """Read the fleet, let the canaries be judged, and write what was decided."""
        if self.uploads:
            versions = dict.fromkeys(self.versions.numbers(), 1)
            self.lease.update(lambda head: msgspec.structs.replace(head, versions=versions))
        self.fleet.poll()
        self.watch()
        self.fleet.poll()
        return rollout_of(self.storage)


def rollout_of(storage):
    file = RolloutFile(storage.bucket)
    file.poll()
    return file.contents


@pytest.fixture
def clock(monkeypatch):
    """The monotonic clock of the canaries' judgement."""
    now = [1000.0]
    monkeypatch.setattr("anabranch.learner.extensions.fleet.canary.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def make(tmp_path, schema):
    """A bench with three servers that serve version 1."""

    def of(**gate):
        bench = FleetBench(tmp_path, schema, **gate)
        bench.hold_out(200)
        bench.publish(GOOD)
        for name in "abc":
            bench.report(name, version=1)
        return bench

    return of


@pytest.fixture
def trying(make):
    """A bench whose canary serves version 2, which is bad, and which the gate could not distinguish."""
    bench = make()
    bench.update()
    bench.publish(BAD)
    bench.versions.write_verdict(2, Verdict("inconclusive"))
    assert bench.update().canary == 2
    return bench


def test_canaries_are_a_part_of_the_servers_at_least_one_and_never_all():
    servers = [server(str(number)) for number in range(20)]
    assert [len(choose_canaries(servers[:count], 0.1)) for count in (0, 1, 2, 10, 20)] == [0, 0, 1, 1, 2]
    assert [len(choose_canaries(servers[:count], 0.99)) for count in (2, 3, 20)] == [1, 2, 19]
    assert choose_canaries(servers, 0.2) == choose_canaries(servers[::-1], 0.2)


def test_a_new_version_goes_to_the_canaries_alone(trying):
    rollout = trying.update()
    assert (rollout.stable, rollout.canary, len(rollout.canaries)) == (1, 2, 1)
    report = trying.judge.report
    assert report is not None
    assert (report.stable, report.version, report.required_rows) == (1, 2, LEAST)


def test_newer_versions_wait_while_one_is_tried(trying):
    trying.publish(GOOD)
    assert trying.update().canary == 2


def test_a_worse_version_is_rejected_on_events_that_came_since(trying):
    trying.update()
    trying.hold_out(LEAST - 10)
    assert trying.update().canary == 2, "too few events"
    trying.hold_out(10)
    rollout = trying.update()
    assert (rollout.stable, rollout.canary, rollout.rolled_back) == (1, None, [2])
    assert trying.verdict(2) == "fail"
    assert "worse than the served version on new events" in trying.reasons(2)
    assert trying.outcomes == ["rejected"]
    assert trying.judge.problem is not None
    assert trying.judge.problem.startswith("version 2 was rejected on the canaries: worse than")
    assert trying.gate.hold.since is not None
    assert trying.update().canary is None, "it is not tried again"


def test_a_canary_is_compared_by_what_its_calibration_makes_of_the_same_weights(make):
    bench = make()
    bench.update()
    rule = AnswerRule(Calibration("platt", 500, bias=[0.0, 0.0, 60.0]))
    manifest = msgspec.structs.replace(bench.versions.manifest(1), number=2, parent=1, rule=rule)
    bench.versions.write(GOOD, manifest, Verdict("inconclusive"))
    assert bench.update().canary == 2
    bench.update()
    bench.hold_out(LEAST)
    assert bench.update().rolled_back == [2]
    assert "worse than the served version on new events" in bench.reasons(2)


def test_after_a_rejection_the_next_version_is_tried_and_promoted(trying):
    trying.update()
    trying.hold_out(LEAST)
    trying.update()
    assert trying.publish(GOOD) == "pass"
    assert trying.update().canary == 3
    trying.serve(3)
    trying.hold_out(LEAST)
    rollout = trying.update()
    assert (rollout.stable, rollout.canary, rollout.canaries) == (3, None, [])
    assert trying.outcomes == ["rejected", "promoted"]
    assert trying.judge.problem is None


@pytest.mark.parametrize(
    ("reports", "reason"),
    [
        ([{"version": 1, "refused": {2: "it has no weights"}}], "refused it: it has no weights"),
        ([{"version": 2, "crashes": {2: 2}}], "has crashed 2 times"),
        ([{"version": 2, "model_problem": "the model fails on every input"}], "the model fails on every input"),
        (
            [{"version": 2, "request_p99_seconds": 0.05, "slo_seconds": 0.02, "beat": b} for b in (2, 14, 15, 16)],
            "answers with a p99 of 50.0 ms, above serving.slo",
        ),
    ],
)
def test_what_goes_wrong_on_a_canary_rejects_its_version(trying, reports, reason):
    (canary,) = trying.update().canaries
    for report in reports:
        assert trying.update().canary == 2
        trying.report(canary, **report)
        rollout = trying.update()
    assert (rollout.canary, rollout.rolled_back) == (None, [2])
    assert reason in trying.reasons(2)


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 1, "model_problem": "the model fails"},  # of another version
        {"version": 2, "crashes": {2: 1, 1: 9}},
        {"version": 2, "request_p99_seconds": 0.01, "slo_seconds": 0.02},
    ],
)
def test_what_does_not_come_from_the_version_does_not_reject_it(fields):
    checks = CanaryServers(2)
    assert all(checks.failure([server("a", **fields, beat=beat)], ["a"]) is None for beat in range(30))


def test_a_slow_fleet_is_not_the_canarys_fault():
    checks, slow = CanaryServers(2), {"request_p99_seconds": 1.0, "slo_seconds": 0.02}
    for beat in range(30):
        servers = [server("a", version=2, beat=beat, **slow), server("b", version=1, beat=beat, **slow)]
        assert checks.failure(servers, ["a"]) is None


@pytest.mark.parametrize(
    ("on_hold", "serves", "stable", "outcomes"),
    [("serve", True, 2, ["promoted"]), ("serve", False, 1, []), ("alert", True, 1, [])],
)
def test_without_labels_gate_on_hold_decides_after_max_hold(make, clock, on_hold, serves, stable, outcomes):
    bench = make(on_hold=on_hold, max_hold="10m")
    bench.update()
    bench.publish(GOOD)
    bench.update()
    if serves:
        bench.serve(2)
    bench.update()
    clock[0] += 599
    assert bench.update().canary == 2
    assert bench.judge.problem is None
    clock[0] += 1
    rollout = bench.update()
    assert (rollout.stable, rollout.rolled_back, bench.outcomes) == (stable, [], outcomes)
    if not outcomes:
        assert rollout.canary == 2
        assert str(bench.judge.problem).startswith("version 2 is still undecided on the canaries after gate.max_hold: ")
        assert ("no canary has served it for a minute" in str(bench.judge.problem)) is not serves
        assert bench.verdict(2) == "pass"


def test_labels_that_come_after_max_hold_still_promote(make, clock):
    bench = make()
    bench.update()
    bench.publish(GOOD)
    bench.update()
    bench.serve(2)
    bench.publish(GOOD)  # a newer one would have to wait for as many labels
    for _ in range(4):
        clock[0] += 600
        bench.hold_out(LEAST // 5)
        assert bench.update().canary == 2
    bench.hold_out(LEAST // 5)
    assert bench.update().stable == 2
    assert bench.judge.problem is None


def test_a_version_that_no_canary_serves_is_never_promoted_and_a_newer_one_is_tried(make, clock):
    bench = make(on_hold="serve")
    bench.update()
    bench.publish(GOOD)
    bench.update()
    bench.hold_out(LEAST)
    bench.update()
    clock[0] += 601
    bench.hold_out(2 * LEAST)
    assert (bench.update().stable, bench.outcomes) == (1, [])
    assert bench.judge.problem is not None
    bench.publish(GOOD)
    rollout = bench.update()
    assert (rollout.stable, rollout.canary, rollout.rolled_back, bench.outcomes) == (1, None, [2], ["undecided"])
    assert bench.verdict(2) == "pass", "it has not failed"
    assert bench.update().canary == 3
    assert str(bench.judge.problem).startswith("version 2 was passed over on the canaries: nothing was decided within")
    bench.serve(3)
    bench.hold_out(LEAST)
    assert bench.update().stable == 3
    assert bench.judge.problem is None


def test_a_canary_that_is_not_ready_or_crashes_has_not_served_its_version():
    checks = CanaryServers(2)
    for beat, fields in enumerate([{"ready": False}] * 20 + [{"crashes": {2: 0}}] * 14 + [{"crashes": {2: 1}}] * 14):
        assert not checks.have_served([server("a", version=2, beat=beat, **fields)], ["a"])
    assert checks.have_served([server("a", version=2, beat=48, crashes={2: 1})], ["a"])


def test_a_person_decides_before_the_labels_do(trying):
    trying.update()
    file = RolloutFile(trying.storage.bucket)
    file.poll()
    file.replace(file.contents.changed_to(RegistryState(promoted=2), [1, 2]))
    trying.hold_out(LEAST)
    rollout = trying.update()
    assert (rollout.stable, rollout.canary, trying.outcomes) == (2, None, [])


def test_a_pinned_fleet_is_left_alone(trying):
    file = RolloutFile(trying.storage.bucket)
    file.poll()
    file.replace(msgspec.structs.replace(file.contents, pinned=1))
    trying.hold_out(LEAST)
    assert trying.update() == file.contents


def test_other_servers_become_canaries_when_those_are_gone(trying):
    (canary,) = trying.update().canaries
    trying.report(canary, stopped=True)
    rollout = trying.update()
    assert rollout.canary == 2
    assert len(rollout.canaries) == 1
    assert canary not in rollout.canaries


def test_a_server_without_others_serves_every_version_but_not_while_another_restarts(trying, clock):
    for name in "ab":
        trying.report(name, stopped=True)
    assert trying.update().stable == 1
    clock[0] += 120
    assert trying.update() == FleetRollout(rolled_back=[2]), "but not the one that is undecided"


def test_a_fleet_without_servers_keeps_its_stable_version(trying, clock):
    before = trying.update()
    for name in "abc":
        trying.report(name, stopped=True)
    for _ in range(3):
        assert trying.update() == before
        clock[0] += 3600


def test_a_decision_is_made_again_after_a_command_was_quicker(trying):
    trying.fleet.poll()
    other = RolloutFile(trying.storage.bucket)
    other.poll()
    other.replace(msgspec.structs.replace(other.contents, rolled_back=[7]))
    trying.fleet.decide(lambda now: msgspec.structs.replace(now, stable=2))
    trying.fleet.poll()
    assert (trying.fleet.rollout.stable, trying.fleet.rollout.rolled_back) == (2, [7])


def test_versions_that_any_server_serves_served_before_or_is_pinned_to_are_not_deleted(make):
    bench = make()
    bench.report("a", version=2, previous=1, pinned=3)
    RolloutFile(bench.storage.bucket).replace(FleetRollout(promoted=4))
    for _ in range(30):
        bench.publish(GOOD)
    assert bench.versions.numbers()[:3] == [1, 2, 3], "nothing is deleted before the fleet was read"
    bench.fleet.poll()
    for name in "bc":
        bench.report(name, stopped=True)
    bench.fleet.poll()
    bench.publisher._pruning._hours.clear()
    bench.publisher._pruning._settings = bench.publisher._pruning._settings.model_copy(update={"keep_hourly": 0})
    bench.publish(GOOD)
    assert bench.versions.numbers()[:5] == [1, 2, 3, 4, 13]


def test_the_gate_follows_the_fleets_decisions(make, monkeypatch):
    bench, compared_with = make(), []
    monkeypatch.setattr(bench.gate, "_start_with", lambda baseline: compared_with.append(baseline.number))
    bench.fleet.poll()
    bench.publish(GOOD)
    RolloutFile(bench.storage.bucket).replace(FleetRollout(rolled_back=[2]))
    bench.fleet.poll()
    bench.publish(GOOD)
    assert compared_with == [1]
    served = bench.fleet.served(RegistryState())
    assert (served.serving, served.rolled_back) == (1, [2])


def test_a_version_that_is_not_uploaded_is_no_canary(make):
    bench = make()
    bench.update()
    bench.uploads = False
    bench.publish(GOOD)
    assert bench.update().canary is None
    bench.uploads = True
    assert bench.update().canary == 2


@pytest.fixture
def fresh(trying, tmp_path):
    """A learner on a fresh host in the middle of a comparison: the object store alone has the versions."""
    VersionUploader(trying.storage.bucket, trying.versions).upload(1, 2)
    stored = Versions(tmp_path, BucketStorage(trying.storage.bucket, "versions", tmp_path / "fetched"))
    trying.judge._versions._stored = stored
    trying.uploads = False
    return trying


def test_a_stable_version_that_cannot_be_read_for_now_promotes_nothing(fresh, clock, monkeypatch):
    fresh.versions.delete(1)
    stored = fresh.judge._versions._stored
    is_away = [True]

    def manifest(number):
        if is_away[0]:
            raise BucketAwayError("away")
        return Versions.manifest(stored, number)

    monkeypatch.setattr(stored, "manifest", manifest)
    fresh.serve(2)
    clock[0] += 3600
    rollout = fresh.update()
    assert (rollout.stable, rollout.canary) == (1, 2)
    assert str(fresh.judge.problem).endswith("cannot be read: away; if it stays so, serve one by hand")
    is_away[0] = False
    assert "away" in str(fresh.update() and fresh.judge.problem), "it is not read again each second"
    clock[0] += 10
    fresh.update()
    assert fresh.judge.problem is None
    fresh.hold_out(LEAST)
    assert fresh.update().rolled_back == [2]


def test_a_stable_version_that_is_damaged_promotes_nothing(trying):
    (trying.versions.directory(1) / "manifest.json").write_bytes(b"{")
    trying.serve(2)
    trying.hold_out(LEAST)
    assert trying.update().stable == 1
    assert str(trying.judge.problem).startswith("version 1, with which the canaries' version 2 is compared, cannot be")


def test_another_models_stable_version_is_followed_by_one_that_a_canary_has_served(trying):
    manifest = trying.versions.directory(1) / "manifest.json"
    manifest.write_text(manifest.read_text().replace("m:build", "m:other"))
    assert trying.update().stable == 1
    trying.serve(2)
    assert trying.update().stable == 2
    assert "version 1 is another model's" in str(trying.judge.report)


def test_a_fresh_host_compares_with_the_stable_version_of_the_object_store(fresh):
    fresh.versions.delete(1)
    fresh.update()
    fresh.hold_out(LEAST)
    assert fresh.update().rolled_back == [2]


def test_a_canary_that_a_fresh_host_does_not_have_is_rejected_too(fresh):
    fresh.update()
    fresh.versions.delete(2)
    fresh.hold_out(LEAST)
    rollout = fresh.update()
    assert (rollout.canary, rollout.rolled_back, fresh.outcomes) == (None, [2], ["rejected"])
    assert fresh.judge.problem is not None


def test_a_canary_that_is_gone_is_rejected(trying):
    trying.versions.delete(2)
    assert trying.update().rolled_back == [2]
    assert "the learner cannot read it" in str(trying.judge.problem)


def test_a_rejection_stays_although_its_verdict_cannot_be_written(trying, monkeypatch):
    def full(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(trying.versions, "write_verdict", full)
    trying.update()
    trying.hold_out(LEAST)
    assert trying.update().rolled_back == [2]


def test_a_canary_that_monitoring_fails_is_rejected(trying):
    trying.update()
    trying.versions.write_verdict(2, Verdict("fail", ["monitoring found it worse"]))
    assert trying.update().rolled_back == [2]
    assert trying.reasons(2) == "monitoring found it worse"


def test_canaries_are_not_replaced_for_ever_when_each_of_them_dies(trying):
    now = [0.0]
    trying.fleet._reader._clock = lambda: time.monotonic() + now[0]
    (first,) = trying.update().canaries
    lost = [first]
    for turn in range(1, 3):
        for beat in range(8 * turn, 8 * turn + 7):
            now[0] += 5
            for name in {*"abcde"} - {*lost}:
                trying.report(name, version=1, beat=beat)
            trying.fleet.poll()
        lost += trying.update().canaries
    rollout = trying.update()
    assert (rollout.stable, rollout.rolled_back, len(lost)) == (1, [2], 2)
    assert "all its canaries ended 2 times without a last report" in trying.reasons(2)


def test_a_host_that_is_slow_with_every_version_rejects_none():
    slow = {"request_p99_seconds": 0.05, "slo_seconds": 0.02}
    checks = CanaryServers(2)
    for beat in range(30):
        assert checks.failure([server("a", version=2, beat=beat, **slow), server("b")], ["a"], {"a"}) is None
    servers = [server(name) for name in "abc"]
    (usual,) = choose_canaries(servers, 0.1)
    assert choose_canaries(servers, 0.1, {usual}) != [usual]


def test_a_slow_host_is_no_canary(make):
    bench = make()
    (usual,) = choose_canaries([server(name) for name in "abc"], 0.3)
    bench.report(usual, version=1, request_p99_seconds=0.05, slo_seconds=0.02)
    bench.update()
    bench.publish(GOOD)
    canaries = bench.update().canaries
    assert len(canaries) == 1
    assert usual not in canaries


def test_a_rejected_stable_version_is_not_what_canaries_are_compared_with(trying):
    trying.serve(2)
    trying.report("a", version=1, previous=1)
    file = RolloutFile(trying.storage.bucket)
    file.poll()
    file.replace(msgspec.structs.replace(file.contents, rolled_back=[1]))
    trying.hold_out(LEAST)
    rollout = trying.update()
    assert (rollout.stable, rollout.canary) == (1, 2), "there is none before it, and nothing is decided"
    assert str(trying.judge.problem).startswith("version 1, which all servers may serve, was rejected")


@pytest.mark.parametrize("by_person", [True, False])
def test_after_the_stable_version_was_rejected_the_one_before_it_is_stable(make, by_person):
    bench = make()
    bench.update()
    for _ in range(2):
        bench.publish(GOOD)
    file = RolloutFile(bench.storage.bucket)
    file.poll()
    rolled_back = [3] if by_person else []
    file.replace(msgspec.structs.replace(file.contents, stable=3, rolled_back=rolled_back))
    if not by_person:
        bench.versions.write_verdict(3, Verdict("fail", ["monitoring found it worse"]))
    assert bench.update().stable == 1, "servers serve it, version 2 has not been judged"


def test_a_version_that_is_not_in_the_object_store_is_not_the_stable_one(make):
    bench = make()
    bench.report("c", version=10**15)
    assert bench.update().stable == 1


def test_a_canary_gets_all_its_time_after_a_pin(trying, clock):
    trying.update()
    file = RolloutFile(trying.storage.bucket)
    for pinned in (1, None):
        file.poll()
        file.replace(msgspec.structs.replace(file.contents, pinned=pinned))
        trying.update()
        clock[0] += 3600 if pinned else 599
    assert trying.update().canary == 2
    assert trying.judge.problem is None


def test_a_comparison_goes_on_after_restarts(trying, clock):
    trying.update()
    for _ in range(4):
        clock[0] += 200
        trying.hold_out(LEAST // 4)
        state = msgspec.json.decode(msgspec.json.encode(trying.judge.state()))
        trying.judge._comparison = None
        trying.judge.restore(state)
        assert trying.judge.state() == state, "also when it restarts at once"
        rollout = trying.update()
    assert rollout.rolled_back == [2]
    assert trying.judge.state() == {}


def test_a_learner_without_its_lease_decides_nothing(trying):
    def check():
        raise SecondLearnerError("another learner has the lease")

    before = trying.update()
    trying.fleet._check = check
    trying.fleet.decide(lambda now: msgspec.structs.replace(now, stable=2))
    with pytest.raises(SecondLearnerError):
        trying.fleet.poll()
    assert rollout_of(trying.storage) == before


def test_a_canary_that_was_slow_with_the_version_before_is_not_rejected_for_it(make):
    bench, slow = make(), {"request_p99_seconds": 0.05, "slo_seconds": 0.02}
    for name in "abc":
        bench.report(name, version=1, **slow)
    bench.update()
    bench.publish(GOOD)
    (canary,) = bench.update().canaries
    for name in {*"abc"} - {canary}:
        bench.report(name, version=1, beat=2)
    for beat in (2, 14, 15, 16, 17):
        bench.report(canary, version=2, beat=beat, **slow)
        assert bench.update().canary == 2
    bench.hold_out(LEAST)
    assert bench.update().stable == 2


def test_a_version_that_the_comparison_cannot_distinguish_is_followed_by_a_newer_one_after_max_hold(
    make, clock, monkeypatch
):
    unsure = Verdict("inconclusive", ["too few events to distinguish it"])
    monkeypatch.setattr("anabranch.learner.extensions.fleet.canary.judge", lambda *_, **__: unsure)
    bench = make()
    bench.update()
    bench.publish(GOOD)
    bench.update()
    bench.serve(2)
    bench.hold_out(LEAST)
    bench.publish(GOOD)
    clock[0] += 599
    assert bench.update().canary == 2
    clock[0] += 1
    assert bench.update().rolled_back == [2]
    assert bench.update().canary == 3
    assert bench.outcomes == ["undecided"]


def test_a_checkpoint_keeps_the_comparison():
    judge, parts = MagicMock(), MagicMock(secret="", undone=MagicMock(number=0))
    judge.state.return_value = {"canary": 2}
    parts.trainer.generators.return_value, parts.trainer.tensors.return_value = ({}, {}), {}
    parts.replay.output_shapes, parts.erasure.excluded_through = {}, 0
    parts.extensions = [FleetExtension(MagicMock(), judge)]
    captured = LoopState(parts, MagicMock(starts={}), MagicMock()).capture()
    state = {**captured.state, "rows": (0, 0)}
    LoopState(parts, MagicMock(starts={}), MagicMock()).restore(Checkpoint(1, captured.tensors, state))
    judge.restore.assert_called_once_with({"canary": 2})
    without = FleetExtension(MagicMock(), None)
    without.restore(without.state())
