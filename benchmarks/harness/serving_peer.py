"""Peer: requests of single rows as JSON that are answered in a second, by us, by LitServe and by Ray Serve.

The same model, the same batching, one worker each, and as many clients, each of which sends the next request after its
answer. Each server is on one core, with all its processes, while the others are stopped; the clients are on the others.
"""

import contextlib
import http.client
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import numpy as np
import psutil

from anabranch.runtime.embedded_broker import free_port
from benchmarks.harness.cores import split
from benchmarks.harness.interleave import Spread, interleave, ratio
from benchmarks.harness.load import Load
from benchmarks.harness.pipeline import BrokenRunError
from benchmarks.harness.results import Form, Results, Target
from benchmarks.harness.server import ServingProcess, binary_request, json_request
from benchmarks.harness.version_publisher import NAME, VersionPublisher

TARGETS = {"throughput_over_litserve": Target(1.5, least=True)}
MLP = {"factory": "mlp", "args": {"widths": [784, 900, 320, 10]}}
PEERS = {"litserve": "litserve", "ray": "ray[serve]"}
"""The servers by their package, and how to install it; the program of that name starts each of them."""
_CLIENTS = 64
_MAX_BATCH, _MAX_DELAY = 64, 0.002
_PATIENCE = 60.0


def measure(results: Results, form: Form, bootstrap: str) -> None:  # noqa: ARG001 - every section takes the same
    """Measure the section."""
    seconds, rounds = ((0.2, 1), (0.7, 2), (8.0, 5))[form]
    core, others = split()
    results.title(f"peer: an MLP of a million parameters, single rows as JSON, {_CLIENTS} clients")
    there = [name for name in PEERS if importlib.util.find_spec(name) is not None]
    for name, package in PEERS.items():
        if name not in there:
            results.remark(f"{name} is left out: pip install '{package}', or the dependency group peers")
    if not there:
        return
    with tempfile.TemporaryDirectory(dir=".", prefix="peer-") as folder, contextlib.ExitStack() as stack:
        root = Path(folder).resolve()
        batching = {"max_batch": _MAX_BATCH, "max_delay": f"{_MAX_DELAY * 1000:g}ms"}
        VersionPublisher(root, MLP, 784, batching).publish()
        server = stack.enter_context(ServingProcess(root, core))
        url = f"{server.wait().address}/v2/models/{NAME}/infer"
        row = np.random.default_rng(0).random(784, np.float32).round(4).tolist()
        asked, head = json.dumps({"x": row}).encode(), {"Content-Type": "application/json"}
        loads = {
            "ours": (server.process.pid, stack.enter_context(Load(url, *json_request(row), others))),
            "ours_binary": (server.process.pid, stack.enter_context(Load(url, *binary_request(1, 784), others))),
        }
        for name in there:
            peer = stack.enter_context(_peer(name, root, core, asked))
            loads[name] = (peer.pid, stack.enter_context(Load(peer.url, asked, head, others)))
        failed = dict.fromkeys(loads, 0)

        def arm(name: str) -> float:
            pid, load = loads[name]
            with _only(pid, list({pid for pid, _ in loads.values()})):
                answers = load.flood(_CLIENTS, seconds)
            failed[name] += answers.failed
            return len(answers.seconds) / seconds

        rates = interleave({name: lambda name=name: arm(name) for name in loads}, rounds)  # type: ignore[misc]
    for name in there:
        results.add(f"throughput_over_{name}", ratio(rates["ours"], rates[name]), "requests a second, JSON both")
    for name, figures in rates.items():
        results.add(f"requests_per_second_{name}", Spread.of(figures), f"{failed[name]} failed" if failed[name] else "")


class _Peer(psutil.Process):
    """The process of a server that was started, and where it is asked."""

    url = ""


@contextlib.contextmanager
def _peer(name: str, folder: Path, cores: set[int] | None, asked: bytes) -> Iterator[_Peer]:
    """A peer that runs in separate processes and answers."""
    port = free_port()
    script = Path(__file__).with_name(f"{name}_peer.py")
    arguments = [str(port), MLP["factory"], json.dumps(MLP["args"]), str(_MAX_BATCH), str(_MAX_DELAY)]
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            stdout=output,
            stderr=output,
            cwd=folder,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(script.parent),
                "RAY_USAGE_STATS_ENABLED": "0",
            },
            preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores),
        )
    peer = _Peer(process.pid)
    peer.url = f"http://127.0.0.1:{port}/predict"
    try:
        deadline = time.monotonic() + _PATIENCE
        while not _answers(port, asked):
            if process.poll() is not None or time.monotonic() > deadline:
                raise BrokenRunError(f"{name} is not ready; log: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield peer
    finally:
        for child in _family(process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()


def _answers(port: int, asked: bytes) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("POST", "/predict", asked, {"Content-Type": "application/json"})
        return connection.getresponse().status == HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def _only(pid: int, of: list[int]) -> Iterator[None]:
    """Suspend the other servers by a signal."""
    stopped = [process for other in of if other != pid for process in _family(other)]
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in stopped:
            process.send_signal(signal.SIGCONT)


def _family(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
