"""Malicious clients, all at once, while a polite client sends twenty requests a second that must not be affected.

They send no token, and keep to a rate: this measures the cost of a few connections, not of a flood of packets. Memory
is compared with that after a request of the largest size that serving accepts.
"""

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from tests.faults.figures import Figures
from tests.faults.pipeline import Pipeline, Supervised, make_topic, send
from tests.faults.serving_kills import BODY, TEXT
from tests.pipelines import LINEAR
from tests.support.ports import first_free_port

PARTS = ("learner", "serving")
_EVERY_SECONDS = 0.05
_LARGE_ROWS, _LONG_DIGITS = 4000, 1300
"""Rows of 3 numbers, and digits of each number, in a request of 15.6 MB."""
_SAMPLE_SECONDS = 0.25
_DESCRIPTORS = 512
"""Limit of open files of each part: fewer than the connections of the attacks."""


@dataclass(frozen=True)
class Besieged:
    """The results of the polite client, and of the parts.

    Attributes:
        quiet_p99: 99th percentile of the polite client's answers before the attack, in seconds; `p99`: during it.
        failures: its requests that were not answered with a prediction.
        memory: largest growth of the parts' memory, in bytes.
        ended: parts that ended or were restarted.
        log_bytes: bytes that the parts logged during the attack.
    """

    quiet_p99: float
    p99: float
    requests: int
    failures: tuple[str, ...]
    memory: int
    ended: tuple[str, ...]
    log_bytes: int


class Polite(threading.Thread):
    """A client with one connection, and a request every 50 ms."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port
        self.done = threading.Event()
        self.seconds: list[float] = []
        self.failures: list[str] = []

    def run(self) -> None:
        """Send requests until `done` is set."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)) as connection:
            while not self.done.wait(_EVERY_SECONDS):
                begin = time.perf_counter()
                try:
                    status, reply = ask(connection, BODY)
                except (OSError, http.client.HTTPException) as exc:
                    connection.close()
                    self.failures.append(repr(exc))
                else:
                    if status != 200:
                        self.failures.append(f"{status}: {reply[:200]!r}")
                self.seconds.append(time.perf_counter() - begin)


def ask(connection: http.client.HTTPConnection, body: str) -> tuple[int, bytes]:
    """Request a prediction."""
    connection.request("POST", "/v2/models/faults/infer", body)
    reply = connection.getresponse()
    return reply.status, reply.read()


@contextmanager
def asking(port: int) -> Iterator[Polite]:
    """A polite client that sends requests until the context ends."""
    polite = Polite(port)
    polite.start()
    try:
        yield polite
    finally:
        polite.done.set()
        polite.join()


def besiege(folder: Path, bootstrap: str, quiet_seconds: float, seconds: float) -> Besieged:
    """Attack serving and the learner for `seconds`, after `quiet_seconds` without an attack."""
    port = first_free_port()
    pipeline = Pipeline(folder, bootstrap, make_topic(bootstrap, "siege"), LINEAR, TEXT.format(port=port))
    send(bootstrap, pipeline.topic, (json.dumps({"x": [1.0, 0.0, 0.0], "y": 0}).encode() for _ in range(64)))
    with Supervised(pipeline, PARTS, _DESCRIPTORS) as parts:
        parts.until(lambda: _answers(port, BODY), "an answer of serving")
        data = ",".join(["0." + "1" * _LONG_DIGITS] * 3 * _LARGE_ROWS)
        rows = f'{{"name": "x", "shape": [{_LARGE_ROWS}, 3], "datatype": "FP32", "data": [{data}]}}'
        large = f'{{"inputs": [{rows}]}}'
        parts.until(lambda: _answers(port, large), "an answer to a large request")
        pids = {part: parts.pid(part) for part in PARTS}
        with asking(port) as quiet:
            time.sleep(quiet_seconds)
        before, said = _memory(pids), parts.log.stat().st_size
        largest = before
        with asking(port) as polite:
            address = [str(port), pipeline.status.rpartition(":")[2]]
            attack = subprocess.Popen([sys.executable, "-m", "tests.faults.siege_program", *address, str(seconds)])
            with attack:
                while attack.poll() is None:
                    largest = max(largest, _memory(pids))
                    time.sleep(_SAMPLE_SECONDS)
        if attack.returncode:
            raise AssertionError(f"the attack ended with {attack.returncode}")
        ended = tuple(part for part in PARTS if parts.supervisor.pids().get(part) != pids[part])
        failures = (*quiet.failures, *polite.failures)
        log_bytes = parts.log.stat().st_size - said
    return Besieged(
        quiet_p99=float(np.percentile(quiet.seconds, 99)),
        p99=float(np.percentile(polite.seconds, 99)),
        requests=len(polite.seconds),
        failures=failures,
        memory=largest - before,
        ended=ended,
        log_bytes=log_bytes,
    )


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Measure the part `siege`."""
    seconds = 20.0 if quick else 60.0
    figures.part("siege", f"six attacks at once on serving and learner, for {seconds:.0f} s")
    besieged = besiege(folder, bootstrap, seconds / 2, seconds)
    remark = (
        f"{besieged.p99 * 1e3:.1f} ms, and {besieged.quiet_p99 * 1e3:.1f} ms before, of {besieged.requests} requests"
    )
    figures.add("siege_p99_ratio", besieged.p99 / besieged.quiet_p99, remark)
    figures.add("siege_failed", len(besieged.failures), "; ".join(besieged.failures[:3]))
    figures.add("siege_memory_bytes", besieged.memory, "largest growth of serving and learner")
    figures.add("siege_ended", len(besieged.ended), ", ".join(besieged.ended))
    figures.add("siege_log_bytes", besieged.log_bytes, "logged by both")


def _answers(port: int, body: str) -> bool:
    """Return whether serving answers with a prediction."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        try:
            return ask(connection, body)[0] == 200
        except (OSError, http.client.HTTPException):
            return False


def _memory(pids: dict[str, int]) -> int:
    """Return the resident memory of the parts that still run."""
    total = 0
    for pid in pids.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            total += psutil.Process(pid).memory_info().rss
    return total
