"""An erasure is complete only once the object store has none of the events either; erasing goes on meanwhile."""

import time
from collections.abc import Callable
from datetime import timedelta

import pytest

from learner.checkpointing.background_erasure import BackgroundErasure
from learner.runtime.shutdown import Deadline
from replay.erasure.erased_events import ByRange
from tests.learner.learner_bench import LearnerBench


class FakeMirror:
    """Uploads whose object store has what a test says."""

    url = "s3://bucket/prefix"

    def __init__(self) -> None:
        self.has_all = False
        self.erased: list[int] = []

    def erase(self, through: int) -> None:
        self.erased.append(through)

    def has_erased(self, through: int) -> bool:
        return self.has_all


class ErasureBench:
    """The erasure of a learner that has one checkpoint."""

    def __init__(self, bench: LearnerBench) -> None:
        self.log, self.checkpointer, self.mirror = bench.log, bench.checkpointer, FakeMirror()
        folder = bench.checkpoints.path.parent / "replay"
        self.erasure = BackgroundErasure(
            self.log, bench.checkpoints, folder, None, self.checkpointer, dict, self.mirror
        )

    def append(self) -> int:
        return self.log.append([ByRange(time=0.0, by="command", partition="t#0[0]", first=1, last=2)])[0].number

    def apply(self, number: int) -> None:
        """Erase the events of all records up to a number from the files of this host."""
        self.erasure.finish(number, Deadline(timedelta(seconds=20)))


@pytest.fixture
def bench(make_bench: Callable[..., LearnerBench]) -> ErasureBench:
    learner = make_bench(2)
    learner.run()
    learner.finish()
    return ErasureBench(learner)


def test_it_is_recorded_as_applied_once_the_object_store_has_none_of_the_events(bench: ErasureBench) -> None:
    number = bench.append()
    bench.apply(number)
    bench.erasure.advance(number)
    assert (bench.log.through, bench.erasure.through, bench.mirror.erased) == (0, 0, [number])
    assert bench.checkpointer.requested, "nothing replaces the checkpoint with the events"
    bench.mirror.has_all = True
    bench.erasure.advance(number)
    assert (bench.log.through, bench.erasure.through) == (number, number)


def test_files_are_erased_while_the_object_store_is_away(bench: ErasureBench) -> None:
    for number in (bench.append(), bench.append()):
        bench.apply(number)
    assert bench.mirror.erased == [1, 2]
    assert bench.log.through == 0
    bench.mirror.has_all = True
    bench.erasure.advance(2)
    assert bench.log.through == 2


def test_records_in_a_row_do_not_make_a_checkpoint_each(bench: ErasureBench, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    asked: list[float] = []
    monkeypatch.setattr(bench.checkpointer, "request", lambda: asked.append(now - begin))
    for second in range(25):
        now = begin + second
        bench.apply(bench.append())
        bench.erasure.advance(bench.log.count)
    assert asked == [0, 10, 20]


def test_a_long_wait_is_a_problem_until_it_is_over(bench: ErasureBench, monkeypatch: pytest.MonkeyPatch) -> None:
    number = bench.append()
    bench.apply(number)
    assert bench.erasure.problem is None
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 11)
    bench.erasure.advance(number)
    assert bench.erasure.problem is not None
    assert bench.erasure.problem.startswith("erased events are still in s3://bucket/prefix: ")
    bench.mirror.has_all = True
    bench.erasure.advance(number)
    assert bench.erasure.problem is None
