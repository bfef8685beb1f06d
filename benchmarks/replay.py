"""The replay store against TorchRL, cpprb and numpy: same events, same batch, in turns.

    python benchmarks/replay.py [--quick] [--json FILE] [--only PART ...] [--threads N]

    hot      a draw of 256 events of 3 KB that are all in memory; beside numpy.take of the same rows, and beside peers
    cold     a tenth of the events in memory, the others on disk and in Redis, while steps of 20 ms go on
    growth   what a draw costs among 100 times as many small events, by the same growth of numpy.take
    add      256 new events offered with all tiers on, over a stream of four times the capacity
    memory   bytes an event beside its payload
    index    neighbours out of a FAISS index, off the step's path

A draw is the choice of 256 different events and their rows, copied. It is timed with the choice of a later one, which a
step pays too. Each line says its target and whether it is met; the figures are medians over rounds, in brackets the
smallest and the largest of one round.
"""

import sys
from pathlib import Path

sys.path.sort(key=str(Path(__file__).resolve().parent).__eq__)  # last: replay.py would hide the package replay

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from harness import peers
from harness.drawing import BATCH, Drawing, Steps
from harness.events import PARTITIONS, Events
from harness.memory import beyond_payload, no_room
from harness.stores import (
    best_admission,
    cold_reads,
    drop_page_cache,
    fill,
    open_clerk,
    open_store,
    valkey,
    why_no_redis,
)
from harness.table import Table, Target, options
from harness.turns import Spread, in_turns, ratio, seconds
from numpy.typing import NDArray

from replay.background_store import BackgroundStore

LARGE, SMALL = 784, 16
"""Floats of an event: of 3 KB, and of 64 bytes."""
TARGETS = {
    "draw_hot_over_numpy_take": Target(1.5),
    "torchrl_over_draw_hot": Target(5, least=True),
    "stall_fraction_cold": Target(0.02),
    "draw_growth": Target(1.3),
    "add_over_copy": Target(3),
    "add_worst_seconds": Target(0.01),
    "index_bytes_per_event": Target(64),
    "similar_recall_at_10": Target(0.9, least=True),
    "similar_stall_fraction": Target(0.02),
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


def over(take: Callable[[NDArray[np.int64]], object], drawing: Drawing) -> Callable[[], float]:
    """Return an arm: the mean time to take the very rows that were drawn last."""
    return lambda: statistics.fmean(seconds(partial(take, each)) for each in drawing.drawn)


def hot(table: Table, sizes: Sizes, folder: Path) -> None:
    """Measure draws of events that are all in memory."""
    for place, (rows, floats) in enumerate(sizes.hot):
        suffix = f"_{rows:.0e}".replace("+0", "") if place else ""
        events = Events(floats)
        table.title(f"hot: {rows:,} events of {events.row_bytes:,} bytes, all in memory; batch {BATCH}")
        # The store, the array that numpy takes from, and a peer.
        if (word := no_room(3.3 * rows * events.row_bytes)) is not None:
            table.word(word)
            continue
        with open_store(events, rows) as store:
            fill(store, events, rows)
            drawing = Drawing(store, events)
            drawing.verify(rows)
            _compare(table, suffix, drawing, rows, sizes.rounds, folder)


def _sampling(sample: peers.Sample, draws: int = 20) -> float:
    return statistics.fmean(seconds(sample) for _ in range(draws))


def _compare(table: Table, suffix: str, drawing: Drawing, rows: int, rounds: int, folder: Path) -> None:
    """Measure the draw beside numpy and one peer after the other: there may not be memory for all at once."""
    events = drawing.events
    gather = peers.Gather(events, rows, BATCH)
    drawing.turn()  # so that there are rows to take in the first round
    arms = {
        "draw": drawing.turn,
        "take": over(gather.take, drawing),
        "take_out": over(gather.take_out, drawing),
    }
    found = in_turns(arms, rounds)
    table.say(f"draw_hot_seconds{suffix}", Spread.of(found["draw"]))
    table.say(f"draw_hot_over_numpy_take{suffix}", ratio(found["draw"], found["take"]))
    table.say(f"draw_hot_over_numpy_take_out{suffix}", ratio(found["draw"], found["take_out"]), "into kept memory")
    for name in peers.PEERS:
        if peers.missing(name):
            table.word(f"{name} is left out: the package {peers.PEERS[name]} is not installed")
            continue
        with peers.peer(name, events, rows, BATCH, folder) as sample:
            found = in_turns(arms | {"peer": partial(_sampling, sample)}, rounds)
        key = f"{name}_over_draw{'' if name == 'torchrl_memmap' else '_hot'}{suffix}"
        table.say(key, ratio(found["peer"], found["draw"]))
        told = "what a draw as fast as numpy.take would have"
        table.say(f"{name}_over_numpy_take{suffix}", ratio(found["peer"], found["take"]), told)


def cold(table: Table, sizes: Sizes, folder: Path) -> None:
    """Measure what steps wait for when a tenth of the events is in memory."""
    for place, (rows, floats) in enumerate(sizes.cold):
        suffix = f"_{rows:.0e}".replace("+0", "") if place else ""
        events = Events(floats)
        table.title(f"cold: {rows:,} events of {events.row_bytes:,} bytes, a tenth of them in memory, steps of 20 ms")
        with tempfile.TemporaryDirectory(dir=folder) as name, valkey(Path(name)) as redis:
            table.word(f"tiers: device, {'' if redis is None else 'Redis for a third, '}disk")
            with open_clerk(events, rows, hot=0.1, folder=Path(name), redis=redis) as clerk:
                begin = fill(clerk.store, events, 2 * rows)
                step = Drawing(clerk.store, events).verify(begin)
                _stalls(table, suffix, Steps(clerk, events, step, begin), sizes.turns, Path(name))
                store = clerk.store
                read = store.tiers.stats.read
                table.word(
                    "rows read from: " + ", ".join(f"{tier} {n / sum(read.values()):.0%}" for tier, n in read.items())
                )
                store.tiers.sync()
                count = round(BATCH * read.get("disk", 0) / sum(read.values()))
                told = f"what the disk alone takes for the {count} rows of a draw"
                for key, found in zip(("disk", "memmap"), cold_reads(Path(name), events.row_bytes, count), strict=True):
                    if found:
                        table.say(f"{key}_seconds_cold{suffix}", Spread.of(found), told)
                        told = "the same, by numpy.take out of a memory map"


def _stalls(table: Table, suffix: str, steps: Steps, turns: int, folder: Path) -> None:
    def drop() -> None:
        drop_page_cache(folder)

    shares: dict[str, list[tuple[float, float]]] = {"": [], "_warm": [], "_sleep": []}

    def arm(name: str, work: Callable[[], None], before: Callable[[], None] | None) -> Callable[[], float]:
        def run() -> float:
            shares[name].append(steps.turn(work, before))
            return shares[name][-1][0]

        return run

    in_turns(
        {
            "": arm("", steps.compute, drop),
            "_warm": arm("_warm", steps.compute, None),
            "_sleep": arm("_sleep", steps.sleep, drop),
        },
        turns,
    )
    notes = {
        "": "one thread computes, page cache emptied each round",
        "_warm": "one thread computes, page cache left alone",
        "_sleep": "the processor is free, page cache emptied",
    }
    for name, found in shares.items():
        table.say(f"stall_fraction_cold{name}{suffix}", Spread.of([stall for stall, _ in found[1:]]), notes[name])
        table.say(f"store_fraction_cold{name}{suffix}", Spread.of([calls for _, calls in found[1:]]), "all its calls")


def growth(table: Table, sizes: Sizes, _folder: Path) -> None:
    """Measure how the cost of a draw grows with the number of events, with nothing fetched ahead."""
    few, many = sizes.growth
    events = Events(SMALL)
    table.title(f"growth: draws at {many:,} events over draws at {few:,}, of {events.row_bytes} bytes; no prefetch")
    with open_store(events, few) as small, open_store(events, many) as large:
        arms: dict[str, Callable[[], float]] = {}
        for name, store, rows in (("few", small, few), ("many", large, many)):
            fill(store, events, rows)
            drawing, gather = Drawing(store, events), peers.Gather(events, rows, BATCH)
            drawing.verify(rows)
            drawing.turn_at_once()
            arms |= {f"draw_{name}": drawing.turn_at_once, f"take_{name}": over(gather.take_out, drawing)}
        found = in_turns(arms, sizes.rounds)
    draw, take = ratio(found["draw_many"], found["draw_few"]), ratio(found["take_many"], found["take_few"])
    table.say("draw_growth_alone", draw, "of the draw")
    table.say("numpy_take_growth", take, "of numpy.take(out=) of the same rows")
    pairs = [
        (a / b) / (c / d)
        for a, b, c, d in zip(*(found[key] for key in ("draw_many", "draw_few", "take_many", "take_few")), strict=True)
    ]
    table.say("draw_growth", Spread.of(pairs))


def add(table: Table, sizes: Sizes, folder: Path) -> None:
    """Measure what offering new events costs its caller, a step's time after the other."""
    events, capacity, admission = Events(LARGE), sizes.add, best_admission()
    adds = 4 * capacity // BATCH
    table.title(
        f"add: {BATCH} events of {events.row_bytes:,} bytes at a time, {adds:,} times, 10 ms apart, {admission}"
    )
    with tempfile.TemporaryDirectory(dir=folder) as name, valkey(Path(name)) as redis:
        if redis is None:
            table.word(f"without Redis: {why_no_redis()}")
        with open_clerk(events, capacity, hot=0.1, folder=Path(name), redis=redis, admission=admission) as clerk:
            before = time.process_time()
            calls, copies, busy, rest = _offer(clerk, events, adds)
            clerk.store.tiers.sync()
            whole = time.process_time() - before - rest
    table.say("add_over_copy", sum(calls) / sum(copies), "mean over mean")
    table.say("add_mean_seconds", sum(calls) / adds)
    table.say("add_processor_seconds", whole / adds, "of all threads: to take in, to write to disk and Redis")
    table.say("copy_mean_seconds", sum(copies) / adds, "every column, into new memory")
    table.say("copy_worst_seconds", max(copies), "what the machine adds to a call")
    table.say("add_p99_seconds", float(np.quantile(calls, 0.99)))
    table.say("add_worst_seconds", max(calls), f"of its own time {busy[calls.index(max(calls))]:.2g}")
    table.fact("add_admission", admission)
    table.fact("add_tiers", "device, disk" if redis is None else "device, redis, disk")


def _offer(clerk: BackgroundStore, events: Events, adds: int) -> tuple[list[float], list[float], list[float], float]:
    """Return the seconds of each add and of a copy of the same block, the processor's seconds of each add, and those of
    this thread in all that was no add.
    """
    calls: list[float] = []
    copies: list[float] = []
    busy: list[float] = []
    first = time.thread_time()

    def offer() -> None:
        begin, own = time.perf_counter(), time.thread_time()
        clerk.offer(columns, PARTITIONS)
        calls.append(time.perf_counter() - begin)
        busy.append(time.thread_time() - own)

    def copy() -> None:
        copies.append(seconds(lambda: {name: column.copy() for name, column in columns.items()}))

    for turn in range(adds):
        columns = events.columns(turn * BATCH, BATCH)
        for act in (offer, copy) if turn % 2 else (copy, offer):
            act()
        time.sleep(0.01)
    return calls, copies, busy, time.thread_time() - first - sum(busy)


def memory(table: Table, sizes: Sizes, folder: Path) -> None:
    """Measure what the store takes beside its payload."""
    admission = best_admission()
    table.title(f"memory: {sizes.memory:,} events, {admission}; growth of what a process takes, by the system's word")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        disk, disk_free = beyond_payload(sizes.memory, Path(name), admission)
    alone, alone_free = beyond_payload(sizes.memory, None, admission)
    table.say("index_bytes_per_event", max(disk, alone), "the larger of the two")
    table.say("index_bytes_per_event_memory", alone, f"all in memory; the allocator keeps {alone_free:.0f} more")
    table.say("index_bytes_per_event_disk", disk, f"a tenth in memory; the allocator keeps {disk_free:.0f} more")


def index(table: Table, sizes: Sizes, _folder: Path) -> None:
    """Measure the index, where there is one."""
    table.title(f"index: the neighbours of 64 among {sizes.index:,} embeddings of 64 dimensions")
    if importlib.util.find_spec("faiss") is None or importlib.util.find_spec("replay_index") is None:
        table.word("left out: " + ("there is no replay_index.py" if importlib.util.find_spec("faiss") else "no faiss"))
        return
    from replay_index import measure

    for key, value in measure(sizes.index, 64, sizes.index_seconds).items():
        table.say(key if key.startswith(("similar", "faiss", "index")) else f"index_{key}", value)


PARTS = {"hot": hot, "cold": cold, "growth": growth, "add": add, "memory": memory, "index": index}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--threads", type=int, default=1, help="of torch; numpy.take has one")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    table = Table(TARGETS)
    table.fact("quick", chosen.quick)
    for part in chosen.only:
        table.fact(f"load_before_{part}", os.getloadavg()[0])
        with tempfile.TemporaryDirectory(dir=".") as folder:
            PARTS[part](table, QUICK if chosen.quick else FULL, Path(folder))
    table.write(chosen.json)


if __name__ == "__main__":
    main()
