"""The harness itself: parts that fail are reported under their keys, and its figures mean what they say."""

import contextlib
import json
import random
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.replay.build import _max_events as most_events
from anabranch.replay.tiers.disk import DiskTier
from benchmarks.harness import data
from tests.faults import __main__ as harness
from tests.faults import late_labels, recovery
from tests.faults.cost import lost, recorded
from tests.faults.cost_program import RECORD
from tests.faults.fuzz import SCHEMA, case, dead_lettered, decoded, event, packed
from tests.faults.late_labels import SHUFFLED_HOURS, WAIT_HOURS, flights, killed_while_events_wait
from tests.support.formats import FORMATS


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


STEP, SLOW, WAITED = 0.010, 0.004, 0.003


@pytest.mark.slow
def test_the_cost_of_a_write_is_distinguished_from_the_noise_of_the_machine():
    """Each write blocks the loop for 3 ms and slows three steps by 4 ms; one step in ten takes ten times as long."""
    dice = np.random.default_rng(0)
    records = np.zeros(40_000, RECORD)
    took = dice.normal(STEP, 0.001, len(records)) + np.where(dice.random(len(records)) < 0.1, 9 * STEP, 0)
    for number, step in enumerate(range(50, len(records) - 50, 40), start=1):
        records["version"][step : step + 3] = number  # the step after the third overlaps with it
        records["blocked"][step] = WAITED
        took[step] += WAITED
        took[step : step + 3] += SLOW
    records["end"] = np.cumsum(took)
    costs = lost(records, "version")
    assert costs.mean() == pytest.approx(WAITED + 3 * SLOW, abs=0.006)
    assert costs.waited.mean() == pytest.approx(WAITED)
    assert costs.shams.mean() > 0.02, "the noise of the machine is not measured"


@pytest.mark.slow
@pytest.mark.any_broker
def test_a_real_learner_is_recorded_at_the_end_of_each_step(kafka, tmp_path):
    records = recorded(tmp_path, kafka.bootstrap, seconds=3, checkpoint_seconds=1, stored=200)
    assert len(records) > 10
    assert np.all(np.diff(records["steps"]) >= 0)
    for kind in ("version", "checkpoint"):
        assert records[kind].max() >= 1, f"no {kind} was being written at any boundary"


@pytest.fixture
def year(monkeypatch):
    """A made-up year of 5,000 flights, since the true ones are fetched from a package registry."""
    generator = np.random.default_rng(0)
    due = np.sort(generator.uniform(0, 365 * 86_400, 5000))
    delay = generator.exponential(3 * 3600, 5000) + 1800
    arrays = {"t": due, "t_label": due + delay, "delay": generator.normal(0, 20, 5000)}
    monkeypatch.setattr(data, "load", lambda *_: arrays)


@pytest.mark.usefixtures("year")
def test_a_plain_loop_over_the_messages_joins_what_is_expected():
    stream = flights(7000, seed=1, now=1_800_000_000)
    wait_ms = WAIT_HOURS * 3_600_000 / late_labels.SPEED
    times = dict(zip(stream.events.rows["flight"].tolist(), stream.events.time_ms.tolist(), strict=True))
    found = np.zeros(7000, np.int64)
    for row, time_ms in zip(stream.labels.rows, stream.labels.time_ms.tolist(), strict=True):
        flight = int(row["flight"])
        if flight in times and abs(time_ms - times[flight]) <= wait_ms:
            found[flight - 1] = row["y"]
    assert (found == stream.expected).all()
    assert {0, 1, 2} == set(np.unique(found).tolist())
    assert (np.diff(stream.events.time_ms) < 0).any(), "shuffled"
    assert np.diff(stream.events.time_ms).min() > -SHUFFLED_HOURS * 3_600_000 / late_labels.SPEED - 2
    assert max(stream.events.time_ms.max(), stream.labels.time_ms.max()) <= 1_800_000_000_000 - 3_600_000


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("year")
def test_the_joined_set_is_that_of_an_offline_join_whenever_the_learner_is_killed(kafka, tmp_path):
    joined = killed_while_events_wait(
        tmp_path, kafka.bootstrap, flights(6000, seed=2), kills=2, checkpoint_every="300ms", seed=3
    )
    assert (joined.kills, joined.differs, joined.twice, joined.other) == (2, 0, 0, 0)
    assert joined.exact
    assert joined.timed_out > 50


@pytest.mark.parametrize("form", sorted(FORMATS))
@given(dice=st.randoms(use_true_random=False))
def test_a_malformed_message_is_rejected_and_its_neighbours_are_not(form, dice):
    good = packed(form, event(random.Random(0)))
    events = FORMATS[form](SCHEMA).decode([good, case(form, dice), good])
    assert events.message.tolist() == [0, 2]
    assert {reject.message for reject in events.rejects} == {1}


@pytest.mark.slow
@pytest.mark.parametrize("form", sorted(FORMATS))
def test_many_malformed_messages_at_once_are_rejected(form):
    fuzzed = decoded(form, 1000, seed=0)
    assert (fuzzed.crashes, fuzzed.passed) == ([], [])
    assert fuzzed.cases >= 1000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_malformed_message_is_dead_lettered_once(kafka, tmp_path):
    fuzzed = dead_lettered(tmp_path, kafka.bootstrap, "json", 300, seed=1)
    assert (fuzzed.crashes, fuzzed.passed) == ([], [])
