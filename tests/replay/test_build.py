"""From one arrangement of tiers to another: a store with other settings restores a checkpoint."""

import dataclasses
import errno
import os
import threading
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.replay.build import build_store, check_policies
from anabranch.replay.sample_plan import AHEAD
from anabranch.replay.settings import ReplaySettings
from anabranch.replay.store import Store
from anabranch.replay.tiers.disk import DiskTier
from anabranch.replay.tiers.disk_files import make_way
from anabranch.testing.stores import FakeCheckpoints, add_now, plan_ahead, plan_of

PARTITIONS = [TopicPartition("events", 0)]
MEMORY: dict[str, Any] = {}
DISK: dict[str, Any] = {"disk": {"bytes": "200kB"}}
LARGER: dict[str, Any] = {"disk": {"bytes": "400kB"}}
SMALLER: dict[str, Any] = {"disk": {"bytes": "60kB"}}
REDIS: dict[str, Any] = {"redis": {"bytes": "1MB"}}
LARGER_REDIS: dict[str, Any] = {"redis": {"bytes": "2MB"}}
SMALLER_REDIS: dict[str, Any] = {"redis": {"bytes": "450kB"}}
BOTH: dict[str, Any] = {"redis": {"bytes": "50kB"}, "disk": {"bytes": "200kB"}, "device_bytes": "1kB"}


@pytest.fixture
def build(schema, tmp_path, request):
    """`build(options, contents=None, capacity=1000)`: stores in one folder, as restarts of one learner make them."""
    stores: list[Store] = []

    def make(options, contents=None, capacity=1000):
        if "redis" in options:
            options = {**options, "redis": {"url": request.getfixturevalue("shared_redis").url, **options["redis"]}}
        settings = ReplaySettings.model_validate({"capacity": capacity, **options})
        stores.append(build_store(settings, schema, torch.device("cpu"), 0, tmp_path, contents, keys="test:rank-0"))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def fill(store, schema, begin, end):
    for offset in range(begin, end, 100):
        add_now(store, fake_columns(schema, range(offset, offset + 100)), PARTITIONS)


def checkpoint(store, number=1):
    return FakeCheckpoints(store).checkpoint(number)


def payload(store):
    """By offset, the payload of what is held, as a sample of everything has it."""
    plan = plan_of(store, 0, len(store))
    offsets = plan.records["offset"].tolist()
    columns = store.planner.fetch(plan).columns
    rows = torch.cat([columns["feature.x"], columns["feature.n"][:, None], columns["label"][:, None]], dim=1)
    return dict(zip(offsets, rows.tolist(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(MEMORY, DISK, id="memory to disk"),
        pytest.param(DISK, MEMORY, id="disk to memory"),
        pytest.param(DISK, LARGER, id="larger disk"),
        pytest.param(LARGER, DISK, id="smaller disk"),
        pytest.param(DISK, DISK, id="as it was"),
        pytest.param(MEMORY, REDIS, id="memory to redis", marks=pytest.mark.services),
        pytest.param(REDIS, BOTH, id="redis to both", marks=pytest.mark.services),
        pytest.param(DISK, REDIS, id="disk to redis", marks=pytest.mark.services),
        pytest.param(BOTH, DISK, id="both to disk", marks=pytest.mark.services),
        pytest.param(DISK, BOTH, id="disk to both", marks=pytest.mark.services),
        pytest.param(REDIS, REDIS, id="redis as it was", marks=pytest.mark.services),
        pytest.param(REDIS, LARGER_REDIS, id="larger redis", marks=pytest.mark.services),
        pytest.param(LARGER_REDIS, SMALLER_REDIS, id="smaller redis", marks=pytest.mark.services),
        pytest.param(BOTH, BOTH, id="both as they were", marks=pytest.mark.services),
    ],
)
def test_contents_move_to_another_arrangement_with_their_plans(schema, build, tmp_path, before, after):
    store, undisturbed = build(before), build(MEMORY)
    for each in (store, undisturbed):
        fill(each, schema, 0, 5000)
        plan_ahead(each, 7, 20)
    contents = checkpoint(store)
    moved = build(after, contents)
    assert payload(moved) == payload(undisturbed)
    for each in (moved, undisturbed):
        fill(each, schema, 5000, 9000)
        plan_ahead(each, 8, 20)
    for step in range(8, 8 + AHEAD):
        mine, expected = moved.planner.sample(step, 20), undisturbed.planner.sample(step, 20)
        assert all(torch.equal(mine.columns[name], column) for name, column in expected.columns.items())
        assert torch.equal(mine.importance, expected.importance)
    assert payload(moved) == payload(undisturbed)
    assert moved.lost == 0


def test_a_disk_that_holds_less_keeps_the_smallest_priorities(schema, build, caplog):
    store = build(DISK)
    fill(store, schema, 0, 5000)
    moved = build(SMALLER, checkpoint(store))
    priorities = np.sort(store.event_table.copy()["priority"])
    assert 300 < len(moved) < 1000
    assert np.array_equal(np.sort(moved.event_table.copy()["priority"]), priorities[: len(moved)])
    assert payload(moved).items() <= payload(store).items()
    assert "replay.disk.bytes = 60000 holds" in caplog.text


@pytest.mark.parametrize(("after", "mine"), [(LARGER, ["2.rows"]), (MEMORY, [])], ids=["larger disk", "memory"])
def test_the_old_file_goes_when_no_checkpoint_can_name_it(schema, build, tmp_path, after, mine):
    store = build(DISK)
    fill(store, schema, 0, 3000)
    contents = checkpoint(store, 4)
    moved = build(after, contents)
    names = lambda: sorted(path.name for path in tmp_path.iterdir())  # noqa: E731
    assert names() == ["1.rows", *mine]
    for number, oldest, left in ((5, 3, ["1.rows"]), (6, 4, ["1.rows"]), (7, 5, [])):
        moved.begin_snapshot(number)
        moved.end_snapshot(oldest)
        assert names() == [*left, *mine], f"with checkpoints from {oldest} on"


def test_files_that_belong_to_no_checkpoint_are_removed(build, tmp_path):
    build(DISK)
    (tmp_path / ".tmp-2.rows").write_bytes(b"half")
    make_way(tmp_path)
    assert not list(tmp_path.iterdir())
    make_way(tmp_path / "nowhere")


def test_rows_that_went_bad_are_left_behind_when_they_are_copied(schema, build):
    store = build(DISK)
    fill(store, schema, 0, 3000)
    contents = checkpoint(store)
    good = payload(store)
    spoil(store, positions=3)
    moved = build(LARGER, contents)
    assert moved.lost == 3
    assert len(payload(moved)) == len(good) - 3
    assert payload(moved).items() <= good.items()


def spoil(store, positions):
    """Flip a bit in the rows of the first events of the index."""
    disk = store.tiers.slow[-1]
    assert isinstance(disk, DiskTier)
    store.tiers.sync()
    with disk.path.open("r+b") as file:
        for slot in store.event_table.copy()["slot"][:positions].tolist():
            file.seek(4096 + slot * disk.slot_bytes)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))


def test_a_row_that_went_bad_is_left_out_of_samples_and_erased(schema, build, caplog):
    store = build({**DISK, "device_bytes": "1kB"}, capacity=200)
    fill(store, schema, 0, 2000)
    held, bad = len(store), set(store.event_table.copy()["offset"][:5].tolist())
    cached = store.tiers.rows(len(store))["device"]
    spoil(store, positions=5)
    plan_ahead(store, 0, held)
    sample = store.planner.sample(0, held)
    assert held - 5 <= len(sample) <= held - 5 + cached
    plan_ahead(store, 1, 10)
    assert store.lost == held - len(sample)
    assert len(store) == len(sample)
    assert bad & set(store.event_table.copy()["offset"].tolist()) <= bad
    assert f"{store.lost} events could not be kept" in caplog.text
    fill(store, schema, 2000, 4000)
    assert len(payload(store)) == len(store)


def test_a_disk_that_is_out_of_reach_for_a_while_costs_no_event(schema, build, monkeypatch):
    store = build({**DISK, "device_bytes": "1kB"}, capacity=200)
    fill(store, schema, 0, 2000)
    held = len(store)

    def stale(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("anabranch.replay.tiers.disk.os.preadv", stale)
        for step in range(10):
            plan_ahead(store, step, 50)
            assert len(store.planner.sample(step, 50)) < 50
        assert "cannot be read: Stale file handle; its events are not replayed" in str(store.tiers.problem)
    for step in range(10, 30):
        plan_ahead(store, step, 50)
        sample = store.planner.sample(step, 50)
    assert (len(sample), len(store), store.lost, store.tiers.problem) == (50, held, 0, None)


def test_a_disk_that_cannot_be_written_costs_events_and_no_step(schema, build, monkeypatch):
    store = build(DISK, capacity=200)
    fill(store, schema, 0, 300)
    store.tiers.sync()
    held = len(store)

    def read_only(*_):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr("anabranch.replay.tiers.disk.os.pwritev", read_only)
        fill(store, schema, 300, 1000)
        store.tiers.sync()
        assert store.tiers.problem is not None
        assert "1.rows cannot be written: Read-only file system; events are not stored" in store.tiers.problem
    plan_ahead(store, 0, 50)
    assert store.lost > 0
    assert len(store.planner.sample(0, 50)) == 50
    assert len(store) <= held
    fill(store, schema, 1000, 3000)
    store.tiers.sync()
    assert store.tiers.problem is None
    assert len(payload(store)) == len(store) > 150


def test_a_checkpoint_is_not_whole_before_its_rows_are_on_the_disk(schema, build, monkeypatch):
    store = build(DISK)
    gate, order = threading.Event(), []
    write, fsync = os.pwritev, os.fsync
    monkeypatch.setattr(
        "anabranch.replay.tiers.disk.os.pwritev", lambda *args: (gate.wait(), order.append("write"), write(*args))[2]
    )
    monkeypatch.setattr("anabranch.replay.tiers.disk.os.fsync", lambda *args: (order.append("sync"), fsync(*args))[1])
    add_now(store, fake_columns(schema, range(10)), PARTITIONS)
    held = store.begin_snapshot(1)
    checkpointer = threading.Thread(target=lambda: (held.contents(), order.append("contents")))
    checkpointer.start()
    checkpointer.join(0.05)
    assert order == []
    gate.set()
    checkpointer.join()
    assert order == ["write", "sync", "contents"]


def test_a_store_without_a_slot_to_write_declines_events(schema, build):
    """It happens when checkpoints cannot be written for long, so that no slot is given back."""
    store = build(SMALLER, capacity=400)
    for number, begin in enumerate(range(0, 60_000, 100), start=1):
        store.begin_snapshot(number)
        fill(store, schema, begin, begin + 100)
        store.end_snapshot(1)
        if store.lost:
            break
    assert store.lost
    assert store.slots.free == 0
    assert len(payload(store)) == len(store)


def test_the_file_of_another_checkpoint_is_refused(schema, build, tmp_path):
    store = build(DISK)
    fill(store, schema, 0, 500)
    contents = checkpoint(store)
    file = contents.state.file
    assert file is not None
    another = dataclasses.replace(contents.state, file=dataclasses.replace(file, id="0" * 32))
    other = dataclasses.replace(contents, state=another)
    with pytest.raises(SettingsError, match=r"1.rows is not the file that checkpoint 1 belongs to; put that one back"):
        build(DISK, other)
    (tmp_path / "1.rows").unlink()
    with pytest.raises(SettingsError, match=r"1.rows, which cannot be opened.*is its disk mounted"):
        build(DISK, contents)


@pytest.mark.parametrize(("key", "instead"), [("admission", "reservoir"), ("sampling", "uniform")])
def test_no_policy_shares_the_store_among_classes_of_which_an_event_has_several(key, instead):
    label = {"name": "y", "classes": 4, "multi": True}
    fields = {"features": {"x": {"dtype": "float32"}}, "label": label}
    settings = ReplaySettings.model_validate({"capacity": 100, key: "class-balanced"})
    with pytest.raises(SettingsError, match=f'replay.{key} = "class-balanced" needs .* "{instead}"'):
        build_store(settings, Schema(SchemaSettings.model_validate(fields)), torch.device("cpu"), 0)


@pytest.mark.parametrize("admission", ["class-balanced", "diverse"])
def test_a_floor_is_for_policies_without_quotas(admission):
    with pytest.raises(ValidationError, match=f'class_floor is for other admissions than "{admission}"'):
        ReplaySettings.model_validate({"admission": admission, "class_floor": 0.25})


def test_a_floor_needs_classes():
    fields = {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "dtype": "float32"}}
    with pytest.raises(SettingsError, match=r"class_floor = 0.25 needs schema.label.classes.*write 0"):
        check_policies(
            ReplaySettings.model_validate({"class_floor": 0.25}), Schema(SchemaSettings.model_validate(fields)), None
        )


def test_a_disk_too_small_for_one_event_is_refused(build):
    with pytest.raises(SettingsError, match=r"replay.disk.bytes = 5000 is too small"):
        build({"disk": {"bytes": 5000}})
