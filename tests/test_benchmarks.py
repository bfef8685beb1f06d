"""Benchmarks can be started, and measure what they say."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

Load = Callable[[str], ModuleType]
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])

    def load(name: str) -> ModuleType:
        return importlib.import_module(f"harness.{name}")

    yield load
    for name in [name for name in sys.modules if name.split(".")[0] == "harness"]:
        del sys.modules[name]


@pytest.mark.parametrize("script", sorted(path.name for path in BENCHMARKS.glob("*.py")))
def test_a_benchmark_starts_and_takes_what_all_of_them_take(script: str) -> None:
    """Also though `replay.py` lies beside it, which is called as the package `replay` is."""
    told = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--help"], capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 0, told.stderr
    assert "--quick" in told.stdout
    assert "--json" in told.stdout


def test_events_know_themselves_again(load: Load) -> None:
    events = load("events").Events(16)
    columns = events.columns(100_000_000, 300)
    x, label = columns["feature.x"], columns["label"]
    events.verify(x, label, below=100_000_300)
    assert set(columns) == set(events.columns(0, 1))
    for rows in (x + 1, x[[0, *range(299)]]):
        with pytest.raises(SystemExit):
            events.verify(rows, label, below=100_000_300)
    with pytest.raises(SystemExit):
        events.verify(x, label, below=100_000_299)


def test_every_arm_has_each_place_of_a_round(load: Load) -> None:
    called: list[str] = []
    arms = {name: lambda name=name: float(len(called.append(name) or called)) for name in "abc"}
    found = load("turns").in_turns(arms, rounds=3)
    assert sorted(place for rounds in found.values() for place in rounds) == list(range(4, 13))
    for figures in found.values():
        assert sorted((int(place) - 1) % 3 for place in figures) == [0, 1, 2]


def test_a_table_says_of_each_target_whether_it_is_met(
    load: Load, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table_, spread = load("table"), load("turns").Spread
    table = table_.Table({"speed": table_.Target(5, least=True), "cost": table_.Target(1.5)})
    table.say("speed", spread.of([4.0, 6.0, 7.0]))
    table.say("cost", 1.6)
    table.say("other", 3.0)
    speed, cost, other = capsys.readouterr().out.splitlines()
    assert speed.split() == ["speed", "6", "[4", "..", "7]", ">=", "5", "met"]
    assert cost.split() == ["cost", "1.6", "<=", "1.5", "MISSED"]
    assert other.split() == ["other", "3"]
    table.write(tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["speed"] == 6.0
    assert (found["speed_least"], found["speed_most"]) == (4.0, 7.0)
    assert not [value for value in found.values() if isinstance(value, dict | list)]
