"""Workers: single rows a second with two processes behind the port, over those with one.

64 clients, each of which sends the next request after its answer. All processes may use all cores, and the load
generator takes one of them: on two cores there is none for a second worker. Both servers run all the time, and answer
in turns.
"""

import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from benchmarks.harness.interleave import Spread
from benchmarks.harness.load import Load
from benchmarks.harness.results import Form, Results, Target
from benchmarks.harness.server import ServingProcess, binary_request
from benchmarks.harness.serving_alone import MODELS
from benchmarks.harness.version_publisher import NAME, VersionPublisher

TARGETS: dict[str, Target] = {}
_CLIENTS = 64
_POLL_SECONDS = 0.05


def measure(results: Results, form: Form, bootstrap: str) -> None:  # noqa: ARG001 - every section takes the same
    """Measure the section."""
    seconds, rounds = ((0.2, 1), (0.5, 2), (6.0, 5))[form]
    results.title("workers: mlp, single rows as binary data, max_batch 64, max_delay 1 ms")
    results.fact("workers_cores", os.cpu_count())
    with ExitStack() as stack:
        loads = [stack.enter_context(_load(stack, workers)) for workers in (1, 2)]
        for load in loads:
            load.flood(_CLIENTS, seconds)
        turns = [[load.flood(_CLIENTS, seconds) for load in loads] for _ in range(rounds)]
    for workers in (1, 2):
        answers = [turn[workers - 1] for turn in turns]
        rates = [len(turn.seconds) / seconds for turn in answers]
        results.add(f"workers_{workers}_requests_per_second", Spread.of(rates), f"{_CLIENTS} clients")
        results.add(f"workers_{workers}_p99_seconds", Spread.of([turn.percentile(99) for turn in answers]))
        results.fact(f"workers_{workers}_failed", sum(turn.failed for turn in answers))
    gains = [len(two.seconds) / len(one.seconds) for one, two in turns]
    results.add("workers_2_over_1", Spread.of(gains), "throughput")


def _load(stack: ExitStack, workers: int) -> Load:
    root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".", prefix="workers-"))).resolve()
    VersionPublisher(root, MODELS["mlp"], 784, {"max_delay": "1ms", "workers": workers}).publish()
    server = stack.enter_context(ServingProcess(root))
    while (report := server.wait()).workers < workers:
        time.sleep(_POLL_SECONDS)
    return Load(f"{report.address}/v2/models/{NAME}/infer", *binary_request(1, 784))
