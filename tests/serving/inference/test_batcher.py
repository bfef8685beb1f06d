"""Dynamic batching: which requests share a run of the model, which wait, and which are refused."""

import asyncio
import contextlib
import gc
import math
import selectors
import tempfile
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anabranch.learner.device.lease import hold_server
from anabranch.serving.errors import BadRequestError, FailedError, TooManyRequestsError, UnavailableError
from anabranch.serving.inference import batch_run
from anabranch.serving.inference.batch_run import BatchRunner
from anabranch.serving.inference.batcher import Batcher, RecentFailures
from anabranch.serving.settings import ServingSettings
from tests.support.waiting import PATIENCE_SECONDS


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_peer_is_removed_ten_seconds_after_its_last_failure():
    clock = Clock()
    failures = RecentFailures(clock)
    failures.add("a")
    clock.now += 6
    failures.add("a")
    clock.now += 9
    assert "a" in failures
    clock.now += 1
    assert "a" not in failures


def test_a_peer_that_was_not_added_or_has_no_name_is_not_contained():
    failures = RecentFailures()
    failures.add("a")
    failures.add(None)
    assert "b" not in failures
    assert None not in failures
    assert len(failures) == 1


def test_expired_peers_are_removed_when_another_is_added():
    clock = Clock()
    failures = RecentFailures(clock)
    for peer in range(100):
        failures.add(peer)
    clock.now += 10
    failures.add("new")
    assert len(failures) == 1


def test_the_oldest_peers_are_removed_for_newer_ones():
    failures = RecentFailures(Clock())
    failures.add("again")
    for peer in range(4095):
        failures.add(peer)
    failures.add("again")
    failures.add("one more")
    assert len(failures) == 4096
    assert 0 not in failures
    assert all(peer in failures for peer in ("again", 1, "one more"))


class FakeVersion:
    """Doubles its input; fails on negative ones, or on all; waits for `go_on` when it is cleared.

    `tried` are the rows of each run, `runs` those of the runs that did not fail.
    """

    def __init__(self, number=1):
        self.number = number
        self.runs: list[int] = []
        self.tried: list[int] = []
        self.threads: set[int] = set()
        self.running = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.broken = False

    def run(self, features, embed=False):
        x = features["x"]
        self.running.set()
        assert self.go_on.wait(PATIENCE_SECONDS)
        self.threads.add(threading.get_ident())
        self.tried.append(len(x))
        if self.broken or (x < 0).any():
            raise IndexError("index out of range in self\nand a second line")
        self.runs.append(len(x))
        with np.errstate(over="ignore"):
            return {"prediction": x * np.float32(2)}

    def works(self):
        return not self.broken


class SteppingLoop(asyncio.SelectorEventLoop):
    """A loop whose time is the same for all callbacks of a turn, and goes on while it waits."""

    def __init__(self):
        self._now = time.monotonic()
        loop = self

        class Selector(selectors.DefaultSelector):
            def select(self, timeout=None):
                ready = super().select(timeout)
                loop._now = time.monotonic()
                return ready

        super().__init__(Selector())

    def time(self):
        return self._now


def batching(test, expected=None, waited=lambda row_seconds: None, **settings):
    """Run a test with a batcher. However busy the machine is, requests of one turn of the loop come at one time."""
    bugs: list[BaseException] = []

    async def main(mark):
        chosen = ServingSettings(**{"max_delay": timedelta(milliseconds=20), **settings})
        with Batcher(chosen, bugs.append, mark, waited=waited) as batcher:
            await asyncio.wait_for(test(batcher), 30)

    with tempfile.TemporaryDirectory() as folder, hold_server(Path(folder), timedelta(milliseconds=20)) as mark:
        with asyncio.Runner(loop_factory=SteppingLoop) as runner:
            runner.run(main(mark))
    assert [type(bug) for bug in bugs] == ([] if expected is None else [expected])


def ask(batcher, version, *values, peer=None):
    x = np.array(values, np.float32)
    return asyncio.ensure_future(batcher.predict(version, {"x": x}, len(x), peer=peer))  # type: ignore[arg-type]


async def occupied(version):
    """Wait until the model's thread is inside a run of this version."""
    await asyncio.to_thread(version.running.wait, 30)


def test_requests_that_wait_together_share_a_run_and_get_their_own_rows():
    version = FakeVersion()

    async def test(batcher):
        answers = await asyncio.gather(ask(batcher, version, 1), ask(batcher, version, 2, 3), ask(batcher, version, 4))
        assert [answer["prediction"].tolist() for answer in answers] == [[2], [4, 6], [8]]

    batching(test)
    assert version.runs == [4]
    assert version.threads != {threading.get_ident()}


def test_a_full_batch_does_not_wait_for_the_delay():
    version = FakeVersion()

    async def test(batcher):
        await asyncio.gather(*(ask(batcher, version, i) for i in range(4)))

    batching(test, max_batch=2, max_delay=timedelta(hours=1))
    assert version.runs == [2, 2]


def test_a_single_request_waits_no_longer_than_the_delay():
    version = FakeVersion()

    async def test(batcher):
        assert (await ask(batcher, version, 5))["prediction"].tolist() == [10]

    batching(test, max_delay=timedelta(0))
    batching(test, max_delay=timedelta(milliseconds=1))


def test_the_time_that_rows_wait_is_counted_also_of_requests_that_are_given_up():
    version = FakeVersion()
    counted: list[float] = []

    async def test(batcher):
        loop = asyncio.get_running_loop()
        version.go_on.clear()
        first = ask(batcher, version, 0)
        await occupied(version)
        counted.clear()
        begin = loop.time()
        kept, given_up = ask(batcher, version, 1, 2, 3), ask(batcher, version, *range(4))
        await asyncio.sleep(0)
        added = loop.time()
        await asyncio.to_thread(version.go_on.wait, 0.02)
        before = loop.time()
        given_up.cancel()
        await asyncio.wait([given_up])
        after = loop.time()
        assert 4 * (before - added) <= counted.pop() <= 4 * (after - begin)
        version.go_on.set()
        await asyncio.gather(first, kept)
        assert 3 * (after - added) <= counted.pop() <= 3 * (loop.time() - begin)
        assert counted == []

    batching(test, waited=counted.append, max_delay=timedelta(0))


def test_requests_that_arrive_while_the_model_runs_are_one_batch_afterwards():
    version = FakeVersion()

    async def test(batcher):
        version.go_on.clear()
        first = ask(batcher, version, 0)
        await occupied(version)
        others = [ask(batcher, version, i) for i in range(1, 6)]
        await asyncio.sleep(0)
        version.go_on.set()
        await asyncio.gather(first, *others)

    batching(test, max_delay=timedelta(0))
    assert version.runs == [1, 5]


def test_a_request_of_more_rows_than_a_batch_is_run_in_pieces_and_answered_at_once():
    version = FakeVersion()

    async def test(batcher):
        assert (await ask(batcher, version, *range(10)))["prediction"].tolist() == [2 * i for i in range(10)]

    batching(test, max_batch=4)
    assert version.runs == [4, 4, 2]


def test_a_batch_has_one_version():
    old, new = FakeVersion(1), FakeVersion(2)

    async def test(batcher):
        await asyncio.gather(
            ask(batcher, old, 1), ask(batcher, old, 2), ask(batcher, new, 3), ask(batcher, new, 4), ask(batcher, old, 5)
        )

    batching(test)
    assert old.runs == [2, 1]
    assert new.runs == [2]


def test_rows_beyond_the_queue_are_refused_until_others_are_answered():
    version = FakeVersion()

    async def test(batcher):
        version.go_on.clear()
        first = ask(batcher, version, 0)
        await occupied(version)
        waiting = [ask(batcher, version, 1, 2), ask(batcher, version, 3)]
        await asyncio.sleep(0)
        with pytest.raises(TooManyRequestsError, match="3 rows wait already"):
            await ask(batcher, version, 4, 5)
        version.go_on.set()
        await asyncio.gather(first, *waiting)
        await ask(batcher, version, 4, 5)

    batching(test, max_queue=4, max_delay=timedelta(0))


def test_a_cancelled_request_leaves_the_queue_and_costs_no_run():
    version = FakeVersion()

    async def test(batcher):
        version.go_on.clear()
        first = ask(batcher, version, 0)
        await occupied(version)
        gone = ask(batcher, version, 1, 2, 3)
        stays = ask(batcher, version, 4)
        await asyncio.sleep(0)
        gone.cancel()
        first.cancel()
        await asyncio.wait([gone, first])
        room = ask(batcher, version, 5, 6, 7)
        await asyncio.sleep(0)
        version.go_on.set()
        await asyncio.gather(stays, room)

    batching(test, max_queue=4, max_delay=timedelta(0))
    assert version.runs == [1, 4]


def test_a_run_that_ends_with_the_server_and_has_no_request_left_is_no_error(tmp_path):
    version = FakeVersion()
    version.go_on.clear()
    errors: list[dict[str, Any]] = []

    async def main():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        with hold_server(tmp_path, timedelta(milliseconds=20)) as mark:
            with Batcher(ServingSettings(max_delay=timedelta(0)), errors.append, mark) as batcher:
                request = ask(batcher, version, 1)
                await occupied(version)
                request.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await request
                version.go_on.set()
        await asyncio.sleep(0)  # the loop runs what the model's thread left for it

    asyncio.run(main())
    assert version.runs == [1]
    assert errors == []


def test_an_input_on_which_the_model_fails_is_a_bad_request_and_affects_no_other():
    version = FakeVersion()

    async def test(batcher):
        good, bad, other = ask(batcher, version, 1), ask(batcher, version, -1), ask(batcher, version, 2)
        assert (await good)["prediction"].tolist() == [2]
        assert (await other)["prediction"].tolist() == [4]
        with pytest.raises(BadRequestError, match=r"fails on this input: IndexError: index out of range in self$"):
            await bad

    batching(test)


def test_a_bad_input_among_many_is_found_by_bisection():
    assert runs_to_find(64, {40}) == 1 + 2 * 6


@pytest.mark.parametrize("bad", [range(64), range(0, 64, 2), range(32), range(63), [0, 63], [3, 17, 40, 41]])
def test_the_search_for_bad_inputs_costs_little_more_than_a_run_for_each_request(bad):
    assert runs_to_find(64, bad) <= 64 + 2 * 6 + 3


@pytest.mark.parametrize("n", [2, 3, 5, 7, 33])
def test_that_bound_holds_for_batches_of_any_size(n):
    for bad in ([0], [n - 1], range(n), range(0, n, 2)):
        assert runs_to_find(n, bad) <= n + 2 * int(math.log2(n)) + 3


def runs_to_find(n, bad):
    """Return the runs of the model that a batch of `n` requests costs, of which these are bad."""
    version = FakeVersion()

    async def test(batcher):
        rows = [np.array([-1 if row in bad else row], np.float32) for row in range(n)]
        answers = await asyncio.gather(
            *(batcher.predict(version, {"x": row}, 1) for row in rows),  # type: ignore[arg-type]
            return_exceptions=True,
        )
        assert [type(answer) for answer in answers] == [BadRequestError if row in bad else dict for row in range(n)]

    batching(test)
    return len(version.tried)


def test_requests_of_a_client_that_made_the_model_raise_do_not_share_a_batch_again():
    version = FakeVersion()

    async def test(batcher):
        for _ in range(3):
            version.tried.clear()
            good = [ask(batcher, version, row, peer="good") for row in range(8)]
            bad = [ask(batcher, version, -1, peer="bad") for _ in range(2)]
            answers = await asyncio.gather(*good, *bad, return_exceptions=True)
            assert [type(answer) for answer in answers] == [dict] * 8 + [BadRequestError] * 2
        assert sorted(version.tried) == [1, 1, 8]

    batching(test)


def test_while_many_such_requests_wait_the_others_get_every_second_run():
    version = FakeVersion()

    async def test(batcher):
        with pytest.raises(BadRequestError):
            await ask(batcher, version, -1, peer="bad")
        version.go_on.clear()
        version.running.clear()
        first = ask(batcher, version, 0)
        await occupied(version)
        version.tried.clear()
        bad = [ask(batcher, version, -1, peer="bad") for _ in range(4)]
        good = [ask(batcher, version, 1, 2, peer="good") for _ in range(4)]
        await asyncio.sleep(0)
        version.go_on.set()
        await asyncio.gather(first, *good, *bad, return_exceptions=True)
        assert version.tried[1:] == [1, 4, 1, 4, 1, 1]

    batching(test, max_batch=4, max_delay=timedelta(0))


def test_rows_that_run_alone_count_in_the_queue_and_can_be_cancelled():
    version = FakeVersion()

    async def test(batcher):
        with pytest.raises(BadRequestError):
            await ask(batcher, version, -1, peer="bad")
        version.go_on.clear()
        version.running.clear()
        first = ask(batcher, version, 0)
        await occupied(version)
        waiting = ask(batcher, version, 1, 2, 3, peer="bad")
        await asyncio.sleep(0)
        with pytest.raises(TooManyRequestsError, match="3 rows wait already"):
            await ask(batcher, version, 4, 5)
        waiting.cancel()
        await asyncio.wait([waiting])
        others = ask(batcher, version, 4, 5)
        await asyncio.sleep(0)
        version.go_on.set()
        await asyncio.gather(first, others)

    batching(test, max_queue=4, max_delay=timedelta(0))
    assert version.runs == [1, 2]


def test_a_model_that_fails_on_every_input_is_counted_against_no_client():
    version = FakeVersion()
    version.broken = True

    async def test(batcher):
        with pytest.raises(FailedError):
            await ask(batcher, version, 1, peer="a")
        version.broken = False
        await asyncio.gather(ask(batcher, version, 1, peer="a"), ask(batcher, version, 2, peer="b"))

    batching(test)
    assert version.runs == [2]


def test_an_answer_that_is_not_finite_is_refused_alone():
    version = FakeVersion()

    async def test(batcher):
        good, bad = ask(batcher, version, 1), ask(batcher, version, 3e38)
        assert (await good)["prediction"].tolist() == [2]
        with pytest.raises(BadRequestError, match="no finite prediction"):
            await bad

    batching(test)


def test_a_model_that_fails_on_every_input_is_a_server_error():
    version = FakeVersion()
    version.broken = True

    async def test(batcher):
        with pytest.raises(FailedError, match="version 1 fails on every input"):
            await ask(batcher, version, 1)

    batching(test)


def test_a_version_is_freed_with_its_last_request():
    async def test(batcher):
        version = FakeVersion()
        gone = weakref.ref(version)
        await ask(batcher, version, 1)
        del version
        await ask(batcher, FakeVersion(2), 1)
        gc.collect()
        assert gone() is None

    batching(test)


class FailingVersion(FakeVersion):
    """Raises an error as often as it is said to, or in runs of more rows than fit."""

    def __init__(self, error, times=math.inf, fits=0):
        super().__init__()
        self.error, self.times, self.fits = error, times, fits

    def run(self, features, embed=False):
        if len(features["x"]) > self.fits and self.times > 0:
            self.times -= 1
            self.tried.append(len(features["x"]))
            raise self.error
        return super().run(features, embed)

    def works(self):
        raise AssertionError("it was asked whether it works")


LOST = torch.AcceleratorError("CUDA error: device-side assert triggered")
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def test_a_lost_device_ends_the_worker_after_one_run_and_all_requests_are_503():
    version = FailingVersion(LOST, times=1)

    async def test(batcher):
        batch = [ask(batcher, version, 1), ask(batcher, version, 2)]
        waiting = [ask(batcher, FakeVersion(2), 3), ask(batcher, version, 4, peer="another")]
        for answer in await asyncio.gather(*batch, *waiting, return_exceptions=True):
            assert isinstance(answer, UnavailableError)
            assert answer.retry_after is not None
        with pytest.raises(UnavailableError):
            await ask(batcher, version, 5)

    batching(test, type(LOST), max_batch=2)
    assert version.tried == [2], "it was run again"


def test_a_device_that_is_lost_when_zeros_are_tried_ends_the_worker_too():
    class Version(FakeVersion):
        def works(self):
            raise LOST

    async def test(batcher):
        with pytest.raises(UnavailableError):
            await ask(batcher, Version(), -1)

    batching(test, type(LOST))


@pytest.mark.parametrize("fits", [1, 3, 6])
def test_a_batch_that_runs_out_of_memory_is_run_in_pieces_that_fit(fits):
    version = FailingVersion(NO_MEMORY, fits=fits)

    async def test(batcher):
        answers = await asyncio.gather(*(ask(batcher, version, row, row) for row in range(4)))
        assert [answer["prediction"].tolist() for answer in answers] == [[2 * row] * 2 for row in range(4)]
        assert batcher.problem == f"the model ran out of memory in the last minute: 8 rows were run {most} at a time"

    most = {1: 1, 3: 2, 6: 4}[fits]
    batching(test)
    assert version.runs == [most] * (8 // most)


@pytest.mark.parametrize("rows", [1, 2])
def test_memory_in_cycles_that_a_model_leaves_is_free_after_a_batch_that_has_none(rows):
    class Kept:
        def __init__(self):
            self.itself = self

    class Version(FakeVersion):
        kept: "weakref.ref[Kept] | None" = None

        def run(self, features, embed=False):
            if self.kept is not None and self.kept() is not None:
                raise NO_MEMORY
            self.kept = weakref.ref(Kept())
            return super().run(features, embed)

    async def test(batcher):
        gc.disable()  # as rare as a server has it
        try:
            await ask(batcher, version, 1)
            assert version.kept is not None
            assert version.kept() is not None
            with contextlib.suppress(UnavailableError):
                await ask(batcher, version, *range(rows))
            assert version.kept() is None
        finally:
            gc.enable()

    version = Version()
    batching(test)


def test_a_request_that_memory_does_not_suffice_for_is_503_and_others_are_answered():
    class Version(FakeVersion):
        def run(self, features, embed=False):
            if (features["x"] == 7).any():
                raise NO_MEMORY
            return super().run(features, embed)

    async def test(batcher):
        good, big, other = ask(batcher, version, 1), ask(batcher, version, 7, peer="big"), ask(batcher, version, 2)
        with pytest.raises(UnavailableError, match="too little memory for now") as raised:
            await big
        assert raised.value.retry_after is not None
        assert ((await good)["prediction"].tolist(), (await other)["prediction"].tolist()) == ([2], [4])
        assert batcher.problem is not None
        assert batcher.problem.endswith("a request of 1 rows was answered 503")
        version.runs.clear()
        again = [ask(batcher, version, row, peer=peer) for row, peer in ((1, None), (7, "big"), (2, None))]
        await asyncio.gather(*again, return_exceptions=True)
        assert version.runs == [2], "its client costs others a run again"

    version = Version()
    batching(test)


def test_memory_that_does_not_suffice_to_try_zeros_is_no_fault_of_the_model():
    class Version(FakeVersion):
        def works(self):
            raise NO_MEMORY

    async def test(batcher):
        with pytest.raises(UnavailableError, match="too little memory for now"):
            await ask(batcher, Version(), -1)

    batching(test)


def test_cached_memory_is_freed_before_a_batch_is_tried_again_and_the_problem_ends_after_a_minute(monkeypatch):
    freed: list[torch.device] = []
    monkeypatch.setattr(batch_run, "free_cached_memory", freed.append)
    device, now = torch.device("cuda", 1), [0.0]
    runner = BatchRunner(4, device, lambda: now[0])
    version: Any = FailingVersion(NO_MEMORY, times=1)
    x = np.zeros(4, np.float32)
    request = batch_run.QueuedRequest(version, {"x": x}, 4, 0.0, None, False, None)  # type: ignore[arg-type]
    assert runner.problem is None
    runner.run([request])
    assert isinstance(request.outcome, dict)
    assert freed == [device]
    now[0] = 59
    assert runner.problem is not None
    now[0] = 60
    assert runner.problem is None
