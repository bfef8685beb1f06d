"""The house: layers, light imports, and the names that are seen from outside, which change only on purpose."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distributions, packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tools import reference

ROOT = Path(__file__).parent.parent
PACKAGES = ("anabranch", "serving", "learner", "replay", "ingest")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def words(text: str) -> list[str]:
    return text.split()


ALLOWED_IN = {
    "bitsandbytes": {"learner/model/base_precision.py"},
    "confluent_kafka": {"ingest"},
    "cryptography": {"anabranch/commands/auditing/signing.py"},
    "faiss": {"replay/embedding_index/faiss_lists.py"},
    "fastavro": {"ingest/formats/avro_records/rows.py"},
    "google": {"ingest/formats/protobuf_schema", "serving/grpc"},
    "grpc": {"serving/grpc"},
    "httpx": {"ingest/schema_registry/client.py"},
    "jsonschema_rs": {"ingest/formats/json_schema.py"},
    "kafka": {"ingest"},
    "mlflow": {"learner/registration/mlflow_client.py"},
    "onnx": set(),
    "onnxruntime": {"anabranch/commands/exporting/program.py"},
    "onnxscript": set(),
    "obstore": {"ingest/backfill/object_store.py", "anabranch/core/object_store"},
    "peft": {"learner/model/adapter.py"},
    "ptars": {"ingest/formats/protobuf_schema/columns.py"},
    "pynvml": {"learner/device_health/nvml.py"},
    "pyarrow": {
        "ingest/formats/arrow_writer.py",
        "ingest/formats/arrow.py",
        "ingest/formats/arrow_columns.py",
        "ingest/formats/avro_records/columns.py",
        "ingest/backfill",
        "ingest/formats/protobuf_schema/columns.py",
        "anabranch/commands/event_files/files.py",
        "anabranch/commands/event_files/history_config.py",
    },
    "opentelemetry": {"anabranch/core/tracing/provider.py", "anabranch/core/tracing/tracer.py"},
    "pyruhvro": {"ingest/formats/avro_records/columns.py"},
    "redis": {"replay/tiers/redis_server.py"},
    "rich": {"anabranch"},
    "safetensors": set(),  # it holds the GIL for a copy of each tensor: learner/state_dir/safetensors_file.py does not
    "sklearn": {"anabranch/demo"},
    "starlette": {"serving/http/app.py", "serving/http/middleware.py", "serving/http/server.py"},
    "tokenizers": {"ingest/events/tokenizer.py"},
    "torch": {
        "learner",
        "replay",
        "serving",
        "anabranch/demo",
        "anabranch/doctor/probe.py",
        "anabranch/doctor/model_checks.py",
        "anabranch/commands/backtest.py",
        "anabranch/commands/backtesting",
        "anabranch/commands/planning/segment_writes.py",
        "anabranch/commands/template",
        "anabranch/commands/exporting/program.py",
        "anabranch/commands/version_files.py",
        "anabranch/pretrained.py",
    },
    "torchao": {"learner/model/float8.py"},
    "transformers": {"anabranch/pretrained.py"},
    "typer": {"anabranch"},
    "uvicorn": {
        "serving/http/connection.py",
        "serving/http/httptools_connection.py",
        "serving/http/server.py",
    },
}
"""Where each third party may be imported; those that are not listed may be anywhere."""

WALL_CLOCK = {
    "anabranch/core/tracing/tracer.py": "the time of a span",
    "anabranch/core/host_clock.py": "the one clock that vouches for times of the stream",
    "anabranch/demo/load_generator.py": "compares with the record times of the stream",
    "anabranch/demo/producer.py": "compares with the record times of the stream",
    "anabranch/doctor/kafka_checks.py": "checks whether the two machines' clocks agree",
    "anabranch/doctor/network_checks.py": "a certificate ends at a date",
    "anabranch/doctor/state_dir_checks.py": "checks whether a file system's clock agrees",
    "anabranch/commands/planning/calibrating/synthetic_ingest.py": "the record times of synthetic events",
    "serving/fleet/overview.py": "how old reports of other hosts are, for display",
    "anabranch/commands/rollout.py": "a command that reads once a report of another process",
    "anabranch/commands/undo/carry_out.py": "a record's time, for display",
    "anabranch/commands/status.py": "a command that reads once a report of another process",
    "anabranch/runtime/serving_workers.py": "a report's time",
    "anabranch/doctor/stream/backfill_checks.py": "whether a time of the settings is in the future",
    "ingest/worker/topic_switch.py": "where a topic begins that is read from its latest record on",
    "ingest/worker/retention_watch.py": "compares with the record times of the stream",
    "ingest/worker/block_builder.py": "compares with the record times of the stream",
    "ingest/backfill/open_files.py": "compares with the times of rows",
    "ingest/kafka/confluent/client.py": "the time of records that cannot be read",
    "ingest/kafka/kafka_python/records.py": "the time of records that cannot be read",
    "learner/checkpointing/checkpointer.py": "a checkpoint's time, for display",
    "learner/object_storage/uploads.py": "how long ago a folder was written that the object store lacks, for display",
    "learner/publishing/hold.py": "since when nothing has passed, for display",
    "learner/undo/going_back.py": "a record's time, for display",
    "learner/publishing/publisher.py": "a version's time, for display",
    "learner/reporter.py": "a report's time",
    "replay/erasure/erasure_log.py": "a record's time, for display",
    "serving/reporting/worker_pool.py": "a report's time",
    "serving/reporting/health.py": "how old the first report is that a process reads of another",
    "serving/dashboard/status.py": "the times of a chart",
    "serving/server.py": "a report's time",
    "serving/rollout/hot_swap.py": "compares with the record times of the stream",
}
"""Who may ask for the time of day, and what for. What lasts is measured by `time.monotonic`: this clock may be set."""

KEYS_OF_THE_DESIGN = words("""
    name state_dir seed
    stream.bootstrap_servers stream.topics stream.dead_letter_topic stream.group_id stream.format stream.start
    stream.on_gap stream.unlabelled stream.isolation_level stream.client stream.properties
    stream.lag_policy.action stream.lag_policy.high stream.lag_policy.low
    schema.features.*.dtype schema.features.*.shape schema.features.*.encode.vocab schema.features.*.encode.hash
    schema.features.*.default schema.label.name schema.label.dtype schema.label.classes
    schema.key.name schema.time.name schema.weight.name schema.group.name
    model.factory model.args model.task model.embedding
    learner.batch_size learner.replay_ratio learner.strategy.name
    learner.optimizer.name learner.optimizer.lr
    learner.precision learner.replicas learner.device learner.deterministic learner.stop_timeout learner.status
    replay.admission replay.sampling replay.capacity replay.device_bytes replay.redis.url replay.redis.bytes
    replay.disk.bytes
    versions.publish_every versions.min_events versions.keep versions.keep_hourly
    checkpoints.every checkpoints.keep gate.holdout_fraction gate.holdout_rows
    gate.max_drop_new gate.max_drop_old gate.min_rows gate.max_hold gate.on_hold
    serving.host serving.port serving.max_batch serving.max_delay
    serving.slo device_sharing.policy
    serving.tokens.read serving.tokens.admin serving.tls.cert serving.tls.key
""")
KEYS_ADDED = words("""
    model.adapter.kind model.adapter.rank model.adapter.alpha model.adapter.targets model.adapter.train
    model.adapter.dropout model.adapter.base_precision
    model.teacher.factory model.teacher.args model.teacher.version.state_dir model.teacher.version.number
    model.teacher.version.factory model.teacher.version.args model.teacher.url model.teacher.model
    model.teacher.version.adapter.kind model.teacher.version.adapter.rank model.teacher.version.adapter.alpha
    model.teacher.version.adapter.targets model.teacher.version.adapter.train model.teacher.version.adapter.dropout
    model.teacher.version.adapter.base_precision
    model.teacher.output model.teacher.logits model.teacher.token model.teacher.ca model.teacher.timeout
    model.teacher.request_rows model.teacher.retries model.teacher.features model.teacher.precision
    model.teacher.weight model.teacher.temperature
    storage.url storage.mode storage.options storage.lease checkpoints.keep_hourly
    stream.backfill.files stream.backfill.format stream.backfill.order stream.backfill.time
    stream.backfill.until stream.backfill.shuffle stream.backfill.epochs stream.backfill.name stream.backfill.storage
    stream.backfill.identity.topic stream.backfill.identity.partition
    stream.backfill.identity.offset
    stream.registry.url stream.registry.subject stream.registry.user stream.registry.password stream.registry.token
    stream.registry.ca stream.registry.timeout stream.registry.fallback
    stream.envelope stream.max_message_bytes stream.buffer_bytes stream.lag_policy.fraction schema.label.multi
    schema.label.length schema.features.*.encode.words
    stream.labels.topics stream.labels.key stream.labels.name stream.labels.wait stream.labels.unmatched
    stream.labels.early stream.labels.take_back stream.labels.bytes
    schema.features.*.min schema.features.*.max schema.label.min schema.label.max schema.weight.max
    schema.features.*.encode.tokenizer schema.features.*.encode.length
    schema.features.*.encode.learn schema.features.*.encode.min_count schema.features.*.encode.expire
    schema.features.*.intercept schema.features.*.scale schema.features.*.missing schema.features.*.cycles
    schema.cross.*.of schema.cross.*.encode.hash
    schema.cross.*.encode.learn schema.cross.*.encode.min_count schema.cross.*.encode.expire
    model.stages model.parallel learner.pipeline_schedule
    learner.mesh.data learner.mesh.tensor learner.mesh.pipeline learner.mesh.expert learner.mesh.shard
    learner.max_delay learner.max_grad_norm learner.micro_batch_size learner.old_weight
    learner.drift.actions learner.drift.delta learner.drift.lr_factor learner.drift.replay_factor learner.drift.steps
    learner.schedule.warmup_steps learner.schedule.restart
    learner.activation_checkpointing learner.compile learner.graphs learner.profile.start learner.profile.steps
    learner.comm_hook learner.topk_fraction learner.sync_every learner.sharding
    learner.standby model.channels_last
    search.challengers search.share search.space search.promote search.measure
    serving.max_queue serving.max_body_bytes serving.max_held_bytes serving.timeout serving.device
    serving.baseline serving.request_log serving.workers serving.shadow serving.precision serving.graphs
    serving.grpc_port serving.versions_from serving.drain serving.canary serving.links
    device_sharing.fraction device_sharing.yield_at
    device_sharing.stream_priority device_sharing.mps_percentage device_sharing.sms device_sharing.memory
    replay.half_life replay.class_floor replay.device_memory
    device.enabled device.every device.timeout device.window device.corrected_errors device.pcie_replays
    device.nvlink_errors device.temperature_margin device.sniff_every device.sniff_deviation
    lineage.sign_key
    mlflow.tracking_uri mlflow.registered_model mlflow.experiment mlflow.alias mlflow.source
    tracing.sample tracing.requests_per_second tracing.steps_per_second tracing.setup
""")

METRICS_OF_THE_DESIGN = words("""
    anabranch_ingest_rows_total anabranch_ingest_lag_offsets
    anabranch_learner_steps_total anabranch_learner_rows_trained_total anabranch_learner_step_duration_seconds
    anabranch_learner_accuracy_ratio anabranch_publish_skipped_total anabranch_gate_verdicts_total
    anabranch_replay_rows anabranch_replay_bytes anabranch_replay_sample_duration_seconds
    anabranch_replay_stall_seconds_total
    anabranch_serving_requests_total anabranch_serving_request_duration_seconds anabranch_serving_version
    anabranch_serving_freshness_duration_seconds anabranch_serving_swaps_total
    anabranch_checkpoint_duration_seconds anabranch_checkpoint_stall_seconds_total
    anabranch_device_sharing_wait_duration_seconds anabranch_device_sharing_training_ratio
""")
METRICS_ADDED = words("""
    anabranch_learner_teacher_rows_total anabranch_learner_teacher_wait_seconds_total anabranch_learner_teacher_up
    anabranch_learner_teacher_request_duration_seconds
    anabranch_serving_queue_row_seconds_total
    anabranch_storage_lag_seconds anabranch_storage_uploaded_bytes_total anabranch_storage_failures_total
    anabranch_learner_absolute_error anabranch_learner_non_finite_steps_total anabranch_versions_published_total
    anabranch_learner_raised_rows_total anabranch_learner_exchanged_bytes_total
    anabranch_learner_clipped_values_total anabranch_ingest_overweight_rows_total
    anabranch_learner_seen_through_offset anabranch_learner_waiting_rows anabranch_learner_waiting_bytes
    anabranch_learner_waited_rows anabranch_learner_kept_labels anabranch_learner_labels_total
    anabranch_learner_label_lag_seconds
    anabranch_learner_problems anabranch_learner_trained_through_offset anabranch_learner_version
    anabranch_ingest_skipped_rows anabranch_replay_bound_bytes anabranch_replay_capacity_rows anabranch_holdout_rows
    anabranch_replay_read_rows_total anabranch_replay_lost_rows_total
    anabranch_replay_missed_rows_total anabranch_replay_moved_bytes_total anabranch_replay_demoted_rows_total
    anabranch_replay_index_rows anabranch_replay_index_tombstone_rows anabranch_replay_index_trained_rows
    anabranch_replay_index_recall_ratio anabranch_replay_index_age_steps anabranch_replay_index_stale_rows
    anabranch_replay_index_bytes anabranch_replay_index_waiting_requests anabranch_replay_index_answer_seconds
    anabranch_replay_index_declined_total anabranch_replay_index_left_out_rows_total
    anabranch_replay_index_restarts_total
    anabranch_checkpoint_number anabranch_checkpoint_time_seconds
    anabranch_serving_problems anabranch_learner_heartbeat_time_seconds
    anabranch_learner_loss anabranch_learner_window_rows anabranch_learner_class_accuracy_ratio
    anabranch_learner_group_accuracy_ratio anabranch_learner_forgetting_ratio anabranch_learner_drifts_total
    anabranch_learner_replay_ratio
    anabranch_search_challengers anabranch_search_steps_total anabranch_search_ended_total anabranch_search_setting
    anabranch_learner_micro_batch_rows
    anabranch_ingest_lag_seconds anabranch_ingest_lag_time_seconds anabranch_ingest_behind
    anabranch_ingest_passed_offsets
    anabranch_backfill_rows anabranch_backfill_read_rows_total
    anabranch_ingest_letters_dropped_total
    anabranch_gate_withdrawn_total anabranch_gate_hold_seconds
    anabranch_learner_device_memory_bytes
    anabranch_serving_shadow_rows_total anabranch_serving_shadow_disagreement_total
    anabranch_serving_follow_lag_seconds anabranch_canary_verdicts_total
    anabranch_device_memory_used_bytes anabranch_device_memory_capacity_bytes anabranch_device_utilization_ratio
    anabranch_device_temperature_celsius anabranch_device_power_watts anabranch_device_power_limit_watts
    anabranch_device_energy_joules_total anabranch_device_clock_hertz anabranch_device_slowdown
    anabranch_device_ecc_errors_total anabranch_device_ecc_lifetime_errors anabranch_device_remapped_rows
    anabranch_device_xid_events_total anabranch_device_pcie_replays_total anabranch_device_nvlink_active
    anabranch_device_nvlink_errors_total anabranch_device_silence_seconds anabranch_device_symptoms
    anabranch_device_sniff_seconds
    anabranch_tracing_left_out_total anabranch_mlflow_versions_total anabranch_mlflow_waiting_versions
""")

COMMANDS = {"demo", "init", "up", "learn", "serve", "produce", "status", "doctor", "versions ls", "versions show"}
COMMANDS |= {"versions promote", "versions reject", "versions rollback", "versions pin", "versions unpin"}
COMMANDS |= {"versions diff", "versions export", "versions rebuild", "versions lineage"}
COMMANDS |= {"config check", "config show", "checkpoints ls", "checkpoints show", "checkpoints restore"}
COMMANDS |= {"checkpoints backup"}
COMMANDS |= {"dead-letters ls", "dead-letters resend", "predict", "backtest", "plan"}
COMMANDS |= {"search status", "search promote", "search pin", "search unpin"}
COMMANDS |= {"replay stats", "replay sample", "replay erase", "undo"}


def in_a_new_process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment}
    )


def nodes_of(path: Path, *names: str) -> Iterator[ast.AST]:
    """Yield the nodes of a module in which one of these names occurs; none of another, which is not parsed."""
    text = path.read_text(encoding="utf-8")
    if any(name in text for name in names):
        yield from ast.walk(ast.parse(text))


def imports(path: Path, *containing: str) -> Iterator[str]:
    for node in nodes_of(path, *(containing or ALLOWED_IN)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_imports_run_against_the_data_flow():
    linted = subprocess.run([Path(sys.executable).with_name("lint-imports")], cwd=ROOT, capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout + linted.stderr


@pytest.mark.slow
def test_each_third_party_is_known_to_one_part_of_the_house():
    strangers = []
    for path in FILES:
        module = path.relative_to(ROOT).as_posix()
        for name in imports(path):
            allowed = ALLOWED_IN.get(name.partition(".")[0])
            if allowed is not None and not any(module == part or module.startswith(f"{part}/") for part in allowed):
                strangers.append(f"{module} imports {name}")
    assert strangers == []


@pytest.mark.slow
def test_each_third_party_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        re.split(r"[^\w-]", requirement)[0].replace("-", "_")
        for requirement in [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    }
    suppliers = {root: [name.replace("-", "_") for name in names] for root, names in packages_distributions().items()}
    roots = {name.partition(".")[0] for path in FILES for name in imports(path, "import")}
    strangers = roots - set(sys.stdlib_module_names) - set(PACKAGES)
    assert {name: suppliers.get(name) for name in strangers if not declared & set(suppliers.get(name, []))} == {}


def asks_for_the_time_of_day(path: Path) -> bool:
    """Whether a module names `time.time`, `time.time_ns` or `datetime.now`, or imports the former."""
    for node in nodes_of(path, "from time import", "time.time", "datetime.now", "datetime.utcnow"):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "time"
            and {"time", "time_ns"} & {alias.name for alias in node.names}
        ):
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"}:
                return True
    return False


def test_only_what_has_a_reason_asks_for_the_time_of_day():
    found = {path.relative_to(ROOT).as_posix() for path in FILES if asks_for_the_time_of_day(path)}
    assert found == set(WALL_CLOCK), "measure what lasts by time.monotonic; else write down the reason"


def test_the_packages_hold_a_docstring_and_nothing_else():
    for path in (path for path in FILES if path.name == "__init__.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert [type(node) for node in body] == [ast.Expr], path
        assert isinstance(body[0].value.value, str)


@pytest.mark.slow
def test_each_pinned_package_runs_on_the_first_python_that_make_takes():
    """A pin that requires a later one makes the installation impossible, as on Debian 12, whose Python is 3.11.2."""
    text = (ROOT / "constraints.txt").read_text().replace("_", "-")
    pins = dict(line.split("==") for line in text.splitlines() if "==" in line)
    pinned = [each for each in distributions() if pins.get(each.name.lower().replace("_", "-")) == each.version]
    required = {each.name: each.metadata["Requires-Python"] or "" for each in pinned}
    assert len(required) > 100
    assert [name for name, versions in required.items() if "3.11.0" not in SpecifierSet(versions)] == []


@pytest.mark.slow
def test_no_class_name_has_two_meanings():
    modules = {}
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body if "class " in text else ():
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}


def test_tests_are_no_packages():
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("serving.server", ["kafka", "confluent_kafka", "redis", "faiss", "grpc", "google", "opentelemetry"]),
        ("learner.run", ["kafka", "confluent_kafka", "starlette", "opentelemetry", "mlflow"]),
        ("anabranch.cli.app", ["torch", "kafka", "confluent_kafka", "sklearn", "starlette", "uvicorn", "numpy"]),
        ("anabranch.config.loader", ["torch", "kafka", "confluent_kafka", "starlette", "numpy"]),
        ("anabranch.commands.versions", ["torch", "kafka"]),
        ("anabranch.commands.rollout", ["torch", "kafka", "starlette"]),
        ("anabranch.commands.undo.carry_out", ["torch", "kafka", "starlette"]),
        ("ingest.reader.reader", ["torch", "kafka", "confluent_kafka"]),
        ("replay.embedding_index.client", ["torch", "faiss"]),
        ("learner.device_health.nvml", ["torch", "pynvml"]),
        ("anabranch.doctor.device_checks", ["torch", "pynvml"]),
        ("replay.embedding_index.process", ["torch", "pydantic"]),
        ("ingest.__main__", ["torch", "confluent_kafka", "pyarrow", "httpx", "fastavro", "opentelemetry"]),
        *(
            (f"{package}.config", ["torch", "kafka", "confluent_kafka", "starlette", "numpy"])
            for package in PACKAGES[1:]
        ),
    ],
)
@pytest.mark.process
def test_an_import_is_light(module, unwanted):
    done = in_a_new_process(f"import sys, {module}; print(*[name for name in {unwanted} if name in sys.modules])")
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.process
def test_help_needs_neither_torch_nor_kafka():
    done = in_a_new_process(
        "import sys; from anabranch.__main__ import main; sys.argv = ['anabranch', '--help']; code = main();"
        "print('loaded', *[name for name in ('torch', 'kafka', 'sklearn') if name in sys.modules]); sys.exit(code)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded"


def test_the_keys_of_the_settings_are_frozen():
    assert sorted(key for key, _ in reference.settings()) == sorted(KEYS_OF_THE_DESIGN + KEYS_ADDED)


def test_every_key_says_what_it_is_for():
    assert [key for key, field in reference.settings() if not field.description] == []


def test_the_names_of_the_metrics_are_frozen():
    assert sorted(reference.metrics()) == sorted(METRICS_OF_THE_DESIGN + METRICS_ADDED)


def test_no_metric_is_defined_besides_those():
    names, classes = set(), ("Counter", "Gauge", "Histogram", "Summary", "StateCounter", "StateGauge")
    called = *classes, "counter", "gauge", "histogram"  # the same, with a registry
    for path in FILES:
        for node in nodes_of(path, *classes):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in called:
                suffix = "_total" if node.func.id.lower().endswith("counter") else ""
                names |= {f"{arg.value}{suffix}" for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    assert names == set(reference.metrics())


def test_the_commands_are_frozen():
    assert set(reference.commands()) == COMMANDS


def test_every_command_has_an_example():
    for name, command in reference.commands().items():
        assert f"Example: anabranch {name}" in command.epilog


def test_the_reference_has_bounds_of_settings_that_may_be_absent():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for row in (
        "micro_batch_size` | whole number >= 2",
        "mps_percentage` | whole number >= 1, <= 100",
        "sms` | whole n",
    ):
        assert f"| `{row}" in page


def test_the_reference_is_that_of_the_code():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert page == reference.reference(), "write it again: python -m tools.reference > docs/reference.md"
    assert [name for name in METRICS_OF_THE_DESIGN + METRICS_ADDED if f"`{name}`" not in page] == []
    assert "ANABRANCH_TEST_" not in page


@pytest.mark.process
class TestIntruders:
    """Other distributions install a top-level `replay` too."""

    def start(self, path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "anabranch", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            # Before the working directory, where this checkout's own packages are found.
            env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])},
        )

    @pytest.mark.parametrize("package", ["ingest", "replay", "learner", "serving"])
    def test_one_that_hides_ours_is_named_at_start(self, tmp_path, package):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise ImportError('an intruder is not imported')\n")
        done = self.start(tmp_path, "--help")
        assert done.returncode == 2
        assert done.stderr.startswith(f'anabranch: the package "{package}" in {tmp_path.resolve() / package} hides')
        assert "in its own environment" in done.stderr
        assert len(done.stderr.splitlines()) == 1

    def test_one_that_is_a_single_file_is_named_too(self, tmp_path):
        (tmp_path / "replay.py").write_text("")
        done = self.start(tmp_path, "--help")
        assert done.returncode == 2
        assert str(tmp_path.resolve() / "replay.py") in done.stderr

    def test_the_distribution_that_it_belongs_to_is_named(self, tmp_path):
        (tmp_path / "replay").mkdir()
        (tmp_path / "replay" / "__init__.py").write_text("")
        record = tmp_path / "replay_rec-1.0.dist-info"
        record.mkdir()
        (record / "METADATA").write_text("Metadata-Version: 2.1\nName: replay-rec\nVersion: 1.0\n")
        (record / "RECORD").write_text("replay/__init__.py,,\n")
        (record / "top_level.txt").write_text("replay\n")
        assert "(replay-rec)" in self.start(tmp_path, "--help").stderr

    def test_one_that_was_installed_over_ours_is_noticed(self, tmp_path):
        for package in PACKAGES:
            (tmp_path / package).mkdir()
            (tmp_path / package / "__init__.py").write_text('"""Ours."""\n')
        (tmp_path / "anabranch" / "runtime").mkdir()
        for name in ("__main__.py", "runtime/__init__.py", "runtime/package_check.py"):
            (tmp_path / "anabranch" / name).write_text((ROOT / "anabranch" / name).read_text())
        record = tmp_path / "anabranch-9.dist-info"
        record.mkdir()
        (record / "METADATA").write_text("Metadata-Version: 2.1\nName: anabranch\nVersion: 9\n")
        digest = "sha256=j_Hbdyw1gGGsvqrsj7WYEJFlMA7lmWpQFaAjYp6XRiA"
        (record / "RECORD").write_text(f"replay/__init__.py,{digest},14\n")
        done = self.start(tmp_path, "--help")
        assert done.returncode == 2
        assert f'the package "replay" in {tmp_path.resolve() / "replay"} was overwritten' in done.stderr

    def test_without_one_the_program_starts(self, tmp_path):
        (tmp_path / "replay").mkdir()  # a folder without __init__.py hides nothing
        assert self.start(tmp_path, "--help").returncode == 0
