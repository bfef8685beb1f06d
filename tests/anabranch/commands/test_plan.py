"""`anabranch plan`: the arithmetic of its lines, its warnings, and the constants of a run."""

import io
import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from anabranch.commands.plan import segment_writes
from anabranch.commands.plan.constants import Constants, Load
from anabranch.commands.plan.disk import DAY
from anabranch.commands.plan.estimate import make_plan, render_plan
from anabranch.commands.plan.run_constants import measured_constants
from anabranch.commands.plan.speed import RATE, limited_by
from anabranch.commands.plan.store_size import ENTRY_BYTES, PlannedStore, admitted
from anabranch.config.loader import load_config
from anabranch.config.pipeline import Pipeline
from anabranch.learner.device.memory_ledger import learner_ledger
from anabranch.learner.status.report import LearnerReport, read_report, write_report
from anabranch.replay.segments import most_events
from anabranch.replay.tiers.disk import DiskTier
from anabranch.runtime.lifecycle import Exit
from anabranch.serving.reporting.report import ServingReport
from anabranch.serving.reporting.report import write_report as write_serving

GIGABYTE = 10**9
MODEL = "import torch\n\ndef build():\n    return torch.nn.Linear(4, 3)\n"
BASE = """
name = "planned"
[stream]
topics = ["events"]
[schema]
features = {x = {dtype = "float32", shape = [4]}}
label = {name = "y", classes = 3}
[model]
factory = "planned_model:build"
[learner]
device = "cpu"
"""


@pytest.fixture(autouse=True, scope="module")
def simulated_shortly():
    """Simulate few checkpoints, with more time between them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_writes, "_CHECKPOINTS", 100)
        yield


def config_of(folder, more=""):
    (folder / "planned_model.py").write_text(MODEL)
    path = folder / "pipeline.toml"
    path.write_text(BASE + more)
    return load_config(path, {})


def constants(**changes):
    found = Constants(
        source="run",
        parameters=1_000_000,
        row_bytes=1_024,
        learner_bytes=200_000_000,
        ingest_bytes=50_000_000,
        serving_bytes=100_000_000,
        version_bytes=4_000_000,
        checkpoint_bytes=12_000_000,
        report_bytes=12_288,
        publish_seconds=1.0,
        step_seconds=0.01,
        delivery_seconds=0.1,
        delivery_p99_seconds=0.3,
        full_step_seconds=0.0125,
        full_step_rows=64.0,
        stall_seconds_per_event=1e-5,
        saturation_rate=5_000.0,
        disk_bytes_per_second=1e9,
        request_seconds=0.002,
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def plan_of(folder, more="", load=None, **changes):
    return make_plan(config_of(folder, more), load or Load(rate=1_000.0), constants(**changes))


def test_tensors_of_the_host_are_those_of_the_doctors_ledger(tmp_path):
    plan = plan_of(tmp_path)
    ledger = learner_ledger(1_000_000, config_of(tmp_path).pipeline.learner, 0)
    for name in ("weights", "gradients", "optimizer", "scorer"):
        assert plan.sections["memory"].value(name) == ledger[name] > 0
    assert "device" not in plan.sections


def test_a_total_is_the_sum_of_its_lines_and_every_line_has_a_formula(tmp_path):
    plan = plan_of(
        tmp_path, '[replay]\ncapacity = 5000\ndisk = {bytes = "20MB"}\n', Load(rate=1_000.0, drive_tbw=600.0)
    )
    for name in ("memory", "first day", "later day"):
        *parts, _ = values = [line for line in plan.sections[name].lines if line.unit != "years"]
        assert values[-1].name == "total"
        assert values[-1].value == pytest.approx(sum(line.value or 0.0 for line in parts))
    lines = [line for section in plan.sections.values() for line in section.lines]
    assert all(line.formula for line in lines)
    years = plan.sections["later day"]["life of the drive"].value
    assert years == pytest.approx(600e12 / (plan.sections["later day"].value("total") or 0.0) / 365)


def test_events_that_wait_for_labels_take_memory_besides_their_payload(tmp_path):
    name = "table of events that wait for labels"
    assert name not in [line.name for line in plan_of(tmp_path).sections["memory"].lines]
    more = '[schema.key]\nname = "id"\n[stream.labels]\ntopics = ["labels"]\nwait = "1h"\nbytes = "1GB"\n'
    memory = plan_of(tmp_path, more).sections["memory"]
    slots = DiskTier.slots_in(GIGABYTE, 1_024)
    assert memory.value(name) == 64 * slots > 50_000_000
    assert memory.value("total") == pytest.approx(sum(line.value or 0.0 for line in memory.lines[:-1]))


@pytest.mark.slow
def test_checkpoints_with_rows_have_buffers_of_new_and_merged_rows(tmp_path):
    rows = "buffers of checkpoints"
    each, segment = 1_024 + ENTRY_BYTES, most_events(1_024)
    for capacity, rate, written in ((4_000, 10.0, 4_000), (10**6, 10.0, segment), (10**6, 1e6, 10**6)):
        plan = plan_of(tmp_path, f'[replay]\ncapacity = {capacity}\ndevice_bytes = "2GB"\n', Load(rate=rate))
        assert plan.sections["memory"].value(rows) == 2 * written * each
    plan = plan_of(tmp_path, '[replay]\ncapacity = 4000\ndisk = {bytes = "20MB"}\n')
    assert rows not in {line.name for line in plan.sections["memory"].lines}


def test_a_later_day_replaces_fewer_events_of_a_reservoir(tmp_path):
    plan = plan_of(tmp_path, "[replay]\ncapacity = 100000\n")
    first, later = (plan.sections[name].value("events in checkpoints") or 0.0 for name in ("first day", "later day"))
    assert first > 5 * later > 0


@given(
    st.sampled_from(["reservoir", "recent"]),
    st.integers(1, 10**6),
    st.floats(0.1, 1e5),
    st.floats(0, 1e6),
    st.floats(1, 1e6),
)
def test_admitted_events_are_no_more_than_came_and_add_up(admission, k, rate, begin, length):
    store = PlannedStore(8, k, k, k, 0, 0)
    pipeline = _PIPELINES[admission]
    end = begin + length
    middle = (begin + end) / 2
    whole = admitted(store, pipeline, rate, begin, end)
    assert 0 <= whole <= rate * length * (1 + 1e-9)
    parts = admitted(store, pipeline, rate, begin, middle) + admitted(store, pipeline, rate, middle, end)
    assert math.isclose(whole, parts, rel_tol=1e-6, abs_tol=1e-6)


def _pipeline(admission):
    section = {"x": {"dtype": "float32"}}
    return Pipeline.model_validate(
        {
            "name": "planned",
            "stream": {"topics": ["events"]},
            "schema": {"features": section, "label": {"name": "y", "classes": 2}},
            "model": {"factory": "m:f"},
            "replay": {"admission": admission},
        }
    )


_PIPELINES = {name: _pipeline(name) for name in ("reservoir", "recent")}


def test_a_rate_above_saturation_has_no_freshness_and_names_what_limits(tmp_path):
    plan = plan_of(tmp_path, load=Load(rate=6_000.0))
    assert plan.sections["freshness"].value("mean") is None
    assert any("above saturation" in sentence and "steps" in sentence for sentence in plan.warnings)
    assert plan.exit_code() is Exit.UNHEALTHY
    slow = plan_of(tmp_path, load=Load(rate=6_000.0), saturation_rate=4_000.0)
    assert limited_by(slow.sections["saturation"]).startswith("ingest"), "the loop is busy for 0.78 of the time"
    pauses = {"saturation_rate": 4_000.0, "checkpoint_stall_seconds_per_event": 2e-4}
    paused = plan_of(tmp_path, load=Load(rate=6_000.0), **pauses)
    assert limited_by(paused.sections["saturation"]) == "checkpoints"


def test_a_disk_that_is_slower_than_steps_is_what_limits(tmp_path):
    plan = plan_of(tmp_path, load=Load(rate=100.0), disk_bytes_per_second=100_000.0)
    assert (plan.sections["saturation"].value(RATE) or 0.0) < 5_000
    assert limited_by(plan.sections["saturation"]) == "disk"


def test_versions_and_checkpoints_do_not_grow_with_the_rate(tmp_path):
    """A model of 40 MB and small events: the disk has room for few more versions, and for many more events."""
    changes = {"version_bytes": 40_000_000, "disk_bytes_per_second": 60e6}
    plan = plan_of(tmp_path, "[replay]\ncapacity = 5000\n", Load(rate=100.0), **changes)
    assert plan.sections["saturation"].value(RATE) == 5_000.0
    assert limited_by(plan.sections["saturation"]) == "steps"
    plan = plan_of(
        tmp_path, "[replay]\ncapacity = 5000\n", Load(rate=100.0), **changes | {"disk_bytes_per_second": 30e6}
    )
    assert plan.sections["saturation"].value(RATE) == 0.0, "versions alone take more"


def test_a_part_that_takes_next_to_nothing_is_said_to_set_no_limit(tmp_path):
    """A store that is long full admits few events a day: their bytes do not say at which rate the disk is full."""
    changes = {"disk_bytes_per_second": 1e9, "stall_seconds_per_event": 1e-9}
    plan = plan_of(tmp_path, "[replay]\ncapacity = 5000\n", Load(rate=100.0), **changes)
    section = plan.sections["saturation"]
    for name in ("disk", "replay"):
        assert (section[name].value, section[name].text, section[name].is_known) == (None, "no limit", True)
    assert section.value(RATE) == 5_000.0
    assert not plan.unknown()
    for line in section.lines:
        assert line.value is None or line.value <= 100 * 5_000.0
    console = Console(file=io.StringIO(), width=80)
    console.print(render_plan(plan, explain=False))
    assert "no limit" in console.file.getvalue()


def test_a_plan_without_a_store_counts_the_rows_of_held_out_events(tmp_path):
    """The model of the config has four numbers and a label; a run holds out few at first."""
    more = 'strategy = "none"\n'
    checkpoints = plan_of(tmp_path, more, row_bytes=None, checkpoint_bytes=0).sections["later day"].value("checkpoints")
    pipeline = config_of(tmp_path, more).pipeline
    rows, a_day = pipeline.gate.holdout_rows, DAY / pipeline.checkpoints.every.total_seconds()
    assert (checkpoints or 0.0) / a_day / rows > 36 + 4 * 4


def test_a_healthy_plan_breaks_no_promise(tmp_path):
    plan = plan_of(tmp_path, "[replay]\ncapacity = 1000\n", Load(rate=1_000.0, retention_seconds=DAY))
    assert not plan.warnings
    assert plan.exit_code() is Exit.DONE
    freshness = plan.sections["freshness"]
    assert freshness.value("mean") == pytest.approx((0.05 + 1.0) / 2 + 0.01 + 0.1)


@pytest.mark.parametrize(
    ("more", "load", "changes", "words"),
    [
        ("", Load(rate=10.0, retention_seconds=30.0), {}, "the topic keeps events for"),
        ("", Load(rate=10.0), {"learner_bytes": 10**18}, "the host has"),
        ("", Load(rate=10.0), {"version_bytes": 10**18}, "the disk is full"),
        ("", Load(rate=10.0, requests_per_second=1e6), {}, "raise serving.workers"),
        ("", Load(rate=4_500.0), {}, "catches up slowly"),
        ("", Load(rate=10.0), {"device": "cuda", "device_total_bytes": 10**6}, "the device has"),
    ],
)
def test_each_broken_promise_is_a_warning(tmp_path, more, load, changes, words):
    assert any(words in sentence for sentence in plan_of(tmp_path, more, load, **changes).warnings)


def test_lines_that_were_not_measured_have_no_value_and_no_total(tmp_path):
    plan = make_plan(config_of(tmp_path), Load(rate=10.0), Constants(source="model", parameters=15))
    assert plan.sections["memory"]["ingest process"].text == "not measured"
    assert plan.sections["memory"].value("total") is None
    assert plan.sections["saturation"].value(RATE) is None
    assert not plan.warnings
    assert json.loads(json.dumps(plan.document()))["constants"]["source"] == "model"
    console = Console(file=io.StringIO(), width=80)
    console.print(render_plan(plan, explain=False))
    shown = " ".join(console.file.getvalue().split())
    assert "every promise holds" not in shown
    assert "ingest process" not in shown, "a line without a value says nothing"
    for sentence in (
        "not complete, since constants of it were not measured: host memory; disk writes, first day; ",
        "rate at which it saturates nothing that was measured breaks a promise",
    ):
        assert sentence in shown


def test_tiers_hit_in_the_proportion_of_their_rows(tmp_path):
    more = '[replay]\ncapacity = 10000\ndevice_bytes = "1MB"\ndisk = {bytes = "100MB"}\n'
    tiers = plan_of(tmp_path, more).sections["tiers"]
    assert tiers.value("memory tier") == pytest.approx(10**6 // 1_024 / 10_000)
    assert sum(line.value or 0.0 for line in tiers.lines) == pytest.approx(1.0)


def run_in(config, **changes):
    """Write what a pipeline that learns 100 events a second leaves in its state directory."""
    state_dir = config.state_dir
    for folder, files in {
        "versions/3": {"manifest.json": 10, "weights.safetensors": 5_000},
        "versions/12": {"manifest.json": 10, "weights.safetensors": 9_000},
        "checkpoints/2": {"manifest.json": 10, "model.safetensors": 30_000, "rows-1": 10**6},
    }.items():
        (state_dir / folder).mkdir(parents=True)
        for name, length in files.items():
            (state_dir / folder / name).write_bytes(bytes(length))
    rates = {"steps": 20.0, "rows_new": 100.0, "rows_replay": 100.0, "step_seconds": 0.1}
    full = {"steps": 50.0, "rows_new": 3_200.0, "rows_replay": 3_200.0, "step_seconds": 0.8}
    stalls = {"replay_stall_seconds": 0.32, "checkpoint_stall_seconds": 0.032}
    fields = {
        "pid": os.getpid(),
        "device_memory": {"weights": 60, "optimizer": 120},
        "replay_rows": {"device": 1_000},
        "replay_bytes": {"device": 48_000},
        "rates": rates | dict.fromkeys(stalls, 0.0),
        "full_rates": full | stalls,
        "checkpoint_seconds": 0.5,
        "versions_published": 60,
        "publish_skipped": 30,
    }
    report = LearnerReport(generation=1, started=0.0, time=60.0, steps=9, **(fields | changes))  # type: ignore[arg-type]
    write_report(state_dir, report)
    served = {"freshness_p50_seconds": 3.0, "freshness_p99_seconds": 4.5, "request_p50_seconds": 0.004}
    write_serving(state_dir, ServingReport(pid=os.getpid(), started=0.0, time=60.0, address="", ready=True, **served))  # type: ignore[arg-type]


def test_a_run_in_the_state_directory_gives_the_constants(tmp_path):
    config = config_of(tmp_path, 'max_delay = "100ms"\n[versions]\npublish_every = "2s"\n')
    run_in(config)
    found = measured_constants(config)
    assert (found.source, found.parameters, found.row_bytes) == ("run", 15, 48)
    assert found.version_bytes == 4_096 + 3 * 4_096, "the newest, in whole pages"
    assert found.checkpoint_bytes == 4_096 + 8 * 4_096, "without rows"
    assert found.report_bytes == 2 * 4_096
    assert found.publish_seconds == 3.0, "a version was due each 2 s, and one of three fell due while one was written"
    assert found.checkpoint_seconds == 0.5
    assert (found.saturation_rate, found.full_step_rows, found.full_step_seconds) == (3_200, 64, 0.016)
    assert found.stall_seconds_per_event == pytest.approx(1e-4)
    assert found.checkpoint_stall_seconds_per_event == pytest.approx(1e-5)
    assert (found.step_seconds, found.request_seconds) == (pytest.approx(0.005), 0.004)
    assert found.delivery_seconds == pytest.approx(3.0 - (0.1 + 3.0) / 2 - 0.005)
    assert found.delivery_p99_seconds == pytest.approx(4.5 - 3.1 - 0.005)
    assert found.disk_bytes_per_second
    assert 10**6 < (found.learner_bytes or 0) == pytest.approx(found.serving_bytes or 0, rel=0.1)
    assert not found.remarks
    plan = make_plan(config, Load(rate=100.0), found)
    assert not [name for name in plan.unknown() if name != "host memory"]


def test_what_a_run_does_not_show_is_not_in_the_plan_and_the_plan_says_how_to_measure_it(tmp_path):
    config = config_of(tmp_path)
    run_in(config, pid=2**30, full_rates={}, lag_seconds=60.0)
    found = measured_constants(config)
    assert found.learner_bytes is found.saturation_rate is found.delivery_seconds is None
    assert [remark.partition(":")[0] for remark in found.remarks] == [
        "nothing runs",
        "no freshness",
        "no highest rate",
    ]
    console = Console(file=io.StringIO(), width=200)
    console.print(render_plan(make_plan(config, Load(rate=10.0), found), explain=False))
    assert all(remark in console.file.getvalue() for remark in found.remarks)


@pytest.mark.process
def test_without_a_run_the_model_alone_is_measured(tmp_path):
    config = config_of(tmp_path)
    found = measured_constants(config)
    assert (found.source, found.parameters, found.saturation_rate) == ("model", 15, None)
    assert read_report(config.state_dir) is None
    assert f"no learner has run in {config.state_dir}" in found.remarks[0]
