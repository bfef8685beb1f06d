"""Tracing: requests a second of a server that traces 1 % of them, over those of one that traces none.

Two servers share a core, and are flooded in turns. Spans go by OTLP to a collector on the other cores, which discards
them. The CPU time of a request is less affected by other processes than the rate.
"""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

from benchmarks.harness.cores import split
from benchmarks.harness.interleave import interleave, ratio
from benchmarks.harness.load import Load
from benchmarks.harness.results import Results, Target
from benchmarks.harness.server import ServingProcess, binary_request
from benchmarks.harness.version_publisher import NAME, VersionPublisher

TARGETS = {"tracing_throughput_over_off": Target(0.99, least=True), "tracing_busy_over_off": Target(1.01)}
MISSING = "tracing: left out, since opentelemetry-exporter-otlp-proto-http is missing"
_MLP = {"factory": "mlp", "args": {"widths": [784, 100, 100, 10]}}
_CLIENTS = 16


def measure(results: Results, quick: bool, bootstrap: str) -> None:  # noqa: ARG001 - every section takes the same
    """Measure the section; it is left out where the exporter is not installed."""
    if not has_exporter():
        results.remark(MISSING)
        return
    seconds, rounds = (0.5, 10) if quick else (4.0, 15)
    core, others = split()
    results.title("tracing: single rows, 1 % of the requests traced")
    rates: dict[str, Callable[[], float]] = {}
    busy: dict[str, list[float]] = {"off": [], "on": []}
    with contextlib.ExitStack() as stack:
        variables = stack.enter_context(collector())
        for arm, sections in {"off": "", "on": "[tracing]\nsample = 0.01\n"}.items():
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".", prefix=f"tracing-{arm}-"))).resolve()
            VersionPublisher(root, _MLP, 784, {"max_delay": "0ms"}).publish()
            with (root / "pipeline.toml").open("a") as config:
                config.write(f"\n{sections}")
            server = stack.enter_context(ServingProcess(root, core, variables))
            url = f"{server.wait().address}/v2/models/{NAME}/infer"
            load = stack.enter_context(Load(url, *binary_request(1, 784), others))

            def turn(arm: str = arm, server: ServingProcess = server, load: Load = load) -> float:
                before = server.busy_seconds()
                answered = len(load.flood(_CLIENTS, seconds).seconds)
                busy[arm].append((server.busy_seconds() - before) / answered)
                return answered / seconds

            rates[arm] = turn
        found = interleave(rates, rounds)
    results.add("tracing_throughput_over_off", ratio(found["on"], found["off"]))
    results.add("tracing_busy_over_off", ratio(busy["on"][1:], busy["off"][1:]), "CPU time of a request")


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
