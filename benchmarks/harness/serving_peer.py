"""Peer: requests of single rows as JSON that are answered in a second, by us and by LitServe.

The same model, the same batching, one worker each, and as many clients, each of which asks again when it is answered.
Each server is on one core, with all its processes, while the other one is stopped; the clients are on the others.
"""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from anabranch.broker import free_port
from harness.cores import split
from harness.load import Load
from harness.pipeline import BrokenRunError
from harness.published import NAME, Published
from harness.server import ServingProcess, binary_request, json_request
from harness.table import Table, Target
from harness.turns import Spread, in_turns, ratio

TARGETS = {"throughput_over_litserve": Target(1.5, least=True)}
MLP = {"factory": "mlp", "args": {"widths": [784, 900, 320, 10]}}
_CLIENTS = 64
_MAX_BATCH, _MAX_DELAY = 64, 0.002
_PATIENCE = 60.0


def measure(table: Table, quick: bool, bootstrap: str) -> None:  # noqa: ARG001 - every section takes the same
    """Measure the section."""
    seconds, rounds = (0.7, 2) if quick else (8.0, 5)
    core, others = split()
    table.title(f"peer: an MLP of a million parameters, single rows as JSON, {_CLIENTS} clients")
    if importlib.util.find_spec("litserve") is None:
        table.word("litserve is not installed: left out (the extra peers brings it)")
        return
    with tempfile.TemporaryDirectory(dir=".", prefix="peer-") as folder, contextlib.ExitStack() as stack:
        place = Path(folder).resolve()
        batching = {"max_batch": _MAX_BATCH, "max_delay": f"{_MAX_DELAY * 1000:g}ms"}
        Published(place, MLP, 784, batching).publish()
        server = stack.enter_context(ServingProcess(place, core))
        url = f"{server.wait().address}/v2/models/{NAME}/infer"
        peer = stack.enter_context(_litserve(place, core))
        row = np.random.default_rng(0).random(784, np.float32).round(4).tolist()
        asked = json.dumps({"x": row}).encode()
        loads = {
            "ours": (server.process.pid, stack.enter_context(Load(url, *json_request(row), others))),
            "ours_binary": (server.process.pid, stack.enter_context(Load(url, *binary_request(1, 784), others))),
            "litserve": (
                peer.pid,
                stack.enter_context(Load(_predict(peer), asked, {"Content-Type": "application/json"}, others)),
            ),
        }
        failed = dict.fromkeys(loads, 0)

        def arm(name: str) -> float:
            pid, load = loads[name]
            with _only(pid, [server.process.pid, peer.pid]):
                answers = load.flood(_CLIENTS, seconds)
            failed[name] += answers.failed
            return len(answers.seconds) / seconds

        rates = in_turns({name: lambda name=name: arm(name) for name in loads}, rounds)  # type: ignore[misc]
    table.say("throughput_over_litserve", ratio(rates["ours"], rates["litserve"]), "requests a second, JSON both")
    for name, found in rates.items():
        table.say(f"requests_per_second_{name}", Spread.of(found), f"{failed[name]} failed" if failed[name] else "")


class _Peer(psutil.Process):
    """The process of LitServe that was started, and where it listens."""

    port = 0


def _predict(peer: _Peer) -> str:
    return f"http://127.0.0.1:{peer.port}/predict"


@contextlib.contextmanager
def _litserve(folder: Path, cores: set[int] | None) -> Iterator[_Peer]:
    """LitServe in processes of its own, ready."""
    port = free_port()
    script = Path(__file__).with_name("litserve_peer.py")
    arguments = [str(port), MLP["factory"], json.dumps(MLP["args"]), str(_MAX_BATCH), str(_MAX_DELAY)]
    log = folder / "litserve.log"
    with log.open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            stdout=said,
            stderr=said,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=None if cores is None else lambda: os.sched_setaffinity(0, cores),
        )
    peer = _Peer(process.pid)
    peer.port = port
    try:
        deadline = time.monotonic() + _PATIENCE
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise BrokenRunError(f"litserve is not ready; it said: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield peer
    finally:
        for each in [*peer.children(recursive=True), peer]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


@contextlib.contextmanager
def _only(pid: int, of: list[int]) -> Iterator[None]:
    """Stop the other servers where they are, by a signal."""
    stopped = [each for other in of if other != pid for each in _family(other)]
    for each in stopped:
        each.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for each in stopped:
            each.send_signal(signal.SIGCONT)


def _family(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
