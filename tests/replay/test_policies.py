"""What every admission policy and every sampler promises, and what is special to some: also those of docs/extend/."""

from pathlib import Path

import numpy as np
import pytest

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.replay.policies import ADMISSIONS, SAMPLERS
from anabranch.replay.settings import ADMISSION, SAMPLING, ReplaySettings, admission_compares, sampling_compares
from anabranch.testing.checks import name_of
from anabranch.testing.policies import (
    ADMISSION_CHECKS,
    DAY_MS,
    PARTITIONS,
    SAMPLER_CHECKS,
    SCHEMA,
    fill,
    held,
    sampled,
    stores,
)
from anabranch.testing.stores import add_now
from tests import forkserver

DOCS = Path(__file__).parent.parent.parent / "docs"
FLOORS = {
    "floor": {"class_floor": 0.5},
    "recent floor": {"admission": "recent", "class_floor": 0.5},
}


@pytest.fixture
def open_store():
    """`open_store(capacity, **settings)`."""
    with stores() as opened:
        yield lambda capacity, **settings: opened.open(capacity, settings)


@pytest.mark.parametrize("check", SAMPLER_CHECKS, ids=name_of)
@pytest.mark.parametrize("name", sorted(name for name in SAMPLERS if not sampling_compares(name)))
def test_a_sampler_keeps_what_all_promise(name, check):
    check({"sampling": name})


@pytest.mark.parametrize("check", ADMISSION_CHECKS, ids=name_of)
@pytest.mark.parametrize("name", [*sorted(name for name in ADMISSIONS if not admission_compares(name)), *FLOORS])
def test_an_admission_policy_keeps_what_all_promise(name, check):
    check(FLOORS.get(name, {"admission": name}))


def test_every_name_can_be_written_in_the_settings():
    assert set(ADMISSION.names) == set(ADMISSIONS)
    assert set(SAMPLING.names) == set(SAMPLERS)


@pytest.mark.parametrize("key", ["sampling", "admission"])
def test_arguments_for_a_policy_of_ours_are_refused(key):
    with pytest.raises(ValueError, match=rf'{key}_args are for your own class, and {key} = "\w+" takes none'):
        ReplaySettings.model_validate({f"{key}_args": {"days": 7}})


def test_a_rare_class_keeps_its_floor_and_the_rest_is_as_without_one(open_store):
    """An event in ten is of class 3, and 0.8 of an equal part of 200 events are 40."""
    plain, floored = open_store(200), open_store(200, class_floor=0.8)
    counts = []
    for store in (plain, floored):
        fill(store, list(range(40)))
        index = store.event_table.copy()
        stays = np.isin(index["offset"], [offset for _, offset in held(store)])
        counts.append(np.bincount(index["label"][stays].astype(np.int64), minlength=4))
    missing = np.maximum(0, 40 - counts[0])
    assert missing[3] > 0
    assert counts[1][missing > 0].tolist() == [40] * int((missing > 0).sum())
    assert counts[1].min() == 40
    assert counts[0].sum() == counts[1].sum() == 200
    assert len(set(held(plain)) & set(held(floored))) == 200 - missing.sum()


class TestThePage:
    def test_its_sampler_has_weeks_come_alike(self, open_store, followed):
        store = open_store(2000, sampling=f"{followed('sampler')}:Weekly")
        for week, count in enumerate([1000, 100, 300]):
            columns = fake_columns(SCHEMA, range(1000 * week, 1000 * week + count))
            columns["time_ms"][:] = 7 * DAY_MS * (week + 20) + DAY_MS
            add_now(store, columns, PARTITIONS)
        assert np.bincount(np.array(sampled(store, 0, 240)) // 1000).tolist() == [80, 80, 80]

    def test_its_admission_has_classes_alike_and_fresh(self, open_store, followed):
        fresh, fair = (
            open_store(160, admission=name) for name in (f"{followed('admission')}:FreshClasses", "class-balanced")
        )
        for store in (fresh, fair):
            fill(store, list(range(20)))
            index = store.event_table.copy()
            assert np.ptp(np.bincount(index["label"])) <= 5  # those up to the next clearing
        assert np.median(fresh.event_table.copy()["offset"]) > 1700 > np.median(fair.event_table.copy()["offset"])

    @pytest.mark.process
    def test_its_picture_is_what_the_policies_do(self):
        """When they change: python docs/images/draw_policies.py > docs/images/replay-policies.svg."""
        script = DOCS / "images" / "draw_policies.py"
        picture = (DOCS / "images" / "replay-policies.svg").read_text(encoding="utf-8")
        assert forkserver.run([str(script)]).stdout == picture
