"""Swaps of a pretrained model: versions hold its adapter, and all of them share one base in the server's memory.

Turns without and with swaps alternate, the same requests in both of a pair: a few that arrive together wait for each
other, which makes the 99th percentile of other requests another one. The server is on one core, what publishes and what
sends requests on the others.
`adapter_swap_added_p99_seconds` is the 99th percentile of a turn with swaps less that of the turn without before it;
`adapter_swap_memory_bytes` the server's resident memory after the last tenth of the swaps less that after the first.
"""

import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.cores import split
from benchmarks.harness.interleave import Spread
from benchmarks.harness.load import Answers, Load
from benchmarks.harness.results import Results, Target
from benchmarks.harness.server import ServingProcess
from benchmarks.harness.serving_swaps import Publisher
from benchmarks.harness.texts import CLASSES, text_schema
from benchmarks.harness.version_publisher import NAME, VersionPublisher

TARGETS = {
    "adapter_swap_failed": Target(0),
    "adapter_swap_added_p99_seconds": Target(0.001),
    "adapter_swap_memory_bytes": Target(5e6),
}
_EVERY = 0.1
"""Seconds between two versions, as in `serving_swaps`."""
_RATE = 20.0
_MAX_BATCH = 8
"""Each version is warmed up on a batch of this size, the first ones on all smaller sizes too: requests are single."""
_TEXT = "A real picture of a town in winter, and of the people who stay there because nobody else does."


def measure(results: Results, quick: bool, minilm: Path, adapter: Mapping[str, Any]) -> None:
    """Measure the part."""
    swaps, rounds = (20, 2) if quick else (100, 10)
    core, others = split()
    results.title(f"swaps: {swaps * rounds} of an adapter of MiniLM, ten a second, {_RATE:.0f} requests a second")
    args = {"path": str(minilm), "classes": len(CLASSES)}
    model = {"factory": "anabranch.pretrained:sequence_classifier", "args": args, "adapter": adapter}
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": [_TEXT]}
    with tempfile.TemporaryDirectory(dir=".", prefix="swaps-") as folder:
        root = Path(folder).resolve()
        published = VersionPublisher(root, model, text_schema(minilm), {"max_delay": "1ms", "max_batch": _MAX_BATCH})
        published.publish()
        with ServingProcess(root, core) as server:
            url = f"{server.wait().address}/v2/models/{NAME}/infer"
            body = json.dumps({"inputs": [tensor]}).encode()
            with (
                Load(url, body, {"Content-Type": "application/json"}, others) as load,
                Publisher(published, server.process.pid, others) as publisher,
            ):
                load.turn(_RATE, 1.0)
                pairs: list[tuple[Answers, Answers]] = []
                resident: list[int] = []
                for _ in range(rounds):
                    quiet = load.turn(_RATE, _EVERY * swaps)
                    publisher.begin(swaps)
                    pairs.append((quiet, load.turn(_RATE, _EVERY * swaps, again=True)))
                    resident.extend(publisher.end().resident)
    tenth = max(2, len(resident) // 10)
    first, last = (statistics.median(part) for part in (resident[tenth : 2 * tenth], resident[-tenth:]))
    added = Spread.of([swapping.percentile(99) - before.percentile(99) for before, swapping in pairs])
    failed = sum(swapping.failed for _, swapping in pairs)
    results.add("adapter_swap_failed", float(failed))
    results.add("adapter_swap_added_p99_seconds", added)
    results.add("adapter_swap_memory_bytes", last - first, f"of {first / 1e6:.0f} MB, {len(resident)} swaps")
    results.add("adapter_swap_quiet_p99_seconds", Spread.of([before.percentile(99) for before, _ in pairs]))
