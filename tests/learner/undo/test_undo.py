"""A learner that undoes events equals one whose topic never had them, bit for bit."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ingest.events.identity import partition_name
from ingest.events.schema import Schema
from learner.state_dir.undo_file import UndoRecord, append_record, ranges_of
from tests.learner.learner_bench import TIERS
from tests.learner.undo.undo_bench import NAMES, Missing, UndoBench

COUNT = 1200
FLIPPED: Missing = {NAMES[0]: {*range(500, 620), 700, 702, 950}, NAMES[1]: {*range(640, 660)}}


@pytest.fixture
def make(tmp_path: Path, schema: Schema) -> Iterator[Callable[..., UndoBench]]:
    """Makes learners, `make(name, count, missing, **options)`, over the state directory of that name."""
    benches: list[UndoBench] = []

    def start(name: str, count: int = COUNT, missing: Missing | None = None, **options: Any) -> UndoBench:
        (tmp_path / name).mkdir(exist_ok=True)
        benches.append(UndoBench(tmp_path / name, schema, count, missing, **options))
        return benches[-1]

    yield start
    for bench in benches:
        bench.close()


def record(state_dir: Path, missing: Missing, until: int = COUNT) -> UndoRecord:
    """Record to undo these offsets."""
    ranges = ranges_of({partition_name(name): [(each, each) for each in gone] for name, gone in missing.items()})
    ends = dict.fromkeys(map(partition_name, NAMES), until)
    return append_record(
        state_dir, lambda number: UndoRecord(number=number, time=time.time(), ranges=ranges, until=ends)
    )


def assert_same(one: UndoBench, other: UndoBench) -> None:
    """Assert that two learners have the same state, but for counts of outcomes."""
    for part, tensors in other.trainer.tensors().items():
        assert tensors.keys() == one.trainer.tensors()[part].keys()
        for name, value in tensors.items():
            assert torch.equal(one.trainer.tensors()[part][name], value), (part, name)
    assert one.loop.state.steps == other.loop.state.steps
    assert one.loop.ledger.positions == other.loop.ledger.positions
    assert one.loop.monitor.prequential.state() == other.loop.monitor.prequential.state()
    held = one.holdout.held.columns
    assert all((held[name] == column).all() for name, column in other.holdout.held.columns.items())
    stored, expected = (each.store.fetch(each.store.plan(0, len(each.store))).columns for each in (one, other))
    assert all(torch.equal(stored[name], column) for name, column in expected.items())
    assert one.store.lost == other.store.lost == 0


@pytest.mark.parametrize("replay", TIERS.values(), ids=TIERS)
def test_undone_events_leave_the_state_as_if_the_topic_never_had_them(
    make: Callable[..., UndoBench], tmp_path: Path, replay: Mapping[str, Any]
) -> None:
    clean = make("clean", COUNT, FLIPPED)
    clean.run()
    first = make("undone", 400, replay=replay)
    first.run()
    before = first.checkpoint()
    first.close()
    second = make("undone", replay=replay)
    second.run()
    tainted = second.checkpoint()
    second.close()
    record(tmp_path / "undone", FLIPPED)
    again = make("undone", replay=replay)
    assert again.found is not None
    assert (again.found[0], again.checkpoints.numbers()) == (before, [before])
    assert (tmp_path / "undone" / "checkpoints" / f"{tainted}.set-aside").is_dir()
    again.run()
    assert_same(again, clean)
    skipped = again.loop.ledger.skipped
    assert skipped == {"undone": sum(map(len, FLIPPED.values()))}


@pytest.mark.parametrize("replay", [TIERS["device"], TIERS["disk with a small cache"]], ids=["device", "disk"])
def test_a_checkpoint_that_is_kept_by_the_hour_is_returned_to_though_its_slots_are_used_again(
    make: Callable[..., UndoBench], tmp_path: Path, replay: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = make("clean", COUNT, FLIPPED)
    clean.run()
    options: dict[str, Any] = {
        "replay": {**replay, "capacity": 100},
        "checkpoints": {"keep": 2, "keep_hourly": 4},
        "complete": True,
    }
    hours, kept = [time.time() - 3600 * hour for hour in range(6, 0, -1)], []
    for hour, count in zip(hours, (200, 400, 600, 800, 1000, COUNT), strict=True):
        bench = make("undone", count, **options)
        monkeypatch.setattr(time, "time", lambda hour=hour: hour)
        bench.run(bench.checkpointer.request)
        kept.append(bench.checkpoint())
        assert bench.checkpointer._oldest in bench.checkpoints.numbers()[-2:]
        bench.close()
    numbers = bench.checkpoints.numbers()
    assert kept[2:] == sorted(set(kept) & set(numbers)), "the last of each hour, and the newest"
    monkeypatch.undo()
    late: Missing = {name: {each for each in gone if each >= 600} for name, gone in FLIPPED.items()}
    record(tmp_path / "undone", late)
    again = make("undone", **options)
    assert again.found is not None
    assert again.found[0] == kept[2]
    again.run()
    expected = make("clean of late ones", COUNT, late, replay={"capacity": 100})
    expected.run()
    assert_same(again, expected)
