"""What a plan says that checkpoints write of events, against those of a store."""

import itertools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from anabranch.commands.plan import segment_writes
from anabranch.commands.plan.segment_writes import SegmentSizes, checkpoint_moments, written_events
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.checkpoints.format import SEGMENT
from anabranch.learner.checkpoints.parts import pack
from anabranch.replay import segments
from anabranch.replay.build import build_store
from anabranch.replay.segments import Tensors, most_events
from anabranch.replay.settings import ReplaySettings
from anabranch.replay.snapshot import ENTRY
from anabranch.testing.stores import add_now

SCHEMA = Schema(
    SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 4}})
)
PARTITIONS = [TopicPartition("events", 0)]
AT_ONCE = 500
STORES = 6


class Time(NamedTuple):
    """Seconds of a stream, and the store that it fills."""

    capacity: int
    rate: float
    every: float
    begin: float
    end: float


def written_by_store(time, seed):
    """Return the bytes of events that checkpoints of a store write in the time, as those of its events."""
    store = build_store(ReplaySettings(capacity=time.capacity), SCHEMA, torch.device("cpu"), seed)
    random, files, before = np.random.default_rng(seed), dict[str, Tensors](), ()
    came = written = 0
    for number in range(1, round(time.end / time.every) + 1):
        last = came + int(random.poisson(time.rate * time.every))
        for first in range(came, last, AT_ONCE):
            add_now(
                store, fake_columns(SCHEMA, range(first, min(last, first + AT_ONCE)), label=[0, 1, 2, 3]), PARTITIONS
            )
        came = last
        state, change = store.begin_snapshot(number).contents()
        store.end_snapshot(number)
        earlier: Any = SimpleNamespace(part=lambda _, name, files=files: files[name], rows=None)
        part, before = pack(state, change, before, earlier)
        new = {name: tensors for name, tensors in part.tensors.items() if name.startswith(SEGMENT)}
        written += sum(map(bytes_of, new.values())) if number * time.every > time.begin else 0
        files = {name: (files | new)[name] for name in [*part.carried, *new]}
    assert change.payload is not None
    store.close()
    return written / (ENTRY.itemsize + change.payload.shape[1])


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors.values())


def admission(time):
    """Return what a reservoir admits."""

    def admitted(begin, end):
        first, last = time.rate * begin, time.rate * end
        filling = max(0.0, min(last, time.capacity) - first)
        return filling + max(0.0, time.capacity * math.log(max(1.0, last / max(first, time.capacity))))

    return admitted


def planned(time):
    admitted = admission(time)
    return written_events(admitted, time.capacity, most_events(12), time.every, time.begin, time.end)


@pytest.mark.slow
@pytest.mark.parametrize(
    "time",
    [
        pytest.param(Time(3_000, 100.0, 4.0, 0.0, 28.0), id="fills"),
        pytest.param(Time(3_000, 100.0, 4.0, 8.0, 48.0), id="fills, and is replaced"),
        pytest.param(Time(3_000, 1_000.0, 4.0, 4.0, 60.0), id="filled before the first checkpoint"),
        pytest.param(Time(1_000, 100.0, 1.0, 10.0, 210.0), id="long"),
        pytest.param(Time(1_000, 100.0, 1.0, 100.0, 200.0), id="long after it was filled"),
    ],
)
def test_checkpoints_of_a_store_write_what_is_planned(time):
    written = np.mean([written_by_store(time, seed) for seed in range(STORES)])
    assert planned(time) == pytest.approx(written, rel=0.1)


@pytest.mark.slow
def test_checkpoints_of_a_store_in_several_pieces_write_what_is_planned(monkeypatch):
    monkeypatch.setattr(segments, "PIECE_BYTES", 20_000)
    time = Time(3_000, 1_000.0, 0.5, 2.0, 30.0)
    assert most_events(12) < time.capacity / 5
    written = np.mean([written_by_store(time, seed) for seed in range(STORES)])
    assert planned(time) == pytest.approx(written, rel=0.1)


def test_an_event_that_comes_in_a_checkpoint_of_its_own_is_written_at_least_once_and_seldom_again():
    # Each of 64 checkpoints adds 64 events: they are merged about log2(64) times at most.
    assert 1 <= planned(Time(4_096, 64.0, 1.0, 0.0, 64.0)) / 4_096 <= 7


def test_a_store_that_is_replaced_between_two_checkpoints_is_written_once():
    sizes = SegmentSizes(1_000, 10_000)
    assert sizes.checkpoint(1_000.0) == 1_000
    assert sizes.checkpoint(1e6) == pytest.approx(1_000)
    assert sizes.held == pytest.approx([1_000])


def test_checkpoints_without_new_events_write_nothing():
    sizes = SegmentSizes(1_000, 600)
    assert sizes.checkpoint(1_000.0) == 1_000
    assert sizes.held == [600, 400]
    assert sizes.checkpoint(0.0) == 0
    assert sizes.held == [600, 400]


@pytest.mark.slow
def test_a_day_long_after_the_start_has_the_mean_of_those_around_it(monkeypatch):
    """On few days all events are merged, which writes as many as several other days do."""
    days = [Time(20_000, 100.0, 3_600.0, day * 86_400.0, (day + 1) * 86_400.0) for day in range(20, 40)]
    found = [planned(day) for day in days]
    assert max(found) < 2 * min(found)
    for name, value in {"_REPLACED": math.inf, "_EARLIER": 0.0, "_IN_ALL": 1}.items():
        monkeypatch.setattr(segment_writes, name, value)
    each = [planned(day) for day in days]
    assert max(each) > 4 * min(each)
    assert np.mean(found) == pytest.approx(np.mean(each), rel=0.15)


def test_simulated_checkpoints_are_those_of_the_time_that_counts_and_fewer_before_it():
    moments, first = checkpoint_moments(10.0, 40_000.0, 40_100.0)
    assert moments[first:] == pytest.approx([40_010.0 + 10 * each for each in range(10)])
    assert moments[first - 1] == 40_000
    assert moments[first - 2] == 39_990
    assert first < 500
    assert all(0 < one < other for one, other in itertools.pairwise(moments))
    assert checkpoint_moments(10.0, 0.0, 20.0) == ([10.0, 20.0], 0)


def test_no_more_checkpoints_are_simulated_than_a_bound(monkeypatch):
    monkeypatch.setattr(segment_writes, "_CHECKPOINTS", 4)
    assert checkpoint_moments(1.0, 0.0, 20.0) == ([5.0, 10.0, 15.0, 20.0], 0)
