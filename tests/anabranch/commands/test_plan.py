"""`anabranch plan`: the arithmetic of its lines, its warnings, and a calibration of a small pipeline."""

import io
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from anabranch.commands.planning import segment_writes
from anabranch.commands.planning.calibrating.differences import differences_of
from anabranch.commands.planning.calibrating.process_usage import PeakMemory, cpu_seconds
from anabranch.commands.planning.calibrating.synthetic_events import Synthetic, synthetic_messages
from anabranch.commands.planning.calibrating.synthetic_pipeline import CalibrationSpec, calibrated
from anabranch.commands.planning.constants import Constants, Load
from anabranch.commands.planning.disk import DAY
from anabranch.commands.planning.lines import size
from anabranch.commands.planning.plan import Plan, make_plan, render_plan
from anabranch.commands.planning.run_constants import process_sizes
from anabranch.commands.planning.speed import RATE, limited_by
from anabranch.commands.planning.store_size import ENTRY_BYTES, PlannedStore, admitted
from anabranch.config.loader import Config, load_config
from anabranch.config.model import Pipeline
from anabranch.core.errors import SettingsError
from anabranch.doctor.accelerator_checks import learner_ledger
from anabranch.runtime.lifecycle import Exit
from ingest.config import SchemaSettings, StreamSettings
from ingest.events.schema import Schema
from ingest.formats.registry import FORMATS
from replay.checkpoint.segments import most_events
from replay.tiers.disk import DiskTier

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
def simulated_shortly() -> Iterator[None]:
    """Simulate few checkpoints, with more time between them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_writes, "_CHECKPOINTS", 100)
        yield


def config_of(folder: Path, more: str = "") -> Config:
    (folder / "planned_model.py").write_text(MODEL)
    path = folder / "pipeline.toml"
    path.write_text(BASE + more)
    return load_config(path, {})


def constants(**changes: object) -> Constants:
    found = Constants(
        source="calibration",
        parameters=1_000_000,
        row_bytes=1_024,
        learner_bytes=200_000_000,
        ingest_bytes=50_000_000,
        serving_bytes=100_000_000,
        version_bytes=4_000_000,
        checkpoint_bytes=12_000_000,
        report_bytes_per_second=10_000.0,
        publish_seconds=1.0,
        step_seconds=0.01,
        delivery_seconds=0.1,
        delivery_p99_seconds=0.3,
        full_step_seconds=0.01,
        full_step_rows=64.0,
        stall_seconds_per_event=1e-5,
        saturation_rate=5_000.0,
        ingest_rate=50_000.0,
        disk_bytes_per_second=1e9,
        request_seconds=0.002,
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def plan_of(folder: Path, more: str = "", load: Load | None = None, **changes: object) -> Plan:
    return make_plan(config_of(folder, more), load or Load(rate=1_000.0), constants(**changes))


def test_tensors_of_the_host_are_those_of_the_doctors_ledger(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    ledger = learner_ledger(1_000_000, config_of(tmp_path).pipeline.learner, 0)
    for name in ("weights", "gradients", "optimizer", "scorer"):
        assert plan.sections["memory"].value(name) == ledger[name] > 0
    assert "device" not in plan.sections


def test_a_total_is_the_sum_of_its_lines_and_every_line_has_a_formula(tmp_path: Path) -> None:
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


def test_events_that_wait_for_labels_take_memory_besides_their_payload(tmp_path: Path) -> None:
    name = "table of events that wait for labels"
    assert name not in [line.name for line in plan_of(tmp_path).sections["memory"].lines]
    more = '[schema.key]\nname = "id"\n[stream.labels]\ntopics = ["labels"]\nwait = "1h"\nbytes = "1GB"\n'
    memory = plan_of(tmp_path, more).sections["memory"]
    slots = DiskTier.slots_in(GIGABYTE, 1_024)
    assert memory.value(name) == 64 * slots > 50_000_000
    assert memory.value("total") == pytest.approx(sum(line.value or 0.0 for line in memory.lines[:-1]))


@pytest.mark.slow
def test_checkpoints_with_rows_have_buffers_of_new_and_merged_rows(tmp_path: Path) -> None:
    rows = "buffers of checkpoints"
    each, segment = 1_024 + ENTRY_BYTES, most_events(1_024)
    for capacity, rate, written in ((4_000, 10.0, 4_000), (10**6, 10.0, segment), (10**6, 1e6, 10**6)):
        plan = plan_of(tmp_path, f'[replay]\ncapacity = {capacity}\ndevice_bytes = "2GB"\n', Load(rate=rate))
        assert plan.sections["memory"].value(rows) == 2 * written * each
    plan = plan_of(tmp_path, '[replay]\ncapacity = 4000\ndisk = {bytes = "20MB"}\n')
    assert rows not in {line.name for line in plan.sections["memory"].lines}


def test_a_later_day_replaces_fewer_events_of_a_reservoir(tmp_path: Path) -> None:
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
def test_admitted_events_are_no_more_than_came_and_add_up(
    admission: str, k: int, rate: float, begin: float, length: float
) -> None:
    store = PlannedStore(8, k, k, k, 0, 0)
    pipeline = _PIPELINES[admission]
    end = begin + length
    middle = (begin + end) / 2
    whole = admitted(store, pipeline, rate, begin, end)
    assert 0 <= whole <= rate * length * (1 + 1e-9)
    parts = admitted(store, pipeline, rate, begin, middle) + admitted(store, pipeline, rate, middle, end)
    assert math.isclose(whole, parts, rel_tol=1e-6, abs_tol=1e-6)


def _pipeline(admission: str) -> Pipeline:
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


def test_a_rate_above_saturation_has_no_freshness_and_names_what_limits(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, load=Load(rate=6_000.0))
    assert plan.sections["freshness"].value("mean") is None
    assert any("above saturation" in sentence and "steps" in sentence for sentence in plan.warnings)
    assert plan.exit_code() is Exit.UNHEALTHY
    slow = plan_of(tmp_path, load=Load(rate=6_000.0), ingest_rate=5_100.0)
    assert limited_by(slow.sections["saturation"]) == "ingest"


def test_a_disk_that_is_slower_than_steps_is_what_limits(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, load=Load(rate=100.0), disk_bytes_per_second=100_000.0)
    assert (plan.sections["saturation"].value(RATE) or 0.0) < 5_000
    assert limited_by(plan.sections["saturation"]) == "disk"


def test_fewer_cores_limit_the_rate_by_the_cpu_time_of_an_event(tmp_path: Path) -> None:
    changes = {"cpu_seconds_per_event": {"learner": 1e-4, "ingest": 0.9e-4, "serving": 1e-5}, "cores": 2}
    plan = plan_of(tmp_path, load=Load(rate=100.0), **changes)
    assert plan.sections["saturation"].value("cores") == pytest.approx(10_000)
    assert plan.sections["saturation"].value(RATE) == 5_000
    plan = plan_of(tmp_path, load=Load(rate=100.0, cores=0.5), **changes)
    assert plan.sections["saturation"].value(RATE) == pytest.approx(2_500)
    assert limited_by(plan.sections["saturation"]) == "cores"
    assert "ingest" in plan.sections["saturation"]["cores"].formula
    plan = plan_of(tmp_path, load=Load(rate=100.0, cores=0.5))
    assert plan.sections["saturation"].value("cores") is None, "a run shows no CPU time of an event"


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        ('bootstrap_servers = "127.0.0.1:1"\n', "--cores"),
        ('bootstrap_servers = "kafka:9092"\n', ""),
        ('bootstrap_servers = "kafka:9092"\nclient = "confluent"\n', '"confluent" did not read'),
    ],
)
def test_a_calibration_says_what_of_the_broker_and_the_client_differs(tmp_path: Path, stream: str, words: str) -> None:
    path = tmp_path / "pipeline.toml"
    path.write_text(BASE.replace("[schema]", stream + "[schema]"))
    (tmp_path / "planned_model.py").write_text(MODEL)
    found = differences_of(load_config(path, {}).pipeline, Load(rate=1.0), Synthetic([b""], 1.0))
    assert len(found) == bool(words)
    assert all(words in sentence for sentence in found)


def test_versions_and_checkpoints_do_not_grow_with_the_rate(tmp_path: Path) -> None:
    """A model of 40 MB and small events: the disk has room for few more versions, and for many more events."""
    changes = {"version_bytes": 40_000_000, "disk_bytes_per_second": 60e6}
    plan = plan_of(tmp_path, "[replay]\ncapacity = 5000\n", Load(rate=100.0), **changes)
    assert plan.sections["saturation"].value(RATE) == 5_000.0
    assert limited_by(plan.sections["saturation"]) == "steps"
    plan = plan_of(
        tmp_path, "[replay]\ncapacity = 5000\n", Load(rate=100.0), **changes | {"disk_bytes_per_second": 30e6}
    )
    assert plan.sections["saturation"].value(RATE) == 0.0, "versions alone take more"


def test_a_plan_without_a_store_counts_the_rows_of_held_out_events(tmp_path: Path) -> None:
    """The model of the config has four numbers and a label; a calibration holds out more than a run does at first."""
    more = 'strategy = "none"\n'
    checkpoints = plan_of(tmp_path, more, row_bytes=None, checkpoint_bytes=0).sections["later day"].value("checkpoints")
    pipeline = config_of(tmp_path, more).pipeline
    rows, a_day = pipeline.gate.holdout_rows, DAY / pipeline.checkpoints.every.total_seconds()
    assert (checkpoints or 0.0) / a_day / rows > 36 + 4 * 4


@pytest.mark.parametrize(("saved", "copied"), [(0.0, 0), (1_000.0, 1_000), (9e9, 4_000)])
def test_copies_of_rows_in_checkpoints_of_a_calibration_are_not_of_the_plan(
    tmp_path: Path, saved: float, copied: int
) -> None:
    config, peak, found = config_of(tmp_path), PeakMemory(0, None), constants()
    report = SimpleNamespace(replay_rows={"device": 4_000}, replay_bytes={"device": 0})
    peak.learner = 10**9
    process_sizes(config, report, found, peak)  # type: ignore[arg-type]
    without = found.learner_bytes or 0
    process_sizes(config, report, found, peak, saved)  # type: ignore[arg-type]
    assert without - (found.learner_bytes or 0) == 2 * copied * (1_024 + ENTRY_BYTES)


def test_the_cpu_time_of_a_process_is_that_of_all_its_threads() -> None:
    counted = cpu_seconds(os.getpid())
    assert counted == pytest.approx(time.process_time(), abs=0.5)
    assert cpu_seconds(2**30) == 0


def test_a_healthy_plan_breaks_no_promise(tmp_path: Path) -> None:
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
def test_each_broken_promise_is_a_warning(
    tmp_path: Path, more: str, load: Load, changes: dict[str, object], words: str
) -> None:
    assert any(words in sentence for sentence in plan_of(tmp_path, more, load, **changes).warnings)


def test_lines_that_were_not_measured_have_no_value_and_no_total(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (999_499, "999 kB"), (999_600, "1 MB"), (1e6, "1 MB"), (5e15, "5,000 TB")],
)
def test_a_size_has_three_digits_and_the_unit_that_needs_no_exponent(value: float, text: str) -> None:
    assert size(value) == text


def test_tiers_hit_in_the_proportion_of_their_rows(tmp_path: Path) -> None:
    more = '[replay]\ncapacity = 10000\ndevice_bytes = "1MB"\ndisk = {bytes = "100MB"}\n'
    tiers = plan_of(tmp_path, more).sections["tiers"]
    assert tiers.value("memory tier") == pytest.approx(10**6 // 1_024 / 10_000)
    assert sum(line.value or 0.0 for line in tiers.lines) == pytest.approx(1.0)


@pytest.mark.parametrize("form", ["json", "rows", "arrow"])
def test_synthetic_messages_are_events_of_the_schema(form: str) -> None:
    if form == "arrow":
        pytest.importorskip("pyarrow")
    described = {
        "features": {"x": {"dtype": "float32", "shape": [3]}, "id": {"dtype": "int32", "min": 2, "max": 5}},
        "label": {"name": "y", "classes": 3},
        "key": {"name": "who"},
        "time": {"name": "at"},
    }
    schema = Schema(SchemaSettings.model_validate(described))
    stream = StreamSettings.model_validate({"topics": ["t"], "format": form})
    messages = synthetic_messages(schema, stream, None, 1 if form == "json" else 5)
    decoded = FORMATS[form](schema).decode(messages.values)
    assert not decoded.rejects
    assert len(decoded.columns["label"]) == len(messages.values) * (1 if form == "json" else 5)
    assert set(np.unique(decoded.columns["feature.id"])) <= {2, 3, 4, 5}
    assert len(np.unique(decoded.columns["label"])) == 3


def test_json_events_have_the_size_that_is_asked_for_or_the_smallest_possible() -> None:
    described = {"features": {"x": {"dtype": "float64", "shape": [50]}}, "label": {"name": "y", "dtype": "float32"}}
    schema = Schema(SchemaSettings.model_validate(described))
    stream = StreamSettings.model_validate({"topics": ["t"]})
    for least in (400, 1_000, 5_000):
        assert synthetic_messages(schema, stream, least, 1).event_bytes == pytest.approx(least, rel=0.1)
    assert synthetic_messages(schema, stream, 10, 1).event_bytes > 100
    with pytest.raises(SettingsError, match="one event"):
        synthetic_messages(schema, stream, None, 2)


def test_a_calibration_changes_what_is_outside_and_keeps_the_rest(tmp_path: Path) -> None:
    more = (
        '[learner.mesh]\ndata = 2\n[storage]\nurl = "s3://bucket/prefix"\n[replay]\ncapacity = 1000000\n'
        '[replay.redis]\nurl = "redis://h"\nbytes = "1GB"\n[serving]\nport = 9\ngrpc_port = 10\nworkers = 3\n'
    )
    pipeline = config_of(tmp_path, more).pipeline
    spec = CalibrationSpec("/elsewhere", "m", 1.0, "f", "127.0.0.1:1", 5.0, 0.5, 0.05)
    changed = calibrated(pipeline, spec)
    assert changed.storage is changed.replay.redis is changed.learner.mesh is changed.serving.grpc_port is None
    assert (changed.serving.port, changed.serving.workers, changed.learner.replicas) == (0, 1, 1)
    assert str(changed.state_dir) == "/elsewhere"
    assert changed.replay.capacity == 50_000
    assert changed.model == pipeline.model
    assert changed.learner.optimizer == pipeline.learner.optimizer
