"""Each part of each benchmark runs, in its smallest form, on events that are made here.

They take minutes, so that they run only where `ANABRANCH_TEST_BENCHMARKS` is set.
"""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from tests import forkserver
from tests.support.waiting import slowness

ROOT = Path(__file__).parent.parent
PARTS = {
    "backfill": ["rate", "memory"],
    "calibration": ["elec2", "flights"],
    "capacity": ["disk", "memory", "none", "large", "wide"],
    "features": ["tabular", "ids", "groups"],
    "forgetting": ["split_mnist", "best", "experts", "auto", "strangers", "compression", "memory"],
    "fresh_host": ["file", "s3"],
    "ingest": ["decode", "poll"],
    "late_labels": ["rate", "memory", "freshness", "early"],
    "learner": ["mlp", "large", "convnet", "formats", "tracing", "ranks", "narrow", "lock", "overhead", "measures"],
    "mirror": ["s3", "folder"],
    "replay": ["hot", "cold", "growth", "add", "memory", "index", "api"],
    "replay_disk": ["large", "disk", "cold"],
    "search": ["streams", "cost"],
    "serving": [
        *("alone", "swaps", "base_swaps", "experts", "grpc", "tracing", "workers", "fleet", "freshness"),
        *("device_sharing", "stream", "log"),
    ],
    "verdicts": ["equal", "worse"],
}
"""Those that run here. Left out are `gpu`, which test_gpu_tools.py runs, and what takes a model or packages from afar:
`pretrained`, and serving's `peer`."""
DATA = {"calibration", "features", "forgetting", "late_labels", "search"}
SEEDS = {"forgetting", "late_labels"}
EVENTS = 2_000


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with random events in place of each data set."""
    folder, generator = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    images = {
        f"x_{part}": generator.integers(0, 256, (n, 784), np.uint8) for part, n in (("train", 600), ("test", 200))
    }
    np.savez(folder / "mnist.npz", **images, y_train=np.arange(600) % 10, y_test=np.arange(200) % 10)
    numbers = generator.random((EVENTS, 14), np.float32)
    np.savez(folder / "elec.npz", x=numbers[:, :6], y=generator.integers(0, 2, EVENTS))
    times = np.sort(1.36e9 + 1e6 * generator.random(EVENTS))
    delay, cat = generator.normal(10, 30, EVENTS).astype(np.float32), generator.integers(0, 3, (EVENTS, 3))
    np.savez(folder / "nycflights.npz", t=times, t_label=times + 3600, delay=delay, num=numbers, cat=cat)
    np.savez(folder / "flight_plan.npz", num=numbers, delay=delay, flight=generator.integers(0, 60, EVENTS))
    for name in ("covertype", "rain", "watch"):
        np.savez(folder / f"{name}.npz", x=numbers[:, :5], y=np.arange(EVENTS) % 7)
    after = np.stack([360 * generator.random(EVENTS), generator.normal(size=EVENTS)], axis=1).astype(np.float32)
    np.savez(folder / "hours.npz", x=numbers[:, :13], after=after)
    return folder


@pytest.mark.skipif(not os.environ.get("ANABRANCH_TEST_BENCHMARKS"), reason="ANABRANCH_TEST_BENCHMARKS is not set")
@pytest.mark.parametrize(("benchmark", "part"), [(name, part) for name, parts in PARTS.items() for part in parts])
@pytest.mark.process
@pytest.mark.timeout(600)
def test_a_part_of_a_benchmark_runs(benchmark, part, data, tmp_path):
    figures = tmp_path / "figures.json"
    more = [*(["--data", str(data)] if benchmark in DATA else []), *(["--seeds", "1"] if benchmark in SEEDS else [])]
    command = ["-m", f"benchmarks.{benchmark}", "--smoke", "--only", part, "--json", str(figures), *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = forkserver.run(command, env=environment, cwd=tmp_path, timeout=120 * slowness())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    left_out = [line for line in done.stdout.splitlines() if "left out" in line]
    assert not [line for line in left_out if "missing" not in line and "is not installed" not in line]
    facts = {"quick"} | {key for key in json.loads(figures.read_text()) if key.startswith("load_")}
    assert json.loads(figures.read_text()).keys() - facts, done.stdout


EACH_IN_A_FORK = """
import os, runpy, sys

os.dup2(1, 2)
for script in sys.argv[1:]:
    print("==", script, flush=True)
    if os.fork() == 0:
        sys.argv[1:] = ["--help"]
        runpy.run_module(f"benchmarks.{script}", run_name="__main__", alter_sys=True)
        os._exit(0)
    print("==", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.mark.process
def test_each_benchmark_starts_and_each_of_its_parts_is_among_those_that_run():
    """Each runs in a forked process with our packages and torch already imported."""
    scripts = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))
    assert set(scripts) - PARTS.keys() == {"gpu", "pretrained"}
    run = forkserver.run(["-c", EACH_IN_A_FORK, *scripts], env={**os.environ, "COLUMNS": "1000"})
    assert run.returncode == 0, run.stdout
    _, *said = run.stdout.split("== ")
    for name, named, code in zip(scripts, said[::2], said[1::2], strict=True):
        assert code.strip() == "0", named
        for option in ("--quick", "--only", "--json", "--save"):
            assert option in named
        (parts,) = re.findall(r"--only PART \[PART \.\.\.\]\s+(.*)", named)
        assert name not in PARTS or set(parts.split(", ")) - {"peer"} == set(PARTS[name]), name
