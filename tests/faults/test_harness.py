"""The harness itself: a part that fails is reported under its key, and the others run."""

import contextlib
import json
import sys

from anabranch.replay.build import _max_events as most_events
from anabranch.replay.tiers.disk import DiskTier
from tests.faults import __main__ as harness
from tests.faults import recovery


def test_a_part_that_fails_is_reported_and_the_others_run(tmp_path, monkeypatch, capsys):
    def broken(*_, **__):
        raise TimeoutError("the store is not full")

    def sound(_folder, _bootstrap, figures, **__):
        figures.add("lost", 0)

    monkeypatch.setattr(harness, "PARTS", {"first": broken, "second": sound})
    monkeypatch.setattr(harness, "broker", lambda _folder: contextlib.nullcontext("127.0.0.1:1"))
    monkeypatch.setattr(sys, "argv", ["faults", "--quick", "--json", str(tmp_path / "figures.json")])
    assert harness.main() == 1
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["failed_first"] == "TimeoutError: the store is not full"
    assert figures["lost"] == 0
    assert "missed: first" in capsys.readouterr().out


def test_without_a_failure_the_exit_code_is_0(monkeypatch):
    monkeypatch.setattr(harness, "PARTS", {"only": lambda *_, **__: None})
    monkeypatch.setattr(harness, "broker", lambda _folder: contextlib.nullcontext("127.0.0.1:1"))
    monkeypatch.setattr(sys, "argv", ["faults"])
    assert harness.main() == 0


def test_the_file_of_the_recovery_part_holds_every_event_that_it_waits_for():
    rows = 1_000_000_000 // recovery.ROW_BYTES
    slots = DiskTier.slots_in(recovery.disk_bytes(rows), recovery.ROW_BYTES)
    assert most_events(rows, slots, recovery.ROW_BYTES, "disk.bytes", 2 * 256) == rows
