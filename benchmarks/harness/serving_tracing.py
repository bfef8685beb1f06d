"""Tracing: requests a second of a server that traces 1 % of them, over those of the same server without tracing.

The server has a core, and tracing is switched off and on between turns of a flood. Spans go by OTLP to a collector on
the other cores, which discards them. `alike` is the same measurement with tracing on in all turns.
"""

import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

from benchmarks.harness.cores import kept_to, split
from benchmarks.harness.interleave import Spread
from benchmarks.harness.load import Load
from benchmarks.harness.pipeline import BrokenRunError
from benchmarks.harness.results import ROOT, Form, Results, Target
from benchmarks.harness.server import ServingProcess, binary_request
from benchmarks.harness.version_publisher import NAME, VersionPublisher

_PROGRAM = f"""
import runpy, signal, sys, threading
sys.path.append({str(ROOT)!r})
from anabranch.core.tracing import spans
from anabranch.core.tracing.provider import BackgroundExport
taken, on = [], threading.Event()
on.set()
take = BackgroundExport.take
def take_in_turns_with_tracing(self, spans):
    on.wait()
    return take(self, spans)
BackgroundExport.take = take_in_turns_with_tracing
def switch(*_):
    if taken:
        spans._tracers.append(taken.pop())
        on.set()
    else:
        on.clear()
        taken.append(spans._tracers.pop())
signal.signal(signal.SIGUSR1, switch)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
_ORDER = (False, True, True, False)
"""Whether turns are traced: so that neither arm is the later one."""


@dataclass(frozen=True)
class Turn:
    """What was done in a turn, its length, and the CPU time of the process in it."""

    done: int
    seconds: float
    busy: float


@dataclass(frozen=True)
class Ratios:
    """With tracing over without: what is done a second, and the CPU time of each; the spread is that of rounds."""

    rate: Spread
    busy: Spread


def switchable(module: str) -> tuple[str, ...]:
    """Return the arguments of a Python that runs a module, whose tracing SIGUSR1 switches."""
    return ("-c", _PROGRAM, module)


def alternate(pid: int, turn: Callable[[], Turn], rounds: int, *, turns: int, switch: bool = True) -> Ratios:
    """Compare turns with tracing and without.

    Args:
        pid: the process, which traces now, and at the end again.
        turn: lets the process work.
        rounds: how many ratios are measured.
        turns: of each kind in a round; even.
        switch: False: tracing stays on, which shows what this measurement can resolve.
    """
    rates, busy = [], []
    traced = True
    for _ in range(rounds):
        done: dict[bool, list[Turn]] = {True: [], False: []}
        for number in range(2 * turns):
            arm = _ORDER[number % len(_ORDER)]
            if arm is not traced and switch:
                os.kill(pid, signal.SIGUSR1)
            traced = arm
            done[arm].append(turn())
        on, off = _total(done[True]), _total(done[False])
        rates.append(on.done / on.seconds / (off.done / off.seconds))
        busy.append(on.busy / on.done / (off.busy / off.done))
    if not traced and switch:
        os.kill(pid, signal.SIGUSR1)
    return Ratios(Spread.of(rates), Spread.of(busy))


def _total(turns: list[Turn]) -> Turn:
    return Turn(sum(each.done for each in turns), sum(each.seconds for each in turns), sum(each.busy for each in turns))


TARGETS = {"tracing_throughput_over_off": Target(0.99, least=True), "tracing_busy_over_off": Target(1.01)}
MISSING = "tracing: left out, since opentelemetry-exporter-otlp-proto-http is missing"
_MLP = {"factory": "mlp", "args": {"widths": [784, 100, 100, 10]}}
_CLIENTS = 16
_SECONDS = 0.25
"""Of a turn."""


def measure(results: Results, form: Form, bootstrap: str) -> None:  # noqa: ARG001 - every section takes the same
    """Measure the section; it is left out where the exporter is not installed."""
    if not has_exporter():
        results.remark(MISSING)
        return
    rounds, turns = ((1, 2), (4, 8), (15, 20))[form]
    core, others = split()
    results.title("tracing: single rows, 1 % of the requests traced")
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_to(others))
        variables = stack.enter_context(collector())
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".", prefix="tracing-"))).resolve()
        VersionPublisher(root, _MLP, 784, {"max_delay": "0ms"}).publish()
        with (root / "pipeline.toml").open("a") as config:
            config.write("\n[tracing]\nsample = 0.01\n")
        server = stack.enter_context(ServingProcess(root, core, variables, switchable("serving")))
        url = f"{server.wait().address}/v2/models/{NAME}/infer"
        load = stack.enter_context(Load(url, *binary_request(1, 784), others))

        def turn() -> Turn:
            before = server.busy_seconds()
            answers = load.flood(_CLIENTS, _SECONDS)
            if answers.failed:
                raise BrokenRunError(f"requests failed: {dict(answers.refused)}")
            return Turn(len(answers.seconds), _SECONDS, server.busy_seconds() - before)

        for _ in range(2 * turns):  # warm-up
            turn()
        found = alternate(server.process.pid, turn, rounds, turns=turns)
        alike = alternate(server.process.pid, turn, rounds, turns=turns, switch=False)
    results.add("tracing_throughput_over_off", found.rate)
    results.add("tracing_busy_over_off", found.busy, "CPU time of a request")
    results.add("tracing_throughput_alike_over_alike", alike.rate, "tracing on in both")
    results.add("tracing_busy_alike_over_alike", alike.busy, "tracing on in both")


def has_exporter() -> bool:
    """Return whether spans can be exported by OTLP over HTTP."""
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


@contextlib.contextmanager
def collector() -> Iterator[dict[str, str]]:
    """Run a collector that discards all spans; yield the variables with which processes export to it."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}"}
        server.shutdown()
