"""Kill -9: the store that is opened again has every event of the last checkpoint, whole, and goes on as if nothing had
been.

With the checkpointer of the learner, in a background thread, over a file in which slots are soon written again.
"""

import contextlib
import hashlib
import os
import random
import shutil
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.checkpoints.checkpointer import CapturedState, Checkpointer
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.checkpoints.parts import StorePart, unpack
from anabranch.learner.settings.learner import CheckpointSettings
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.replay.background_store import BackgroundStore
from anabranch.replay.build import build_store
from anabranch.replay.sample_plan import AHEAD
from anabranch.replay.settings import ReplaySettings
from anabranch.replay.tiers import redis_server as redis
from anabranch.testing.stores import plan_ahead
from tests.support.processes import Lives, serve_lives
from tests.support.waiting import TAKES_MINUTES

KEYS = "crash:rank-0"
CPU = torch.device("cpu")
PARTITIONS = [TopicPartition("events", 0), TopicPartition("events", 1)]
NEW, SAMPLED, PLANNED, CAPACITY = 30, 16, 20, 400
SETTINGS: dict[str, dict[str, Any]] = {
    "recent and loss": {"admission": "recent", "half_life": "1s", "sampling": "loss"},
    "reservoir with a floor": {"class_floor": 0.8},
    "class-balanced": {"admission": "class-balanced", "sampling": "class-balanced"},
}
TIERS: dict[str, dict[str, Any]] = {
    "disk": {"disk": {"bytes": "33kB"}, "device_bytes": "4kB"},
    "redis": {"redis": {"bytes": "200kB"}, "device_bytes": "4kB"},
    "both": {"disk": {"bytes": "33kB"}, "redis": {"bytes": "30kB"}, "device_bytes": "4kB"},
}
SCHEMA = {
    "features": {"x": {"dtype": "float32", "shape": [2]}, "n": {"dtype": "int64"}},
    "label": {"name": "y", "classes": 4},
    "weight": {"name": "w"},
}


def columns_of(schema, partition, offsets):
    """What an event is follows from its identity; a second has 30 of them, a class as many as its number says."""
    number = offsets * 2 + partition
    columns = fake_columns(schema, offsets.tolist(), partition=partition)
    columns["feature.x"] = np.stack([number, -number], axis=1).astype(np.float32)
    columns["feature.n"] = number * 1_000_003
    columns["label"] = np.array([0, 1, 1, 2, 2, 2, 3, 3, 3, 3])[number % 10]
    columns["weight"] = np.array([0.5, 1.0, 3.0], np.float32)[number % 3]
    columns["time_ms"] = number * 1000 // 30
    return columns


class Rehearsal:
    """What a learner does with a store, a step after the other; nothing of it depends on time."""

    def __init__(self, keeper, schema, step):
        self._keeper, self.schema, self.step = keeper, schema, step
        if not step:
            self._plan_ahead(0)

    def _plan_ahead(self, step):
        if isinstance(self._keeper, BackgroundStore):
            self._keeper.plan_ahead(step, PLANNED)
        else:
            plan_ahead(self._keeper, step, PLANNED)

    @property
    def store(self):
        return self._keeper.flush() if isinstance(self._keeper, BackgroundStore) else self._keeper

    def take_step(self):
        """Sample, learn, add and plan; return the digest of what was sampled."""
        keeper = self._keeper
        sample = (keeper if isinstance(keeper, BackgroundStore) else keeper.planner).sample(self.step, SAMPLED)
        if sample is not None:
            offsets = sample.records["offset"]
            self._keeper.update_priorities(sample, ((offsets * 31 + self.step) % 17 / 4).astype(np.float32))
        for partition in (0, 1):
            begin = self.step * NEW // 2
            self._keeper.add(columns_of(self.schema, partition, np.arange(begin, begin + NEW // 2)), PARTITIONS)
        self.step += 1
        self._plan_ahead(self.step)
        return digest_of(sample)

    def state(self):
        """Return the digest of what is held, in order, and planned."""
        self.store.flush_pending()
        assert self.store.lost == 0
        index = self.store.event_table.copy()
        index["slot"] = 0
        plans = [plan.records.tobytes() for plan in self.store.planner.plans]
        thresholds = self.store.reservoir.quotas.thresholds.tobytes()
        sampler = [values.tobytes() for values in self.store._sampler.state().values()]
        return hashlib.sha256(b"".join([index.tobytes(), *plans, thresholds, *sampler])).hexdigest()


class Life(Rehearsal):
    """One that goes on from the newest checkpoint and makes checkpoints; `close` ends it as a crash does, but for open
    files."""

    def __init__(self, path, schema, settings, tiers, redis=""):
        """`redis` is the address of a server, if the tiers need one."""
        checkpoints = Checkpoints(path / "checkpoints", schema.digest, 1)
        checkpoints.storage.clean()
        found = checkpoints.newest()
        contents, segments = (unpack(found[1]) if found else None) or (None, ())
        chosen = dict(TIERS[tiers])
        if "redis" in chosen:
            chosen["redis"] = {"url": redis, **chosen["redis"]}
        options = ReplaySettings.model_validate({"capacity": CAPACITY, **SETTINGS[settings], **chosen})
        self._background_store = BackgroundStore(
            build_store(options, schema, CPU, 0, path / "replay", contents, keys=KEYS)
        )
        super().__init__(self._background_store, schema, found[1].step if found else 0)
        every = CheckpointSettings.model_validate({"every": "5ms"})
        metrics, part = LearnerMetrics(CollectorRegistry()), StorePart(self._background_store, segments)
        self._checkpointer = Checkpointer(checkpoints, every, metrics.checkpoint, metrics.checkpoint_stall, [part])

    def checkpoint_if_due(self):
        if self._checkpointer.is_due():
            self._checkpointer.checkpoint(lambda: CapturedState(self.step, {}, {}))
        assert self._checkpointer.problem is None

    def close(self):
        self._background_store.close()


class Undisturbed:
    """The same steps in one life, in memory and one thread."""

    def __init__(self, schema, settings):
        options = ReplaySettings.model_validate({"capacity": CAPACITY, **SETTINGS[settings]})
        self._life = Rehearsal(build_store(options, schema, CPU, 0), schema, 0)
        self._states, self._samples = [self._life.state()], list[str]()

    def state(self, step):
        """Return the digest of the state before a step."""
        self._go_on(step)
        return self._states[step]

    def sample(self, step):
        """Return the digest of what a step samples."""
        self._go_on(step + 1)
        return self._samples[step]

    def _go_on(self, step):
        while self._life.step < step:
            self._samples.append(self._life.take_step())
            self._states.append(self._life.state())


def digest_of(sample):
    if sample is None or not len(sample):
        return ""
    columns = [column.numpy().tobytes() for column in sample.columns.values()]
    names = np.stack([sample.records[name] for name in ("partition", "offset", "row")])
    return hashlib.sha256(b"".join([names.tobytes(), sample.importance.numpy().tobytes(), *columns])).hexdigest()


def expect_whole(store, schema):
    """Fail unless the file has each event's own row, and each slot is free, used or retired."""
    slots = store.event_table.slots
    rows, whole = store.tiers.primary.read(slots.astype(np.int64), store.event_table.identity(slots))
    assert whole.all(), f"{(~whole).sum()} rows of {len(slots)} are torn or of other events"
    columns = store._layout.unpack(rows)
    records = store.event_table.by_slot.take(slots)
    for partition in (0, 1):
        mine = records["partition"] == partition
        if not mine.any():  # the first checkpoint may be made before anything came
            continue
        expected = columns_of(schema, partition, records["offset"][mine])
        for name, column in columns.items():
            assert column.numpy()[mine].tobytes() == np.ascontiguousarray(expected[name]).tobytes(), name
    retired = [slots for _, slots in store.slots._retired]
    everything = np.concatenate([slots, store.slots._free, *retired])
    assert sorted(everything.tolist()) == list(range(store.tiers.slots))


@pytest.mark.parametrize(
    ("settings", "kills", "tiers"),
    [
        ("recent and loss", 10, "disk"),
        *(
            pytest.param("reservoir with a floor", 5, tiers, marks=pytest.mark.services, id=f"floor-5-{tiers}")
            for tiers in ("redis", "both")
        ),
        *(
            pytest.param(*(name, 200, "disk"), marks=[pytest.mark.slow, pytest.mark.timeout(1800), TAKES_MINUTES])
            for name in SETTINGS
        ),
    ],
)
def test_a_store_is_whole_after_kills_at_random_moments(tmp_path, one_thread, nursery, settings, kills, tiers, request):
    """After each: every event of the last checkpoint, no torn one, no slot leaked, and the next samples bit for bit.

    The same holds for the oldest checkpoint that is kept. The next life goes on from the last one: what it has at its
    own last checkpoint shows that it did as if undisturbed.
    """
    schema = Schema(SchemaSettings.model_validate(SCHEMA))
    moments, undisturbed, checkpoints = (
        random.Random(kills),
        Undisturbed(schema, settings),
        Checkpoints(tmp_path / "checkpoints", "", 1),
    )
    longest, crashes, newest = 0.15, 0, set[int]()
    server = request.getfixturevalue("shared_redis").url if "redis" in TIERS[tiers] else ""
    while crashes < kills or len(newest) <= kills / 4:
        pid = nursery.begin(str(tmp_path), settings, tiers, server)
        threading.Event().wait(moments.uniform(0.01, longest))
        os.kill(pid, signal.SIGKILL)
        nursery.await_end()
        number = max(checkpoints.numbers(), default=0)
        if number in newest | {0}:
            longest *= 1.1  # for a slow machine: if lives end before a checkpoint, nothing goes on
        if not number:
            continue
        newest.add(number)
        crashes += 1
        for path in (tmp_path, *_with_the_oldest_alone(tmp_path, checkpoints.numbers())):
            life = Life(path, schema, settings, tiers, server)
            expect_whole(life.store, schema)
            assert life.state() == undisturbed.state(life.step), "others are held or planned"
            for step in range(life.step, life.step + AHEAD):
                assert digest_of(life.store.planner.sample(step, SAMPLED)) == undisturbed.sample(step)
            life.close()


def _with_the_oldest_alone(path, numbers):
    """Return a folder with only the oldest checkpoint, as if the others were damaged, if there is more than one."""
    if len(numbers) < 2:
        return []
    oldest = path / "oldest"
    shutil.rmtree(oldest, ignore_errors=True)
    shutil.copytree(
        path / "checkpoints" / str(numbers[0]), oldest / "checkpoints" / str(numbers[0]), copy_function=os.link
    )
    (oldest / "replay").symlink_to(path / "replay")
    return [oldest]


@pytest.fixture(scope="module")
def nursery():
    with contextlib.closing(Lives(__file__)) as lives:
        yield lives


def _breed():
    schema = Schema(SchemaSettings.model_validate(SCHEMA))
    torch.set_num_threads(1)
    redis._TIMEOUT_SECONDS = 60.0  # as for the fixture `shared_redis`
    for settings in SETTINGS:
        # The first step imports much, which a life would be too short for.
        with tempfile.TemporaryDirectory() as scratch:
            warm = Life(Path(scratch), schema, settings, "disk")
            warm.take_step()
            warm.close()

    def live(path, *how):
        life = Life(Path(path), schema, *how)
        while True:
            life.checkpoint_if_due()
            life.take_step()

    serve_lives(live)


if __name__ == "__main__":
    _breed()
