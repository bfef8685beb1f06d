"""`anabranch replay erase` where no learner runs: it works under the learner's lock, for which a learner waits."""

import io
import json
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import anabranch.commands.erase
from anabranch.cli import app as cli
from anabranch.commands.erase import erase_events
from anabranch.config.loader import Config, load_config
from learner.state_dir.lock import LOCK, hold_state_directory


@pytest.fixture
def config(write_pipeline: Callable[..., Path]) -> Config:
    found = load_config(write_pipeline("127.0.0.1:1", "events", ""))
    found.state_dir.mkdir()
    return found


def test_a_learner_that_is_started_meanwhile_waits_until_the_files_are_clean(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    import learner.checkpointing.erase_offline

    erase, begun, erased = learner.checkpointing.erase_offline.erase, threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        begun.set()
        with pytest.raises(TimeoutError):
            started.result(0.2)  # beyond what one with this patience waits for another learner
        erased.set()
        return erase(*arguments, **options)

    def start() -> bool:
        begun.wait(30)
        with hold_state_directory(config.state_dir, threading.Event(), timedelta(milliseconds=1)):
            return erased.is_set()

    monkeypatch.setattr(learner.checkpointing.erase_offline, "erase", slow)
    with ThreadPoolExecutor() as pool:
        started = pool.submit(start)
        assert erase_events(config, [], ["events[0]@1..2"], timedelta(0)).applied
        assert started.result(30), "it did not wait"


def test_erase_asks_first_and_a_dry_run_changes_nothing(
    config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    arguments = ["replay", "erase", "--offsets", "events[0]@1..2", "-c", str(config.path)]
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.startswith("anabranch: replay erase asks first")
    assert cli.main([*arguments, "--dry-run"]) == 0
    assert capsys.readouterr().out == "would erase events#0[0]@1..2\n"
    assert not list(config.state_dir.iterdir())
    assert cli.main([*arguments, "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["applied"] is True


def test_what_takes_seconds_to_import_is_there_before_the_lock_is_taken(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hold(*arguments: Any, **options: Any) -> Any:
        assert "learner.checkpointing.erase_offline" in sys.modules
        return hold_state_directory(*arguments, **options)

    monkeypatch.delitem(sys.modules, "learner.checkpointing.erase_offline", raising=False)
    monkeypatch.setattr(anabranch.commands.erase, "hold_state_directory", hold)
    assert erase_events(config, [], ["events[0]@1..2"], timedelta(0)).applied


def test_while_a_learner_runs_it_waits_for_its_report_and_does_not_touch_its_files(config: Config) -> None:
    with hold_state_directory(config.state_dir):
        answer = erase_events(config, [], ["events[0]@1..2"], timedelta(0))
        assert not answer.applied
        assert "the learner has not said in time" in str(answer.missing)
    assert (config.state_dir / LOCK).read_bytes() == b""
