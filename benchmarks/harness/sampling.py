"""A learner's use of a store: samples alone, and samples and new events in steps of 20 ms."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness.events import PARTITIONS, Events
from replay.background_store import BackgroundStore
from replay.fake import plan_ahead
from replay.store import Store

BATCH = 256
_STEP_SECONDS = 0.02
_STEPS = 30


@dataclass
class Sampling:
    """Samples from a store step by step, and records which events they were."""

    store: Store
    events: Events
    step: int = 0
    sampled: list[NDArray[np.int64]] = field(default_factory=list)

    def turn(self, samples: int = 20) -> float:
        """Return the mean time of some samples; as many are planned meanwhile, a block of them at once."""
        self.sampled = []
        return statistics.fmean(self._sample() for _ in range(samples))

    def turn_at_once(self, samples: int = 20) -> float:
        """Return the mean time of some samples that are planned and fetched at once."""
        self.sampled = []
        return statistics.fmean(self._sample_at_once() for _ in range(samples))

    def verify(self, below: int) -> int:
        """Check a sample against what was stored, events with numbers less than `below`, and return the next step."""
        plan_ahead(self.store, self.step, BATCH)
        columns = self.store.sample(self.step, BATCH).columns
        self.step += 1
        assert len(columns["label"]) == BATCH
        self.events.verify(columns["feature.x"].numpy(), columns["label"].numpy(), below)
        plan_ahead(self.store, self.step, BATCH)
        return self.step

    def _sample(self) -> float:
        begin = time.perf_counter()
        sample = self.store.sample(self.step, BATCH)
        plan_ahead(self.store, self.step + 1, BATCH)
        taken = time.perf_counter() - begin
        self.step += 1
        self.sampled.append(self.events.numbers(sample.columns["feature.x"].numpy()))
        return taken

    def _sample_at_once(self) -> float:
        begin = time.perf_counter()
        sample = self.store.fetch(self.store.plan(self.step, BATCH))
        taken = time.perf_counter() - begin
        self.step += 1
        self.sampled.append(self.events.numbers(sample.columns["feature.x"].numpy()))
        return taken


class Steps:
    """Steps of 20 ms that sample 256 old events and add as many new ones."""

    def __init__(self, background_store: BackgroundStore, events: Events, step: int, begin: int) -> None:
        """Continue at `step`, with the event of the number `begin`."""
        self._background_store, self._events, self._step, self._next = background_store, events, step, begin
        background_store.plan_ahead(step, BATCH)
        self._matrix = torch.randn(192, 192)

    def compute(self) -> None:
        """Multiply matrices for the time of a step, on one thread."""
        end = time.perf_counter() + _STEP_SECONDS
        while time.perf_counter() < end:
            self._matrix @ self._matrix

    def sleep(self) -> None:
        """Leave the CPU idle for the time of a step, as a learner does whose device computes."""
        time.sleep(_STEP_SECONDS)

    def turn(self, work: Callable[[], None], before: Callable[[], None] | None = None) -> tuple[float, float]:
        """Take steps, and return two fractions of their time: waiting, and in all calls of the store."""
        background_store = self._background_store
        if before is not None:
            before()
        waited, calls = background_store.flush().tiers.stats.stall_seconds, 0.0
        begin = time.perf_counter()
        for _ in range(_STEPS):
            new = self._events.columns(self._next, BATCH)
            self._next += BATCH
            work()
            start = time.perf_counter()
            sample = background_store.sample(self._step, BATCH)
            background_store.add(new, PARTITIONS)
            self._step += 1
            background_store.plan_ahead(self._step, BATCH)
            calls += time.perf_counter() - start
            assert len(sample) == BATCH
        total = time.perf_counter() - begin
        return (background_store.flush().tiers.stats.stall_seconds - waited) / total, calls / total
