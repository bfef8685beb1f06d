"""An erasure is complete only once the object store has none of the events either; erasing goes on meanwhile."""

import time

import pytest

from anabranch.core.shutdown import Deadline
from anabranch.learner.checkpoints.background_erasure import BackgroundErasure
from anabranch.learner.checkpoints.erase_checkpoints import Eraser
from anabranch.replay.erasure.erased_events import ByRange
from tests.support.waiting import PATIENCE


class FakeMirror:
    """Uploads whose object store has what a test says."""

    url = "s3://bucket/prefix"

    def __init__(self):
        self.has_all = False
        self.erased: list[int] = []

    def erase_through(self, through):
        self.erased.append(through)

    def has_erased(self, through):
        return self.has_all


class ErasureBench:
    """The erasure of a learner that has one checkpoint."""

    def __init__(self, bench):
        self.log, self.checkpointer, self.mirror = bench.log, bench.checkpointer, FakeMirror()
        self.erasure = BackgroundErasure(self.log, bench.checkpoints, self.checkpointer, self.mirror)

    def append(self, by="command"):
        return self.log.append([ByRange(time=0.0, by=by, partition="t#0[0]", first=1, last=2)])[0].number

    def apply(self, number):
        """Erase the events of all records up to a number from the files of this host."""
        self.erasure.finish(number, Deadline(PATIENCE))


@pytest.fixture
def bench(make_bench):
    learner = make_bench(2)
    learner.run()
    learner.finish()
    return ErasureBench(learner)


def test_it_is_recorded_as_applied_once_the_object_store_has_none_of_the_events(bench):
    number = bench.append()
    bench.apply(number)
    bench.erasure.advance(number)
    assert (bench.log.through, bench.erasure.through, bench.mirror.erased) == (0, 0, [number])
    assert bench.checkpointer.is_due(), "nothing replaces the checkpoint with the events"
    bench.mirror.has_all = True
    bench.erasure.advance(number)
    assert (bench.log.through, bench.erasure.through) == (number, number)


def test_files_are_erased_while_the_object_store_is_away(bench):
    for number in (bench.append(), bench.append()):
        bench.apply(number)
    assert bench.mirror.erased == [1, 2]
    assert bench.log.through == 0
    bench.mirror.has_all = True
    bench.erasure.advance(2)
    assert bench.log.through == 2


def test_records_in_a_row_do_not_make_a_checkpoint_each(bench, monkeypatch):
    begin = now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    asked: list[float] = []
    monkeypatch.setattr(bench.checkpointer, "request", lambda: asked.append(now - begin))
    for second in range(25):
        now = begin + second
        bench.apply(bench.append())
        bench.erasure.advance(bench.log.count)
    assert asked == [0, 10, 20]


def test_a_long_wait_is_a_problem_until_it_is_over(bench, monkeypatch):
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


def test_tombstones_are_gathered_the_longer_the_more_a_rewrite_takes_and_a_command_is_not(bench, monkeypatch):
    bench.mirror.has_all, now, rewrites = True, 1000.0, list[float]()
    rewrite = Eraser.run

    def slow(eraser, *args):
        nonlocal now
        rewrites.append(now)
        now += 0.5  # of the rewrite
        return rewrite(eraser, *args)

    def advance():
        bench.erasure.advance(bench.log.count)
        while bench.erasure._work is not None:
            bench.checkpointer.wait(Deadline(PATIENCE))
            bench.erasure.advance(bench.log.count)

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(Eraser, "run", slow)
    for _ in range(500):
        bench.append(by="events#0[0]@7")
        advance()
        now += 0.2
    assert len(rewrites) == 4, "100 s, of which each rewrite takes half a second, and 25 s between two"
    assert bench.erasure.through < bench.log.count, "what is not rewritten is not said to be erased"
    number = bench.append()
    advance()
    assert bench.erasure.through == number == bench.log.through
    now += 25.0
    bench.append(by="events#0[0]@8")
    advance()
    bench.append(by="events#0[0]@9")
    advance()
    assert bench.erasure.through == number + 1
    bench.erasure.finish(number + 2, Deadline(PATIENCE))
    assert bench.erasure.through == number + 2, "the end of the learner waits for no more tombstones"
