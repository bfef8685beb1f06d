"""Learner and serving on one CUDA device: samples, steps, device sharing, swaps, checkpoints and memory.

    python -m benchmarks.gpu [--tests] [--minutes N] [--quick] [--json FILE] [--save] [--only PART ...]

    step        steps a second of the whole learner over those of a plain PyTorch loop, in turns: an MLP of 10 million
                parameters with 512 new and 512 old events a step, and a convnet of the size of ResNet-50 on 64 and 64
                images of 224 x 224
    checkpoint  steps a second with a version a second and a checkpoint each 30 s, over those without; and bytes of
                device memory for each parameter, without the store, at the highest point of all that
    sample      the time of a sample of 256 events of 3.1 kB from the device tier, until its rows are on the device, and
                that of `index_select` with indices of the host
    yield       from the mark of a request to training that has stopped, with an idle device
    swap        how much later requests are answered while a version is swapped in four times a second
    sharing     requests while the MLP's learner trains, over requests alone, and steps meanwhile over those that the
                rest of the device's time allows

A device may be there for a quarter of an hour. So parts run in the order of their worth, each is saved when it ends,
one that fails does not stop the others, and with `--minutes` all ends in time. `make gpu` runs the tests for a device
and all parts in ten minutes. At the end is a table of all targets: met, missed or not measured. The exit code is 1
where tests or a part failed.

It needs neither Kafka, Redis nor FAISS. Learner and server are separate processes, as in production, with events
from memory and requests by calls: `harness/gpu_learner.py` and `harness/gpu_server.py` say how. Without a CUDA device
it ends with code 2.

Requests are open-loop, at times that are fixed in advance. `sharing` sets their rate so that the model alone is busy
for a fifth of the time. The server runs requests of one row.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from anabranch.learner.device.lease import Field, hold_server, learners
from anabranch.testing.stores import plan_ahead
from benchmarks.harness.events import Events
from benchmarks.harness.gpu_learner import SLO, LearnerProcess, Saving, plain_loop
from benchmarks.harness.gpu_models import CONVNET, MLP, SMALL_CONVNET, SMALL_MLP, Workload
from benchmarks.harness.gpu_server import Answers, ServerProcess, VersionWriter
from benchmarks.harness.interleave import Spread, interleave, ratio
from benchmarks.harness.results import ROOT, Form, Results, Target, options
from benchmarks.harness.stores import fill, open_store

TARGETS = {
    "mlp_step_over_plain": Target(1.5, least=True),
    "convnet_step_over_plain": Target(0.98, least=True),
    "saving_cost_fraction": Target(0.005),
    "memory_bytes_per_parameter": Target(24),
    "sample_seconds": Target(5e-5),
    "yield_p99_seconds": Target(3e-3),
    "swap_added_p99_seconds": Target(3e-3),
    "p99_training_over_alone": Target(1.05),
    "training_kept_over_free": Target(0.98, least=True),
}
TESTS = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "tests"]
_TESTS_SECONDS = 150.0
_LONGEST_SECONDS = 1e6
"""Without `--minutes`."""
XSCHED = 1.01
"""The ratio that XSched's authors published for a request's 99th percentile during training (OSDI 2025)."""
_BATCH, _FLOATS = 256, 784
_USED = 0.2
_MOST_RATE = 1500.0
_SWAPS_SECONDS = 0.25


@dataclass(frozen=True)
class Sizes:
    """Seconds of a turn and of the warm-up before it, rounds, and what else differs between the forms."""

    turn: float
    warm_up: float
    rounds: int
    saving: Saving
    saving_turn: float
    stored: int = 100_000
    samples: int = 200
    requests: int = 300
    rate: float = 200.0
    mlp: Workload = MLP
    convnet: Workload = CONVNET


FULL = Sizes(4.0, 1.0, 4, Saving(1.0, 30.0), 31.0)
QUICK = Sizes(3.0, 1.0, 3, Saving(1.0, 5.0), 11.0, stored=20_000, samples=50, requests=100)
SMOKE = Sizes(
    0.5, 0.1, 1, Saving(0.2, 0.3), 0.8, 500, samples=3, requests=3, rate=30.0, mlp=SMALL_MLP, convnet=SMALL_CONVNET
)
"""Of each form: the long one takes seven minutes, and the smallest, of the test on a CPU, has figures that mean
nothing."""


@dataclass(frozen=True)
class Bench:
    """What all parts get: the device, the sizes, and a folder."""

    device: torch.device
    sizes: Sizes
    folder: Path

    def learner(self, name: str, workload: Workload, saving: Saving, policy: str = "exclusive") -> LearnerProcess:
        """Start a learner with its own state directory."""
        return LearnerProcess(workload, self.folder / name, str(self.device), saving, policy)

    def synchronize(self) -> None:
        """Wait until the device has done all work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def step(results: Results, bench: Bench) -> None:
    """Measure the learner and the plain loop in turns, for each model."""
    sizes = bench.sizes
    for key, workload in (("mlp", sizes.mlp), ("convnet", sizes.convnet)):
        results.title(f"step: {key}, {workload.batch_size} new and {workload.batch_size} old events a step")
        with plain_loop(workload, bench.device) as plain, bench.learner(key, workload, Saving()) as learner:
            arms = {
                "plain": lambda plain=plain: plain.turn(sizes.warm_up, sizes.turn),
                "learner": lambda learner=learner: learner.turn(sizes.warm_up, sizes.turn),
            }
            rates = interleave(arms, sizes.rounds)
        results.add(f"{key}_step_over_plain", ratio(rates["learner"], rates["plain"]))
        for arm, found in rates.items():
            results.add(f"{key}_steps_per_second_{arm}", Spread.of(found))


def checkpoint(results: Results, bench: Bench) -> None:
    """Measure what versions and checkpoints cost, and the highest amount of device memory that tensors take."""
    sizes = bench.sizes
    saving = sizes.saving
    results.title(
        f"checkpoint: the MLP, a version each {saving.publish:g} s, a checkpoint each {saving.checkpoint:g} s"
    )
    with bench.learner("plain", sizes.mlp, Saving()) as plain, bench.learner("saving", sizes.mlp, saving) as other:
        arms = {
            "plain": lambda: plain.turn(sizes.warm_up, sizes.saving_turn),
            "saving": lambda: other.turn(sizes.warm_up, sizes.saving_turn),
        }
        rates = interleave(arms, min(2, sizes.rounds), warm_up=0)  # each turn has a warm-up, and a checkpoint
        most, parameters = other.memory()
    kept = [a / b for a, b in zip(rates["saving"], rates["plain"], strict=True)]
    results.add("saving_cost_fraction", Spread.of([max(0.0, 1 - each) for each in kept]))
    remark = f"{most:,} bytes for {parameters:,} parameters, with a step's activations, without the CUDA context"
    results.add("memory_bytes_per_parameter", most / parameters, remark, "bytes per parameter")


def sample(results: Results, bench: Bench) -> None:
    """Measure samples of the store alone."""
    events, sizes = Events(_FLOATS), bench.sizes
    results.title(f"sample: {_BATCH} of {sizes.stored:,} events of {events.row_bytes:,} bytes on {bench.device}")
    words = torch.zeros((sizes.stored, events.row_bytes // 8), dtype=torch.int64, device=bench.device)
    generator = np.random.default_rng(0)

    def gather() -> float:
        indices = torch.from_numpy(generator.integers(0, sizes.stored, _BATCH))
        begin = time.perf_counter()
        words.index_select(0, indices.to(bench.device))
        bench.synchronize()
        return time.perf_counter() - begin

    with open_store(events, sizes.stored, device=bench.device) as store:
        fill(store, events, sizes.stored)
        plan_ahead(store, 0, _BATCH)
        step = 0

        def one() -> float:
            nonlocal step
            bench.synchronize()
            begin = time.perf_counter()
            columns = store.planner.sample(step, _BATCH).columns
            bench.synchronize()
            taken = time.perf_counter() - begin
            assert len(columns["label"]) == _BATCH
            step += 1
            plan_ahead(store, step, _BATCH)  # by the store's thread in a learner
            return taken

        turns = {
            "sample": lambda: statistics.fmean(one() for _ in range(sizes.samples)),
            "gather": lambda: statistics.fmean(gather() for _ in range(sizes.samples)),
        }
        times = interleave(turns, sizes.rounds)
    results.add("sample_seconds", Spread.of(times["sample"]))
    results.add("index_select_seconds", Spread.of(times["gather"]), "the same number of rows, indices from the host")
    results.add("sample_over_index_select", ratio(times["sample"], times["gather"]))


def yield_(results: Results, bench: Bench) -> None:
    """Measure how long training takes to stop for a request."""
    sizes, waits = bench.sizes, list[float]()
    results.title("yield: the MLP's learner, with marks as a server sets them")
    with (
        bench.learner("yield", sizes.mlp, Saving(), "inference-first") as learner,
        hold_server(learner.state_dir, SLO) as mark,
    ):
        learner.turn(sizes.warm_up, 1.0)  # so that it finds the server
        learner.begin(0, sizes.requests * 0.03 + 1)
        for _ in range(sizes.requests):
            time.sleep(random.uniform(0.01, 0.03))
            with mark.waiting():
                begin = time.monotonic_ns()
                mark.run()
                yielded = _when_yielding(learner.state_dir, begin)
                mark.rest()
            if yielded is not None:
                waits.append((yielded - begin) / 1e9)
        learner.end()
    if not waits:
        results.remark("training never had to stop: its steps are shorter than the time between two marks")
        return
    results.add("yield_p99_seconds", float(np.percentile(waits, 99)), f"of {len(waits)} requests")
    results.add("yield_p50_seconds", float(np.percentile(waits, 50)))


def _when_yielding(state_dir: Path, since: int) -> int | None:
    """Return when training stopped after a mark, by `time.monotonic_ns`; None if it did not within a second."""
    end = time.monotonic() + 1
    while time.monotonic() < end:
        for rank in learners(state_dir):
            if rank[Field.YIELDING] >= since:
                return rank[Field.YIELDING]
        time.sleep(5e-5)
    return None


def swap(results: Results, bench: Bench) -> None:
    """Measure requests with and without swaps."""
    sizes, added = bench.sizes, list[float]()
    results.title(f"swap: the MLP, {sizes.rate:g} single rows a second, a version each {_SWAPS_SECONDS:g} s")
    writer = VersionWriter(sizes.mlp, bench.folder / "swap")
    writer.publish()
    swaps = 0
    with ServerProcess(sizes.mlp, bench.folder / "swap", str(bench.device)) as server:
        server.turn(sizes.rate, sizes.warm_up)
        for _ in range(sizes.rounds):
            alone = server.turn(sizes.rate, sizes.turn)
            stop = threading.Event()
            thread = threading.Thread(target=_publish, args=(writer, stop))
            thread.start()
            swapped = server.turn(sizes.rate, sizes.turn)
            stop.set()
            thread.join()
            added.append(max(0.0, swapped.percentile(99) - alone.percentile(99)))
            swaps += swapped.versions - 1
    results.add("swap_added_p99_seconds", Spread.of(added), f"{swaps} swaps")


def _publish(writer: VersionWriter, stop: threading.Event) -> None:
    while not stop.wait(_SWAPS_SECONDS):
        writer.publish()


def sharing(results: Results, bench: Bench) -> None:
    """Measure serving and the learner on one device."""
    sizes = bench.sizes
    results.title(f"sharing: the MLP's learner and server, requests for {_USED:g} of the device's time")
    alone, free, shared = list[Answers](), list[float](), list[tuple[Answers, float]]()
    with ExitStack() as stack:
        learner = stack.enter_context(bench.learner("sharing", sizes.mlp, Saving(1.0, 30.0), "inference-first"))
        learner.turn(sizes.warm_up, 2 * sizes.turn)  # publishes a version
        server = stack.enter_context(ServerProcess(sizes.mlp, learner.state_dir, str(bench.device)))
        rate = sizes.rate
        for _ in range(2):
            rate = min(_MOST_RATE, rate * _USED / max(1e-3, server.turn(rate, sizes.turn).busy))
        for _ in range(sizes.rounds):
            alone.append(server.turn(rate, sizes.turn))
            free.append(learner.turn(sizes.warm_up, sizes.turn))
            learner.begin(sizes.warm_up, sizes.turn)
            answers = server.turn(rate, sizes.turn)
            shared.append((answers, learner.end()))
    used = [answers.busy for answers in alone]
    over_alone = ratio([each.percentile(99) for each, _ in shared], [each.percentile(99) for each in alone])
    results.add("p99_training_over_alone", over_alone, f"XSched published {XSCHED:g}, for other models and devices")
    kept = ratio([steps for _, steps in shared], [(1 - part) * steps for part, steps in zip(used, free, strict=True)])
    results.add("training_kept_over_free", kept)
    results.add("p99_alone_seconds", Spread.of([each.percentile(99) for each in alone]))
    results.add("device_used_by_serving_alone", Spread.of(used), f"at {rate:.0f} requests a second")


PARTS: dict[str, Callable[[Results, Bench], None]] = {
    "step": step,
    "checkpoint": checkpoint,
    "sample": sample,
    "yield": yield_,
    "swap": swap,
    "sharing": sharing,
}
"""In the order of their worth."""


class OutOfTimeError(Exception):
    """The time of `--minutes` is over."""


@contextmanager
def ending_at(end: float) -> Iterator[None]:
    """Raise OutOfTimeError in the block at a time of the monotonic clock."""

    def over(*_: object) -> None:
        raise OutOfTimeError

    left = end - time.monotonic()
    if left <= 0:
        raise OutOfTimeError
    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, left)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_tests(results: Results, end: float) -> bool:
    """Run the tests for a CUDA device, and return whether none failed."""
    results.title("tests: pytest -m gpu")
    seconds = max(1.0, min(_TESTS_SECONDS, end - time.monotonic()))
    try:
        code = subprocess.run(TESTS, cwd=ROOT, check=False, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        results.remark(f"not all of them ended within {seconds:.0f} s")
        return False
    results.fact("tests_passed", code == 0)
    return code == 0


def run_parts(results: Results, bench: Bench, options: argparse.Namespace, end: float) -> bool:
    """Run the parts until `end`, and save the figures of each; return whether none failed."""
    passed = True
    for part in options.only or PARTS:
        results.fact(f"load_before_{part}", os.getloadavg()[0])
        try:
            with ending_at(end):
                PARTS[part](results, bench)
        except OutOfTimeError:
            results.remark(f"no time was left for {part}")
        except (Exception, SystemExit):  # noqa: BLE001 the other parts still have their figures
            traceback.print_exc()
            passed = False
        results.write(options)
    return passed


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, PARTS, "shorter turns, fewer rounds, and a checkpoint each 5 s")
    parser.add_argument("--tests", action="store_true", help="run the tests for a CUDA device first")
    parser.add_argument("--minutes", type=float, metavar="N", help="end within that time")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    end = time.monotonic() + (_LONGEST_SECONDS if chosen.minutes is None else 60 * chosen.minutes)
    if chosen.device != "cpu" and not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA device, and torch sees none on this machine", file=sys.stderr)
        return 2
    results = Results("gpu", TARGETS)
    results.fact("quick", chosen.form is not Form.LONG)
    sizes = SMOKE if chosen.device == "cpu" else (SMOKE, QUICK, FULL)[chosen.form]
    passed = run_tests(results, end) if chosen.tests else True
    with tempfile.TemporaryDirectory(prefix="anabranch-gpu-") as folder:
        bench = Bench(torch.device(chosen.device), sizes, Path(folder))
        passed = run_parts(results, bench, chosen, end) and passed
    results.table()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
