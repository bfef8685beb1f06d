"""The list of versions: the newest, those that count, and one a minute, also of those whose files are gone."""

import pytest

from anabranch.serving.dashboard.version_history import FAILED, MINUTES, NEWEST, VersionHistory
from anabranch.serving.rollout.version_list import VersionLine


def line(number, fate="swapped", verdict="pass", every=1.0):
    return VersionLine(number=number, time=6000 + number * every, fate=fate, verdict=verdict)


def on_disk(newest, fates=None, verdicts=None, every=1.0):
    """The 20 newest versions, the newest of them served but for `fates`."""
    fates = fates or {newest: "served"}
    numbers = range(newest, max(0, newest - 20), -1)
    return [line(n, fates.get(n, "swapped"), (verdicts or {}).get(n, "pass"), every) for n in numbers]


def test_one_a_minute_is_listed_of_those_that_are_neither_new_nor_special():
    history = VersionHistory()
    for newest in range(1, 301):
        rows = history.update(on_disk(newest))
    numbers = [row.number for row in rows]
    assert numbers[:NEWEST] == list(range(300, 300 - NEWEST, -1))
    assert numbers[NEWEST:] == [240, 180, 120, 60, 1]
    assert [row.removed for row in rows] == [False] * NEWEST + [True] * 5


@pytest.mark.slow
def test_memory_is_fixed():
    history = VersionHistory()
    for newest in range(1, 5000):
        rows = history.update(on_disk(newest, verdicts={n: "fail" for n in range(newest) if n % 7 == 0}, every=30.0))
        assert len(rows) <= NEWEST + FAILED + MINUTES + 3


def test_a_failed_version_stays_listed_when_newer_ones_have_passed():
    history = VersionHistory()
    for newest in range(1, 100):
        rows = history.update(on_disk(newest, verdicts={30: "fail"}))
    assert [(row.number, row.verdict) for row in rows if row.number == 30] == [(30, "fail")]


def test_the_pinned_version_and_the_one_before_stay_listed():
    history = VersionHistory()
    history.update(on_disk(9))
    for newest in range(10, 25):
        rows = history.update(on_disk(newest, {8: "pinned"}))
    fates = {row.number: row.fate for row in rows}
    assert fates[8] == "pinned"
    assert fates[9] == "swapped"
    rows = history.update(on_disk(25, {25: "served"}))
    assert {row.number: row.fate for row in rows}[8] == "swapped"


def test_a_version_that_waits_when_its_files_go_is_superseded():
    history = VersionHistory()
    history.update([line(1, "waiting")])
    rows = history.update([line(3, "served"), line(2)])
    assert [(row.number, row.fate, row.removed) for row in rows] == [
        (3, "served", False),
        (2, "swapped", False),
        (1, "superseded", True),
    ]
