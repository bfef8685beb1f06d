"""What every admission policy and every sampler promises, under whatever name: also those that docs/extend/ adds."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import numpy as np
import pytest
import torch

from ingest.events.partition import TopicPartition
from ingest.events.schema import Schema
from ingest.kafka.fake import fake_columns
from replay import policies
from replay.build import build_store
from replay.config import COMPARING, ReplaySettings
from replay.fake import FakeCheckpoints, add_now
from replay.policies import ADMISSIONS, SAMPLERS
from replay.reservoir.quotas import Quotas
from replay.snapshot import StoreSnapshot
from replay.store import Store

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = "\n".join((DOCS / "extend" / name).read_text(encoding="utf-8") for name in ("sampler.md", "admission.md"))
LINES: dict[str, str] = {
    name: line for line, name in re.findall(r'^```python\n(    "(\S+)": .*?,)\n```$', PAGE, re.MULTILINE)
}
PARTITIONS = [TopicPartition("events", 0), TopicPartition("events", 1)]
DAY_MS = 86_400_000
samplers = pytest.mark.parametrize("name", [*sorted(SAMPLERS.keys() - COMPARING), "weekly"])
FLOORS = {
    "floor": {"class_floor": 0.5},
    "recent floor": {"admission": "recent", "class_floor": 0.5},
}
admissions = pytest.mark.parametrize("name", [*sorted(ADMISSIONS.keys() - COMPARING), "fresh-classes", *FLOORS])
Open = Callable[..., Store]


@pytest.fixture(autouse=True)
def _the_page_is_followed(added: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Add to the dicts what the page says."""
    for name, kind, known in (("weekly", "Weekly", SAMPLERS), ("fresh-classes", "FreshClasses", ADMISSIONS)):
        module = added(f"replay.{name.replace('-', '_')}")
        namespace = {**vars(policies), kind: vars(module)[kind]}
        monkeypatch.setitem(known, name, eval("{" + LINES[name] + "}", namespace)[name])


@pytest.fixture
def open_store(schema: Schema, tmp_path: Path) -> Any:
    stores: list[Store] = []

    def make(capacity: int, contents: StoreSnapshot | None = None, **policies: Any) -> Store:
        settings = ReplaySettings.model_validate({"capacity": capacity, "disk": {"bytes": "2MB"}})
        settings = settings.model_copy(update=policies)
        stores.append(build_store(settings, schema, torch.device("cpu"), 0, tmp_path, contents))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def fill(store: Store, schema: Schema, batches: list[int], partition: int = 0) -> None:
    """Add batches of 100 events by number: classes 0 to 3 by turns, an event each quarter of an hour."""
    for number in batches:
        offsets = range(100 * number, 100 * number + 100)
        columns = fake_columns(schema, offsets, partition=partition, label=[0, 0, 0, 0, 0, 1, 1, 2, 2, 3])
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
    offsets: list[int] = store.plan(step, n).records["offset"].tolist()
    return offsets


def policies_of(name: str) -> dict[str, Any]:
    """Return the settings of an admission policy."""
    return FLOORS.get(name, {"admission": name})


@samplers
class TestSamplers:
    def test_a_sample_is_of_different_events_that_are_held(self, name: str, schema: Schema, open_store: Open) -> None:
        store = open_store(200, sampling=name)
        fill(store, schema, list(range(20)))
        there = set(store.event_table.copy()["offset"].tolist())
        for step in range(50):
            offsets = sampled(store, step, 60)
            assert len(set(offsets)) == 60
            assert set(offsets) <= there

    def test_a_sample_is_of_all_when_few_are_held(self, name: str, schema: Schema, open_store: Open) -> None:
        store = open_store(200, sampling=name)
        assert sampled(store, 0, 10) == []
        fill(store, schema, [0])
        assert sorted(sampled(store, 0, 1000)) == list(range(100))

    def test_a_sample_follows_from_contents_and_step(self, name: str, schema: Schema, open_store: Open) -> None:
        one, two = open_store(200, sampling=name), open_store(200, sampling=name)
        for store in (one, two):
            fill(store, schema, list(range(20)))
        sampled(two, 3, 60)
        assert sampled(one, 9, 60) == sampled(two, 9, 60) != sampled(one, 10, 60)

    def test_samples_go_on_alike_after_a_restart(self, name: str, schema: Schema, open_store: Open) -> None:
        store = open_store(200, sampling=name)
        fill(store, schema, list(range(20)))
        sample = store.fetch(store.plan(0, 100))
        store.update_priorities(sample, np.linspace(0, 5, 100, dtype=np.float32))
        again = open_store(200, FakeCheckpoints(store).checkpoint(1), sampling=name)
        for each in (store, again):
            fill(each, schema, [20, 21])
        assert [sampled(store, step, 30) for step in range(5)] == [sampled(again, step, 30) for step in range(5)]


@admissions
class TestAdmissions:
    def test_no_more_is_held_than_capacity_and_a_little(self, name: str, schema: Schema, open_store: Open) -> None:
        store = open_store(320, **policies_of(name))
        for number in range(40):
            fill(store, schema, [number])
            assert len(store) <= 330
        assert len(store) > 300

    def test_adding_again_changes_nothing(self, name: str, schema: Schema, open_store: Open) -> None:
        store = open_store(200, **policies_of(name))
        fill(store, schema, list(range(20)))
        before = held(store)
        fill(store, schema, [3, 19, 4])
        assert held(store) == before

    def test_the_order_of_additions_does_not_matter(self, name: str, schema: Schema, open_store: Open) -> None:
        one, two = open_store(200, **policies_of(name)), open_store(200, **policies_of(name))
        fill(one, schema, list(range(20)))
        fill(one, schema, list(range(5)), partition=1)
        fill(two, schema, list(range(5)), partition=1)
        fill(two, schema, list(range(20))[::-1])
        assert held(one) == held(two)


def test_a_rare_class_keeps_its_floor_and_the_rest_is_as_without_one(schema: Schema, open_store: Open) -> None:
    """An event in ten is of class 3, and 0.8 of an equal part of 200 events are 40."""
    plain, floored = open_store(200), open_store(200, class_floor=0.8)
    counts = []
    for store in (plain, floored):
        fill(store, schema, list(range(40)))
        index = store.event_table.copy()
        stays = np.isin(index["offset"], [offset for _, offset in held(store)])
        counts.append(np.bincount(index["label"][stays].astype(np.int64), minlength=4))
    missing = np.maximum(0, 40 - counts[0])
    assert missing[3] > 0
    assert counts[1][missing > 0].tolist() == [40] * int((missing > 0).sum())
    assert counts[1].min() == 40
    assert counts[0].sum() == counts[1].sum() == 200
    assert len(set(held(plain)) & set(held(floored))) == 200 - missing.sum()


def test_every_name_can_be_written_in_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    fields = ReplaySettings.model_fields
    assert set(get_args(fields["admission"].annotation)) == set(ADMISSIONS)
    assert set(get_args(fields["sampling"].annotation)) == set(SAMPLERS)


class TestThePage:
    def test_its_sampler_has_weeks_come_alike(self, schema: Schema, open_store: Open) -> None:
        store = open_store(2000, sampling="weekly")
        for week, count in enumerate([1000, 100, 300]):
            columns = fake_columns(schema, range(1000 * week, 1000 * week + count))
            columns["time_ms"][:] = 7 * DAY_MS * (week + 20) + DAY_MS
            add_now(store, columns, PARTITIONS)
        assert np.bincount(np.array(sampled(store, 0, 240)) // 1000).tolist() == [80, 80, 80]

    def test_its_admission_has_classes_alike_and_fresh(self, schema: Schema, open_store: Open) -> None:
        fresh, fair = (open_store(160, admission=name) for name in ("fresh-classes", "class-balanced"))
        for store in (fresh, fair):
            fill(store, schema, list(range(20)))
            index = store.event_table.copy()
            assert np.ptp(np.bincount(index["label"])) <= 5  # those up to the next clearing
        assert np.median(fresh.event_table.copy()["offset"]) > 1700 > np.median(fair.event_table.copy()["offset"])

    @pytest.mark.process
    def test_its_picture_is_what_the_policies_do(self) -> None:
        """When they change: python docs/images/draw_policies.py > docs/images/replay-policies.svg."""
        script = DOCS / "images" / "draw_policies.py"
        made = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=60).stdout
        assert made == (DOCS / "images" / "replay-policies.svg").read_text(encoding="utf-8")
