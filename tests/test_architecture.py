"""The house: layers, light imports, widths, and docs/reference.md, whose names change only on purpose."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distributions, packages_distributions
from itertools import chain
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import anabranch
from tools import reference

ROOT = Path(__file__).parent.parent
PACKAGES = ("anabranch", "serving", "learner", "replay", "ingest")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


MOST_IMPORTS, MOST_PARAMETERS, MOST_METHODS = 20, 8, 12
"""Modules of this project that a module imports, parameters of a constructor, and public methods of a class."""
CONTRACTS = {
    "Extension": "a hook for each point of a step, without effect here",
    "Strategy": "a hook for each point of a step, without effect here",
}
"""The classes whose methods are not counted: what implements them has the few that it needs."""


ALLOWED_IN = {
    "aws_msk_iam_sasl_signer": {"ingest/kafka/tokens.py"},
    "azure": {"ingest/kafka/tokens.py"},
    "bitsandbytes": {"learner/model/base_precision.py"},
    "confluent_kafka": {"ingest"},
    "cryptography": set(),
    "faiss": {"replay/embedding_index/ivf_index.py"},
    "fastavro": {"ingest/formats/avro_records/rows.py"},
    "google": {"ingest/formats/protobuf_schema", "ingest/kafka/tokens.py", "serving/grpc"},
    "grpc": {"serving/grpc"},
    "jsonschema_rs": {"ingest/formats/json_schema.py"},
    "kafka": {"ingest"},
    "mlflow": {"learner/extensions/track/mlflow_client.py"},
    "onnx": set(),
    "onnxruntime": {"anabranch/commands/versions/export/program.py"},
    "onnxscript": set(),
    "obstore": {"ingest/backfill/object_store.py", "anabranch/core/object_store"},
    "peft": {"learner/model/adapter.py", "anabranch/commands/versions/export/weights.py"},
    "ptars": {"ingest/formats/protobuf_schema/columns.py"},
    "pynvml": {"learner/device/nvml.py"},
    "pyarrow": {
        "ingest/formats/arrow.py",
        "ingest/formats/arrow_columns.py",
        "ingest/formats/avro_records/columns.py",
        "ingest/backfill",
        "ingest/formats/protobuf_schema/columns.py",
        "anabranch/api/data.py",
        "anabranch/commands/backtest/predictions_file.py",
        "anabranch/commands/event_files/files.py",
        "anabranch/commands/init/history.py",
    },
    "opentelemetry": {"anabranch/core/tracing/provider.py", "anabranch/core/tracing/tracer.py"},
    "pyruhvro": {"ingest/formats/avro_records/columns.py"},
    "redis": {"replay/tiers/redis_server.py"},
    "rich": {"anabranch"},
    "safetensors": set(),  # it holds the GIL for a copy of each tensor: learner/state_dir/safetensors_file.py does not
    "sklearn": {"anabranch/commands/demo"},
    "starlette": {"serving/http/app.py", "serving/http/middleware.py", "serving/http/server.py"},
    "tensorboard": {"learner/extensions/track/run_clients.py"},
    "tokenizers": {"ingest/events/tokenizer.py"},
    "torch": {
        "learner",
        "replay",
        "serving",
        "anabranch/api",
        "anabranch/testing",
        "anabranch/commands/demo",
        "anabranch/commands/backtest",
        "anabranch/commands/plan/segment_writes.py",
        "anabranch/commands/init/template",
        "anabranch/commands/versions/export",
        "anabranch/commands/versions/diff.py",
        "anabranch/pretrained.py",
        "anabranch/runtime/model_process.py",
    },
    "torchao": {"learner/model/float8.py"},
    "trackio": {"learner/extensions/track/run_clients.py"},
    "transformers": {"anabranch/pretrained.py"},
    "typer": {"anabranch"},
    "uvicorn": {
        "serving/http/connection.py",
        "serving/http/httptools_connection.py",
        "serving/http/server.py",
    },
    "wandb": {"learner/extensions/track/run_clients.py"},
}
"""Where each third party may be imported; those that are not listed may be anywhere."""

WALL_CLOCK = {
    "ingest/kafka/tokens.py": "when a token ends, which who issues it says by that clock",
    "anabranch/core/tracing/tracer.py": "the time of a span",
    "anabranch/core/start_report.py": "a report's time",
    "anabranch/core/host_clock.py": "the one clock that vouches for times of the stream",
    "serving/fleet/overview.py": "how old reports of other hosts are, for display",
    "anabranch/commands/versions/rollout.py": "a command that reads once a report of another process",
    "anabranch/commands/undo/command.py": "a record's time, for display",
    "anabranch/commands/status.py": "a command that reads once a report of another process",
    "anabranch/runtime/serving_workers.py": "a report's time",
    "ingest/preflight/broker.py": "checks whether the two machines' clocks agree",
    "ingest/preflight/history.py": "whether a time of the settings is in the future",
    "ingest/worker/topic_switch.py": "where a topic begins that is read from its latest record on",
    "ingest/worker/history_feed.py": "compares with the record times of the stream",
    "ingest/worker/block_builder.py": "compares with the record times of the stream",
    "ingest/backfill/open_files.py": "compares with the times of rows",
    "ingest/kafka/confluent/client.py": "the time of records that cannot be read",
    "ingest/kafka/kafka_python/records.py": "the time of records that cannot be read",
    "learner/checkpoints/checkpointer.py": "a checkpoint's time, for display",
    "learner/preflight/state_dir.py": "checks whether a file system's clock agrees",
    "learner/extensions/storage/uploads.py": "how long the object store has lacked a folder, for display",
    "learner/versions/gate.py": "since when nothing has passed, for display",
    "learner/extensions/undo/extension.py": "a record's time, for display",
    "learner/versions/publisher.py": "a version's time, for display",
    "learner/assembly.py": "the start of the process, which reports have",
    "learner/loop/reporter.py": "a report's time",
    "replay/erasure/erasure_log.py": "a record's time, for display",
    "serving/reporting/worker_pool.py": "a report's time",
    "serving/reporting/health.py": "how old the first report is that a process reads of another",
    "serving/dashboard/status.py": "the times of a chart",
    "serving/stream/answer_log.py": "when an answer was given",
    "serving/stream/answer_stream.py": "how old messages are when they are answered",
    "serving/preflight.py": "a certificate ends at a date",
    "serving/server.py": "a report's time",
    "serving/rollout/hot_swap.py": "compares with the record times of the stream",
    "learner/extensions/served_answers/topic.py": "how far back in record times answers are read",
}
"""Who may ask for the time of day, and what for. What lasts is measured by `time.monotonic`: this clock may be set."""


def in_a_new_process(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment}
    )


def nodes_of(path, *names):
    """Yield the nodes of a module in which one of these names occurs; none of another, which is not parsed."""
    text = path.read_text(encoding="utf-8")
    if any(name in text for name in names):
        yield from ast.walk(ast.parse(text))


def imports(path, *containing):
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


def asks_for_the_time_of_day(path):
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
    api = ROOT / "anabranch/__init__.py"  # the one whose names are public: it imports each when it is used
    for path in (path for path in FILES if path.name == "__init__.py" and path != api):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert [type(node) for node in body] == [ast.Expr], path
        assert isinstance(body[0].value.value, str)


@pytest.mark.slow
def test_each_pinned_package_runs_on_the_first_python_that_make_takes():
    """A pin that requires a later one makes the installation impossible, as on Debian 12, whose Python is 3.11.2."""
    text = (ROOT / "constraints.txt").read_text().replace("_", "-")
    pins = dict(line.split("==") for line in text.splitlines() if "==" in line)
    pinned = [each for each in distributions() if pins.get(each.name.lower().replace("_", "-")) == each.version]
    required = {each.name: each.metadata.get("Requires-Python", "") for each in pinned}
    assert len(required) > 100
    assert [name for name, versions in required.items() if "3.11.0" not in SpecifierSet(versions)] == []


@pytest.mark.slow
def test_no_class_name_has_two_meanings():
    modules = {}
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body if "class " in text else ():
            # A subclass may have the name of its base, as in the Python API, where it has the same meaning. Public
            # names are the user's, who never sees inner classes next to them.
            is_public = path.parent.name == "api" and getattr(node, "name", "") in anabranch.__all__
            bases = [getattr(base, "attr", "") for base in getattr(node, "bases", ())]
            if isinstance(node, ast.ClassDef) and node.name not in bases and not is_public:
                modules.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}


def widths(path):
    """Yield what of a module is wider than it may be, with its width."""
    module = path.relative_to(ROOT).as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            own |= {alias.name for alias in node.names if alias.name.partition(".")[0] in PACKAGES}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] in PACKAGES:
            own.add(node.module)
        elif isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            public = sum(not each.name.startswith("_") for each in methods)
            if public > MOST_METHODS and node.name not in CONTRACTS:
                yield f"{module}: public methods of {node.name}", public
            for each in methods:
                parameters = len(each.args.posonlyargs) + len(each.args.args) + len(each.args.kwonlyargs) - 1
                if each.name == "__init__" and parameters > MOST_PARAMETERS:
                    yield f"{module}: parameters of {node.name}", parameters
    if len(own) > MOST_IMPORTS and path.name != "assembly.py":
        yield f"{module}: imports", len(own)


@pytest.mark.slow
def test_modules_constructors_and_classes_are_narrow():
    assert dict(chain.from_iterable(map(widths, FILES))) == {}, "split it by subject"


@pytest.mark.slow
def test_no_call_hides_its_arguments_in_a_tuple():
    hidden = []
    for path in FILES:
        for node in nodes_of(path, "*("):
            arguments = node.args if isinstance(node, ast.Call) else []
            if any(isinstance(each, ast.Starred) and isinstance(each.value, ast.Tuple) for each in arguments):
                hidden.append(f"{path.relative_to(ROOT).as_posix()}:{node.lineno}")
    assert hidden == []


def test_tests_are_no_packages():
    assert list((ROOT / "tests").rglob("__init__.py")) == []


LIGHT = {
    "torch kafka confluent_kafka starlette numpy": [
        "anabranch.config.loader",
        "anabranch.serving.settings",
        "anabranch.learner.settings.learner",
        "anabranch.replay.settings",
        "anabranch.ingest.settings.stream",
    ],
    "torch kafka confluent_kafka starlette uvicorn faiss pynvml": [
        "anabranch.commands.versions.show",
        "anabranch.commands.versions.rollout",
        "anabranch.commands.undo.command",
        "anabranch.ingest.reader.reader",
        "anabranch.learner.device.nvml",
        "anabranch.replay.embedding_index.client",
    ],
    "torch kafka confluent_kafka sklearn starlette uvicorn numpy": ["anabranch.cli"],
    "torch numpy pydantic pyarrow": ["anabranch"],
    "torch pynvml": ["anabranch.commands.doctor.command", "anabranch.api.client", "anabranch.api.pipeline"],
    "torch pydantic": ["anabranch.replay.embedding_index.process"],
    "torch confluent_kafka pyarrow requests fastavro opentelemetry": ["anabranch.ingest.__main__"],
    "kafka confluent_kafka redis faiss grpc google opentelemetry": ["anabranch.serving.server"],
    "kafka confluent_kafka starlette opentelemetry mlflow tensorboard wandb trackio": ["anabranch.learner.assembly"],
}
"""Modules by what they and all that they import leave out."""


@pytest.mark.parametrize(("unwanted", "modules"), LIGHT.items())
@pytest.mark.process
def test_imports_are_light(unwanted, modules):
    code = f"import sys, {', '.join(modules)}; print(*[name for name in {unwanted.split()} if name in sys.modules])"
    done = in_a_new_process(code)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.process
def test_help_needs_neither_torch_nor_kafka():
    done = in_a_new_process(
        "import sys; from anabranch.__main__ import main; sys.argv = ['anabranch', '--help']; code = main();"
        "print('loaded', *[name for name in ('torch', 'kafka', 'sklearn') if name in sys.modules]); sys.exit(code)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded"


def test_every_key_says_what_it_is_for():
    assert [key for key, field in reference.settings() if not field.description] == []


def test_no_metric_is_defined_that_the_reference_lacks():
    names, classes = set(), ("Counter", "Gauge", "Histogram", "Summary", "StateCounter", "StateGauge", "Reported")
    called = *classes, "counter", "gauge", "histogram"  # the same, with a registry
    for path in FILES:
        for node in nodes_of(path, *classes):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in called:
                suffix = "_total" if node.func.id.lower().endswith("counter") else ""
                names |= {f"{arg.value}{suffix}" for arg in node.args[:1] if isinstance(arg, ast.Constant)}
    assert names == set(reference.metrics())


def test_every_command_has_an_example():
    for name, command in reference.commands().items():
        assert f"Example: anabranch {name}" in command.epilog


def test_the_reference_has_bounds_of_settings_that_may_be_absent():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    for row in (
        "micro_batch_size`** (integer >= 2)",
        "mps_percentage`** (integer 1..100)",
        "sms`** (integer >= 1)",
    ):
        assert f"- **`{row}" in page


def test_the_reference_is_that_of_the_code():
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert page == reference.reference(), "write it again: python -m tools.reference > docs/reference.md"
    assert "ANABRANCH_TEST_" not in page


@pytest.mark.process
@pytest.mark.parametrize("package", ["ingest", "replay", "learner", "serving"])
def test_folders_of_the_same_names_in_the_working_directory_hide_nothing_of_ours(tmp_path, package):
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("mine = True\n")
    code = f"import {package}; assert {package}.mine; import anabranch.{package}.settings, anabranch.cli"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_nothing_imports_a_package_of_ours_by_a_bare_name():
    # It would load the package a second time, next to `anabranch.<package>`.
    bare = re.compile(r"^\s*(?:from|import)\s+(?:ingest|learner|replay|serving)\b", re.MULTILINE)
    folders = [*PACKAGES, "tests", "benchmarks", "tools", "examples"]
    files = [path for name in folders for path in (ROOT / name).rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in files if bare.search(path.read_text(encoding="utf-8"))] == []
