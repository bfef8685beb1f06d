"""Many events and their labels, shuffled and with restarts, against an offline join; and what they cost."""

import os
import time
from datetime import timedelta

import numpy as np
import pytest

from tests.learner.extensions.late_labels.joins import (
    SCHEMA,
    JoinBench,
    events,
    labels,
    options,
    predictions,
    schema_with,
)

EVENTS, BATCH = (1_000_000, 5_000) if "ANABRANCH_TEST_LONG" in os.environ else (200_000, 1_000)
WAIT_MS = EVENTS // 4
NEVER = 2**40
MOST_BYTES = 64
"""Of memory for each event that waits."""
CPU_SECONDS = 90
"""The join takes less than ten microseconds an event, and the test as much again."""


def shuffled(times, rng):
    """Return an order in which messages with these times may be read."""
    return np.argsort(times + rng.integers(0, WAIT_MS // 8, len(times)), kind="stable")


def earliest_from(times):
    """Return the earliest time from each message on, and NEVER for the end."""
    return np.append(np.minimum.accumulate(times[::-1])[::-1], NEVER)


def collect(join, labels_N):
    """Take all decided events, and set their labels, -1 for none; each must be -2 before."""
    while ready := join.take(2 * BATCH):
        offsets = ready.columns["offset"].astype(np.int64)
        assert (labels_N[offsets] == -2).all()
        assert np.array_equal(ready.predictions[:, 0], offsets.astype(np.float32))
        labels_N[offsets] = ready.columns["label"]
        join.settle()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_shuffled_events_are_joined_as_offline(tmp_path):
    rng = np.random.default_rng(0)
    keys, event_ms = np.arange(1, EVENTS + 1) * 7919, np.arange(EVENTS)
    lag = rng.exponential(WAIT_MS / 2, EVENTS).astype(np.int64) - WAIT_MS // 10
    label_ms, value, labelled = event_ms + lag, rng.integers(0, 3, EVENTS), rng.random(EVENTS) < 0.7
    offline = np.where(labelled & (np.abs(lag) <= WAIT_MS), value, -1)

    event_order = shuffled(event_ms, rng)
    label_order = np.flatnonzero(labelled)[shuffled(label_ms[labelled], rng)]
    event_batches = np.split(event_order, range(BATCH, EVENTS, BATCH))
    label_ends = np.linspace(0, len(label_order), len(event_batches) + 1).astype(int)
    events_from, labels_from = earliest_from(event_ms[event_order]), earliest_from(label_ms[label_order])

    bench = JoinBench(tmp_path, options(wait=timedelta(milliseconds=WAIT_MS), bytes=EVENTS * 112))
    joined, number, kills = np.full(EVENTS, -2), 0, {30, 61, 62, 140}
    saved, cpu = (number, joined.copy()), time.process_time()
    while number < len(event_batches):
        if number % 20 == 0:
            bench.checkpoint()
            saved = number, joined.copy()
        if number in kills:
            kills.remove(number)
            bench.restart()
            number, joined = saved[0], saved[1].copy()
        chosen, found = event_batches[number], label_order[label_ends[number] : label_ends[number + 1]]
        bench.join.add_events(events(chosen, keys[chosen], event_ms[chosen]), predictions(chosen))
        bench.join.add_labels(labels(keys[found], value[found], label_ms[found]))
        number += 1
        bench.join.advance(labels_from[label_ends[number]], events_from[min(EVENTS, number * BATCH)])
        collect(bench.join, joined)
    assert np.array_equal(joined, offline)
    assert (bench.join.events.waiting, bench.join.counts.damaged, bench.join.counts.early_timeouts) == (0, 0, 0)
    assert time.process_time() - cpu < CPU_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("own_key", [False, True], ids=["one key", "a key of labels"])
def test_a_waiting_event_takes_at_most_64_bytes_of_memory(tmp_path, *, own_key):
    count, batch = 60_000, 2_000
    schema = schema_with("order") if own_key else SCHEMA
    bench = JoinBench(tmp_path, options(wait=timedelta(days=1), bytes=3 * count * 112), schema=schema)
    rng, waiting = np.random.default_rng(0), np.zeros(0, np.int64)
    for first in range(0, 3 * count // 2, batch):
        offsets = np.arange(first, first + batch)
        columns = events(offsets, offsets + 1, offsets)
        if own_key:
            columns["label_key"], columns["key_hash"] = columns["key_hash"], columns["key_hash"] // 10
        bench.join.add_events(columns, predictions(offsets))
        waiting = np.append(waiting, offsets)
        if len(waiting) > count:
            chosen = rng.choice(len(waiting), batch, replace=False)
            bench.join.add_labels(labels(waiting[chosen] + 1, [1] * batch, waiting[chosen]))
            waiting = np.delete(waiting, chosen)
            bench.join.take(batch)
            bench.join.settle()
        bench.join.advance(0, events_ms=NEVER)
        bench.capture()
        bench.part.end(bench.number, written=True)
    assert bench.join.events.waiting == count
    assert 45 < bench.join.events.nbytes / count <= MOST_BYTES
