"""What every sampler and admission policy promises. The subject of a check is settings of `[replay]` that name it.

Legend of the events of the checks: batches of 100, classes 0 to 3 by turns, an event each quarter of an hour.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.replay.build import build_store
from anabranch.replay.reservoir.quotas import Quotas
from anabranch.replay.settings import ReplaySettings
from anabranch.replay.snapshot import StoreSnapshot
from anabranch.replay.store import Store
from anabranch.testing.checks import Check, expect
from anabranch.testing.stores import FakeCheckpoints, add_now, plan_of, sample_of

Settings = Mapping[str, Any]
PARTITIONS = [TopicPartition("events", 0), TopicPartition("events", 1)]
DAY_MS = 86_400_000
SCHEMA = Schema(
    SchemaSettings.model_validate(
        {
            "features": {"x": {"dtype": "float32", "shape": [2]}, "n": {"dtype": "int16"}},
            "label": {"name": "y", "classes": 4},
            "weight": {"name": "w"},
        }
    )
)


class _Stores:
    """Opens stores below one folder."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def open(self, capacity: int, settings: Settings, contents: StoreSnapshot | None = None) -> Store:
        """Open a store with a disk tier."""
        chosen = ReplaySettings.model_validate({"capacity": capacity, "disk": {"bytes": "2MB"}, **settings})
        store = build_store(chosen, SCHEMA, torch.device("cpu"), 0, self._folder, contents, dim=2)
        self._stack.callback(store.close)
        return store

    def close(self) -> None:
        """Close all stores, as the end of their process does."""
        self._stack.pop_all().close()


@contextlib.contextmanager
def stores() -> Iterator[_Stores]:
    """Yield what opens stores in a temporary folder, and close them."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        yield _Stores(Path(folder), stack)


def fill(store: Store, batches: Sequence[int], partition: int = 0) -> None:
    """Add batches of 100 events by number."""
    for number in batches:
        offsets = range(100 * number, 100 * number + 100)
        columns = fake_columns(SCHEMA, offsets, partition=partition, label=[0, 0, 0, 0, 0, 1, 1, 2, 2, 3])
        columns["time_ms"][:] = np.array(offsets) * (DAY_MS // 96)
        add_now(store, columns, PARTITIONS)


def held(store: Store) -> list[tuple[int, int]]:
    """Return who is held once all that is too much has left."""
    index = store.event_table.copy()
    admission = store.reservoir.admission
    quotas = Quotas(store.capacity, admission.groups, admission.floors(store.capacity))
    stays = quotas.lower(index["priority"], index["group"])
    return sorted(zip(index["partition"][stays].tolist(), index["offset"][stays].tolist(), strict=True))


def sampled(store: Store, step: int, n: int) -> list[int]:
    """Return the offsets of a sample."""
    offsets: list[int] = plan_of(store, step, n).records["offset"].tolist()
    return offsets


def samples_different_events_that_are_held(settings: Settings) -> None:
    """A sample of n has n different events, all of them stored."""
    with stores() as opened:
        store = opened.open(200, settings)
        fill(store, range(20))
        there = set(store.event_table.copy()["offset"].tolist())
        for step in range(50):
            offsets = sampled(store, step, 60)
            expect(len(offsets) == 60, f"a sample of 60 of {len(there)} stored events has {len(offsets)}")
            expect(len(set(offsets)) == 60, f"a sample has events twice: {60 - len(set(offsets))} of 60")
            gone = set(offsets) - there
            expect(not gone, f"a sample has {len(gone)} events that are stored no more: remove(slots) has to drop them")


def samples_all_where_few_are_held(settings: Settings) -> None:
    """A sample of more than there are has each event once; of an empty store it is empty."""
    with stores() as opened:
        store = opened.open(200, settings)
        expect(sampled(store, 0, 10) == [], "a sample of an empty store has events")
        fill(store, [0])
        offsets = sampled(store, 0, 1000)
        expect(sorted(offsets) == list(range(100)), f"a sample of 1000 of 100 events has {len(set(offsets))} of them")


def samples_follow_from_contents_and_step(settings: Settings) -> None:
    """The same step of the same store has the same sample, whatever was sampled before, and others have others."""
    with stores() as opened:
        one, two = opened.open(200, settings), opened.open(200, settings)
        for store in (one, two):
            fill(store, range(20))
        sampled(two, 3, 60)
        first, second, third = sampled(one, 9, 60), sampled(two, 9, 60), sampled(one, 10, 60)
        expect(first == second, "a sample depends on earlier samples: use no randomness but that of the generator")
        expect(first != third, "two steps have the same sample: choose with the generator of the step")


def samples_go_on_alike_after_a_restart(settings: Settings) -> None:
    """`state` and `restore` keep what the sampler has learned, of losses too."""
    with stores() as opened:
        store = opened.open(200, settings)
        fill(store, range(20))
        sample = sample_of(store, 0, 100)
        store.update_priorities(sample, np.linspace(0, 5, 100, dtype=np.float32))
        again = opened.open(200, settings, FakeCheckpoints(store).checkpoint(1))
        for each in (store, again):
            fill(each, [20, 21])
        samples = [[sampled(each, step, 30) for step in range(5)] for each in (store, again)]
        expect(samples[0] == samples[1], "samples are others after a restart: state() lacks what they depend on")


def holds_no_more_than_capacity_and_a_little(settings: Settings) -> None:
    """The store is full, and not too full."""
    with stores() as opened:
        store = opened.open(320, settings)
        for number in range(40):
            fill(store, [number])
            expect(len(store) <= 330, f"a store of 320 events holds {len(store)}")
        expect(len(store) > 300, f"a store of 320 events holds {len(store)} of 4000: give each group what it can fill")


def adding_again_changes_nothing(settings: Settings) -> None:
    """After a restart events come again, and priorities depend on the event alone."""
    with stores() as opened:
        store = opened.open(200, settings)
        fill(store, range(20))
        before = held(store)
        fill(store, [3, 19, 4])
        expect(held(store) == before, "events that were added again have replaced others: priorities depend on more")


def the_order_of_additions_does_not_matter(settings: Settings) -> None:
    """Partitions come in any order."""
    with stores() as opened:
        one, two = opened.open(200, settings), opened.open(200, settings)
        fill(one, range(20))
        fill(one, range(5), partition=1)
        fill(two, range(5), partition=1)
        fill(two, range(20)[::-1])
        expect(held(one) == held(two), "other events are held in another order of arrival: priorities depend on it")


SAMPLER_CHECKS: Sequence[Check] = (
    samples_different_events_that_are_held,
    samples_all_where_few_are_held,
    samples_follow_from_contents_and_step,
    samples_go_on_alike_after_a_restart,
)
ADMISSION_CHECKS: Sequence[Check] = (
    holds_no_more_than_capacity_and_a_little,
    adding_again_changes_nothing,
    the_order_of_additions_does_not_matter,
)
