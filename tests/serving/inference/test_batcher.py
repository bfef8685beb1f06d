"""Dynamic batching: which requests share a run of the model, which wait, and which are refused."""

import asyncio
import gc
import math
import tempfile
import threading
import weakref
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.device_sharing.lease import ServerMark, hold_server
from serving.config import ServingSettings
from serving.errors import BadRequestError, FailedError, TooManyRequestsError
from serving.inference.batcher import Batcher


class FakeVersion:
    """Doubles its input; fails on negative ones, or on all; waits for `go_on` when it is cleared.

    `tried` are the rows of each run, `runs` those of the runs that did not fail.
    """

    def __init__(self, number: int = 1) -> None:
        self.number = number
        self.runs: list[int] = []
        self.tried: list[int] = []
        self.threads: set[int] = set()
        self.running = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.broken = False

    def run(self, features: Mapping[str, Any], embed: bool = False) -> dict[str, Any]:
        x = features["x"]
        self.running.set()
        assert self.go_on.wait(30)
        self.threads.add(threading.get_ident())
        self.tried.append(len(x))
        if self.broken or (x < 0).any():
            raise IndexError("index out of range in self\nand a second line")
        self.runs.append(len(x))
        with np.errstate(over="ignore"):
            return {"prediction": x * np.float32(2)}

    def works(self) -> bool:
        return not self.broken


def batching(test: Callable[[Batcher], Awaitable[None]], **settings: Any) -> None:
    bugs: list[BaseException] = []

    async def main(mark: ServerMark) -> None:
        chosen = ServingSettings(**{"max_delay": timedelta(milliseconds=20), **settings})
        with Batcher(chosen, bugs.append, mark) as batcher:
            await asyncio.wait_for(test(batcher), 30)

    with tempfile.TemporaryDirectory() as folder, hold_server(Path(folder), timedelta(milliseconds=20)) as mark:
        asyncio.run(main(mark))
    assert not bugs


def ask(batcher: Batcher, version: FakeVersion, *values: float, peer: Hashable = None) -> asyncio.Task[Any]:
    x = np.array(values, np.float32)
    return asyncio.ensure_future(batcher.predict(version, {"x": x}, len(x), peer=peer))  # type: ignore[arg-type]


async def occupied(version: FakeVersion) -> None:
    """Wait until the model's thread is inside a run of this version."""
    await asyncio.to_thread(version.running.wait, 30)


def test_requests_that_wait_together_share_a_run_and_get_their_own_rows() -> None:
    version = FakeVersion()

    async def test(batcher: Batcher) -> None:
        answers = await asyncio.gather(ask(batcher, version, 1), ask(batcher, version, 2, 3), ask(batcher, version, 4))
        assert [answer["prediction"].tolist() for answer in answers] == [[2], [4, 6], [8]]

    batching(test)
    assert version.runs == [4]
    assert version.threads != {threading.get_ident()}


def test_a_full_batch_does_not_wait_for_the_delay() -> None:
    version = FakeVersion()

    async def test(batcher: Batcher) -> None:
        await asyncio.gather(*(ask(batcher, version, i) for i in range(4)))

    batching(test, max_batch=2, max_delay=timedelta(hours=1))
    assert version.runs == [2, 2]


def test_a_single_request_waits_no_longer_than_the_delay() -> None:
    version = FakeVersion()

    async def test(batcher: Batcher) -> None:
        assert (await ask(batcher, version, 5))["prediction"].tolist() == [10]

    batching(test, max_delay=timedelta(0))
    batching(test, max_delay=timedelta(milliseconds=1))


def test_requests_that_arrive_while_the_model_runs_are_one_batch_afterwards() -> None:
    version = FakeVersion()

    async def test(batcher: Batcher) -> None:
        version.go_on.clear()
        first = ask(batcher, version, 0)
        await occupied(version)
        others = [ask(batcher, version, i) for i in range(1, 6)]
        await asyncio.sleep(0)
        version.go_on.set()
        await asyncio.gather(first, *others)

    batching(test, max_delay=timedelta(0))
    assert version.runs == [1, 5]


def test_a_request_of_more_rows_than_a_batch_is_run_in_pieces_and_answered_at_once() -> None:
    version = FakeVersion()

    async def test(batcher: Batcher) -> None:
        assert (await ask(batcher, version, *range(10)))["prediction"].tolist() == [2 * i for i in range(10)]

    batching(test, max_batch=4)
    assert version.runs == [4, 4, 2]


def test_a_batch_has_one_version() -> None:
    old, new = FakeVersion(1), FakeVersion(2)

    async def test(batcher: Batcher) -> None:
        await asyncio.gather(
            ask(batcher, old, 1), ask(batcher, old, 2), ask(batcher, new, 3), ask(batcher, new, 4), ask(batcher, old, 5)
        )

    batching(test)
    assert old.runs == [2, 1]
    assert new.runs == [2]


def test_rows_beyond_the_queue_are_refused_until_others_are_answered() -> None:
    version = FakeVersion()

    async def test(batcher: Batcher) -> None:
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


def test_a_cancelled_request_leaves_the_queue_and_costs_no_run() -> None:
    version = FakeVersion()

    async def test(batcher: Batcher) -> None:
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


def test_an_input_on_which_the_model_fails_is_a_bad_request_and_affects_no_other() -> None:
    version = FakeVersion()

    async def test(batcher: Batcher) -> None:
        good, bad, other = ask(batcher, version, 1), ask(batcher, version, -1), ask(batcher, version, 2)
        assert (await good)["prediction"].tolist() == [2]
        assert (await other)["prediction"].tolist() == [4]
        with pytest.raises(BadRequestError, match=r"fails on this input: IndexError: index out of range in self$"):
            await bad

    batching(test)


def test_a_bad_input_among_many_is_found_by_bisection() -> None:
    assert runs_to_find(64, {40}) == 1 + 2 * 6


@pytest.mark.parametrize("bad", [range(64), range(0, 64, 2), range(32), range(63), [0, 63], [3, 17, 40, 41]])
def test_the_search_for_bad_inputs_costs_little_more_than_a_run_for_each_request(bad: Collection[int]) -> None:
    assert runs_to_find(64, bad) <= 64 + 2 * 6 + 3


@pytest.mark.parametrize("n", [2, 3, 5, 7, 33])
def test_that_bound_holds_for_batches_of_any_size(n: int) -> None:
    for bad in ([0], [n - 1], range(n), range(0, n, 2)):
        assert runs_to_find(n, bad) <= n + 2 * int(math.log2(n)) + 3


def runs_to_find(n: int, bad: Collection[int]) -> int:
    """Return the runs of the model that a batch of `n` requests costs, of which these are bad."""
    version = FakeVersion()

    async def test(batcher: Batcher) -> None:
        rows = [np.array([-1 if row in bad else row], np.float32) for row in range(n)]
        answers = await asyncio.gather(
            *(batcher.predict(version, {"x": row}, 1) for row in rows),  # type: ignore[arg-type]
            return_exceptions=True,
        )
        assert [type(answer) for answer in answers] == [BadRequestError if row in bad else dict for row in range(n)]

    batching(test)
    return len(version.tried)


def test_requests_of_a_client_that_made_the_model_raise_do_not_share_a_batch_again() -> None:
    version = FakeVersion()

    async def test(batcher: Batcher) -> None:
        for _ in range(3):
            version.tried.clear()
            good = [ask(batcher, version, row, peer="good") for row in range(8)]
            bad = [ask(batcher, version, -1, peer="bad") for _ in range(2)]
            answers = await asyncio.gather(*good, *bad, return_exceptions=True)
            assert [type(answer) for answer in answers] == [dict] * 8 + [BadRequestError] * 2
        assert sorted(version.tried) == [1, 1, 8]

    batching(test)


def test_while_many_such_requests_wait_the_others_get_every_second_run() -> None:
    version = FakeVersion()

    async def test(batcher: Batcher) -> None:
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


def test_rows_that_run_alone_count_in_the_queue_and_can_be_cancelled() -> None:
    version = FakeVersion()

    async def test(batcher: Batcher) -> None:
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


def test_a_model_that_fails_on_every_input_is_counted_against_no_client() -> None:
    version = FakeVersion()
    version.broken = True

    async def test(batcher: Batcher) -> None:
        with pytest.raises(FailedError):
            await ask(batcher, version, 1, peer="a")
        version.broken = False
        await asyncio.gather(ask(batcher, version, 1, peer="a"), ask(batcher, version, 2, peer="b"))

    batching(test)
    assert version.runs == [2]


def test_an_answer_that_is_not_finite_is_refused_alone() -> None:
    version = FakeVersion()

    async def test(batcher: Batcher) -> None:
        good, bad = ask(batcher, version, 1), ask(batcher, version, 3e38)
        assert (await good)["prediction"].tolist() == [2]
        with pytest.raises(BadRequestError, match="no finite prediction"):
            await bad

    batching(test)


def test_a_model_that_fails_on_every_input_is_a_server_error() -> None:
    version = FakeVersion()
    version.broken = True

    async def test(batcher: Batcher) -> None:
        with pytest.raises(FailedError, match="version 1 fails on every input"):
            await ask(batcher, version, 1)

    batching(test)


def test_a_version_is_freed_with_its_last_request() -> None:
    async def test(batcher: Batcher) -> None:
        version = FakeVersion()
        gone = weakref.ref(version)
        await ask(batcher, version, 1)
        del version
        await ask(batcher, FakeVersion(2), 1)
        gc.collect()
        assert gone() is None

    batching(test)
