"""gRPC: latency of single rows over that of HTTP, with the stock client of each, one after the other on one server.

`grpc_echo_*` is that of a server of grpcio alone, which answers the same call with a constant: the least that gRPC
takes in Python.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.serving.reporting.report import ServingReport, read_report
from benchmarks.harness.cores import split
from benchmarks.harness.interleave import Spread, interleave
from benchmarks.harness.results import ROOT, Form, Results, Target
from benchmarks.harness.server import ServingProcess
from benchmarks.harness.version_publisher import NAME, VersionPublisher

TARGETS = {"grpc_p50_over_http": Target(1.0), "grpc_p99_over_http": Target(1.0)}
_MLP = {"factory": "mlp", "args": {"widths": [784, 100, 100, 10]}}
_POLL_SECONDS = 0.05


def measure(results: Results, form: Form, bootstrap: str) -> None:  # noqa: ARG001 - every section takes the same
    """Measure the section; it is left out where the stock clients are not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of gevent and its event loop, at import
            import tritonclient.grpc
            import tritonclient.http
    except ImportError as exc:
        results.remark(f"grpc: left out, since a client is missing: {exc}")
        return
    calls, rounds = ((20, 1), (300, 5), (2000, 15))[form]
    core, _ = split()
    results.title("grpc: single rows, one at a time, by tritonclient's clients")
    with tempfile.TemporaryDirectory(dir=".", prefix="grpc-") as folder:
        root = Path(folder).resolve()
        VersionPublisher(root, _MLP, 784, {"max_delay": "0ms", "grpc_port": 0}).publish()
        with ServingProcess(root, core) as server, _echo(core) as echo:
            report = _listening(server, root)
            clients = {
                "http": (tritonclient.http, report.address.removeprefix("http://")),
                "grpc": (tritonclient.grpc, report.grpc_address),
                "echo": (tritonclient.grpc, echo),
            }
            turns = {name: _turn(module, address, calls) for name, (module, address) in clients.items()}
            for turn in turns.values():
                turn(50)
                turn(99)
            found = {
                q: interleave({name: lambda turn=turn, q=q: turn(q) for name, turn in turns.items()}, rounds)  # type: ignore[misc]
                for q in (50, 99)
            }
    for q, seconds in found.items():
        for name, key in (("grpc", "grpc"), ("echo", "grpc_echo")):
            ratios = [a / b for a, b in zip(seconds[name], seconds["http"], strict=True)]
            results.add(f"{key}_p{q}_over_http", Spread.of(ratios))
        for name, values in seconds.items():
            results.add(f"grpc_{name}_p{q}_seconds", Spread.of(values))


@contextlib.contextmanager
def _echo(cores: set[int] | None) -> Iterator[str]:
    """The address of a server of grpcio alone, on the cores of the one that serves."""
    command = [sys.executable, "-m", "benchmarks.harness.grpc_echo"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        if cores is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(process.pid, cores)
        yield f"127.0.0.1:{process.stdout.readline().strip()}"  # it ends with its stdin, which `Popen` closes


def _listening(server: ServingProcess, root: Path) -> ServingReport:
    """Return the report of a server that answers calls."""
    server.wait()
    while not ((report := read_report(root / "var")) and report.grpc_address):
        time.sleep(_POLL_SECONDS)
    return report


def _turn(module: Any, address: str, calls: int) -> Callable[[float], float]:
    """Return what sends so many requests and returns a percentile of the seconds that they took."""
    client, row = module.InferenceServerClient(address), module.InferInput("x", [1, 784], "FP32")
    row.set_data_from_numpy(np.random.default_rng(0).random((1, 784), np.float32))

    def turn(q: float) -> float:
        seconds = []
        for _ in range(calls):
            began = time.perf_counter()
            client.infer(NAME, [row]).as_numpy("prediction")
            seconds.append(time.perf_counter() - began)
        return float(np.percentile(seconds, q))

    return turn
