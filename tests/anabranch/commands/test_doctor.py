"""`anabranch doctor`: every finding with its fault really present, and nothing changed by the checks."""

import contextlib
import functools
import http.server
import importlib
import io
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import fastavro
import msgspec
import psutil
import pyarrow
import pyarrow.parquet
import pytest
import torch
from confluent_kafka import Producer
from kafka import KafkaAdminClient
from kafka.errors import KafkaConnectionError

import anabranch
from anabranch import cli
from anabranch.commands.doctor import command as all_checks
from anabranch.commands.doctor import command as examination
from anabranch.commands.doctor.command import CHECKS, Check, examine, exit_code, summary
from anabranch.config.loader import load_config
from anabranch.core.object_store.bucket import Bucket
from anabranch.core.preflight import ok, problem, warning
from anabranch.ingest.events.block import Outcome
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.kafka_python.connection import translated
from anabranch.ingest.kafka.topic_inspector import Inspector
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints
from anabranch.learner.device import cuda_limits, visible_devices
from anabranch.learner.model import device as learner_device
from anabranch.learner.model.device import Precision
from anabranch.learner.model.examples import OUTPUT
from anabranch.learner.model.factory import build_on_device, make_task
from anabranch.learner.model.task import Classification
from anabranch.learner.model.trained_set import base_digest, trained_state
from anabranch.learner.object_storage.head import HEAD
from anabranch.learner.object_storage.opening import holder_of, record_mode
from anabranch.learner.preflight import device as device_checks
from anabranch.learner.preflight import model as model_checks
from anabranch.learner.preflight import state_dir as state_checks
from anabranch.learner.preflight.device import check_compiler, check_load, check_sharing
from anabranch.learner.preflight.model import ModelTrial
from anabranch.learner.settings.learner import CheckpointSettings, DeviceSharingSettings
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.state_dir.lock import lock_state_directory
from anabranch.learner.status.report import BackfillReport, LearnerReport, write_report
from anabranch.learner.strategies.er import ExperienceReplay
from anabranch.learner.stream.partition_ledger import PartitionLedger
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.learner.versions.format import ModelReference, Verdict, Versions, reference_to
from anabranch.runtime.lifecycle import Exit
from anabranch.runtime.model_process import Result, run_trial, try_model
from anabranch.serving import preflight as serving_checks
from tests.support.manifests import manifest_of
from tests.support.nvml import OTHER, UUID
from tests.support.ports import first_free_port
from tests.support.registry_server import registry_server
from tests.support.s3 import S3Prefix
from tests.support.s3_proxy import Answer, S3Proxy
from tests.support.tokenizer import write_tokenizer

EVENT = {"x": [0.5] * 64, "y": 7}
PATIENT = 600.0
"""Seconds that a check may take: a busy machine takes a minute to import what adapters need."""
OF_NOBODY = {"aws_access_key_id": "key-of-nobody", "aws_secret_access_key": "secret-of-nobody"}


@pytest.fixture
def in_this_process(monkeypatch):
    """Has the model tried in the tests' own process, which has torch: a launcher of `try_model`."""
    monkeypatch.setattr(sys, "path", sys.path[:])

    def launch(config, trial):
        sys.modules.pop("my_model", None)
        importlib.invalidate_caches()
        messages = []
        try:
            run_trial(config.pipeline, messages.append, on_device=trial.on_device)
        finally:
            sys.modules.pop("my_model", None)
        return Result(messages, 0, "")

    return launch


@pytest.fixture
def checks(in_this_process):
    """All checks, that of the model in this process."""
    model = functools.partial(try_model, launch=in_this_process)
    return [check._replace(run=model) if check.name == "model" else check for check in CHECKS]


@pytest.fixture
def diagnose(example, checks):
    """Runs one check on the example and returns its findings: `diagnose("ports", timeout=PATIENT)`.

    The model is checked in this process, unless it is to be `alone`.
    """

    def run(name, timeout=PATIENT, *, alone=False):
        chosen = [check for check in (CHECKS if alone else run.checks) if check.name == name]
        results = list(examine(example / "pipeline.toml", timeout, checks=chosen))
        return [finding for check, finding in results if check == name]

    run.checks = checks
    return run


@pytest.fixture
def setting(monkeypatch):
    """Overrides a key: `setting("serving.port", 1)`."""

    def override(key, value):
        monkeypatch.setenv(
            "ANABRANCH__" + key.upper().replace(".", "__"), value if isinstance(value, str) else json.dumps(value)
        )

    return override


@pytest.fixture
def edit(example):
    """Replaces text in the example's config, or adds it when `old` is None."""

    def replace(old, new):
        path = example / "pipeline.toml"
        text = path.read_text()
        assert old is None or old in text
        path.write_text(f"{text}\n{new}\n" if old is None else text.replace(old, new))

    return replace


@pytest.fixture(autouse=True)
def _on_a_disk(monkeypatch):
    """The folder for temporary files is no finding where it is in memory."""
    monkeypatch.setattr(state_checks, "_MEMORY", set())


@pytest.fixture
def mounted(tmp_path):
    """Mounts a tmpfs, `mounted("size=1m")`, and returns its path; skips where that is not allowed."""
    paths = []

    def mount(options):
        path = tmp_path / "mounted"
        path.mkdir()
        if sys.platform != "linux" or os.geteuid() or shutil.which("mount") is None:
            pytest.skip("only root on Linux mounts a small file system")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
        paths.append(path)
        return path

    yield mount
    for path in paths:
        subprocess.run(["umount", path], check=True)


def kinds(findings):
    return [finding.kind for finding in findings if finding.kind]


def only(findings, kind):
    (one,) = [finding for finding in findings if finding.kind == kind]
    return one


def test_every_finding_has_a_test_that_makes_it_real():
    root = Path(anabranch.__file__).parent
    files = [*root.glob("*/preflight.py"), *root.glob("*/preflight/*.py"), *root.glob("commands/doctor/*.py")]
    code = "".join(path.read_text() for path in [*files, root / "runtime/model_process.py"])
    made = {*re.findall(r"\b(?:info|warning|problem)\(\s*\"([a-z0-9_.]+)\"", code), *model_checks.FIXES}
    assert len(made) > 90
    expected = re.sub(r"\bsetting\([^)]*\)", "", Path(__file__).read_text())
    assert made - {*re.findall(r'"([a-z0-9_]+\.[a-z0-9_]+)"', expected)} == set()


def test_a_check_that_the_page_adds(diagnose, setting, monkeypatch):
    page = Path(anabranch.__file__).parents[1].joinpath("docs/extend/doctor-check.md").read_text()
    function, line, test = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    known = vars(state_checks) | {"CheckpointSettings": CheckpointSettings, "timedelta": timedelta}
    exec(function, known)
    monkeypatch.setattr(state_checks, "check_undo", known["check_undo"], raising=False)
    added = eval(f"({line})", vars(all_checks))
    monkeypatch.setattr(diagnose, "checks", [*diagnose.checks, *added])
    written = dict(globals())
    exec(test, written)
    written["test_checkpoints_that_reach_back_for_seconds"](diagnose, setting)


STRING = (None, '[schema.features.s]\ndtype = "string"\nencode = {hash = 9}')
ON_CPU = {"learner.device": "cpu"}
GAMMA = {"learner.strategy": "der++", "learner.strategy.gamma": "0.9"}
LAKE = '[stream.backfill]\nfiles = ["s3://lake/*.parquet"]\nstorage = {{{}}}'
BUCKET = '[storage]\nurl = "s3://bucket/prefix"\noptions = {aws_colour = "blue"}'
NO_ROWS = 'stream.format = "rows" cannot hold schema.features.s'
NO_MODULE = 'learner.activation_checkpointing: the model has no module "nope", but 0, 1'
NO_LAYER = 'model.adapter.targets = "query": the model has no such linear layer or convolution'
NO_HOOK = 'learner.comm_hook = "bf16" needs CUDA devices; write "fp16", or "none".'
NO_CUDA = "needs a CUDA device, but the device is cpu."
NO_LAKE = "s3://lake/ cannot be opened: "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("check", "changes", "kind", "part"),
    [
        ("schema", [("shape = [64]", "shape = [64]\ndefault = [1, 2]")], "schema.invalid", "schema.features.x.default"),
        ("schema", [('format = "json"', 'format = "rows"'), STRING], "schema.invalid", NO_ROWS),
        ("model", [{**ON_CPU, "learner.precision": "fp16"}], "device.precision", 'learner.precision = "fp16" needs'),
        ("model", [('name = "adamw"', 'name = "adamw", momentum = 0.9')], "model.optimizer", "has no 'momentum'"),
        ("model", [GAMMA], "model.strategy", "has no 'gamma'"),
        ("model", [{"learner.activation_checkpointing": ["nope"]}], "model.checkpointing", NO_MODULE),
        ("model", [{"model.embedding": "body"}], "model.embedding", 'model.embedding = "body": the model has no such'),
        ("model", [(None, "[gate.measures]\nmae = 0.1\n")], "gate.measures", '"mae" is no measure of this task'),
        ("model", [{"gate.slices": ["nope"]}], "gate.slices", 'gate.slices: "nope" is no feature of [schema.features]'),
        ("model", [{"gate.slices": ["x"]}], "gate.slices", 'gate.slices: "x" is a time, a text or a vector; name'),
        ("model", [{"model.adapter.targets": ["query"]}], "model.factory", NO_LAYER),
        ("model", [{**ON_CPU, "learner.replicas": 2, "learner.comm_hook": "bf16"}], "learner.replicas", NO_HOOK),
        ("model", [("my_model:build", "not_there:build")], "model.factory", "no module named not_there"),
        ("model", [("hidden = 128", "wide = 128")], "model.factory", "unexpected keyword argument 'wide'"),
        ("model", [("classes = 10", "classes = 7")], "model.output", "[3, 10]"),
        ("model", [{**ON_CPU, "device_sharing.sms": 16}], "device_sharing.refinement", f"sms = 16 {NO_CUDA}"),
        (
            "model",
            [{**ON_CPU, "device_sharing.mps_percentage": 50}],
            "device_sharing.mps",
            f"_percentage = 50 {NO_CUDA}",
        ),
        ("broker", [{"stream.bootstrap_servers": "a..b:9092"}], "broker.name", "The name a..b of"),
        ("history", [(None, LAKE.format('aws_nonsense = "x"'))], "backfill.missing", NO_LAKE),
        ("history", [(None, LAKE.format('aws_region = "x", default_content_type = "y"'))], "backfill.missing", NO_LAKE),
        ("storage", [(None, BUCKET)], "storage.unusable", "s3://bucket/prefix cannot be opened: "),
    ],
)
def test_a_fault_of_the_settings_is_found(diagnose, setting, edit, check, changes, kind, part):
    for change in changes:
        if isinstance(change, dict):
            for key, value in change.items():
                setting(key, value)
        else:
            edit(*change)
    assert part in only(diagnose(check), kind).message


class TestConfig:
    @pytest.mark.parametrize("content", [None, b"name = = 3", b"name = '\xff'"])
    def test_a_file_that_cannot_be_read(self, example, content):
        path = example / "pipeline.toml"
        path.unlink() if content is None else path.write_bytes(content)
        ((check, finding),) = examine(path, PATIENT)
        assert (check, finding.kind) == ("config", "config.unreadable")

    def test_all_errors_are_reported_at_once_and_what_can_run_still_runs(self, example, edit, setting):
        edit("batch_size = 32", 'batchsize = 32\nprecision = "fp99"')
        edit("port = 8000", "port = 99999")
        edit('topics = ["events"]', 'topics = ["events"]\nproperties = {"sasl.password" = {env = "DOCTOR_NOT_SET"}}')
        setting("learner.nope", 3)
        results = list(
            examine(
                example / "pipeline.toml",
                PATIENT,
                checks=[c for c in CHECKS if c.name in ("state", "ports", "checkpoints")],
            )
        )
        messages = [finding.message for _, finding in results if finding.kind == "config.invalid"]
        for part in ("batchsize", "precision = 'fp99'", "serving.port = 99999", "DOCTOR_NOT_SET", "LEARNER__NOPE"):
            assert sum(part in message for message in messages) == 1, part
        assert len(messages) == 5
        # The ports' and the state's settings are at fault; the checkpoints' are not.
        assert {check for check, _ in results} == {"config", "checkpoints"}

    def test_a_tokenizer_that_is_missing_is_one_finding(self, diagnose, example, edit):
        text_feature(edit)
        (finding,) = diagnose("schema")
        path = example / "model/tokenizer.json"
        assert finding.message.startswith(f'schema.features.s.encode.tokenizer = "{path}" cannot be read: No such file')
        checks = [check for check in CHECKS if check.name in ("schema", "checkpoints", "versions", "state")]
        found = list(examine(example / "pipeline.toml", PATIENT, checks=checks))
        assert [check for check, finding in found if finding.level != "ok"] == ["schema"]

    def test_a_tokenizer_that_pads_with_another_id_than_the_model_masks(self, diagnose, example, edit):
        text_feature(edit)
        (example / "model").mkdir()
        write_tokenizer(example / "model/tokenizer.json")
        for config, levels in (('{"pad_token_id": 0}', ["ok"]), ('{"pad_token_id": 1}', ["ok", "warning"])):
            (example / "model/config.json").write_text(config)
            assert [finding.level for finding in diagnose("schema")] == levels
        assert "is filled up with id 0, but" in only(diagnose("schema"), "schema.padding").message


def text_feature(edit):
    edit(None, '[schema.features.s]\ndtype = "string"\nencode = {tokenizer = "model/tokenizer.json", length = 8}')


class TestInstallation:
    @pytest.mark.process
    def test_a_torch_that_is_broken(self, diagnose, tmp_path, monkeypatch):
        (tmp_path / "torch").mkdir()
        (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch.so: cannot open')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setenv("ANABRANCH_TEST_SPAWN", "1")
        message = only(diagnose("model", alone=True), "install.torch").message
        assert message == "torch cannot be imported: libtorch.so: cannot open."

    def test_a_crc32c_that_is_broken(self, diagnose, tmp_path, monkeypatch):
        (tmp_path / "crc32c.py").write_text("raise ImportError('built for another Python')")
        monkeypatch.delitem(sys.modules, "crc32c", raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        assert kinds(diagnose("install")) == ["install.crc32c"]

    def test_an_extra_that_is_missing(self, diagnose, edit, setting, monkeypatch):
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        monkeypatch.setitem(sys.modules, "fastavro", None)
        monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
        monkeypatch.setitem(sys.modules, "mlflow", None)
        edit(None, '[track]\nkind = "mlflow"\nurl = "http://mlflow:5000"')
        edit(None, "[tracing]")
        extras = ["otel", "mlflow"]
        assert [each.fix for each in diagnose("install") if each.fix] == [
            f"Install it: pip install 'anabranch[{extra}]'." for extra in extras
        ]
        setting("stream.format", "arrow")
        assert only(diagnose("install")[-1:], "install.extra").fix == "Install it: pip install 'anabranch[arrow]'."
        edit('format = "json"', 'format = "avro"\nregistry = {url = "http://registry"}')
        setting("stream.format", "avro")
        finding = diagnose("install")[-1]
        assert finding.message == 'stream.format = "avro" needs fastavro, which cannot be imported.'
        assert finding.fix == "Install it: pip install 'anabranch[registry]'."

    def test_a_low_limit_of_open_files(self, diagnose, monkeypatch):
        monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 512))
        assert "Only 512 files" in only(diagnose("limits"), "limit.files").message
        monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
        assert kinds(diagnose("limits")) == [], "a daemon raises its limit itself"

    def test_a_sound_one_has_no_finding(self, diagnose):
        assert kinds(diagnose("install") + diagnose("limits") + diagnose("schema")) == []


class TestDevice:
    def test_a_device_that_is_well_has_no_finding(self, diagnose, fake_nvml):
        fake_nvml()
        (finding,) = diagnose("device")
        assert finding.level == "ok"
        assert finding.message.startswith(f"NVIDIA Fake ({UUID}) is well, 62 °C, 20.0 of 80.0 GB")

    def test_devices_that_fail_or_may_soon(self, diagnose, fake_nvml):
        fake_nvml(["remap_failed=1 1:remap_pending=1"], uuids=(UUID, OTHER))
        findings = diagnose("device")
        assert f"({UUID}): no spare row of memory is left" in only(findings, "device.failing").message
        assert OTHER in only(findings, "device.warning").message

    def test_a_device_that_is_lost(self, diagnose, fake_nvml):
        fake_nvml(["error=15"])
        assert "GPU is lost" in only(diagnose("device"), "device.failing").message
        fake_nvml(at_start="error=15")
        assert "fallen off the bus" in only(diagnose("device"), "device.failing").message

    def test_devices_that_cannot_be_watched(self, diagnose, setting, fake_nvml, monkeypatch):
        monkeypatch.setenv("FAKE_NVML_SCRIPT", "")
        setting("device.enabled", "on")
        assert "Driver Not Loaded" in only(diagnose("device"), "device.unwatched").message

    def test_off_none_is_read(self, diagnose, setting):
        setting("device.enabled", "off")
        assert kinds(diagnose("device")) == []


class TestModel:
    def test_a_sound_one_has_no_finding(self, diagnose):
        findings = diagnose("model")
        assert kinds(findings) == []
        assert "26,122 parameters" in findings[-1].message

    def test_settings_without_a_bound_reach_the_probe(self, diagnose, setting):
        setting("learner.max_grad_norm", "inf")
        assert kinds(diagnose("model")) == []

    @pytest.mark.slow
    def test_an_adapter_says_what_is_trained_and_what_it_takes(self, diagnose, setting):
        setting("model.adapter.rank", "2")
        setting("model.adapter.base_precision", "bf16")
        findings = diagnose("model")
        assert kinds(findings) == []
        assert findings[-1].message == (
            "1,172 numbers of it are trained: a version takes 4.7 kB, and the frozen base 52.8 kB, once."
        )

    def test_a_device_that_is_not_there(self, diagnose, setting):
        setting("learner.device", "cuda:77")
        setting("serving.device", "cuda:77")
        findings = [finding for finding in diagnose("model") if finding.kind == "device.missing"]
        assert [finding.fix.partition(" =")[0] for finding in findings] == ["Set learner.device", "Set serving.device"]

    def test_a_model_that_fails_in_the_precision_of_training(self, diagnose, setting, example):
        source = (
            "import torch\nfrom torch import nn\n\n\nclass Own(nn.Linear):\n    def forward(self, x):\n"
            "        if torch.is_autocast_enabled('cpu'):\n            raise RuntimeError('no kernel')\n"
            "        return super().forward(x)\n\n\ndef build(hidden):\n    return Own(64, 10)\n"
        )
        (example / "my_model.py").write_text(source)
        setting("learner.device", "cpu")
        setting("learner.precision", "fp32")
        assert kinds(diagnose("model")) == []
        setting("learner.precision", "bf16")
        message = only(diagnose("model"), "model.output").message
        assert message.startswith("model.factory: the forward pass fails in training, in bf16 by autocast")

    def test_policies_that_compare_what_there_is_not(self, diagnose, example, edit, setting):
        setting("replay.sampling", "similar")
        message = (
            'replay.sampling = "similar" needs model.embedding: the module whose output is compared, such as "body".'
        )
        assert only(diagnose("model"), "replay.policy").message == message
        setting("model.embedding", "2")
        assert kinds(diagnose("model")) == []
        edit('dtype = "int64"\nclasses = 10', 'dtype = "float32"')
        edit('"classification"', '"regression"')
        (example / "my_model.py").write_text("from torch import nn\ndef build(hidden):\n    return nn.Linear(64, 1)\n")
        setting("model.embedding", "")
        for key in ("sampling", "admission"):
            setting("replay.sampling", "uniform")
            setting(f"replay.{key}", "class-balanced")
            message = only(diagnose("model"), "replay.policy").message
            assert message.startswith(f'replay.{key} = "class-balanced" needs schema.label.classes')

    def test_what_only_several_replicas_do(self, diagnose, setting):
        assert diagnose("replicas") == []
        setting("learner.sync_every", 2)
        assert (
            only(diagnose("replicas"), "learner.alone").message
            == "learner.sync_every = 2 has no effect with one replica."
        )
        setting("learner.sync_every", 1)
        setting("learner.sharding", "zero1")
        assert (
            only(diagnose("replicas"), "learner.alone").message
            == 'learner.sharding = "zero1" has no effect with one replica.'
        )
        setting("learner.replicas", 2)
        assert diagnose("replicas") == []

    def test_multiprocessors_without_mps_give_serving_nothing(self, monkeypatch, tmp_path):
        monkeypatch.setattr(cuda_limits, "lacks_green_contexts", lambda _: None)
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
        sharing = DeviceSharingSettings(sms=16)
        said, how = check_sharing(sharing, torch.device("cuda"))
        assert said.kind == "device_sharing.sms"
        assert said.message == (
            "device_sharing.sms = 16 slows training and gives serving nothing: no MPS daemon listens, since there is "
            f"no {tmp_path / 'control'}."
        )
        assert "steps keep to 16 multiprocessors" in how.message
        monkeypatch.setattr(cuda_limits, "mps_fault", lambda: None)
        assert [finding.kind for finding in check_sharing(sharing, torch.device("cuda"))] == [""]

    def test_it_says_how_the_device_is_shared(self, diagnose, setting):
        setting("learner.device", "cpu")
        setting("device_sharing.policy", "fraction")
        sentence = "Training yields to requests on cpu, and gets at least 50% of it; its threads run at a lower"
        assert any(finding.message.startswith(sentence) for finding in diagnose("model"))

    def test_refinements_that_are_there_are_reported(self, monkeypatch):
        monkeypatch.setattr(cuda_limits, "mps_fault", lambda: None)
        (said,) = check_sharing(DeviceSharingSettings(mps_percentage=30), torch.device("cuda"))
        assert said.message == (
            "Training yields to requests on cuda; serving's kernels are taken first; "
            "training takes at most 30 % of the device's threads."
        )

    def test_a_driver_that_is_too_old(self, diagnose, setting, monkeypatch, tmp_path):
        monkeypatch.setattr(learner_device, "DRIVER", tmp_path)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        messages = [finding.message for finding in diagnose("model") if finding.kind]
        assert len(messages) == 2
        for key, message in zip(("learner", "serving"), messages, strict=True):
            assert message.startswith(
                f'{key}.device = "auto" takes the CPU: torch {torch.__version__} is built for CUDA'
            )
        setting("learner.device", "cuda")
        (finding,) = (finding for finding in diagnose("model") if finding.message.startswith("learner.device"))
        assert (finding.kind, finding.fix.partition(",")[0]) == ("device.driver", "Update NVIDIA's driver")

    def test_uuids_of_the_machine_are_listed_and_one_that_is_absent_is_a_problem(self, diagnose, setting, monkeypatch):
        for module in (device_checks, visible_devices, serving_checks):
            monkeypatch.setattr(module, "machine_devices", lambda: {"GPU-aa11": [], "GPU-bb22": ["MIG-cc33"]})
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        setting("learner.device", "GPU-dd44")
        setting("serving.device", "MIG-ee55")
        findings = diagnose("model")
        assert any(f.message == "The machine's GPUs are GPU-aa11, GPU-bb22 (instances MIG-cc33)." for f in findings)
        missing = [finding.message for finding in findings if finding.kind == "device.missing"]
        there = "this machine has no such device; it has GPU-aa11, GPU-bb22, MIG-cc33."
        assert missing == [f'learner.device = "GPU-dd44": {there}', f'serving.device = "MIG-ee55": {there}']

    def test_what_the_compiler_lacks(self, diagnose, setting, monkeypatch, tmp_path):
        setting("learner.device", "cpu")
        setting("learner.compile", "true")
        for name in ("CC", "CXX"):
            monkeypatch.setenv(name, str(tmp_path / "compiler"))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "not" / "there"))
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
        asked, noexec = [], SimpleNamespace(f_flag=device_checks._NOEXEC | os.ST_RDONLY)
        monkeypatch.setattr(device_checks.os, "statvfs", lambda path: asked.append(path) or noexec)
        messages = {finding.kind: finding for finding in diagnose("model")}
        assert messages["compile.compiler"].message == (
            f"learner.compile needs a C compiler, but there is no {tmp_path / 'compiler'}."
        )
        assert messages["compile.folder"].message == (
            f"learner.compile loads what it compiles from {tmp_path / 'not' / 'there'}, which is mounted noexec."
        )
        assert messages["compile.folder"].fix.startswith("Set TORCHINDUCTOR_CACHE_DIR to a folder")
        assert asked == [tmp_path]

    def test_a_compiler_and_its_folders_that_can_be_used(self, monkeypatch, tmp_path):
        (tmp_path / "cc").touch(mode=0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        (finding,) = check_compiler("cuda", {"TRITON_CACHE_DIR": str(tmp_path)})
        assert finding.kind == ""
        kinds = [finding.kind for finding in check_compiler("cpu", {})]
        assert kinds == ["compile.compiler"]

    def test_a_folder_that_cannot_be_written(self, monkeypatch, tmp_path):
        monkeypatch.setattr(device_checks.os, "access", lambda path, _mode: path != tmp_path)
        folder = str(tmp_path / "compiled")
        (finding,) = check_compiler("cpu", {"CXX": shlex.quote(sys.executable), "TORCHINDUCTOR_CACHE_DIR": folder})
        assert finding.message == f"learner.compile loads what it compiles from {folder}, which cannot be written."

    def test_triton_has_its_own_folder(self, monkeypatch, tmp_path):
        flags = {str(tmp_path): device_checks._NOEXEC}
        monkeypatch.setattr(device_checks.os, "statvfs", lambda path: SimpleNamespace(f_flag=flags.get(str(path), 0)))
        environment = {"CC": shlex.quote(sys.executable), "TRITON_CACHE_DIR": str(tmp_path)}
        (finding,) = check_compiler("cuda", environment)
        assert (finding.kind, finding.fix.split()[:2]) == ("compile.folder", ["Set", "TRITON_CACHE_DIR"])
        environment["CXX"] = environment["CC"]
        assert [finding.kind for finding in check_compiler("cpu", environment)] == [""]

    @pytest.fixture
    def small_device(self, monkeypatch):
        """A CUDA device of 200 kB, to which no model can be moved."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=200_000))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * 26_122 * 4 - 1, 200_000))
        move = torch.nn.Module.to

        def refuse(model, device):
            if device.type == "cuda":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")
            return move(model, device)

        monkeypatch.setattr(torch.nn.Module, "to", refuse)

    @pytest.mark.usefixtures("small_device")
    def test_a_model_that_needs_more_than_its_part_of_a_device(self, diagnose):
        findings = diagnose("model")
        assert set(kinds(findings)) == {"device.ledger"}
        messages = [finding.message for finding in findings]
        assert any("26,122 parameters" in message for message in messages)  # tried on the CPU, for lack of room
        message, of_serving = [finding.message for finding in findings if finding.kind == "device.ledger"]
        assert of_serving.startswith("Serving needs at least 0.")
        assert message.startswith("The learner needs at least 0.")
        assert "but cuda:0 has 0.0 GB for it with device_sharing.memory = 0.7; most is replay 0." in message

    def test_a_ledger_names_the_largest_items(self):
        learner = {"weights": 10, "optimizer": 20, "scorer": 25, "replay": 6, "contexts": 1}
        serving = {"versions": 8, "held_version": 4, "contexts": 1}

        def found_for(total, **settings):
            sharing = DeviceSharingSettings.model_validate(settings)
            sizes = [{name: size * 10**9 for name, size in each.items()} for each in items]
            return " ".join(each.message for each in check_load("cuda:0", total * 10**9, *sizes, sharing))

        items = learner, serving
        assert found_for(100) == (
            "Of 100.0 GB of cuda:0, the learner takes at least 62.0 GB and serving takes at least 13.0 GB; activations "
            "come on top."
        )
        assert found_for(80) == (
            "The learner needs at least 61.0 GB without activations, but cuda:0 has 56.0 GB for it with "
            "device_sharing.memory = 0.7; most is scorer 25.0 GB, optimizer 20.0 GB, weights 10.0 GB."
        )
        assert found_for(80, memory=0.9) == (
            "Serving needs at least 12.0 GB without activations, but cuda:0 has 4.0 GB for it with "
            "device_sharing.memory = 0.9; most is versions 8.0 GB, held_version 4.0 GB."
        )
        assert found_for(40).count("without activations") == 2
        # Neither has a part of it, and so only both together can be too much.
        assert found_for(70, policy="exclusive") == (
            "The pipeline needs at least 75.0 GB without activations, but cuda:0 has 70.0 GB; most is scorer 25.0 GB, "
            "optimizer 20.0 GB, weights 10.0 GB."
        )
        items = learner, {}
        assert found_for(62, policy="exclusive") == (
            "Of 62.0 GB of cuda:0, the learner takes at least 62.0 GB; activations come on top."
        )

    @pytest.mark.usefixtures("small_device")
    def test_a_device_that_is_full_is_one_finding_and_the_model_is_tried_on_the_cpu(self, diagnose, example, checks):
        chosen = [check for check in checks if check.name == "model"]
        findings = [
            finding for _, finding in examine(example / "pipeline.toml", PATIENT, checks=chosen, on_device=True)
        ]
        message = "cuda:0 has too little free memory to try the model: CUDA out of memory. Tried to allocate 2.00 GiB."
        assert only(findings, "device.busy").message == message
        assert any("26,122 parameters" in finding.message for finding in findings)

    def test_a_running_learner_is_not_disturbed(self, monkeypatch, tmp_path):
        def refuse(_):
            raise AssertionError("that takes a context")

        cuda = torch.device("cuda", 0)
        pipeline = cast("PipelineSettings", SimpleNamespace(state_dir=tmp_path))
        trial = ModelTrial(pipeline, lambda _: None, on_device=False)
        monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
        with lock_state_directory(tmp_path):
            assert trial.device_of_trial(cuda, 100) == torch.device("cpu")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (200, 1000))
        assert trial.device_of_trial(cuda, 100) == cuda
        assert trial.device_of_trial(cuda, 101) == torch.device("cpu")

    def test_more_replay_than_there_is_memory(self, diagnose, setting):
        setting("learner.device", "cpu")
        total = psutil.virtual_memory().total
        setting("replay.capacity", 2_000_000_000)
        setting("replay.device_bytes", f"{total}B")
        if total > 2_000_000_000 * 300:
            pytest.skip("this machine has memory for that")
        assert kinds(diagnose("model")) == ["device.memory"]

    @pytest.mark.process
    def test_a_factory_that_crashes(self, diagnose, example):
        (example / "my_model.py").write_text(
            "import os, sys\nsys.stderr.write('oh no\\n')\nsys.stderr.flush()\nos.abort()\n"
        )
        crash = only(diagnose("model", alone=True), "model.crash")
        assert crash.message == "The model's process ended with signal 6 while building my_model:build; it said: oh no."

    @pytest.mark.process
    def test_a_factory_that_crashes_and_leaves_a_process_that_holds_its_output_does_not_hang(self, diagnose, example):
        (example / "my_model.py").write_text(
            "import os, pathlib, subprocess, sys\n"
            "left = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])\n"
            "pathlib.Path(__file__).with_name('left').write_text(str(left.pid))\n"
            "sys.stderr.write('x' * 100_000 + '\\noh no\\n')\nsys.stderr.flush()\nos.abort()\n"
        )
        try:
            crash = only(diagnose("model", alone=True), "model.crash")
        finally:
            os.kill(int((example / "left").read_text()), signal.SIGKILL)
        assert crash.message.endswith("it said: oh no.")

    @pytest.mark.process
    @pytest.mark.slow
    def test_a_factory_that_hangs(self, diagnose, example):
        (example / "my_model.py").write_text("import threading\nthreading.Event().wait()\n")
        message, timeout = "importing torch", 5.0
        while re.search("starting Python|importing torch|has not ended within", message):  # on a busy machine
            timeout *= 2
            *_, last = diagnose("model", timeout=timeout, alone=True)
            message = last.message
        assert last.kind == "model.hang"
        assert "still building my_model:build" in message

    @pytest.mark.process
    def test_what_a_model_prints_in_a_process_of_its_own_is_no_finding(self, diagnose, example):
        path = example / "my_model.py"
        path.write_text(path.read_text() + "\nprint('x' * 100_000)\n")
        assert kinds(diagnose("model", alone=True)) == []


@pytest.fixture
def server():
    """Listens on loopback and calls back with each connection: `server(talk) -> port`."""
    with contextlib.ExitStack() as stack:

        def listen(talk):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def accept():
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = listener.accept()
                        with connection, contextlib.suppress(OSError):
                            talk(connection)

            thread = threading.Thread(target=accept, daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
            return listener.getsockname()[1]

        yield listen


class TestReachingTheBroker:
    def test_a_port_on_which_nothing_listens(self, diagnose, setting, free_port):
        setting("stream.bootstrap_servers", f"127.0.0.1:{free_port()}")
        finding = only(diagnose("broker"), "broker.connect")
        assert finding.message.endswith("Connection refused.")

    def test_a_port_that_does_not_speak_tls(self, diagnose, setting, edit, server):
        port = server(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH\r\n"))
        setting("stream.bootstrap_servers", f"127.0.0.1:{port}")
        edit(None, '[stream.properties]\n"security.protocol" = "SSL"')
        finding = only(diagnose("broker"), "broker.tls")
        assert "does not speak TLS" in finding.message

    @pytest.mark.parametrize(("days", "trusted", "why"), [(-1, True, "expired"), (1, False, "self-signed")])
    def test_a_certificate_that_is_not_accepted(self, diagnose, setting, edit, server, certificate, days, trusted, why):
        cert, key = certificate(days)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        port = server(lambda connection: context.wrap_socket(connection, server_side=True).close())
        setting("stream.bootstrap_servers", f"localhost:{port}")
        ca = f'"ssl.ca.location" = "{cert}"' if trusted else ""
        edit(None, f'[stream.properties]\n"security.protocol" = "SASL_SSL"\n{ca}')
        finding = only(diagnose("broker"), "broker.certificate")
        assert why in finding.message.replace("self signed", "self-signed")

    def test_a_file_of_authorities_that_is_not_there(self, diagnose, setting, edit, server, tmp_path):
        setting("stream.bootstrap_servers", f"127.0.0.1:{server(lambda _: None)}")
        edit(None, f'[stream.properties]\n"security.protocol" = "SSL"\n"ssl.ca.location" = "{tmp_path}/ca.pem"')
        finding = only(diagnose("broker"), "broker.files")
        assert "No such file" in finding.message

    @pytest.mark.slow
    def test_something_that_is_no_broker(self, diagnose, setting, server):
        setting("stream.bootstrap_servers", f"127.0.0.1:{server(lambda connection: connection.sendall(b'hello'))}")
        finding = only(diagnose("broker"), "broker.protocol")
        assert "does not answer as a Kafka broker" in finding.message

    @pytest.mark.slow
    def test_an_address_that_only_the_broker_can_resolve(self, diagnose, setting, kafka, monkeypatch):
        setting("stream.bootstrap_servers", kafka.bootstrap)

        def topic(inspector, name):
            brokers = [SimpleNamespace(host="kafka-internal.invalid", port=9092)]
            client = SimpleNamespace(_manager=SimpleNamespace(cluster=SimpleNamespace(brokers=lambda: brokers)))
            with translated(f"cannot look up {name}", client, inspector._settings):
                raise KafkaConnectionError("DNS Resolution failure")

        monkeypatch.setattr(Inspector, "topic", topic)
        finding = only(diagnose("broker"), "broker.advertised")
        assert "gives kafka-internal.invalid:9092 as its address (advertised.listeners)" in finding.message
        assert "advertised.listeners" in finding.fix

    @pytest.mark.slow
    def test_something_that_never_answers(self, diagnose, setting, server):
        done = threading.Event()
        setting("stream.bootstrap_servers", f"127.0.0.1:{server(lambda _: done.wait())}")
        try:
            finding = only(diagnose("broker", timeout=1.5), "check.slow")
        finally:
            done.set()
        assert finding.message == "It has not ended within 1.5 s."

    # kafka-python leaves the socket of a connection that was refused to the garbage collector.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_a_wrong_password(self, diagnose, setting, edit, sasl_kafka):
        self.as_user(setting, edit, sasl_kafka, sasl_kafka.user, "hunter-2-is-wrong")
        finding = only(diagnose("broker"), "broker.credentials")
        assert "refuses the credentials" in finding.message
        assert exit_code([("broker", finding)]) is Exit.DEPENDENCY

    def test_a_user_without_rights(self, diagnose, setting, edit, sasl_kafka, create_topic, request):
        create_topic(sasl_kafka.plain, "guarded")
        create_topic(sasl_kafka.plain, "guarded.dead")
        setting("stream.topics", ["guarded"])
        self.as_user(setting, edit, sasl_kafka, sasl_kafka.stranger, sasl_kafka.password)
        messages = [finding.message for finding in diagnose("broker") if finding.kind == "topic.denied"]
        assert messages == [
            "The user of [stream.properties] may not read the topic guarded.",
            "The user of [stream.properties] may not write the topic guarded.dead.",
        ]

    def as_user(self, setting, edit, broker, user, password):
        setting("stream.bootstrap_servers", broker.bootstrap)
        edit(
            None,
            '[stream.properties]\n"security.protocol" = "SASL_PLAINTEXT"\n"sasl.mechanism" = "PLAIN"\n'
            f'"sasl.username" = "{user}"\n"sasl.password" = "{password}"',
        )


class TestHistory:
    @pytest.fixture
    def lake(self, tmp_path, setting):
        """A folder with two files that fit, of 1,000 rows each."""
        folder = tmp_path / "lake"
        folder.mkdir()
        for number in range(2):
            self.write(folder / f"part-{number}.parquet")
        setting("stream.backfill.files", [f"{folder}/*.parquet"])
        setting("stream.bootstrap_servers", "127.0.0.1:1")
        return folder

    def write(self, path, rows=1000, **columns):
        x = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array([0.5] * 64 * rows, pyarrow.float32()), 64)
        pyarrow.parquet.write_table(pyarrow.table({"x": x, "y": [7] * rows} | columns), path)

    def test_without_one_there_is_nothing_to_say(self, diagnose):
        assert diagnose("history") == []

    def test_a_sound_one_has_no_finding(self, diagnose, lake):
        (finding,) = diagnose("history")
        assert finding == ok("The history has 2 files with 2,000 rows, which fit [schema].")

    def test_a_pattern_that_matches_nothing(self, diagnose, lake, setting):
        setting("stream.backfill.files", [f"{lake}/*.parquet", f"{lake}/no-*.pq"])
        finding = only(diagnose("history"), "backfill.missing")
        assert finding.message == f'stream.backfill.files: no file matches "{lake}/no-*.pq".'

    def test_files_of_another_schema_are_named_with_the_column_and_its_types(self, diagnose, lake):
        self.write(lake / "part-1.parquet", y=["seven"] * 1000)
        finding = only(diagnose("history"), "backfill.schema")
        what = "its column y is of Arrow type string, not a whole number"
        assert finding.message == f"stream.backfill.files: {lake}/part-1.parquet does not fit [schema]: {what}."
        for number in range(2, 7):
            pyarrow.parquet.write_table(pyarrow.table({"y": [7]}), lake / f"part-{number}.parquet")
        findings = diagnose("history")
        assert kinds(findings) == [*["backfill.schema"] * 3, "backfill.others"]
        assert "part-2.parquet does not fit [schema]: it has no column x." in findings[1].message
        assert findings[-1].message == "3 more of 7 files cannot be used."

    def test_times_in_milliseconds(self, diagnose, lake, setting):
        for number in range(2):
            self.write(lake / f"part-{number}.parquet", at=[1_700_000_000_000] * 1000)
        setting("stream.backfill.time", "at")
        findings = diagnose("history")
        assert kinds(findings) == ["backfill.schema"] * 2
        assert "part-0.parquet has only times more than a day ahead of now in at" in findings[0].message

    def test_a_file_that_is_no_parquet(self, diagnose, lake):
        (lake / "part-1.parquet").write_bytes(b"PAR1, but no more of it")
        assert "part-1.parquet is damaged: " in only(diagnose("history"), "backfill.damaged").message

    @pytest.mark.slow
    def test_a_bucket_that_refuses_the_credentials(self, diagnose, edit, forbidding):
        storage = (
            f'{{endpoint = "{forbidding}", allow_http = "true", access_key_id = "me", secret_access_key = "pass!"}}'
        )
        edit(None, f'[stream.backfill]\nfiles = ["s3://lake/topics/*.parquet"]\nstorage = {storage}')
        finding = only(diagnose("history"), "backfill.unreadable")
        assert finding.message.startswith("s3://lake/topics/*.parquet cannot be read: ")
        assert finding.unreachable
        assert "pass!" not in finding.message

    @pytest.fixture
    def forbidding(self):
        """The URL of a server that answers 403."""

        class Forbidding(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_error(403)

            def log_message(self, *_):
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Forbidding) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
            thread.join()

    def test_files_without_the_label_are_none_that_fit(self, diagnose, lake, setting):
        for number in range(2):
            path = lake / f"part-{number}.parquet"
            (lake / f"y={number}").mkdir()
            pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).drop(["y"]), lake / f"y={number}" / path.name)
            path.unlink()
        setting("stream.backfill.files", [f"{lake}/**/*.parquet"])
        finding = only(diagnose("history"), "backfill.label")
        assert finding.message.startswith(
            "No file has a value in the column y of [schema.label], so that nothing can be learned"
        )
        assert finding.message.endswith("their paths have it (y=0), which is not read.")
        setting("stream.unlabelled", "store")
        assert kinds(diagnose("history")) == []

    def test_files_without_the_offsets_of_kafka(self, diagnose, lake, setting):
        setting("stream.backfill.identity.partition", "kafka_partition")
        setting("stream.backfill.identity.offset", "kafka_offset")
        self.write(lake / "part-0.parquet", kafka_partition=[0] * 1000, kafka_offset=list(range(1000)))
        finding = only(diagnose("history"), "backfill.identity")
        named = "has no column kafka_partition and no column kafka_offset, which stream.backfill.identity names"
        assert finding.message == f"{lake}/part-1.parquet {named}."

    def test_json_lines_that_would_be_dead_lettered(self, diagnose, lake, setting):
        (lake / "events.jsonl").write_text(json.dumps(EVENT) + '\n{"x": [1], "y": 7}\n')
        setting("stream.backfill.files", [f"{lake}/events.jsonl"])
        assert "events.jsonl: row 2 cannot be used: " in only(diagnose("history"), "backfill.line").message

    def test_an_end_in_the_future(self, diagnose, lake, setting):
        self.write(lake / "part-0.parquet", at=[0] * 1000)
        self.write(lake / "part-1.parquet", at=[0] * 1000)
        setting("stream.backfill.time", "at")
        setting("stream.backfill.until", "2999-01-01")
        assert kinds(diagnose("history")) == ["backfill.until"]
        setting("stream.backfill.until", "2020-01-01")
        assert kinds(diagnose("history")) == []

    def test_a_topic_that_deletes_messages_before_the_history_is_read(
        self, diagnose, lake, setting, kafka, make_topic, example
    ):
        topic = make_topic()
        setting("stream.bootstrap_servers", kafka.bootstrap)
        setting("stream.topics", [topic])
        assert kinds(diagnose("history")) == []
        report = LearnerReport(pid=1, generation=1, started=0.0, time=0.0, steps=0)
        counts = {"rows_read": 5, "rows": 10, "files_read": 0, "files": 1}
        for seconds, expected in ((1e9, ["backfill.retention"]), (60.0, [])):
            backfill = BackfillReport(topics=["history"], **counts, rate=1.0, seconds_left=seconds)
            (example / "var").mkdir(exist_ok=True)
            write_report(example / "var", msgspec.structs.replace(report, backfill=backfill))
            findings = diagnose("history")
            assert kinds(findings) == expected
            if expected:
                kept = f"at its present rate, but the topic {topic} keeps messages for"
                assert f"The history takes about 277,778 hours {kept}" in findings[-1].message

    @pytest.mark.parametrize(("module", "extra"), [("pyarrow", "arrow"), ("obstore", "storage")])
    def test_a_package_that_is_missing_is_a_finding_of_the_installation_alone(
        self, diagnose, lake, setting, monkeypatch, module, extra
    ):
        if module == "obstore":
            setting("stream.backfill.files", ["s3://lake/*.parquet"])
        for name in [each for each in sys.modules if each.startswith("anabranch.ingest.backfill.")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module, None)
        assert only(diagnose("install"), "install.extra").fix == f"Install it: pip install 'anabranch[{extra}]'."
        assert diagnose("history") == []


class TestTopics:
    @pytest.fixture
    def topic(self, kafka, make_topic, setting):
        name = make_topic(2)
        setting("stream.bootstrap_servers", kafka.bootstrap)
        setting("stream.topics", [name])
        return name

    @pytest.fixture
    def send(self, kafka, topic, produce):
        return lambda *values, **options: produce(kafka.bootstrap, topic, values, **options)

    def test_a_sound_one_has_no_finding(self, diagnose, topic, send):
        send(b"{bad")
        send(EVENT, partition=1)  # the newest of all partitions counts
        findings = diagnose("broker")
        assert kinds(findings) == []
        assert f"{topic}[1]@0, can be used" in findings[2].message

    def test_one_of_two_brokers_is_away(self, diagnose, topic, send, setting, kafka, free_port):
        send(EVENT)
        setting("stream.bootstrap_servers", f"{kafka.bootstrap},127.0.0.1:{free_port()}")
        assert kinds(diagnose("broker")) == ["broker.partly"]

    def test_topics_that_are_not_there(self, diagnose, topic, setting):
        setting("stream.topics", [f"{topic}-none"])
        missing = [finding for finding in diagnose("broker") if finding.kind == "topic.missing"]
        assert [finding.message.split()[4] for finding in missing] == [f"{topic}-none", f"{topic}-none.dead"]
        assert all(finding.unreachable for finding in missing)

    def test_an_empty_topic_that_does_not_reach_back_to_the_start(self, diagnose, topic, setting):
        setting("stream.start", "2020-01-01T00:00:00Z")
        assert kinds(diagnose("broker")) == ["topic.retention", "message.none"]

    def test_a_message_that_is_compressed_as_the_client_cannot_undo(self, diagnose, topic, kafka, monkeypatch):
        monkeypatch.setattr("kafka.codec.has_zstd", lambda: False)
        producer = Producer({"bootstrap.servers": kafka.bootstrap, "compression.type": "zstd"})
        producer.produce(topic, json.dumps(EVENT | {"z": "x" * 500}).encode())
        assert producer.flush(30) == 0
        finding = only(diagnose("broker"), "message.codec")
        assert "compressed with zstd" in finding.message
        assert "anabranch[codecs]" in finding.fix

    def test_a_message_that_cannot_be_used_is_explained_field_by_field(self, diagnose, topic, send, edit):
        edit(None, '[schema.features.amount]\ndtype = "float32"\n[schema.features.country]\ndtype = "int8"')
        send({"x": [0.5] * 63, "amount": "12", "country": 3, "y": 99})
        message = only(diagnose("broker"), "message.unusable").message
        assert message.startswith(f"The newest message, {topic}[0]@0, cannot be used: Expected `array` of length")
        for field in ("`$.x`", "`$.amount`", "`$.y`"):
            assert message.count(field) == 1
        assert "country" not in message

    def test_a_message_with_an_integer_out_of_its_bounds(self, diagnose, topic, send, edit):
        edit("[schema.features.x]", '[schema.features.day]\ndtype = "int64"\nmin = 1\nmax = 7\n[schema.features.x]')
        send(EVENT | {"day": 8})
        message = only(diagnose("broker"), "message.unusable").message
        assert message == f"The newest message, {topic}[0]@0, cannot be used: day is not in 1..7."

    @pytest.mark.parametrize(
        ("value", "reason"), [(b"{bad", "JSON is malformed"), (b"[1]", "Expected `object`"), (None, "null value")]
    )
    def test_a_message_that_is_no_event(self, diagnose, send, value, reason):
        send(value, key=b"k")
        assert reason in only(diagnose("broker"), "message.unusable").message

    @pytest.mark.any_broker
    def test_a_record_time_in_another_unit_is_named(self, diagnose, send):
        """In seconds, a broker with retention removes the message first; Apache Kafka refuses microseconds itself."""
        written = int(time.time()) * 1_000_000
        send(EVENT, timestamp_ms=written)
        message = only(diagnose("broker"), "message.time").message
        assert message.endswith(f"[0]@0, has the record time {written}, which seems to be microseconds or nanoseconds.")

    def test_an_envelope_is_named_and_not_the_fields_that_it_lacks(self, diagnose, send):
        send({"before": None, "after": EVENT, "op": "c"})
        assert only(diagnose("broker"), "message.unusable").message.endswith(
            'cannot be used: it is an envelope of Debezium, with the row in "after": set stream.envelope = "debezium".'
        )

    def test_a_tombstone_is_known_and_the_form_of_its_key(self, diagnose, send, edit):
        edit("[schema.label]", '[schema.key]\nname = "id"\n[schema.label]')
        send(None, key=b"17")
        assert "is a tombstone, which erases the events with its key." in " ".join(
            finding.message for finding in diagnose("broker")
        )
        send(None, key=b'{"id": 17}')
        message = only(diagnose("broker"), "message.tombstone").message
        assert "its key is a JSON object, not the text of [schema.key] id." in message

    def test_a_message_without_a_label_but_with_more(self, diagnose, send):
        send({"x": EVENT["x"], "lable": 7})
        findings = diagnose("broker")
        assert "has no label (y) and is skipped" in only(findings, "message.unlabelled").message
        assert only(findings, "message.unknown").message.endswith("does not know: lable.")

    def test_a_message_without_a_label_that_a_teacher_answers_for(self, diagnose, send, edit):
        edit("[stream]", '[model.teacher]\nfactory = "my_model:build"\n[stream]\nunlabelled = "distil"')
        send({"x": EVENT["x"]})
        said = " ".join(finding.message for finding in diagnose("broker"))
        assert "has no label (y) and is trained on by the teacher's output alone" in said

    def test_an_arrow_message_with_more(self, diagnose, send, setting):
        setting("stream.format", "arrow")
        batch = pyarrow.record_batch({"x": [EVENT["x"]], "y": [EVENT["y"]], "more": [1]})
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        send(sink.getvalue().to_pybytes())
        assert kinds(diagnose("broker")) == ["message.unknown"]

    def test_properties_that_only_the_pipelines_client_has(self, diagnose, topic, setting, edit):
        setting("stream.client", "confluent")
        edit(None, '[stream.properties]\n"socket.nagle.disable" = true')
        message = only(diagnose("broker"), "broker.unseen").message
        assert "kafka-python cannot do socket.nagle.disable" in message

    def test_a_message_from_the_future(self, diagnose, send):
        send(EVENT, timestamp_ms=int(time.time() * 1000) + 600_000)
        assert kinds(diagnose("broker")) == ["clock.ahead"]

    def test_nothing_is_changed_by_the_checks(self, example, kafka, topic, send, consume_all, setting):
        send(EVENT)
        setting("serving.port", 0)
        setting("learner.status", "127.0.0.1:0")

        def world():
            with contextlib.closing(KafkaAdminClient(bootstrap_servers=kafka.bootstrap)) as admin:
                groups = {group.get("group_id") if isinstance(group, dict) else group for group in admin.list_groups()}
                files = sorted(path for path in example.rglob("*.*") if path.suffix != ".pyc")
                return sorted(admin.list_topics()), groups, files

        before = world()
        results = list(examine(example / "pipeline.toml", PATIENT))
        assert exit_code(results) is Exit.DONE, results
        assert summary(results) == "nothing is wrong"
        assert world() == before
        assert consume_all(kafka.bootstrap, f"{topic}.dead") == []


class TestAnswers:
    @pytest.fixture
    def topics(self, kafka, make_topic, setting, edit):
        events, output = make_topic(2), make_topic(2)
        setting("stream.bootstrap_servers", kafka.bootstrap)
        setting("stream.topics", [events])
        edit(None, f'[serving.stream]\ntopics = ["{events}"]\noutput = "{output}"')
        return events, output

    def test_have_no_finding_where_topics_and_transactions_are_there(self, diagnose, topics):
        (finding,) = diagnose("answers")
        assert finding.message == f"{topics[0]} can be answered in {topics[1]}."

    def test_need_an_output(self, diagnose, topics, setting):
        setting("serving.stream.output", f"{topics[1]}-none")
        finding = only(diagnose("answers"), "topic.missing")
        assert f"There is no topic {topics[1]}-none" in finding.message
        assert "anabranch topics create" in finding.fix

    def test_need_a_topic_for_their_log(self, diagnose, topics, edit, make_topic, setting):
        edit(None, f'[serving.log]\ntopic = "{topics[1]}-none"')
        assert "or fix serving.log.topic" in only(diagnose("answers"), "topic.missing").fix
        setting("serving.log.topic", logged := make_topic())
        assert [each.message for each in diagnose("answers")][1] == f"Answers can be logged in {logged}."

    def test_need_transactions_unless_they_may_come_twice(self, diagnose, topics, setting, monkeypatch):
        monkeypatch.setattr(KafkaAdminClient, "api_versions", lambda _: {0: (0, 9), 22: (0, 4)})
        assert "at-least-once" in only(diagnose("answers"), "stream.transactions").fix
        setting("serving.stream.delivery", "at-least-once")
        assert kinds(diagnose("answers")) == []

    def test_need_the_client(self, diagnose, topics, monkeypatch):
        monkeypatch.setitem(sys.modules, "confluent_kafka", None)
        assert "anabranch[fast]" in only(diagnose("answers"), "install.extra").fix

    def test_get_their_topics_by_a_command(self, diagnose, topics, setting, example, kafka, capsys):
        setting("serving.stream.output", f"{topics[1]}-new")
        assert cli.main(["topics", "create", "-c", str(example / "pipeline.toml"), "--partitions", "3"]) == 0
        assert f"created {topics[1]}-new with 3 partitions" in capsys.readouterr().out
        assert kinds(diagnose("answers")) == []


class TestObjectStore:
    @pytest.fixture
    def bucket(self, tmp_path, edit):
        """The object store of the example: a folder."""
        edit(None, f'[storage]\nurl = "file://{tmp_path}/bucket"')
        return Bucket(f"file://{tmp_path}/bucket", {})

    def s3(self, edit, endpoint, more=""):
        prefix = S3Prefix("s3://bucket/prefix", {"endpoint": endpoint, "aws_region": "us-east-1", **OF_NOBODY})
        edit(None, f"[storage]\n{prefix.toml}".replace(" }", f"{more} }}"))

    def test_without_one_there_is_nothing_to_say(self, diagnose):
        assert diagnose("storage") == []

    def test_one_that_is_well_keeps_nothing_of_the_check(self, diagnose, bucket):
        (finding,) = diagnose("storage")
        assert finding == ok(f"{bucket.url} answers, can be written, and compares before it replaces.")
        assert bucket.sizes("doctor") == {}

    def test_an_s3_server_without_encryption_by_options(self, diagnose, edit, s3):
        edit(None, f"[storage]\n{s3.toml}")
        findings = diagnose("storage")
        assert [finding.level for finding in findings] == ["ok", "info"]
        assert "storage.options names no encryption" in only(findings, "storage.encryption").message

    def test_encryption_is_named(self, diagnose, bucket, edit):
        edit(None, 'options = {aws_server_side_encryption = "AES256"}')
        assert diagnose("storage")[-1] == ok(
            "Encryption of objects by the object store is set by aws_server_side_encryption."
        )

    def test_one_that_is_away(self, diagnose, edit):
        self.s3(edit, f"http://127.0.0.1:{first_free_port()}")
        finding = only(diagnose("storage"), "storage.connect")
        assert finding.unreachable
        assert "s3://bucket/prefix/head.json: " in finding.message

    @pytest.mark.parametrize("method", ["GET", "PUT"])
    def test_rights_that_are_missing_and_no_secret_is_shown(self, diagnose, edit, method):
        with S3Proxy("http://127.0.0.1:1") as proxy:
            denied, missing = Answer(403, "AccessDenied"), Answer(404, "NoSuchKey")
            proxy.fault = lambda each, path: denied if each == method else missing
            self.s3(edit, proxy.endpoint)
            finding = only(diagnose("storage"), "storage.denied")
        assert "403" in finding.message
        assert not any(secret in finding.message for secret in OF_NOBODY.values())

    def test_one_that_compares_nothing(self, diagnose, bucket, monkeypatch):
        def write(self, path, content, tag=""):
            self.write(path, content)
            return content.decode()

        monkeypatch.setattr(Bucket, "create", write)
        monkeypatch.setattr(Bucket, "replace", write)
        assert "replaces objects without a comparison" in only(diagnose("storage"), "storage.conditional").message

    def test_a_head_of_another_release(self, diagnose, bucket):
        bucket.write(HEAD, b'{"format":99,"generation":1,"holder":"a"}')
        assert "is of format 99" in only(diagnose("storage"), "storage.head").message


class TestRedis:
    @pytest.fixture
    def redis(self, mortal_redis, edit):
        """Adds the tier to the example, which has a disk tier: `redis(password="")`."""

        def add(*, password=""):
            url = mortal_redis.url.replace("redis://", f"redis://:{password}@") if password else mortal_redis.url
            edit("[replay]\n", f'[replay]\nredis = {{url = "{url}", bytes = "50MB"}}\n')

        return add

    def test_without_the_tier_there_is_nothing_to_say(self, diagnose):
        assert diagnose("redis") == []

    def test_one_that_is_well_keeps_nothing_of_the_check(self, diagnose, redis, mortal_redis):
        redis()
        (finding,) = diagnose("redis")
        assert finding.level == "ok"
        assert mortal_redis.say("KEYS *").count(b"probe") == 1  # for ten seconds

    def test_one_that_is_away(self, diagnose, redis, edit, mortal_redis):
        redis()
        mortal_redis.stop()
        assert only(diagnose("redis"), "redis.away").level == "warning"
        edit("\ndisk = ", "\n# disk = ")
        assert "does not answer" in only(diagnose("redis"), "redis.connect").message

    def test_a_wrong_password(self, diagnose, redis, mortal_redis):
        mortal_redis.stop()
        mortal_redis.start("--requirepass", "opensesame")
        redis(password="sesame-open")
        finding = only(diagnose("redis"), "redis.refused")
        assert "refuses user or password" in finding.message
        assert "sesame" not in finding.message

    def test_an_authority_that_is_not_there(self, diagnose, edit, tmp_path):
        url = f"rediss://localhost/0?ssl_ca_certs={tmp_path}/ca.pem"
        edit("[replay]\n", f'[replay]\nredis = {{url = "{url}", bytes = "50MB"}}\n')
        assert f"ssl_ca_certs={tmp_path}/ca.pem" in only(diagnose("redis"), "redis.refused").message

    def test_too_little_memory_and_a_policy_that_evicts(self, diagnose, redis, edit, mortal_redis):
        redis()
        mortal_redis.bound(40_000_000, "allkeys-lru")
        assert kinds(diagnose("redis")) == ["redis.memory"]
        edit("\ndisk = ", "\n# disk = ")
        assert kinds(diagnose("redis")) == ["redis.memory", "redis.policy"]
        assert "maxmemory 62mb" in only(diagnose("redis"), "redis.memory").fix

    def test_one_that_is_full(self, diagnose, redis, mortal_redis):
        redis()
        mortal_redis.bound(1, "noeviction")
        assert kinds(diagnose("redis")) == ["redis.full", "redis.memory"]

    def test_one_that_takes_no_rows_for_now(self, diagnose, redis, mortal_redis):
        redis()
        mortal_redis.say("CONFIG SET min-replicas-to-write 1")
        assert "takes no rows for now: NOREPLICAS" in only(diagnose("redis"), "redis.away").message

    def test_a_user_that_may_not_read_the_memory(self, diagnose, redis, mortal_redis):
        mortal_redis.say("ACL SETUSER default -info")
        redis()
        assert "no permissions" in only(diagnose("redis"), "redis.unseen").message


class TestStateDirectory:
    def test_a_file_in_the_way(self, diagnose, setting, tmp_path):
        (tmp_path / "file").write_text("")
        setting("state_dir", str(tmp_path / "file" / "var"))
        assert kinds(diagnose("state")) == ["state.unwritable"]

    def test_one_that_is_read_only(self, diagnose, setting, mounted):
        setting("state_dir", str(mounted("ro")))
        assert "Read-only file system" in only(diagnose("state"), "state.unwritable").message

    def test_too_little_room_for_a_checkpoint(self, diagnose, setting, mounted):
        setting("state_dir", str(mounted("size=1m")))
        assert only(diagnose("state"), "state.full").message.endswith(
            "a full checkpoint and a version need 560 kB, and the disk tier 32 MB."
        )

    def test_checkpoints_have_the_rows_of_the_disk_tier_where_there_is_an_object_store(
        self, diagnose, setting, mounted, tmp_path
    ):
        setting("state_dir", str(mounted("size=1m")))
        setting("storage.url", f"file://{tmp_path}/bucket")
        assert "a full checkpoint and a version need 3.25 MB" in only(diagnose("state"), "state.full").message

    def test_too_little_room_for_all_that_is_kept(self, diagnose, setting, mounted):
        setting("state_dir", str(mounted("size=32m")))
        assert "state.filling" in kinds(diagnose("state"))

    def test_one_that_is_in_memory(self, diagnose, setting, monkeypatch):
        shared = Path("/dev/shm")
        if not shared.is_dir():
            pytest.skip("this system has no /dev/shm")
        with tempfile.TemporaryDirectory(dir=shared) as folder:
            setting("state_dir", folder)
            monkeypatch.setattr(state_checks, "_MEMORY", {"tmpfs"})
            assert kinds(diagnose("state")) == ["state.memory"]

    def test_one_that_is_on_a_network(self, diagnose, example, monkeypatch, tmp_path):
        mounts = f"/dev/vda / ext4 rw 0 0\nfiler:/home {example} nfs4 rw 0 0\n"
        (tmp_path / "mounts").write_text(mounts)
        monkeypatch.setattr(state_checks, "MOUNTS", tmp_path / "mounts")
        assert kinds(diagnose("state")) == ["state.network"]

    def test_one_without_fsync_and_locks(self, diagnose, monkeypatch):
        def refuse(*_):
            raise OSError(22, "Invalid argument")

        monkeypatch.setattr(state_checks.os, "fsync", refuse)
        monkeypatch.setattr(state_checks.fcntl, "flock", refuse)
        assert kinds(diagnose("state")) == ["state.sync", "state.lock"]

    def test_one_whose_clock_is_off(self, diagnose, monkeypatch):
        monkeypatch.setattr(state_checks, "time", SimpleNamespace(time=lambda: time.time() - 60))
        assert "+60 s" in only(diagnose("state"), "clock.files").message

    def test_one_that_others_may_read_and_that_no_start_closes(self, diagnose, example, edit):
        example.chmod(0o755)
        edit('state_dir = "var"', 'state_dir = "."')
        assert kinds(diagnose("state")) == ["state.exposed"]
        example.chmod(0o700)
        assert kinds(diagnose("state")) == []

    def test_a_key_that_others_may_read(self, diagnose, example, edit):
        (example / "tls.key").touch()
        (example / "tls.key").chmod(0o644)  # whatever the umask is
        edit("[serving]", '[serving]\ntls = {cert = "tls.crt", key = "tls.key"}')
        findings = [each for each in diagnose("state") if each.kind == "key.exposed"]
        assert [each.message.partition(" = ")[0] for each in findings] == ["serving.tls.key"]
        (example / "tls.key").chmod(0o600)
        assert [each.kind for each in diagnose("state")].count("key.exposed") == 0

    def test_one_that_a_learner_holds(self, diagnose, example):
        with lock_state_directory(example / "var"):
            findings = diagnose("state")
        assert kinds(findings) == ["state.held"]
        assert exit_code([("state", finding) for finding in findings]) is Exit.DONE

    def test_one_whose_learner_warns(self, diagnose, example):
        with lock_state_directory(example / "var"):
            now = time.time()
            report = LearnerReport(pid=1, generation=1, started=now, time=now, steps=1, warnings=["x is far"])
            write_report(example / "var", report)
            assert "The learner warns: x is far." in only(diagnose("state"), "learner.warning").message

    def test_one_that_is_not_there_is_not_made(self, diagnose, example):
        assert kinds(diagnose("state")) == []
        assert not (example / "var").exists()


class TestWhatIsSaved:
    @pytest.fixture
    def save(self, example):
        """Writes a checkpoint and a version under a schema; returns their directories."""

        def write(digest=None, model=None, base=None):
            config = load_config(example / "pipeline.toml")
            digest = digest or Schema(config.pipeline.events).digest
            checkpoint = Checkpoints(config.state_dir / "checkpoints", digest, 1).write(
                3, Checkpoint(1, {"model": {"w": torch.ones(9)}}, {}), 1.0
            )
            manifest = manifest_of(
                4, time=1.0, step=1, schema=digest, model=model or reference_to(config.pipeline.model), base=base
            )
            versions = Versions(config.state_dir / "versions")
            return checkpoint, versions.write({"w": torch.ones(9)}, manifest, Verdict("pass"))

        return write

    def test_sound_ones_have_no_finding(self, diagnose, save):
        save()
        messages = [finding.message for finding in diagnose("checkpoints") + diagnose("versions")]
        assert messages == [
            "The newest checkpoint, 3, is whole and of this schema.",
            "The newest version, 4, is whole and of this schema.",
        ]

    def test_a_checkpoint_of_another_strategy_model_or_optimizer(self, diagnose, example, edit, setting):
        setting("learner.device", "cpu")
        config = load_config(example / "pipeline.toml")
        layers = [torch.nn.Linear(*sizes) for sizes in ((64, 128), (128, 128), (128, 10))]
        model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
        settings, task = config.pipeline.learner, Classification()
        schema = Schema(config.pipeline.events)
        trainer = Trainer(
            TrainingSetup(
                model, task, ExperienceReplay(), schema, settings, torch.device("cpu"), Precision("fp32", None)
            )
        )
        tensors = {**trainer.tensors(), "replay": {"retired": torch.zeros(1)}}
        checkpoint = Checkpoint(1, tensors, {"trainer": trainer.state(), OUTPUT: None})
        Checkpoints(config.state_dir / "checkpoints", schema.digest, 1).write(3, checkpoint, 1.0)
        assert kinds(diagnose("model") + diagnose("checkpoints")) == []
        setting("learner.strategy", "der")
        message = only(diagnose("model"), "checkpoint.misfit").message
        assert message.startswith('learner.strategy = "der" requires an output of shape [10] with each stored event')
        setting("learner.strategy", "er")
        setting("learner.optimizer.name", "sgd")
        assert "is of adamw, and learner.optimizer is sgd" in only(diagnose("model"), "checkpoint.misfit").message
        edit("hidden = 128", "hidden = 64")
        assert "does not fit the model" in only(diagnose("model"), "checkpoint.misfit").message

    def test_frozen_weights_that_the_factory_samples_are_those_of_the_learner(self, diagnose, example, setting):
        setting("model.adapter.rank", "2")
        setting("model.task", "seeded_task:SeededTask")
        (example / "seeded_task.py").write_text(
            "import torch\n"
            "from anabranch.learner.model.task import Classification\n\n\n"
            "class SeededTask(Classification):\n"
            "    def __init__(self):\n"
            "        torch.rand(3)\n"
        )
        config = load_config(example / "pipeline.toml")
        pipeline, digest = config.pipeline, Schema(config.pipeline.events).digest
        torch.manual_seed(pipeline.seed)
        make_task(pipeline.model.task, config.folder)
        model = build_on_device(pipeline.model, config.folder, torch.device("cpu"))
        checkpoints = Checkpoints(config.state_dir / "checkpoints", digest, 1)
        checkpoints.base = base_digest(model)
        checkpoints.write(3, Checkpoint(1, {"model": trained_state(model)}, {"trainer": {}}), 1.0)
        messages = [finding.message for finding in diagnose("model")]
        assert not [message for message in messages if "was trained with the base" in message]
        setting("seed", pipeline.seed + 1)
        assert "was trained with the base" in only(diagnose("model"), "checkpoint.misfit").message

    def test_a_checkpoint_of_another_release(self, diagnose, save):
        checkpoint, _ = save()
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"format": 1}))
        assert "is of format 1, and this release reads" in only(diagnose("model"), "checkpoint.misfit").message

    def test_a_flipped_bit(self, diagnose, save):
        for directory in save():
            (path,) = directory.rglob("model.safetensors")
            content = path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert "does not have its digest" in only(diagnose("checkpoints"), "checkpoint.damaged").message
        assert "model.safetensors does not have" in only(diagnose("versions"), "version.damaged").message

    def test_a_file_that_is_gone(self, diagnose, save):
        for directory in save():
            next(directory.rglob("model.safetensors")).unlink()
        assert [*kinds(diagnose("checkpoints")), *kinds(diagnose("versions"))] == [
            "checkpoint.damaged",
            "version.damaged",
        ]

    def test_a_version_without_its_base(self, diagnose, save, example):
        save(base="a" * 64)
        path = load_config(example / "pipeline.toml").state_dir / "bases" / ("a" * 64) / "model.safetensors"
        message = only(diagnose("versions"), "version.damaged").message
        assert message.startswith("The newest version is damaged: version 4: its base 'aaaaaaaaaaaa' cannot be used: ")
        assert str(path.parent) in message

    def test_a_state_that_is_left_in_an_object_store(self, diagnose, example):
        state_dir = load_config(example / "pipeline.toml").state_dir
        state_dir.mkdir()
        holder_of(state_dir)
        record_mode(state_dir, "s3://bucket/prefix")
        assert "is in s3://bucket/prefix, by storage.mode" in only(diagnose("storage"), "storage.left").message

    def test_versions_that_serving_does_not_read(self, diagnose, setting):
        setting("storage.url", "memory:///a")
        setting("storage.mode", "only")
        finding = only(diagnose("versions"), "version.nowhere")
        assert finding.message.endswith("waits for one there.")
        assert finding.fix == 'Set serving.versions_from = "storage".'

    def test_events_that_wait_for_labels_that_no_section_names(self, diagnose, example, setting):
        setting("learner.device", "cpu")
        config = load_config(example / "pipeline.toml")
        ledger = PartitionLedger(TopicPartition("events", 0), 0)
        ledger.outcomes[Outcome.WAITING] = 7
        state = {"trainer": {}, "ledger": [ledger.state()]}
        checkpoints = Checkpoints(config.state_dir / "checkpoints", Schema(config.pipeline.events).digest, 1)
        checkpoints.write(3, Checkpoint(1, {"model": {"w": torch.ones(9)}}, state), 1.0)
        message = only(diagnose("model"), "checkpoint.misfit").message
        assert "checkpoint 3 has 7 events that wait for their labels, and there is no [stream.labels]" in message

    def test_another_schema(self, diagnose, save):
        save("0" * 64)
        assert only(diagnose("checkpoints"), "checkpoint.schema").level == "problem"
        assert only(diagnose("versions"), "version.schema").level == "info"

    def test_other_args_of_the_model(self, diagnose, save, edit):
        save()
        edit("hidden = 128", "hidden = 64")
        message = only(diagnose("versions"), "version.model").message
        assert "it was trained with other model.args (hidden) than [model] has now" in message

    def test_another_factory(self, diagnose, save):
        save(model=ModelReference("m:b", {}, "classification"))
        assert "it is of m:b for classification, but" in only(diagnose("versions"), "version.model").message


class TestPorts:
    @pytest.fixture(autouse=True)
    def _free_ports(self, setting, free_port):
        setting("serving.port", free_port())
        setting("learner.status", "127.0.0.1:0")

    @pytest.fixture
    def taken(self, setting):
        """Takes serving's port and the learner's."""
        with contextlib.ExitStack() as stack:
            ports = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(2)]
            setting("serving.port", ports[0])
            setting("learner.status", f"127.0.0.1:{ports[1]}")
            yield ports

    def test_free_ones_have_no_finding(self, diagnose):
        assert kinds(diagnose("ports")) == []

    def test_ports_that_others_have(self, diagnose, taken):
        first, second = (finding for finding in diagnose("ports") if finding.kind == "port.taken")
        assert first.message == f"serving.port: another program listens on 127.0.0.1:{taken[0]}."
        assert "learner.status" in second.fix

    def test_ports_that_the_pipeline_itself_has(self, diagnose, taken, example):
        report = LearnerReport(pid=os.getpid(), generation=1, started=1.0, time=time.time(), steps=0)
        (example / "var").mkdir()
        write_report(example / "var", report)
        assert kinds(diagnose("ports")) == ["port.taken"]  # serving's, of which there is no report

    def test_a_port_for_grpc_that_another_has(self, diagnose, setting, taken):
        setting("serving.port", "0")
        setting("serving.grpc_port", taken[0])
        messages = [finding.message for finding in diagnose("ports") if finding.kind == "port.taken"]
        assert f"serving.grpc_port: another program listens on 127.0.0.1:{taken[0]}." in messages

    def test_an_address_of_another_machine(self, diagnose, setting):
        setting("serving.host", "192.0.2.1")
        for token in ("read", "admin"):
            setting(f"serving.tokens.{token}", "secret")
        finding = only(diagnose("ports"), "port.address")
        assert finding.message.startswith('serving.host = "192.0.2.1" cannot be bound: ')
        assert ";" not in finding.message
        assert finding.fix.startswith("Set serving.host")

    def test_both_on_one_port(self, diagnose, setting, free_port):
        port = free_port()
        setting("serving.port", port)
        setting("learner.status", f"127.0.0.1:{port}")
        assert kinds(diagnose("ports")) == ["port.clash"]


class TestTls:
    @pytest.fixture
    def use(self, setting):
        def use(cert, key):
            setting("serving.tls.cert", str(cert))
            setting("serving.tls.key", str(key))

        return use

    def test_a_sound_one_has_no_finding(self, diagnose, use, certificate):
        use(*certificate(100))
        (finding,) = diagnose("tls")
        assert f"valid until {datetime.now(UTC) + timedelta(days=100):%Y-%m-%d}" in finding.message

    def test_without_one_nothing_is_said(self, diagnose):
        assert diagnose("tls") == []

    def test_one_that_has_expired(self, diagnose, use, certificate):
        use(*certificate(-1))
        assert "expired" in only(diagnose("tls"), "tls.expired").message

    def test_one_that_expires_soon(self, diagnose, use, certificate):
        use(*certificate(3))
        assert "in 2 days" in only(diagnose("tls"), "tls.expiring").message

    def test_a_key_of_another_certificate(self, diagnose, use, certificate):
        use(certificate(9)[0], certificate(9, "other")[1])
        assert "is not the key of the certificate" in only(diagnose("tls"), "tls.unusable").message

    @pytest.mark.parametrize("content", [None, "no PEM"])
    def test_one_that_cannot_be_read(self, diagnose, use, certificate, tmp_path, content):
        cert, _ = certificate(9)
        path = tmp_path / "bad.key"
        if content:
            path.write_text(content)
        use(cert, path)
        assert str(path) in only(diagnose("tls"), "tls.unusable").message


class TestCommand:
    @pytest.fixture
    def doctor(self, example, capsys, setting, free_port, monkeypatch, checks):
        """Runs the command, which checks the model in this process, and returns exit code and stdout."""
        monkeypatch.setattr(examination, "CHECKS", checks)
        setting("stream.bootstrap_servers", f"127.0.0.1:{free_port()}")
        setting("serving.port", 0)
        setting("learner.status", "127.0.0.1:0")

        def run(*arguments):
            code = cli.main(["doctor", "-c", str(example / "pipeline.toml"), *arguments])
            return code, capsys.readouterr().out

        return run

    def test_what_cannot_be_reached_alone_is_exit_code_3(self, doctor):
        code, out = doctor()
        assert code == 3
        assert re.search(
            r"^problem  broker      No connection can be made to 127\.0\.0\.1:\d+: Connection refused\.$", out, re.M
        )
        assert re.search(r"^ +Start the broker, or fix stream\.bootstrap_servers or the firewall\.$", out, re.M)
        assert out.endswith("\n1 problem\n")
        messages = {re.match(r"\w+ +\w+ +| +", line).end() for line in out.splitlines()[:-1]}
        assert messages == {21}, "also where the name of a check is long"

    def test_a_problem_of_the_settings_is_exit_code_2(self, doctor, edit):
        edit("batch_size = 32", "batch_size = 0")
        code, out = doctor()
        assert code == 2
        assert "learner.batch_size = 0" in out
        assert "127.0.0.1" in out, "the broker is checked all the same"

    def test_as_json_it_is_a_list(self, doctor):
        code, out = doctor("--json")
        findings = json.loads(out)
        assert code == 3
        assert {frozenset(finding) for finding in findings} == {
            frozenset({"check", "kind", "level", "message", "fix", "unreachable"})
        }
        assert findings[0]["check"] == "config"

    @pytest.mark.parametrize(("arguments", "on_device"), [((), False), (("--device",), True)])
    def test_the_model_is_tried_on_a_busy_device_on_request(self, doctor, monkeypatch, arguments, on_device):
        asked = []

        def check(config, trial):
            def launch(_config, trial):
                asked.append(trial.on_device)
                return Result([], 0, "")

            yield from try_model(config, trial, launch)

        monkeypatch.setattr(
            examination, "CHECKS", [check_._replace(run=check) for check_ in CHECKS if check_.name == "model"]
        )
        doctor(*arguments)
        assert asked == [on_device]

    def test_secrets_are_not_printed(self, doctor, edit, monkeypatch):
        monkeypatch.setenv("DOCTOR_PASSWORD", "hunter-2-secret")
        edit("args = {hidden = 128}", 'args = {hidden = 128}\nembedding = {env = "DOCTOR_PASSWORD"}')
        edit(None, '[stream.properties]\n"sasl.password" = "hunter-3-secret"')
        code, out = doctor()
        assert code == 2
        assert "model.embedding: it is stored in every version and shown in errors, so it holds no secret" in out
        assert "hunter" not in out

    def test_a_bug_in_one_check_hides_no_other(self, example):
        def broken(*_):
            raise RuntimeError("bug")

        checks = [Check("broken", broken, ()), Check("fine", lambda *_: [ok("Fine.")], ())]
        seen = []
        with pytest.raises(RuntimeError, match="bug"):
            seen.extend(examine(example / "pipeline.toml", PATIENT, checks=checks))
        iterator = examine(example / "pipeline.toml", PATIENT, checks=checks)
        assert [next(iterator).check, next(iterator).check] == ["config", "fine"]

    def test_exit_codes_and_the_summary(self):
        away, wrong = ("x", problem("a", "", "", unreachable=True)), ("x", problem("b", "", ""))
        warned = ("x", warning("c", "", ""))
        assert [exit_code(some) for some in ([warned], [away, warned], [away, wrong])] == [0, 3, 2]
        assert summary([away, wrong, warned]) == "2 problems and 1 warning"

    def test_findings_are_plain_data(self):
        assert msgspec.to_builtins(problem("model.crash", "It broke.", "Fix it."))["unreachable"] is False


class TestTheRegistry:
    DIGIT = {"x": {"type": "array", "items": "float"}, "y": ["null", "int"]}

    @pytest.fixture(autouse=True)
    def _in_the_config(self, edit, registry):
        edit('format = "json"', f'format = "avro"\nregistry = {{url = "{registry.url}", timeout = "2s"}}')

    @staticmethod
    def record(**types):
        fields = [{"name": name, "type": kind} for name, kind in types.items() if kind]
        return {"type": "record", "name": "Digit", "fields": fields}

    def test_that_has_a_schema_that_fits(self, diagnose, registry):
        registry.register("events-value", self.record(**self.DIGIT))
        (finding,) = diagnose("registry")
        assert finding == ok("[schema] can read the newest schema, events-value:1.")

    def test_every_field_that_does_not_fit_is_named(self, diagnose, registry, edit):
        edit("[schema.label]", '[schema.key]\nname = "who"\n[schema.features.size]\ndtype = "int8"\n[schema.label]')
        registry.register("events-value", self.record(**self.DIGIT, size="string"))
        assert [finding.message for finding in diagnose("registry") if finding.kind == "registry.schema"] == [
            "events-value:1 does not fit [schema]: size is of Avro type string, not int8.",
            "events-value:1 does not fit [schema]: the writer's record has no field who, which has no default.",
        ]

    def test_the_field_by_which_labels_find_events_has_to_be_there(self, diagnose, registry, edit):
        edit("[schema.label]", '[stream.labels]\ntopics = ["labels"]\nwait = "1h"\nkey = "order"\n[schema.label]')
        registry.register("events-value", self.record(**self.DIGIT))
        message = only(diagnose("registry"), "registry.schema").message
        assert "the writer's record has no field order, which has no default" in message

    def test_a_subject_that_it_lacks(self, diagnose, registry):
        registry.register("event-value", self.record(**self.DIGIT))
        message = only(diagnose("registry"), "registry.subject").message
        assert message == "The registry has no subject events-value; the nearest one is event-value."

    def test_a_subject_of_another_format(self, diagnose, registry):
        registry.register("events-value", "{}", "JSON")
        finding = only(diagnose("registry"), "registry.format")
        assert finding.message.startswith('The newest schema, events-value:1, is of "json-schema", but stream.format')
        assert finding.fix == 'Set stream.format = "json-schema", or stream.registry.subject.'

    def test_credentials_that_it_refuses_and_does_not_print(self, diagnose, registry, setting):
        registry.credentials = ("reader", "sesame")
        setting("stream.registry.user", "reader")
        setting("stream.registry.password", "open barley")
        finding = only(diagnose("registry"), "registry.credentials")
        assert "refuses credentials (401)" in finding.message
        assert "barley" not in finding.message

    def test_one_that_is_away_and_nothing_is_said_of_messages(self, diagnose, registry):
        registry.faults.away = True
        finding = only(diagnose("registry"), "registry.connect")
        assert finding.message.startswith(f"The registry at {registry.url} cannot be reached")
        assert finding.unreachable

    def test_a_certificate_that_is_not_trusted(self, diagnose, certificate, setting):
        with registry_server(certificate(days=30)) as secure:
            setting("stream.registry.url", secure.url)
            assert "is not trusted (" in only(diagnose("registry"), "registry.certificate").message

    def test_a_file_of_authorities_that_is_not_there_is_relative_to_the_config(self, diagnose, setting, example):
        setting("stream.registry.ca", "ca.pem")
        message = only(diagnose("registry"), "registry.ca").message
        assert message == f"stream.registry.ca = {example / 'ca.pem'} cannot be read as PEM: No such file or directory."

    def test_a_proxy_that_cannot_be_used(self, diagnose, monkeypatch):
        monkeypatch.setenv("ALL_PROXY", "tin://proxy:1")
        message = only(diagnose("registry"), "registry.proxy").message
        assert message.startswith("The proxy of stream.registry cannot be used")

    def test_what_is_wrong_with_the_schema_is_no_finding_of_the_registry(self, diagnose, registry, edit):
        edit("[schema.label]", '[schema.features.size]\ndtype = "int8"\ndefault = 1000\n[schema.label]')
        registry.register("events-value", self.record(**self.DIGIT, size="int"))
        assert diagnose("registry") == []
        only(diagnose("schema"), "schema.invalid")

    @pytest.mark.any_broker
    def test_the_newest_message_is_read_with_its_schema(self, diagnose, registry, kafka, make_topic, produce, edit):
        topic = make_topic()
        number = registry.register(f"{topic}-value", self.record(**self.DIGIT))
        sink = io.BytesIO()
        event = {"x": [0.5] * 64, "y": 7}
        fastavro.schemaless_writer(sink, fastavro.parse_schema(self.record(**self.DIGIT)), event)
        edit('topics = ["events"]', f'topics = ["{topic}"]')
        edit("localhost:9092", kafka.bootstrap)
        produce(kafka.bootstrap, topic, [b"\0" + number.to_bytes(4) + sink.getvalue()])
        messages = [finding.message for finding in diagnose("broker")]
        assert f"The newest message, {topic}[0]@0, can be used." in messages
        registry.faults.away = True
        assert not [finding for finding in diagnose("broker") if "newest message" in finding.message]
        registry.faults.away = False
        produce(kafka.bootstrap, topic, [b"\0\0\0\0\x63abc"])
        message = only(diagnose("broker"), "message.unusable").message
        assert f"schema: the registry at {registry.url} has no schemas/ids/99" in message


class TestLateLabels:
    @pytest.fixture
    def topics(self, kafka, make_topic, setting, edit):
        events, labels = make_topic(2), make_topic(1)
        setting("stream.bootstrap_servers", kafka.bootstrap)
        setting("stream.topics", [events])
        edit(None, f'[stream.labels]\ntopics = ["{labels}"]\nwait = "10s"\n[schema.key]\nname = "id"')
        return events, labels

    @pytest.fixture
    def send(self, kafka, topics, produce):
        """Sends 50 events of now, and labels of some seconds later under the same or other keys."""

        def send(seconds, prefix=""):
            now = int(time.time() * 1000) - 3_600_000
            events = [{"id": f"a-{number}", "x": [0.5] * 64} for number in range(50)]
            labels = [{"id": f"{prefix}a-{number}", "y": 7} for number in range(50)]
            produce(kafka.bootstrap, topics[0], events, timestamp_ms=now)
            produce(kafka.bootstrap, topics[1], labels, timestamp_ms=now + int(seconds * 1000))

        return send

    def test_labels_that_find_their_events_have_no_finding(self, diagnose, send):
        send(5)
        findings = diagnose("broker")
        assert kinds(findings) == []
        assert findings[-1].message == "50 of the 50 newest labels find one of the newest events."
        assert any("has no label and waits for it" in finding.message for finding in findings)

    def test_a_key_that_never_matches(self, diagnose, send):
        send(5, prefix="payment-")
        message = only(diagnose("broker"), "labels.key").message
        assert message == "None of the 50 newest labels has the key (id) of one of the 50 newest events."

    def test_labels_that_come_later_than_events_wait(self, diagnose, send):
        send(90)
        message = only(diagnose("broker"), "labels.wait").message
        assert message == (
            "Of the newest labels, 1 in 100 comes more than 90s after its event, and stream.labels.wait is 10s."
        )

    def test_a_topic_of_labels_that_is_not_there(self, diagnose, topics, setting):
        setting("stream.labels.topics", [f"{topics[1]}-none"])
        finding = only(diagnose("broker"), "topic.missing")
        assert finding.message.startswith(f"There is no topic {topics[1]}-none on")
        assert finding.fix.endswith("or fix stream.labels.topics.")
