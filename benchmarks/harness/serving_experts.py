"""Experts: latency of single rows with 20 experts over that of the same model without any.

Two servers are on one core, and turns of the same rate alternate between them. The model is the MLP 784-100-100-10 of
the benchmark of forgetting, whose layers after the first are adapted, so that it runs once for each request.
"""

import statistics
import tempfile
from pathlib import Path

from benchmarks.harness.cores import split
from benchmarks.harness.interleave import Spread, interleave
from benchmarks.harness.load import Load
from benchmarks.harness.results import Form, Results, Target
from benchmarks.harness.server import ServingProcess, binary_request
from benchmarks.harness.version_publisher import NAME, VersionPublisher

TARGETS = {"experts_p99_over_plain": Target(1.10)}
MLP = {"factory": "mlp", "args": {"widths": [784, 100, 100, 10]}, "embedding": "0"}
_EXPERTS = 20
_RATE = 200.0


def measure(results: Results, form: Form, bootstrap: str) -> None:  # noqa: ARG001 - every section takes the same
    """Measure the section."""
    seconds, rounds = ((0.2, 1), (1.0, 4), (4.0, 40))[form]
    core, others = split()
    results.title(f"experts: {_EXPERTS} of them, single rows, {_RATE:.0f} requests a second")
    with tempfile.TemporaryDirectory(dir=".", prefix="experts-") as folder:
        roots = {name: Path(folder).resolve() / name for name in ("plain", "experts")}
        for name, root in roots.items():
            root.mkdir()
            parts = _EXPERTS if name == "experts" else 0
            VersionPublisher(root, MLP, 784, {"max_delay": "1ms"}, parts=parts).publish()
        with ServingProcess(roots["plain"], core) as plain, ServingProcess(roots["experts"], core) as experts:
            urls = [f"{server.wait().address}/v2/models/{NAME}/infer" for server in (plain, experts)]
            with (
                Load(urls[0], *binary_request(1, 784), others) as to_plain,
                Load(urls[1], *binary_request(1, 784), others) as to_experts,
            ):
                turns = {"plain": to_plain, "experts": to_experts}
                answers = {name: [load.turn(_RATE, 1.0)] for name, load in turns.items()}

                def turn(name: str) -> float:
                    answers[name].append(turns[name].turn(_RATE, seconds))
                    return answers[name][-1].percentile(99)

                p99 = interleave({name: lambda name=name: turn(name) for name in turns}, rounds)  # type: ignore[misc]
    over = [a / b for a, b in zip(p99["experts"], p99["plain"], strict=True)]
    results.add("experts_p99_over_plain", Spread.of(over))
    for name, values in answers.items():
        for q in (50, 99):
            results.add(f"experts_{name}_p{q}_seconds", statistics.median(each.percentile(q) for each in values[1:]))
