"""Alone: throughput and latency of a server without other load.

Latency is of single rows at fractions of the throughput, open-loop. Throughput is of 64 clients, each of which sends
the next request after its answer. The server is on one core, its clients on the others.
"""

import tempfile
from pathlib import Path

from benchmarks.harness.cores import split
from benchmarks.harness.interleave import Spread
from benchmarks.harness.load import Load
from benchmarks.harness.results import Form, Results, Target
from benchmarks.harness.server import ServingProcess, binary_request
from benchmarks.harness.version_publisher import NAME, VersionPublisher

TARGETS: dict[str, Target] = {}
MODELS = {
    "mlp": {"factory": "mlp", "args": {"widths": [784, 900, 320, 10]}},
    "convnet": {"factory": "convnet", "args": {"channels": 16}},
}
_CLIENTS = 64
_PARTS = (0.2, 0.5, 0.8)


def measure(results: Results, form: Form, bootstrap: str) -> None:  # noqa: ARG001 - every section takes the same
    """Measure the section."""
    seconds, rounds = ((0.2, 1), (0.5, 2), (8.0, 5))[form]
    core, others = split()
    for name, model in MODELS.items():
        results.title(f"alone: {name}, single rows as binary data, max_batch 64, max_delay 1 ms")
        with tempfile.TemporaryDirectory(dir=".", prefix="alone-") as folder:
            root = Path(folder).resolve()
            VersionPublisher(root, model, 784, {"max_delay": "1ms"}).publish()
            with ServingProcess(root, core) as server:
                url = f"{server.wait().address}/v2/models/{NAME}/infer"
                with Load(url, *binary_request(1, 784), others) as load:
                    load.flood(_CLIENTS, seconds)
                    floods = [load.flood(_CLIENTS, seconds) for _ in range(rounds)]
                    rates = [len(answers.seconds) / seconds for answers in floods]
                    results.add(f"{name}_requests_per_second", Spread.of(rates), f"{_CLIENTS} clients")
                    for part in _PARTS:
                        turns = [load.turn(part * min(rates), seconds) for _ in range(rounds)]
                        key, remark = f"{name}_at_{part * 100:.0f}", f"at {part * min(rates):.0f} requests a second"
                        for q in (50, 99):
                            results.add(f"{key}_p{q}_seconds", Spread.of([a.percentile(q) for a in turns]), remark)
                        results.fact(f"{key}_failed", sum(a.failed for a in turns))
                    results.add(f"{name}_failed", float(sum(a.failed for a in floods)))
