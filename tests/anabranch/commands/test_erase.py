"""`anabranch erase` where no learner runs: it works under the learner's lock, for which a learner waits."""

import io
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import msgspec
import pytest
import torch

import anabranch.commands.erase
from anabranch import cli
from anabranch.commands.erase import ErasureResult, erase_events, plan_erasure
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints
from anabranch.learner.state_dir.lock import LOCK, lock_state_directory
from anabranch.learner.status.report import LearnerReport, PartitionReport, write_report
from anabranch.replay.erasure.erased_events import ByKey, ByRange
from tests.support.waiting import PATIENCE_SECONDS


@pytest.fixture
def config(write_pipeline):
    found = load_config(write_pipeline("127.0.0.1:1", "events", ""))
    found.state_dir.mkdir()
    return found


@pytest.mark.slow
def test_a_learner_that_is_started_meanwhile_waits_until_the_files_are_clean(config, monkeypatch):
    import anabranch.learner.checkpoints.erase_checkpoints

    erase, begun, erased = anabranch.learner.checkpoints.erase_checkpoints.erase, threading.Event(), threading.Event()

    def slow(*arguments, **options):
        begun.set()
        with pytest.raises(TimeoutError):
            started.result(0.2)  # beyond what one with this patience waits for another learner
        erased.set()
        return erase(*arguments, **options)

    def start():
        begun.wait(PATIENCE_SECONDS)
        with lock_state_directory(config.state_dir, threading.Event(), timedelta(milliseconds=1)):
            return erased.is_set()

    monkeypatch.setattr(anabranch.learner.checkpoints.erase_checkpoints, "erase", slow)
    with ThreadPoolExecutor() as pool:
        started = pool.submit(start)
        assert erase_events(config, [], ["events[0]@1..2"], timedelta(0)).applied
        assert started.result(PATIENCE_SECONDS), "it did not wait"


def test_erase_asks_first_and_a_dry_run_changes_nothing(config, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    arguments = ["erase", "--offsets", "events[0]@1..2", "-c", str(config.path)]
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.startswith("anabranch: erase asks first")
    assert cli.main([*arguments, "--dry-run"]) == 0
    assert capsys.readouterr().out == "would erase events#0[0]@1..2\n"
    assert not list(config.state_dir.iterdir())
    assert cli.main([*arguments, "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["applied"] is True


def test_what_takes_seconds_to_import_is_there_before_the_lock_is_taken(config, monkeypatch):
    def hold(*arguments, **options):
        assert "anabranch.learner.checkpoints.erase_checkpoints" in sys.modules
        return lock_state_directory(*arguments, **options)

    monkeypatch.delitem(sys.modules, "anabranch.learner.checkpoints.erase_checkpoints", raising=False)
    monkeypatch.setattr(anabranch.commands.erase, "lock_state_directory", hold)
    assert erase_events(config, [], ["events[0]@1..2"], timedelta(0)).applied


def test_while_a_learner_runs_it_waits_for_its_report_and_does_not_touch_its_files(config):
    with lock_state_directory(config.state_dir):
        answer = erase_events(config, [], ["events[0]@1..2"], timedelta(0))
        assert not answer.applied
        assert "the learner has not reported in time" in str(answer.missing)
    assert (config.state_dir / LOCK).read_bytes() == b""


def test_what_an_object_store_has_is_left_to_the_learner(write_pipeline, tmp_path):
    found = load_config(write_pipeline("127.0.0.1:1", "events", f'[storage]\nurl = "file://{tmp_path}/bucket"'))
    found.state_dir.mkdir()
    result = erase_events(found, [], ["events[0]@1..2"], timedelta(0))
    assert result.missing is not None
    assert result.missing.startswith(f"checkpoints in file://{tmp_path}/bucket are removed by the next start")


def test_checkpoints_that_were_set_aside_are_deleted_by_an_erasure(config):
    checkpoints = Checkpoints(config.state_dir / "checkpoints", Schema(config.pipeline.events).digest, 1)
    for number in (1, 2):
        checkpoints.write(number, Checkpoint(number, {"model": {"w": torch.zeros(3)}}, {"ledger": []}), 0.0)
    checkpoints.storage.set_aside(2)
    assert (checkpoints.numbers(), checkpoints.highest()) == ([1], 2)
    assert erase_events(config, [], ["events[0]@1..2"], timedelta(0)).applied
    assert [path.name for path in checkpoints.path.iterdir()] == ["1"]


def test_the_erasure_of_a_key_covers_all_rows_of_all_files_of_the_history(write_pipeline):
    """Reports have one account for all files of a pass, whose rows have the same identities in all passes."""
    config = load_config(write_pipeline("127.0.0.1:1", "events", '[schema.key]\nname = "k"\n'))
    config.state_dir.mkdir()
    topic = PartitionReport(start=0, end=9, finished=9, passed=0, gaps=0, removed=0, pending=0, trained_through=8)
    files = [msgspec.structs.replace(topic, end=500, pending=491, files=2, history=number) for number in (1, 2)]
    partitions = {"history": files[0], "history.2": files[1], "events:0": topic}
    report = LearnerReport(pid=1, generation=1, started=0.0, time=0.0, steps=1, partitions=partitions)
    write_report(config.state_dir, report)
    by_key, by_range = plan_erasure(config, ["anna"], ["history[1]@10..19"])
    assert isinstance(by_key, ByKey)
    assert by_key.up_to == {"history#0[0]": 500, "history#0[1]": 500, "events#0[0]": 9}
    assert isinstance(by_range, ByRange)
    assert by_range.partition == "history#0[1]"
    with pytest.raises(SettingsError, match="is of no partition that was read"):
        plan_erasure(config, [], ["history[2]@10..19"])


@pytest.mark.parametrize(("store", "holdout", "says"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_an_erasure_that_finds_no_event_says_so(store, holdout, says):
    result = ErasureResult("erasures.jsonl", [3], {"events:0": 9}, None, store, holdout)
    assert any("byte for byte" in sentence for sentence in result.sentences()) == says
