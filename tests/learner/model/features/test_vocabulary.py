"""The vocabulary that grows on the stream."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from anabranch.ingest.settings.features import LearnedVocabulary
from anabranch.learner.model.features.vocabulary import EMPTY, VocabularyTable, _search

DAY = 86_400_000


def vocabulary(learn=7, min_count=1, **settings):
    return VocabularyTable(LearnedVocabulary.model_validate({"learn": learn, "min_count": min_count, **settings}))


def observe(table, *keys, time_ms=0):
    return table.observe(np.array(keys, np.int64), time_ms).rows.tolist()


def rows(table, *keys):
    found: list[int] = table(torch.tensor(keys)).tolist()
    return found


def check(table):
    """Raise AssertionError where a row has two keys, or the search cannot find one."""
    keys, of_rows = table.get_buffer("keys"), table.get_buffer("rows")
    used = int((keys != EMPTY).sum())
    assert torch.equal(keys, keys.sort().values)
    assert len(keys[:used].unique()) == used
    assert len(of_rows[:used].unique()) == used
    assert used == 0 or (of_rows[:used].min() >= table.shared and of_rows.max() < table.size)
    assert torch.equal(table(keys[:used]), of_rows[:used])


def test_a_value_has_a_shared_row_until_it_was_seen_often_enough():
    table = vocabulary(min_count=3)
    assert observe(table, 5, 9) == []
    assert observe(table, 5) == []
    assert rows(table, 5, 9) == [0, 0]
    assert observe(table, 5) == [1]
    assert rows(table, 5, 9) == [1, 0]


HOUR = 3_600_000


@pytest.mark.parametrize("between", ["2m", "1h"])
def test_a_value_expires_by_the_time_of_records_and_its_row_goes_to_another(between):
    table, step_ms = vocabulary(expire="12h"), {"2m": 120_000, "1h": HOUR}[between]
    now = 1000 * DAY
    for _ in range(12):
        observe(table, 5, 6, time_ms=now)
        now += step_ms
    before = now
    while rows(table, 5) != [0]:
        observe(table, 6, time_ms=now)
        now += step_ms
    assert 12 * HOUR < now - before < 19 * HOUR
    assert rows(table, 5, 6) == [0, 2]
    assert [1] in [observe(table, 7, time_ms=now) for _ in range(3)]


def fill(table, now):
    for _ in range(60):
        observe(table, *range(40), time_ms=now)
        now += 1000
    return now


@pytest.mark.parametrize("hours", [14, -14, 24 * 365])
@pytest.mark.parametrize("batches", [1, 5, 60])
def test_batches_with_wrong_times_let_nothing_expire_and_do_not_stop_the_clock(hours, batches):
    table = vocabulary(learn=64, expire="12h")
    now = fill(table, 1000 * DAY)
    for step in range(batches):
        observe(table, 50, time_ms=now + hours * HOUR + step)
    assert (table(torch.arange(40)) >= table.shared).all()
    now = fill(table, now)
    assert (table(torch.arange(40)) >= table.shared).all()
    assert abs(int(table.state["totals"][1]) - now) < HOUR
    for step in range(60):
        observe(table, 50, time_ms=now + step * HOUR // 2)
    assert (table(torch.arange(40)) < table.shared).all()
    assert rows(table, 50)[0] >= table.shared


def test_after_a_pause_the_clock_follows_and_what_was_seen_since_stays():
    table = vocabulary(learn=64, expire="12h")
    now = fill(table, 1000 * DAY) + 30 * DAY
    for step in range(300):
        observe(table, *range(20), time_ms=now + step * 1000)
    assert (table(torch.arange(20)) >= table.shared).all()
    assert (table(torch.arange(20, 40)) < table.shared).all()


def test_a_full_table_gives_the_row_that_was_unseen_for_longest_to_a_value_seen_more_often():
    table = vocabulary(learn=3)
    observe(table, 1, 1, 1)
    observe(table, 2, 2, 2)
    assert observe(table, 3, 3, 3) == []
    assert observe(table, 3) == [1]
    assert rows(table, 1, 2, 3) == [0, 2, 1]


def test_values_that_are_seen_once_push_nothing_out():
    table = vocabulary(learn=64, min_count=2)
    common = np.arange(40)
    for _ in range(4):
        table.observe(common, 0)
    for begin in range(1_000, 9_000, 100):
        table.observe(np.concatenate([np.arange(begin, begin + 100), common]), 0)
    assert (table(torch.arange(40)) >= table.shared).all()
    check(table)


def test_a_value_starts_from_the_row_that_it_shared_until_then():
    table = vocabulary(learn=64, min_count=2)
    keys = torch.arange(40)
    before = table(keys)
    assert (before < table.shared).all()
    assert len(before.unique()) == table.shared
    table.observe(keys.numpy(), 0)
    assert torch.equal(table(keys), before)
    rows, shared = table.observe(keys.numpy(), 0)
    after = dict(zip(rows.tolist(), shared.tolist(), strict=True))
    assert [after[row] for row in table(keys).tolist()] == before.tolist()


def test_an_exported_search_finds_what_the_usual_one_does(monkeypatch):
    keys = torch.arange(-5, 60)
    for size in range(1, 33):
        table = torch.cat([torch.arange(0, size) * 3, torch.full((size % 4,), EMPTY)])
        expected = torch.searchsorted(table, keys)
        with monkeypatch.context() as patched:
            patched.setattr(torch.compiler, "is_exporting", lambda: True)
            assert torch.equal(_search(table, keys), expected)


def test_the_largest_integer_is_a_value_as_any_other():
    table = vocabulary()
    observe(table, EMPTY, -EMPTY)
    assert sorted(rows(table, EMPTY, -EMPTY)) == [1, 2]
    assert rows(vocabulary(), EMPTY) == [0]


def test_a_table_that_expires_at_once_is_filled_again_without_a_row_for_two_values():
    table = vocabulary(learn=400, expire="1h")
    for step in range(9):
        observe(table, *range(step * 40, step * 40 + 33), time_ms=DAY + step)
    for step in range(300):
        observe(table, 5000, time_ms=2 * DAY + step)
    assert int((table.get_buffer("keys") != EMPTY).sum()) == 1
    for step in range(20):
        observe(table, *(range(1000 + step * 40, 1040 + step * 40)), time_ms=2 * DAY + 9 + step)
        check(table)
    for step in range(20):
        observe(table, *(3000 + step, 3000 + step), time_ms=2 * DAY + 40 + step)
        check(table)


@given(
    st.lists(st.lists(st.integers(-20, 20), min_size=1, max_size=12), max_size=30),
    st.integers(2, 9),
    st.integers(1, 3),
    st.integers(0, 30),
)
def test_a_restored_vocabulary_goes_on_as_the_original_bit_for_bit(batches, learn, min_count, at):
    original = vocabulary(learn, min_count, expire="5ms")
    restored: VocabularyTable | None = None
    for index, keys in enumerate(batches):
        if index == at:
            restored = vocabulary(learn, min_count, expire="5ms")
            restored.load_state_dict(copy.deepcopy(original.state_dict()))
        rows: NDArray[np.int64] = original.observe(np.array(keys, np.int64), 2 * index).rows
        check(original)
        if restored is not None:
            assert rows.tolist() == observe(restored, *keys, time_ms=2 * index)
            for name, value in original.state_dict().items():
                assert torch.equal(value, restored.state_dict()[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("learn", [100, 3000])
def test_memory_is_flat_and_common_values_are_known_among_a_million(learn):
    table, random = vocabulary(learn, 2), np.random.default_rng(0)
    size = sum(value.nbytes for value in table.state_dict().values())
    ids = np.minimum(random.zipf(1.2, 200_000), 1_000_000).astype(np.int64)
    for batch in np.split(ids, 400):
        table.observe(batch, 0)
    check(table)
    assert sum(value.nbytes for value in table.state_dict().values()) == size
    known = table(torch.from_numpy(ids)).numpy() >= table.shared
    values, counts = np.unique(ids, return_counts=True)
    best = np.isin(ids, values[np.argsort(-counts)[: learn - table.shared]])
    assert known.mean() > 0.93 * best.mean()
