"""Pages that are made ahead of what is written."""

import mmap
import resource
import sys
import threading

import numpy as np
import pytest
import torch

from anabranch.replay.tiers.memory import MemoryTier, Pages
from tests.support.waiting import PATIENCE_SECONDS

SIZE = 24_000_000
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux makes pages ahead")


def fresh(size):
    """Return zeros whose pages do not exist yet: those of `np.zeros` may be of memory that was freed."""
    return np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def faults():
    """Return how many pages this thread has waited for so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


@pytest.fixture
def started():
    """Returns the threads that make pages, but for those of other tests."""
    before = threading.enumerate()
    return lambda: [each for each in threading.enumerate() if each.name == "pages" and each not in before]


@linux
def test_what_is_written_finds_its_pages_made_and_what_was_there_stays(started):
    memory = fresh(SIZE)
    memory[:100], memory[-100:] = 7, 9
    pages = Pages(memory.ctypes.data, SIZE)
    pages.request_ahead(SIZE)
    for thread in started():  # none, if it has made all already, and has ended
        thread.join(PATIENCE_SECONDS)
    assert pages.all_requested
    before = faults()
    memory[4096:-4096:4096] = 1
    waited = faults() - before
    if waited > SIZE // 8192:
        pytest.skip("this Linux makes no pages ahead")
    assert waited < 10
    assert (memory[:100] == 7).all()
    assert (memory[-100:] == 9).all()
    pages.close()


@linux
def test_no_more_are_made_than_a_little_ahead_and_none_after_the_end(started):
    memory = fresh(SIZE * 4)
    pages = Pages(memory.ctypes.data, memory.nbytes)
    pages.request_ahead(SIZE)
    assert not pages.all_requested
    pages.close()
    assert not started()
    before = faults()
    memory[SIZE * 2 :: 4096] = 1
    assert faults() > before, "pages far ahead were made"


def test_a_small_memory_has_no_thread(started):
    memory = np.zeros(1000, np.uint8)
    pages = Pages(memory.ctypes.data, memory.nbytes)
    assert pages.all_requested
    assert not started()
    pages.close()


def test_a_memory_tier_that_is_closed_leaves_no_thread_behind(started):
    tier = MemoryTier(4096, 10_000, torch.device("cpu"))
    rows = np.random.default_rng(0).integers(0, 256, (1000, 4096), np.uint8)
    slots = np.arange(3000, 4000)
    tier.write(slots, slots.astype(np.uint64), rows)
    read, _ = tier.read(slots, slots.astype(np.uint64))
    assert np.array_equal(read.numpy(), rows)
    tier.close()
    assert not started()
