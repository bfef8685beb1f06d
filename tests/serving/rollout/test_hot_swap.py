"""Which versions are served, which are refused, and how both are reported. No thread: each test polls."""

import contextlib
import dataclasses
import errno
import gc
import itertools
import logging
import os
import queue
import re
import shutil
import sys
import tempfile
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from anabranch.core.atomic_files import replace_file
from anabranch.learner.errors import ModelError
from anabranch.learner.state_dir.folders import MANIFEST, Folder
from anabranch.learner.stream.trained_through import NewlyTrained
from anabranch.learner.versions.format import VERDICT, WEIGHTS, ModelReference, RegistryState, Verdict
from anabranch.serving.errors import ConflictError, NotFoundError, UnavailableError
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.model import deployment
from anabranch.serving.model import loaded_version as served
from anabranch.serving.model.device import pick_device
from anabranch.serving.model.loaded_version import ServedVersion, load_version
from anabranch.serving.rollout import candidate_loader
from anabranch.serving.rollout import directory_watcher as notice
from anabranch.serving.rollout import load_retry as retry
from anabranch.serving.rollout.commands import pin, promote, reject, roll_back, unpin, version_before
from anabranch.serving.rollout.hot_swap import VersionSwapper
from tests.support.cuda_recorder import CudaRecorder
from tests.support.waiting import PATIENCE_SECONDS


def state_of(publisher):
    """Return the contents of `state.json` without `recent`, of which `test_eligibility.py` has the tests."""
    return msgspec.structs.replace(publisher.versions.state(), recent=[])


class Watched:
    """A swap whose thread is not started, with its metrics."""

    def __init__(self, publisher):
        self.registry = CollectorRegistry()
        self.taken = 0
        self.metrics = ServingMetrics(self.registry)
        self.now = 0.0
        self.swap = VersionSwapper(publisher.deployment, 8, self.metrics, self.count, self.fail, lambda: self.now)

    def count(self):
        self.taken += 1

    def fail(self, exc):
        raise exc

    def poll(self):
        self.swap.poll()
        return self.swap.current.number if self.swap.current else None

    def poll_later(self):
        """Poll when every version that failed for now may be tried again."""
        self.now += 30
        return self.poll()

    def refused(self):
        return self.registry.get_sample_value("anabranch_serving_swaps_total", {"outcome": "refused"}) or 0


@pytest.fixture
def watched(numbers):
    return Watched(numbers)


def test_the_newest_version_is_taken_and_state_json_names_it_and_the_one_before(numbers, watched):
    assert watched.poll() is None
    numbers.publish(1)
    numbers.publish(2)
    assert watched.poll() == 2
    numbers.publish(3)
    assert watched.poll() == 3
    assert state_of(numbers) == RegistryState(serving=3, previous=2)
    assert watched.taken == 2
    assert watched.registry.get_sample_value("anabranch_serving_version") == 3
    assert watched.registry.get_sample_value("anabranch_serving_swaps_total", {"outcome": "swapped"}) == 2


def test_a_version_answers_with_its_weights(numbers, watched):
    numbers.publish(5)
    watched.poll()
    assert watched.swap.current is not None
    outputs = watched.swap.current.run({"x": np.zeros((3, 4), np.float32)})
    assert outputs["prediction"].tolist() == [5, 5, 5]
    assert outputs["prediction"].dtype == np.float32


def test_a_restart_keeps_the_previous_version_and_what_others_wrote_into_state_json(numbers):
    numbers.publish(1)
    numbers.publish(2)
    numbers.versions.write_state(RegistryState(serving=2, previous=1, promoted=2, rolled_back=[9]))
    assert Watched(numbers).poll() == 2
    assert state_of(numbers) == RegistryState(serving=2, previous=1, promoted=2, rolled_back=[9])


@pytest.mark.slow
def test_a_rollout_command_waits_for_others_that_change_the_state(numbers):
    numbers.publish(1)
    one, other = Watched(numbers), Watched(numbers)
    assert (one.poll(), other.poll()) == (1, 1)
    applied = threading.Event()

    def order():
        one.swap.apply(pin, 1)
        applied.set()

    thread = threading.Thread(target=order)
    with numbers.versions.changing_state():
        thread.start()
        before = numbers.versions.state()
        assert not applied.wait(0.2)
        numbers.versions.write_state(msgspec.structs.replace(before, rolled_back=[9]))
    thread.join(PATIENCE_SECONDS)
    assert state_of(numbers) == RegistryState(serving=1, pinned=1, rolled_back=[9])


def test_two_workers_write_one_state_and_the_slower_one_reverts_nothing(numbers):
    numbers.publish(1)
    one, other, late = Watched(numbers), Watched(numbers), Watched(numbers)
    assert (one.poll(), other.poll(), late.poll()) == (1, 1, 1)
    numbers.publish(2)
    assert (one.poll(), other.poll()) == (2, 2)
    assert state_of(numbers) == RegistryState(serving=2, previous=1)
    numbers.publish(3)
    verdict = numbers.versions.directory(3) / VERDICT
    assert one.poll() == 3
    held = verdict.read_bytes()
    verdict.unlink()  # as if the late one had polled before it was written
    assert late.poll() == 2
    replace_file(verdict, held)
    assert state_of(numbers) == RegistryState(serving=3, previous=2)
    assert (late.poll(), other.poll()) == (3, 3)
    assert state_of(numbers) == RegistryState(serving=3, previous=2)
    one.swap.apply(reject, 3)
    assert (late.poll(), other.poll()) == (2, 2)
    assert state_of(numbers) == RegistryState(serving=2, previous=3, rolled_back=[3])


def test_a_version_waits_for_its_verdict_and_is_not_taken_on_fail(numbers, watched):
    numbers.publish(1, verdict="pass")
    numbers.publish(2, verdict="fail")
    verdict = numbers.publish(3) / VERDICT
    verdict.unlink()
    assert watched.poll() == 1
    replace_file(verdict, msgspec.json.encode(Verdict("fail")))
    assert watched.poll() == 1
    replace_file(verdict, msgspec.json.encode(Verdict("pass")))
    assert watched.poll() == 3
    assert watched.refused() == 0


def fail(numbers, number):
    numbers.versions.write_verdict(number, Verdict("fail", ["the watch found it worse"]))


def test_a_served_version_that_fails_later_is_replaced_by_the_newest_older_one_that_has_not(numbers, watched):
    numbers.publish(1)
    numbers.publish(2)
    numbers.publish(3, verdict="fail")
    numbers.publish(4)
    assert watched.poll() == 4
    fail(numbers, 4)
    assert watched.poll() == 2, "a rollback may lower trained_through, and passes over what failed"
    assert state_of(numbers) == RegistryState(serving=2, previous=4, rolled_back=[4])
    assert watched.registry.get_sample_value("anabranch_serving_swaps_total", {"outcome": "rolled_back"}) == 1
    numbers.versions.write_verdict(4, Verdict("pass"))
    assert watched.poll() == 2, "what was rolled back is taken again"
    numbers.publish(5)
    assert watched.poll() == 5


def test_a_version_that_fails_stays_served_while_there_is_no_other(numbers, watched):
    numbers.publish(1)
    watched.poll()
    fail(numbers, 1)
    assert watched.poll() == 1
    assert watched.swap.problems == ["version 1 is withdrawn, and there is no other that may be served"]
    numbers.publish(2)
    assert watched.poll() == 2
    assert watched.swap.problems == []


def test_a_rollback_goes_to_the_version_served_before_and_what_came_since_is_not_taken(numbers, watched):
    numbers.publish(1)
    assert watched.poll() == 1
    for number in (2, 3, 4):
        numbers.publish(number)
    assert watched.poll() == 4
    numbers.publish(5, verdict="fail")
    before = version_before(numbers.versions.state(), numbers.versions.numbers(), numbers.versions.numbers())
    assert before == 1, "3 was never served, and is not what was served before"
    watched.swap.apply(roll_back, before)
    assert watched.poll() == 1
    assert state_of(numbers) == RegistryState(serving=1, previous=4, rolled_back=[2, 3, 4, 5], promoted=1)
    assert Watched(numbers).poll() == 1, "a restart takes what was rolled back"
    numbers.publish(6)
    assert watched.poll() == 6


def test_a_rollback_goes_to_the_version_that_was_named_whatever_its_verdict(numbers, watched):
    numbers.publish(1)
    numbers.publish(2, verdict="fail")
    numbers.publish(3)
    numbers.publish(4)
    assert watched.poll() == 4
    watched.swap.apply(roll_back, 2)
    assert watched.poll() == 2
    assert numbers.versions.state().rolled_back == [3, 4]
    for not_older in (2, 3):
        with pytest.raises(ConflictError, match="roll back to an older version"):
            watched.swap.apply(roll_back, not_older)
    numbers.publish(5)
    assert watched.poll() == 5


def test_a_version_that_cannot_be_loaded_is_not_rolled_back_to(numbers, watched):
    numbers.publish(1, schema="0" * 64)
    numbers.publish(2)
    assert watched.poll() == 2
    before = numbers.versions.state()
    with pytest.raises(ConflictError, match=r"version 1 cannot be served: .*another schema"):
        watched.swap.apply(roll_back, 1)
    assert (watched.poll(), numbers.versions.state()) == (2, before)


def test_a_rejected_version_alone_is_not_served_again(numbers, watched):
    for number in (1, 2, 3):
        numbers.publish(number)
    assert watched.poll() == 3
    watched.swap.apply(reject, 3)
    assert watched.poll() == 2
    watched.swap.apply(reject, 1)
    assert state_of(numbers) == RegistryState(serving=2, previous=3, rolled_back=[1, 3])
    assert Watched(numbers).poll() == 2, "a restart serves what was rejected"


@pytest.mark.parametrize(
    ("state", "before"),
    [
        (RegistryState(serving=4, previous=2), 2),
        (RegistryState(serving=4), 3),
        (RegistryState(serving=4, previous=3, rolled_back=[3]), 2),
        (RegistryState(serving=2, previous=4, rolled_back=[3, 4]), 1),
        (RegistryState(serving=1, previous=4), None),
        (RegistryState(), None),
        (RegistryState(serving=2, previous=4, promoted=2, replaced=4, rolled_back=[3, 4]), 4),
        (RegistryState(serving=2, previous=9, promoted=2, replaced=9, rolled_back=[3, 4]), 1),
        (RegistryState(serving=4, previous=2, promoted=2, replaced=3, rolled_back=[3]), 2),
    ],
)
def test_a_rollback_without_a_target_returns_to_what_was_served_before(state, before):
    assert version_before(state, [1, 2, 3, 4], [1, 2, 3, 4]) == before


def test_a_rollback_after_a_version_that_was_served_by_hand_returns_to_what_it_replaced(numbers, watched):
    for number in (1, 2, 3, 4):
        numbers.publish(number)
        assert watched.poll() == number

    def before():
        return version_before(numbers.versions.state(), numbers.versions.numbers(), [1])

    watched.swap.apply(promote, 2)
    assert watched.poll() == 2
    assert before() == 4
    with pytest.raises(ConflictError, match="roll back to an older version"):
        watched.swap.apply(roll_back, 3)
    watched.swap.apply(roll_back, 4)
    assert watched.poll() == 4
    watched.swap.apply(promote, 2)
    watched.swap.apply(reject, 4)
    assert watched.poll() == 2
    assert before() == 1, "a rejected version is not returned to"


def test_a_rollback_before_serving_runs_takes_a_choice_back(numbers):
    chosen = promote(RegistryState(serving=4, previous=3), 2, [1, 2, 3, 4])
    assert version_before(chosen, [1, 2, 3, 4], [1]) == 4
    assert roll_back(chosen, 4, [1, 2, 3, 4]).promoted == 4


def test_a_choice_of_the_served_version_replaces_none():
    later = RegistryState(serving=4, previous=2, promoted=2, replaced=3, rolled_back=[3])  # 4 passed the gate since
    assert version_before(promote(later, 4, [1, 2, 3, 4]), [1, 2, 3, 4], [1, 2]) == 2
    again = RegistryState(serving=2, previous=4, promoted=2, replaced=4, rolled_back=[3, 4])
    assert version_before(promote(again, 2, [1, 2, 3, 4]), [1, 2, 3, 4], [1]) == 4


def test_a_version_that_is_not_served_is_rejected_before_its_turn(numbers, watched):
    numbers.publish(1)
    watched.poll()
    numbers.publish(2)
    watched.swap.apply(reject, 2)
    assert watched.poll() == 1
    numbers.publish(3)
    assert watched.poll() == 3


def test_a_promoted_version_is_served_whatever_its_verdict_until_a_newer_one_passes(numbers, watched):
    numbers.publish(1)
    numbers.publish(2, verdict="fail")
    numbers.publish(3)
    assert watched.poll() == 3
    watched.swap.apply(promote, 2)
    assert watched.poll() == 2
    assert Watched(numbers).poll() == 2, "a restart loses the promotion"
    numbers.publish(4, verdict="fail")
    assert watched.poll() == 2
    numbers.publish(5)
    assert watched.poll() == 5


def test_a_pinned_version_is_served_and_no_other_until_it_is_unpinned(numbers, watched):
    numbers.publish(1)
    numbers.publish(2)
    assert watched.poll() == 2
    watched.swap.apply(pin, 1)
    numbers.publish(3)
    fail(numbers, 1)
    assert watched.poll() == 1
    assert Watched(numbers).poll() == 1, "a restart removes the pin"
    for order, number in ((promote, 3), (roll_back, 1), (reject, 1), (unpin, 3)):
        with pytest.raises(ConflictError, match="pinned"):
            watched.swap.apply(order, number)
    watched.swap.apply(unpin, 1)
    assert watched.poll() == 3


def test_what_was_promoted_and_is_pinned_later_is_unpinned(numbers, watched):
    numbers.publish(1)
    numbers.publish(2)
    watched.poll()
    watched.swap.apply(promote, 2)
    numbers.publish(3)
    assert watched.poll() == 3
    watched.swap.apply(pin, 2)
    numbers.publish(4)
    assert watched.poll() == 2
    watched.swap.apply(unpin, 2)
    assert watched.poll() == 4
    assert numbers.versions.state().pinned is None


_COMMANDS = {"promote": promote, "reject": reject, "rollback": roll_back, "pin": pin, "unpin": unpin}
_ACTIONS = st.tuples(st.sampled_from([*_COMMANDS, "pass", "fail"]), st.integers(1, 6))


@settings(max_examples=25, deadline=None)
@given(st.lists(_ACTIONS, max_size=12))
def test_rollout_commands_in_any_sequence_are_applied_or_change_nothing(deploy_in, actions):
    with tempfile.TemporaryDirectory() as folder:
        numbers = deploy_in("number", Path(folder))
        watched, newest = Watched(numbers), 0
        for action, number in actions:
            if action in ("pass", "fail"):
                newest += 1
                numbers.publish(newest, verdict=action)
                watched.poll()
                continue
            before = numbers.versions.state()
            try:
                watched.swap.apply(_COMMANDS[action], number)
            except (ConflictError, NotFoundError):
                after = numbers.versions.state()
                assert (after.pinned, after.promoted) == (before.pinned, before.promoted)
                assert (action, number) != ("unpin", before.pinned), "what is pinned cannot be unpinned"
                continue
            after = numbers.versions.state()
            assert action not in ("promote", "rollback", "pin") or watched.poll() == number
            assert action != "unpin" or after.pinned is None
            assert after.pinned in (None, watched.poll())
            assert after.promoted not in after.rolled_back


def test_an_order_that_cannot_be_carried_out_changes_nothing(numbers, watched):
    numbers.publish(1)
    watched.poll()
    numbers.publish(2, schema="0" * 64, verdict="fail")
    before = numbers.versions.state()
    for order in (promote, pin):
        with pytest.raises(ConflictError, match=r"version 2 cannot be served: .*another schema"):
            watched.swap.apply(order, 2)
        with pytest.raises(NotFoundError, match="there is no version 9; there are 1 to 2"):
            watched.swap.apply(order, 9)
    assert watched.poll() == 1
    assert numbers.versions.state() == before
    assert not any("pinned" in sentence for sentence in watched.swap.problems)


def test_a_pinned_version_that_was_deleted_is_a_problem(numbers, watched):
    numbers.publish(1)
    numbers.versions.write_state(RegistryState(pinned=7))
    assert watched.poll() is None
    assert watched.swap.problems == ["version 7 is pinned, and cannot be served"]
    numbers.versions.write_state(RegistryState())
    assert watched.poll() == 1
    assert watched.swap.problems == []


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from([promote, reject, roll_back, pin, unpin]), st.integers(1, 9)), max_size=12))
def test_orders_name_versions_that_are_there_and_no_two_go_against_each_other(orders):
    state, there = RegistryState(serving=8, previous=5), [1, 2, 4, 5, 7, 8]
    for order, number in orders:
        try:
            after = order(state, number, there)
        except (ConflictError, NotFoundError):
            continue
        assert set(after.rolled_back) <= set(there)
        assert after.promoted not in after.rolled_back
        assert (after.pinned is None) or after.pinned == number or after.pinned == state.pinned
        assert order is not reject or number in after.rolled_back
        assert order not in (promote, roll_back) or after.promoted == number
        state = after


def tear_manifest(version):
    content = (version / MANIFEST).read_bytes()
    (version / MANIFEST).write_bytes(content[: len(content) // 2])


def flip_a_bit(version):
    content = bytearray((version / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (version / WEIGHTS).write_bytes(content)


def lose_weights(version):
    (version / WEIGHTS).unlink()


def tear_verdict(version):
    (version / VERDICT).write_bytes(b'{"verdict": "pa')


@pytest.mark.parametrize("damage", [tear_manifest, flip_a_bit, lose_weights, tear_verdict])
def test_a_damaged_version_is_refused_once_and_the_next_best_is_taken(numbers, watched, damage, caplog):
    numbers.publish(1)
    damage(numbers.publish(2))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert watched.poll() == 1
    assert watched.refused() == 1
    assert sum("refused: " in record.message for record in caplog.records) == 1
    numbers.publish(3)
    assert watched.poll() == 3
    assert watched.swap.problems == []


def raises(error):
    def fail(*_, **__):
        raise error

    return fail


@contextlib.contextmanager
def away(error, name, below="", method="read"):
    """Fail to read (or to stat) files of this name, in directories whose names begin with `below`."""
    real = getattr(Folder, method)

    def fail(folder, asked, *more):
        if asked == name and folder.path.name.startswith(below):
            raise error
        return real(folder, asked, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folder, method, fail)
        yield


TRANSIENT = [OSError(code, os.strerror(code)) for code in (errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES)]
OUT_OF_MEMORY = [
    MemoryError("cannot allocate"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"),
]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        *itertools.product([MANIFEST, VERDICT, WEIGHTS], TRANSIENT),
        *itertools.product([WEIGHTS], OUT_OF_MEMORY),
    ],
    ids=repr,
)
def test_a_version_that_is_away_is_taken_when_it_is_back_and_the_served_one_stays_meanwhile(
    numbers, watched, name, error
):
    numbers.publish(1)
    assert watched.poll() == 1
    numbers.publish(2)
    with away(error, name, below="2"):
        assert [watched.poll_later() for _ in range(5)] == [1] * 5
        (problem,) = watched.swap.problems
    assert problem == f"a version cannot be loaded for now, and is tried again: version 2: {error}"
    assert (watched.refused(), watched.swap.refused) == (0, {})
    assert watched.poll_later() == 2
    assert watched.swap.problems == []


def test_a_version_of_which_not_even_the_age_can_be_read_is_tried_again(numbers, watched):
    numbers.publish(1)
    numbers.publish(2)
    with away(TRANSIENT[0], WEIGHTS, below="2", method="stamp"):
        assert watched.poll() == 1, "an older one is better than none"
    assert watched.poll() == 2


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
@pytest.mark.parametrize("where", ["load_state_dict", "warm-up"])
def test_a_version_for_which_there_was_no_memory_is_taken_when_there_is(numbers, watched, where, error):
    numbers.publish(1)
    assert watched.poll() == 1
    numbers.publish(2)
    with pytest.MonkeyPatch.context() as patch:
        if where == "warm-up":
            patch.setattr(ServedVersion, "run", raises(error))
        else:
            patch.setattr(torch.nn.Module, "load_state_dict", raises(error))
        assert [watched.poll_later() for _ in range(5)] == [1] * 5
        (problem,) = watched.swap.problems
    assert str(error) in problem
    assert watched.poll_later() == 2
    assert (watched.refused(), watched.swap.problems) == (0, [])


def test_cached_memory_is_freed_before_a_version_is_tried_again_also_at_a_first_start(numbers, watched, monkeypatch):
    did: list[object] = []
    monkeypatch.setattr(candidate_loader, "free_cached_memory", did.append)
    numbers.publish(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidate_loader, "load_version", lambda *_: did.append("load") or raises(OUT_OF_MEMORY[1])())
        assert [watched.poll_later() for _ in range(2)] == [None] * 2
    assert watched.poll_later() == 1
    device = numbers.deployment.device
    assert did == ["load", device, "load", device]


def test_a_version_that_is_away_is_tried_again_at_once_and_then_ever_more_seldom(numbers, watched):
    numbers.publish(1)
    tries: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "anabranch.serving.rollout.candidate_loader.load_version",
            lambda *_: tries.append(watched.now) or raises(TRANSIENT[0])(),
        )
        for tenth in range(1200):
            watched.now = tenth / 10
            assert watched.poll() is None
    assert tries[:2] == [0.0, 0.1]
    pauses = np.diff(tries[1:])
    longest = np.minimum(30, 2.0 ** np.arange(len(pauses)))
    assert (pauses <= longest + 0.2).all()
    assert (pauses >= longest / 2).all()
    watched.now += 30
    assert watched.poll() == 1


def test_an_unreadable_version_that_is_deleted_or_fails_is_no_longer_reported(numbers, watched):
    numbers.publish(1)
    watched.poll()
    numbers.publish(2)
    numbers.publish(3)
    with away(TRANSIENT[0], WEIGHTS):
        watched.poll()
        numbers.versions.delete(2)
        fail(numbers, 3)
        assert watched.poll_later() == 1
    assert watched.swap.problems == []
    assert watched.swap._retries.next() is None


def test_what_is_damaged_is_refused_until_its_files_are_replaced(numbers, watched):
    numbers.publish(1)
    whole = (numbers.publish(2) / WEIGHTS).read_bytes()
    flip_a_bit(numbers.versions.directory(2))
    assert [watched.poll_later() for _ in range(5)] == [1] * 5
    assert watched.refused() == 1
    replace_file(numbers.versions.directory(2) / WEIGHTS, whole)
    assert watched.poll() == 2


def test_an_order_for_a_version_that_is_away_is_refused_with_the_reason(numbers, watched):
    numbers.publish(1)
    numbers.publish(2)
    assert watched.poll() == 2
    with (
        away(TRANSIENT[0], WEIGHTS),
        pytest.raises(ConflictError, match=r"cannot be served: version 1: .*Input/output"),
    ):
        watched.swap.apply(promote, 1)
    assert numbers.versions.state().promoted is None
    watched.swap.apply(promote, 1)
    assert watched.poll() == 1


def test_a_start_at_which_all_versions_are_away_comes_up_by_itself(numbers, monkeypatch):
    for name in ("POLL_EVERY", "POLL_ANYWAY"):
        monkeypatch.setattr(notice, name, timedelta(hours=1))
    for name in ("_FIRST", "_LONGEST"):
        monkeypatch.setattr(retry, name, timedelta(milliseconds=1))
    real, failures, taken = served.ServedVersion.run, iter(range(12)), threading.Event()

    def run(version, *arguments):
        if next(failures, None) is not None:
            raise OSError(errno.EIO, "Input/output error")
        return real(version, *arguments)

    monkeypatch.setattr(ServedVersion, "run", run)
    for number in (1, 2, 3):
        numbers.publish(number)
    swap = VersionSwapper(numbers.deployment, 8, ServingMetrics(CollectorRegistry()), taken.set, pytest.fail)
    with swap:
        assert taken.wait(PATIENCE_SECONDS)
    assert swap.current is not None


def test_versions_that_failed_and_are_deleted_take_no_memory(numbers, watched):
    numbers.publish(1)
    watched.poll()
    for number in range(2, 30):
        numbers.publish(number, verdict="fail")
        assert watched.poll() == 1
        numbers.versions.delete(number - 2 if number > 3 else 0)
    assert len(watched.swap._loader._unsuitable) <= 3


def test_a_directory_without_manifest_does_not_exist(numbers, watched):
    numbers.publish(1)
    (numbers.publish(2) / MANIFEST).unlink()
    assert watched.poll() == 1
    assert watched.refused() == 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"schema": "0" * 64}, "another schema"),
        ({"weights": {"other": torch.zeros(())}}, "Missing key|Error.* in loading"),
        ({"weights": {"number": torch.zeros(3)}}, "Error.* in loading"),
        ({"weights": {"number": torch.tensor(torch.nan)}}, "not finite"),
        ({"model": ModelReference("os:system", {"command": "false"}, "regression")}, "it is of os:system"),
        ({"model": ModelReference("anabranch_serving_test_models:number", {}, "classification")}, "for classification"),
        (
            {"model": ModelReference("anabranch_serving_test_models:number", {"a": 1}, "regression")},
            r"other model.args \(a\) than \[model\] has now; set them back to serve it, or wait",
        ),
    ],
)
def test_a_version_that_does_not_fit_is_refused(numbers, watched, changes, sentence):
    numbers.publish(1)
    watched.poll()
    numbers.publish(2, **changes)
    assert watched.poll() == 1
    assert watched.refused() == 1
    (problem,) = watched.swap.problems
    assert problem.startswith("a version is refused: version 2: ")
    assert re.search(sentence, problem), problem


def test_a_factory_that_raises_refuses_the_version_and_nothing_else(deploy):
    publisher = deploy("broken")
    watched = Watched(publisher)
    publisher.publish(1)
    assert watched.poll() is None
    (problem,) = watched.swap.problems
    assert "the factory fails" in problem


def test_a_copied_directory_is_refused(numbers, watched):
    shutil.copytree(numbers.publish(1), numbers.versions.directory(2))
    assert watched.poll() == 1
    assert watched.refused() == 1


def test_a_stale_learners_version_is_refused(numbers, watched):
    numbers.publish(1, generation=2)
    assert watched.poll() == 1
    numbers.publish(2, generation=1)
    assert watched.poll() == 1
    numbers.publish(3, generation=3)
    assert watched.poll() == 3


def test_no_start_and_no_way_back_ends_at_a_stale_learners_version(numbers, watched):
    numbers.publish(1, generation=1)
    numbers.publish(2, generation=2)
    numbers.publish(3, generation=2)
    numbers.publish(4, generation=1)
    numbers.publish(5, generation=1)
    assert watched.poll() == 3
    assert "generation 1 is over" in watched.swap.refused[5]
    numbers.publish(6, generation=2)
    assert watched.poll() == 6
    fail(numbers, 6)
    assert watched.poll() == 3
    watched.swap.apply(reject, 3)
    assert watched.poll() == 2
    watched.swap.apply(promote, 4)
    assert watched.poll() == 4, "a person may choose it all the same"


def test_a_served_version_that_turns_out_to_be_a_stale_learners_yields(numbers, watched):
    numbers.publish(1, generation=1)
    numbers.publish(4, generation=1)
    assert watched.poll() == 4
    numbers.publish(2, generation=2)
    assert watched.poll() == 2
    numbers.publish(5, generation=1)
    assert watched.poll() == 2
    numbers.publish(6, generation=2)
    assert watched.poll() == 6


def test_trained_through_never_falls_on_a_partition_of_the_same_incarnation(numbers, watched):
    numbers.publish(1, offsets={"events:0": 5, "events:1": 7})
    assert watched.poll() == 1
    numbers.publish(2, offsets={"events:0": 6, "events:1": 6})
    numbers.publish(3, offsets={"events:0": 9})
    assert watched.poll() == 1
    assert watched.refused() == 2
    numbers.publish(4, offsets={"events:0": 5, "events:1": 7, "events:2": 0})
    assert watched.poll() == 4


def test_a_version_that_has_learned_less_replaces_one_that_failed_where_there_is_no_other(numbers, watched):
    numbers.publish(1, offsets={"events:0": 1000})
    assert watched.poll() == 1
    fail(numbers, 1)
    assert watched.poll() == 1
    numbers.publish(2, offsets={"events:0": 400}, generation=2)
    assert watched.poll() == 2, "the learner has returned to a checkpoint from before what was undone"


def test_a_topic_that_a_later_learner_no_longer_reads_withholds_no_version(numbers, watched):
    numbers.publish(1, offsets={"old:0": 1000, "events:0": 1000, "events:1": 5}, generation=1)
    assert watched.poll() == 1
    numbers.publish(2, offsets={"events:0": 1000, "events:1": 5}, generation=1)
    assert watched.poll() == 1, "a learner reads the same topics always"
    numbers.publish(3, offsets={}, generation=2)
    assert watched.poll() == 1, "a learner that has not read anything yet has learned less"
    numbers.publish(4, offsets={"events:0": 1000}, generation=2)
    assert watched.poll() == 1, "it reads the topic, and has not come to that partition yet"
    numbers.publish(5, offsets={"events:0": 1000, "events:1": 5}, generation=2)
    assert watched.poll() == 5


def test_a_recreated_topic_may_begin_again(numbers, watched):
    numbers.publish(1, offsets={"events:0": 5})
    watched.poll()
    numbers.publish(2, offsets={"events:0": 0}, incarnation=1)
    assert watched.poll() == 2


COUNT = "anabranch_serving_freshness_duration_seconds_count"


def newly_trained(rows, *ages):
    now = time.time()
    return NewlyTrained(rows, [int(1000 * (now - age)) for age in ages])


def test_freshness_counts_the_events_of_which_a_version_is_the_first_served_one(numbers, watched):
    numbers.publish(1, learned=newly_trained(1000, 90))
    watched.poll()
    assert watched.registry.get_sample_value(COUNT) == 0, "what was learned before this process began says nothing"
    numbers.publish(2, learned=newly_trained(300, 45))
    numbers.publish(3, learned=newly_trained(600, 20, 7), verdict="fail")
    watched.poll()
    numbers.publish(4, learned=newly_trained(100, 3.1))
    numbers.publish(5, learned=newly_trained(7, 20), verdict="fail")
    assert watched.poll() == 4
    bucket = "anabranch_serving_freshness_duration_seconds_bucket"
    bounds = ("3.0", "5.0", "10.0", "30.0", "60.0", "+Inf")
    served = [watched.registry.get_sample_value(bucket, {"le": bound}) for bound in bounds]
    assert served == pytest.approx([0, 100, 400, 700, 1000, 1000], abs=1000 / 32)
    assert watched.registry.get_sample_value(COUNT.replace("count", "sum")) == pytest.approx(
        300 * 45 + 300 * 20 + 300 * 7 + 100 * 3.1, rel=0.05
    )


def test_the_events_of_a_version_that_is_deleted_before_its_turn_are_not_lost(numbers, watched):
    numbers.publish(1)
    watched.poll()
    numbers.publish(2, learned=newly_trained(10, 0.1), verdict="fail")
    watched.poll()
    numbers.versions.delete(2)
    numbers.publish(3, learned=newly_trained(5, 0.1))
    watched.poll()
    assert watched.registry.get_sample_value(COUNT) == 15


def test_a_version_without_learned_events_or_with_a_torn_list_is_served(numbers, watched):
    numbers.publish(1)
    watched.poll()
    numbers.publish(2, learned=None)
    numbers.publish(3, learned=NewlyTrained(5, []))
    numbers.publish(4, learned=NewlyTrained(0, [5] * 5000))
    tear_manifest(numbers.publish(5))
    numbers.publish(6, learned=NewlyTrained(-5, [5]))
    numbers.publish(7, learned=NewlyTrained(5, [1 << 70]))
    assert watched.poll() == 4
    assert watched.registry.get_sample_value(COUNT) == 0
    assert watched.metrics.freshness_percentiles() == (None, None)


def test_events_that_wait_for_many_versions_are_all_counted(numbers, watched):
    numbers.publish(1)
    watched.poll()
    for number in range(2, 102):
        numbers.publish(number, learned=newly_trained(40, 10), verdict="fail")
    watched.poll()
    numbers.publish(102, learned=newly_trained(40, 10))
    watched.poll()
    assert watched.registry.get_sample_value(COUNT) == 101 * 40


@pytest.mark.slow
def test_the_old_version_is_freed_with_its_last_reference(numbers, watched):
    numbers.publish(1)
    watched.poll()
    assert watched.swap.current is not None
    gone = weakref.ref(watched.swap.current)
    numbers.publish(2)
    watched.poll()
    gc.collect()
    assert gone() is None


def test_a_state_file_that_cannot_be_written_is_a_problem_and_serving_continues(numbers, watched):
    numbers.publish(1)
    (numbers.versions.path / "state.json").mkdir()
    assert watched.poll() == 1
    (problem,) = watched.swap.problems
    assert "state.json" in problem


@pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")
def test_a_version_and_a_verdict_are_taken_when_they_appear_not_at_the_next_poll(numbers, monkeypatch):
    for name in ("POLL_EVERY", "POLL_ANYWAY"):
        monkeypatch.setattr(notice, name, timedelta(hours=1))
    taken: queue.SimpleQueue[None] = queue.SimpleQueue()
    numbers.publish(1)
    swap = VersionSwapper(
        numbers.deployment, 8, ServingMetrics(CollectorRegistry()), lambda: taken.put(None), pytest.fail
    )
    with swap:
        taken.get(timeout=PATIENCE_SECONDS)
        numbers.publish(2, verdict="fail")
        numbers.publish(3)
        taken.get(timeout=PATIENCE_SECONDS)
        assert swap.current is not None
        assert swap.current.number == 3
        verdict = numbers.publish(4, verdict="fail") / VERDICT
        replace_file(verdict, msgspec.json.encode(Verdict("pass")))
        taken.get(timeout=PATIENCE_SECONDS)
        assert swap.current.number == 4


def test_a_version_is_warmed_up_on_what_the_schema_allows(deploy):
    publisher = deploy("monthly")
    publisher.publish(1, weights={"effect.weight": torch.ones(12, 3)})
    assert Watched(publisher).poll() == 1


def test_the_first_version_is_warmed_up_on_batches_of_all_sizes_and_the_next_on_the_ends(numbers, watched, monkeypatch):
    rows: list[int] = []
    run = ServedVersion.run

    def noting(version, features, *more):
        rows.append(len(features["x"]))
        return run(version, features, *more)

    monkeypatch.setattr(ServedVersion, "run", noting)
    monkeypatch.setattr(served, "_WARM_UP", timedelta(hours=1))
    numbers.publish(1)
    watched.poll()
    assert sorted(rows) == [1, 2, 3, 4, 5, 6, 7, 8]
    rows.clear()
    numbers.publish(2)
    watched.poll()
    assert rows == [1], "nothing but plans remains of a batch on the CPU"


def test_a_slow_model_is_served_before_all_sizes_are_warm_which_go_on_with_the_next_versions_on_a_device(
    numbers, monkeypatch
):
    monkeypatch.setattr(served, "_WARM_UP", timedelta(0))
    with CudaRecorder():
        numbers.deployment = dataclasses.replace(numbers.deployment, device=torch.device("cuda", 0))
        watched = Watched(numbers)
        for number in range(1, 8):
            numbers.publish(number)
            assert watched.poll() == number
            assert numbers.deployment.template.warmed[0] == {*range(2, min(number + 2, 8)), 8}


def test_a_version_is_loaded_in_pieces_before_each_of_which_requests_may_run(numbers):
    numbers.publish(1)
    deployment, versions = numbers.deployment, numbers.versions
    pieces: list[str] = []
    first = load_version(deployment, versions.manifest(1), 8, lambda: pieces.append("first"))
    numbers.publish(2)
    second = load_version(deployment, versions.manifest(2), 8, lambda: pieces.append("second"))
    # Before it is read, before its only tensor, before it begins, before the module is copied, before it gets its
    # weights, and once requests may run, before its only layer is prepared, before and after it runs; at last before
    # garbage is collected.
    expected = ["first"] * 6 + ["second"] * 9
    assert pieces == expected
    assert gc.isenabled()
    second.run({"x": np.zeros((1, 4), np.float32)})
    assert pieces == expected
    assert [each.run({"x": np.zeros((1, 4), np.float32)})["prediction"].tolist() for each in (first, second)] == [
        [1],
        [2],
    ]


@pytest.mark.slow
def test_a_version_is_served_though_requests_always_wait(numbers):
    asked: list[None] = []
    parts = (numbers.deployment, 8, ServingMetrics(CollectorRegistry()), lambda: None, pytest.fail)
    swap = VersionSwapper(*parts, is_idle=lambda: bool(asked.append(None)))  # type: ignore[func-returns-value]
    numbers.publish(1)
    assert swap.poll()
    assert asked


def test_the_factory_is_called_once_and_versions_share_no_weights(numbers, watched, monkeypatch):
    built: list[object] = []
    build = deployment.build_on_device
    monkeypatch.setattr(deployment, "build_on_device", lambda *arguments: built.append(arguments) or build(*arguments))
    numbers.publish(1)
    watched.poll()
    first = watched.swap.current
    numbers.publish(2)
    watched.poll()
    assert len(built) == 1
    assert first is not None
    assert first.run({"x": np.zeros((1, 4), np.float32)})["prediction"].tolist() == [1]


def test_the_thread_takes_a_version_and_ends_with_its_context(numbers):
    taken = threading.Event()
    bugs: list[BaseException] = []
    swap = VersionSwapper(numbers.deployment, 8, ServingMetrics(CollectorRegistry()), taken.set, bugs.append)
    with swap:
        numbers.publish(1)
        assert taken.wait(PATIENCE_SECONDS)
    assert swap.current is not None
    assert not any(thread.name == "serving-swap" for thread in threading.enumerate())
    assert not bugs


def test_the_device_is_the_cpu_where_no_other_is_configured_or_exists():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_version_that_fails_on_one_row_is_refused_with_the_number_of_rows_and_the_line(deploy):
    publisher = deploy("squeezed")
    watched = Watched(publisher)
    publisher.publish(1)
    assert watched.poll() is None
    (sentence,) = watched.swap.problems
    assert "version 1: the model fails on 1 row of zeros: IndexError: Dimension out of range" in sentence
    assert re.search(r"test_models\.py, line \d+\)$", sentence)


def test_a_model_that_fails_on_a_single_event_is_refused_as_by_the_learner(deploy):
    with pytest.raises(ModelError, match=r"the model fails on a single event, x \[1, 4\].*IndexError"):
        deploy("pooled").deployment.check()


def test_a_command_that_cannot_be_saved_for_now_may_be_sent_again(numbers, watched, monkeypatch):
    numbers.publish(1)
    assert watched.poll() == 1

    def no_descriptor(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(type(numbers.versions), "write_state", no_descriptor)
        with pytest.raises(UnavailableError, match=r"cannot be saved for now: .*Too many open files"):
            watched.swap.apply(pin, 1)
    watched.swap.apply(pin, 1)
    assert watched.swap.state.pinned == 1
