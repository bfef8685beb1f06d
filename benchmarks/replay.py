"""The replay store compared with TorchRL, cpprb and numpy: same events, same batch, in turns.

    python -m benchmarks.replay [--quick] [--json FILE] [--save] [--only PART ...] [--threads N]

    hot      a sample of 256 events of 3 KB that are all in memory, over numpy.take of the same rows, and peers over it
    cold     a tenth of the events in memory, the others on disk and in Redis, with steps of 20 ms
    growth   the time of a sample among 100 times as many small events, over the same growth of numpy.take
    add      256 new events added with all tiers on, over a stream of four times the capacity
    memory   bytes per event without its payload
    index    neighbours from a FAISS index, off the path of the step
    api      256 events added and as many sampled by `anabranch.ReplayBuffer`, which checks values, over the same by the
             store alone

A sample is the choice of 256 different events and a copy of their rows. Its time includes the choice of a later sample,
which a step pays too. Each line has the target and whether it is met. Figures are medians over rounds, in brackets
the smallest and the largest of one round.
"""

import argparse
import importlib.util
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import anabranch
from anabranch.replay.background_store import BackgroundStore
from anabranch.replay.store import Store
from anabranch.testing.stores import add_now, plan_ahead, sample_of
from benchmarks.harness import peers
from benchmarks.harness.events import PARTITIONS, Events
from benchmarks.harness.index_steps import measure
from benchmarks.harness.interleave import Spread, interleave, ratio, seconds
from benchmarks.harness.memory import beyond_payload, memory_shortage
from benchmarks.harness.results import Form, Results, Target, options
from benchmarks.harness.stores import (
    best_admission,
    cold_reads,
    drop_page_cache,
    fill,
    open_background_store,
    open_store,
    valkey,
    why_no_redis,
)

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
        columns = self.store.planner.sample(self.step, BATCH).columns
        self.step += 1
        assert len(columns["label"]) == BATCH
        self.events.verify(columns["feature.x"].numpy(), columns["label"].numpy(), below)
        plan_ahead(self.store, self.step, BATCH)
        return self.step

    def _sample(self) -> float:
        begin = time.perf_counter()
        sample = self.store.planner.sample(self.step, BATCH)
        plan_ahead(self.store, self.step + 1, BATCH)
        taken = time.perf_counter() - begin
        self.step += 1
        self.sampled.append(self.events.numbers(sample.columns["feature.x"].numpy()))
        return taken

    def _sample_at_once(self) -> float:
        begin = time.perf_counter()
        sample = sample_of(self.store, self.step, BATCH)
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


LARGE, SMALL = 784, 16
"""Floats of an event: of 3 KB, and of 64 bytes."""
TARGETS = {
    "sample_hot_over_numpy_take": Target(1.5),
    "torchrl_over_sample_hot": Target(5, least=True),
    "stall_fraction_cold": Target(0.02),
    "sample_growth": Target(1.3),
    "add_over_copy": Target(3),
    "add_worst_seconds": Target(0.01),
    "index_bytes_per_event": Target(64),
    "similar_recall_at_10": Target(0.9, least=True),
    "similar_stall_fraction": Target(0.02),
    "api_over_store": Target(1.1),
}


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    hot: list[tuple[int, int]]
    """Events and floats of each; targets are those of the first, other keys say their number of events."""
    cold: list[tuple[int, int]]
    growth: tuple[int, int]
    add: int
    memory: int
    index: int
    index_seconds: float
    rounds: int
    turns: int
    """Rounds of the cold case, each of some dozen steps an arm."""


SMOKE = Sizes([(1_000, LARGE)], [(2_000, LARGE)], (2_000, 4_000), 600, 2_000, 3_000, 0.3, 1, 2)
QUICK = Sizes([(20_000, LARGE)], [(20_000, LARGE)], (100_000, 1_000_000), 20_000, 200_000, 50_000, 5.0, 15, 3)
FULL = Sizes(
    hot=[(100_000, LARGE), (1_000_000, LARGE), (10_000_000, SMALL)],
    cold=[(100_000, LARGE), (1_000_000, LARGE), (10_000_000, SMALL)],
    growth=(100_000, 10_000_000),
    add=100_000,
    memory=1_000_000,
    index=1_000_000,
    index_seconds=30.0,
    rounds=40,
    turns=10,
)
SIZES = SMOKE, QUICK, FULL
"""Of each form."""


def over(take: Callable[[NDArray[np.int64]], object], sampling: Sampling) -> Callable[[], float]:
    """Return an arm: the mean time to take exactly the rows that were sampled last."""
    return lambda: statistics.fmean(seconds(partial(take, numbers)) for numbers in sampling.sampled)


def hot(results: Results, sizes: Sizes, folder: Path) -> None:
    """Measure samples of events that are all in memory."""
    for number, (rows, floats) in enumerate(sizes.hot):
        suffix = f"_{rows:.0e}".replace("+0", "") if number else ""
        events = Events(floats)
        results.title(f"hot: {rows:,} events of {events.row_bytes:,} bytes, all in memory; batch {BATCH}")
        # The store, the array that numpy takes from, and a peer.
        if (reason := memory_shortage(3.3 * rows * events.row_bytes)) is not None:
            results.remark(reason)
            continue
        with open_store(events, rows) as store:
            fill(store, events, rows)
            sampling = Sampling(store, events)
            sampling.verify(rows)
            _compare(results, suffix, sampling, rows, sizes.rounds, folder)


def _sampling(sample: peers.Sample, samples: int = 20) -> float:
    return statistics.fmean(seconds(sample) for _ in range(samples))


def _compare(results: Results, suffix: str, sampling: Sampling, rows: int, rounds: int, folder: Path) -> None:
    """Measure samples, numpy and one peer at a time: memory may not suffice for all at once."""
    events = sampling.events
    gather = peers.Gather(events, rows, BATCH)
    sampling.turn()  # so that there are rows to take in the first round
    arms = {
        "sample": sampling.turn,
        "take": over(gather.take, sampling),
        "take_out": over(gather.take_out, sampling),
    }
    times = interleave(arms, rounds)
    results.add(f"sample_hot_seconds{suffix}", Spread.of(times["sample"]))
    results.add(f"sample_hot_over_numpy_take{suffix}", ratio(times["sample"], times["take"]))
    results.add(
        f"sample_hot_over_numpy_take_out{suffix}", ratio(times["sample"], times["take_out"]), "into kept memory"
    )
    for name in peers.PEERS:
        if peers.missing(name):
            results.remark(f"{name} is left out: the package {peers.PEERS[name]} is not installed")
            continue
        with peers.peer(name, events, rows, BATCH, folder) as sample:
            times = interleave(arms | {"peer": partial(_sampling, sample)}, rounds)
        key = f"{name}_over_sample{'' if name == 'torchrl_memmap' else '_hot'}{suffix}"
        results.add(key, ratio(times["peer"], times["sample"]))
        remark = "the ratio of a sample as fast as numpy.take"
        results.add(f"{name}_over_numpy_take{suffix}", ratio(times["peer"], times["take"]), remark)


def cold(results: Results, sizes: Sizes, folder: Path) -> None:
    """Measure what steps wait for when a tenth of the events is in memory."""
    for number, (rows, floats) in enumerate(sizes.cold):
        suffix = f"_{rows:.0e}".replace("+0", "") if number else ""
        events = Events(floats)
        results.title(f"cold: {rows:,} events of {events.row_bytes:,} bytes, a tenth of them in memory, steps of 20 ms")
        with tempfile.TemporaryDirectory(dir=folder) as name, valkey(Path(name)) as redis:
            results.remark(f"tiers: device, {'' if redis is None else 'Redis for a third, '}disk")
            with open_background_store(events, rows, hot=0.1, folder=Path(name), redis=redis) as background_store:
                begin = fill(background_store.flush(), events, 2 * rows)
                step = Sampling(background_store.flush(), events).verify(begin)
                _stalls(results, suffix, Steps(background_store, events, step, begin), sizes.turns, Path(name))
                store = background_store.flush()
                read = store.tiers.stats.read
                results.remark(
                    "rows read from: " + ", ".join(f"{tier} {n / sum(read.values()):.0%}" for tier, n in read.items())
                )
                store.tiers.sync()
                count = round(BATCH * read.get("disk", 0) / sum(read.values()))
                remark = f"what the disk alone takes for the {count} rows of a sample"
                for key, times in zip(("disk", "memmap"), cold_reads(Path(name), events.row_bytes, count), strict=True):
                    if times:
                        results.add(f"{key}_seconds_cold{suffix}", Spread.of(times), remark)
                        remark = "the same, by numpy.take out of a memory map"


def _stalls(results: Results, suffix: str, steps: Steps, turns: int, folder: Path) -> None:
    def drop() -> None:
        drop_page_cache(folder)

    shares: dict[str, list[tuple[float, float]]] = {"": [], "_warm": [], "_sleep": []}

    def arm(name: str, work: Callable[[], None], before: Callable[[], None] | None) -> Callable[[], float]:
        def run() -> float:
            shares[name].append(steps.turn(work, before))
            return shares[name][-1][0]

        return run

    interleave(
        {
            "": arm("", steps.compute, drop),
            "_warm": arm("_warm", steps.compute, None),
            "_sleep": arm("_sleep", steps.sleep, drop),
        },
        turns,
    )
    remarks = {
        "": "one thread computes, page cache emptied each round",
        "_warm": "one thread computes, page cache left alone",
        "_sleep": "the processor is free, page cache emptied",
    }
    for name, pairs in shares.items():
        results.add(f"stall_fraction_cold{name}{suffix}", Spread.of([stall for stall, _ in pairs[1:]]), remarks[name])
        results.add(f"store_fraction_cold{name}{suffix}", Spread.of([calls for _, calls in pairs[1:]]), "all its calls")


def growth(results: Results, sizes: Sizes, _folder: Path) -> None:
    """Measure how the cost of a sample grows with the number of events, with nothing fetched ahead."""
    few, many = sizes.growth
    events = Events(SMALL)
    results.title(
        f"growth: samples at {many:,} events over samples at {few:,}, of {events.row_bytes} bytes; no prefetch"
    )
    with open_store(events, few) as small, open_store(events, many) as large:
        arms: dict[str, Callable[[], float]] = {}
        for name, store, rows in (("few", small, few), ("many", large, many)):
            fill(store, events, rows)
            sampling, gather = Sampling(store, events), peers.Gather(events, rows, BATCH)
            sampling.verify(rows)
            sampling.turn_at_once()
            arms |= {f"sample_{name}": sampling.turn_at_once, f"take_{name}": over(gather.take_out, sampling)}
        times = interleave(arms, sizes.rounds)
    sample, take = ratio(times["sample_many"], times["sample_few"]), ratio(times["take_many"], times["take_few"])
    results.add("sample_growth_alone", sample, "of the sample")
    results.add("numpy_take_growth", take, "of numpy.take(out=) of the same rows")
    pairs = [
        (a / b) / (c / d)
        for a, b, c, d in zip(
            *(times[key] for key in ("sample_many", "sample_few", "take_many", "take_few")), strict=True
        )
    ]
    results.add("sample_growth", Spread.of(pairs))


def add(results: Results, sizes: Sizes, folder: Path) -> None:
    """Measure the time that adding new events takes from the caller, with a pause as long as a step in between."""
    events, capacity, admission = Events(LARGE), sizes.add, best_admission()
    adds = 4 * capacity // BATCH
    results.title(
        f"add: {BATCH} events of {events.row_bytes:,} bytes at a time, {adds:,} times, every 10 ms, {admission}"
    )
    with tempfile.TemporaryDirectory(dir=folder) as name, valkey(Path(name)) as redis:
        if redis is None:
            results.remark(f"without Redis: {why_no_redis()}")
        with open_background_store(
            events, capacity, hot=0.1, folder=Path(name), redis=redis, admission=admission
        ) as background_store:
            before = time.process_time()
            calls, copies, busy, rest = _add_blocks(background_store, events, adds)
            background_store.flush().tiers.sync()
            cpu = time.process_time() - before - rest
    results.add("add_over_copy", sum(calls) / sum(copies), "mean over mean")
    results.add("add_mean_seconds", sum(calls) / adds)
    results.add("add_processor_seconds", cpu / adds, "CPU time of all threads: admission, disk and Redis")
    results.add("copy_mean_seconds", sum(copies) / adds, "every column, into new memory")
    results.add("copy_worst_seconds", max(copies), "the part of the machine in the worst call")
    results.add("add_p99_seconds", float(np.quantile(calls, 0.99)))
    results.add("add_worst_seconds", max(calls), f"CPU time of that call: {busy[calls.index(max(calls))]:.2g}")
    results.fact("add_admission", admission)
    results.fact("add_tiers", "device, disk" if redis is None else "device, redis, disk")


def _add_blocks(
    background_store: BackgroundStore, events: Events, adds: int
) -> tuple[list[float], list[float], list[float], float]:
    """Return the seconds of each add and of a copy of the same block, the processor's seconds of each add, and those of
    this thread in all that was no add.
    """
    calls: list[float] = []
    copies: list[float] = []
    busy: list[float] = []
    first = time.thread_time()

    def add_block() -> None:
        begin, own = time.perf_counter(), time.thread_time()
        background_store.add(columns, PARTITIONS)
        calls.append(time.perf_counter() - begin)
        busy.append(time.thread_time() - own)

    def copy() -> None:
        copies.append(seconds(lambda: {name: column.copy() for name, column in columns.items()}))

    for turn in range(adds):
        columns = events.columns(turn * BATCH, BATCH)
        for act in (add_block, copy) if turn % 2 else (copy, add_block):
            act()
        time.sleep(0.01)
    return calls, copies, busy, time.thread_time() - first - sum(busy)


def memory(results: Results, sizes: Sizes, folder: Path) -> None:
    """Measure the memory of the store without its payload."""
    admission = best_admission()
    results.title(f"memory: {sizes.memory:,} events, {admission}; growth of a process's memory")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        disk, disk_free = beyond_payload(sizes.memory, Path(name), admission)
    alone, alone_free = beyond_payload(sizes.memory, None, admission)
    results.add("index_bytes_per_event", max(disk, alone), "the larger of the two")
    results.add("index_bytes_per_event_memory", alone, f"all in memory; the allocator keeps {alone_free:.0f} more")
    results.add("index_bytes_per_event_disk", disk, f"a tenth in memory; the allocator keeps {disk_free:.0f} more")


def index(results: Results, sizes: Sizes, _folder: Path) -> None:
    """Measure the index, where there is one."""
    results.title(f"index: the neighbours of 64 among {sizes.index:,} embeddings of 64 dimensions")
    if importlib.util.find_spec("faiss") is None:
        results.remark("left out: faiss is not installed")
        return
    for key, value in measure(sizes.index, 64, sizes.index_seconds).items():
        results.add(key if key.startswith(("similar", "faiss", "index")) else f"index_{key}", value)


def api(results: Results, sizes: Sizes, _folder: Path) -> None:
    """Measure what the Python API adds to a store whose events are all in memory."""
    events, rows = Events(LARGE), sizes.hot[0][0]
    results.title(f"api: {BATCH} of {rows:,} events of {events.row_bytes:,} bytes, all in memory; add, then sample")
    numbers = itertools.count(rows, BATCH)
    times: dict[str, list[float]] = {name: [] for name in ("add api", "sample api", "add store", "sample store")}

    def data(begin: int) -> dict[str, NDArray[Any]]:
        each = np.arange(begin, begin + BATCH)
        return {"x": events.x(each), "y": events.labels(each)}

    def turn(name: str, make: Callable[[int], Any], add: Callable[[Any], Any], sample: Callable[[int], Any]) -> float:
        found = []
        for number in itertools.islice(numbers, 20):
            new = make(number)
            found.append((seconds(partial(add, new)), seconds(partial(sample, number))))
        for act, taken in zip(("add", "sample"), map(statistics.median, zip(*found, strict=True)), strict=True):
            times[f"{act} {name}"].append(taken)
        return times[f"add {name}"][-1] + times[f"sample {name}"][-1]

    with open_store(events, rows) as store, anabranch.ReplayBuffer(rows, events.schema) as buffer:
        fill(store, events, rows)
        for begin in range(0, rows, BATCH):
            buffer.add(data(begin))
        columns = partial(events.columns, count=BATCH)
        arms = {
            "api": lambda: turn("api", data, buffer.add, lambda _: buffer.sample(BATCH)),
            "store": lambda: turn(
                "store",
                columns,
                lambda new: add_now(store, new, PARTITIONS),
                lambda step: sample_of(store, step, BATCH),
            ),
        }
        both = interleave(arms, sizes.rounds, warm_up=0)
    results.add("api_over_store", ratio(both["api"], both["store"]))
    for act in ("add", "sample"):
        results.add(f"api_{act}_over_store", ratio(times[f"{act} api"], times[f"{act} store"]))


PARTS = {"hot": hot, "cold": cold, "growth": growth, "add": add, "memory": memory, "index": index, "api": api}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, PARTS)
    parser.add_argument("--threads", type=int, default=1, help="of torch; numpy.take has one")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    results = Results("replay", TARGETS)
    results.fact("quick", chosen.form is not Form.LONG)
    for part in chosen.only or PARTS:
        results.fact(f"load_before_{part}", os.getloadavg()[0])
        with tempfile.TemporaryDirectory(dir=".") as folder:
            PARTS[part](results, SIZES[chosen.form], Path(folder))
    results.write(chosen)


if __name__ == "__main__":
    main()
