"""Swaps of a pretrained model: versions hold its adapter, and all of them share one base in the server's memory.

Turns without and with swaps alternate, the same requests in both of a pair: a few that arrive together wait for each
other, which makes the 99th percentile of other requests another one. Either comes first in every other pair. The server
is on one core, what publishes and what sends requests on the others. What publishes delays what sends, so it publishes
in turns without swaps too, where no server reads it. Many short pairs give a steadier median than few long ones: what
disturbs the machine for a moment is in few of them, and requests that wait for each other multiply a delay less.

`adapter_swap_added_p99_seconds` is the 99th percentile of a turn with swaps less that of the same turn without;
`adapter_swap_late_p99_seconds` how much of that the generator of requests was late, next to the publisher.
`adapter_swap_memory_bytes` is the peak of the server's resident memory after all swaps less that after the first tenth,
both while as many clients as a batch has rows send requests. The memory that is resident between requests is no measure
of swaps: it depends on the largest batch that ran lately, and differs by up to 15 MB without any swap.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.cores import split
from benchmarks.harness.interleave import Spread
from benchmarks.harness.load import Answers, Load
from benchmarks.harness.results import Form, Results, Target
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
_FLOOD_SECONDS, _MOST_FLOODS, _SETTLED_BYTES = 5.0, 8, 200_000
_RESET_PEAK = "5"
"""Lets the kernel count a process's peak of resident memory from now on."""
_MAX_BATCH = 8
"""Each version is warmed up on a batch of this size, the first ones on all smaller sizes too: requests are single."""
_TEXT = "A real picture of a town in winter, and of the people who stay there because nobody else does."


def measure(results: Results, form: Form, minilm: Path, adapter: Mapping[str, Any]) -> None:
    """Measure the part."""
    swaps, rounds = ((2, 1), (10, 6), (20, 50))[form]
    core, others = split()
    results.title(f"swaps: {swaps * rounds} of an adapter of MiniLM, ten a second, {_RATE:.0f} requests a second")
    args = {"path": str(minilm), "classes": len(CLASSES)}
    model = {"factory": "anabranch.pretrained:sequence_classifier", "args": args, "adapter": adapter}
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": [_TEXT]}
    with tempfile.TemporaryDirectory(dir=".", prefix="swaps-") as folder:
        roots = [Path(folder).resolve() / name for name in ("served", "unserved")]
        for root in roots:
            root.mkdir()
        serving = {"max_delay": "1ms", "max_batch": _MAX_BATCH}
        published, unserved = (VersionPublisher(root, model, text_schema(minilm), serving) for root in roots)
        published.publish()
        with ServingProcess(roots[0], core) as server:
            url = f"{server.wait().address}/v2/models/{NAME}/infer"
            body = json.dumps({"inputs": [tensor]}).encode()
            with (
                Load(url, body, {"Content-Type": "application/json"}, others) as load,
                Publisher(published, server.process.pid, others, unserved) as publisher,
            ):
                load.turn(_RATE, 1.0)
                pairs: list[tuple[Answers, Answers]] = []
                peaks: list[int] = []
                for index in range(rounds):
                    if index == max(1, rounds // 10):
                        peaks = [_peak(load, server.process.pid)]
                    pairs.append(_pair(load, publisher, swaps, swaps_first=index % 2 == 1))
                peaks.append(_peak(load, server.process.pid))
    results.add("adapter_swap_failed", float(sum(swapping.failed for _, swapping in pairs)))
    results.add("adapter_swap_added_p99_seconds", _added(pairs, lambda answers: answers.percentile(99)))
    results.add("adapter_swap_late_p99_seconds", _added(pairs, lambda answers: answers.late_p99))
    remark = f"of {peaks[0] / 1e6:.0f} MB, {swaps * rounds} swaps"
    results.add("adapter_swap_memory_bytes", float(peaks[1] - peaks[0]), remark)
    results.add("adapter_swap_quiet_p99_seconds", Spread.of([before.percentile(99) for before, _ in pairs]))


def _pair(load: Load, publisher: Publisher, swaps: int, *, swaps_first: bool) -> tuple[Answers, Answers]:
    """Return the answers of a turn without swaps, and of the same turn with them."""
    answers = {}
    for index, swapping in enumerate((True, False) if swaps_first else (False, True)):
        publisher.begin(swaps, served=swapping)
        answers[swapping] = load.turn(_RATE, _EVERY * swaps, again=index == 1)
        publisher.end()
    return answers[False], answers[True]


def _added(pairs: Sequence[tuple[Answers, Answers]], figure: Callable[[Answers], float]) -> Spread:
    return Spread.of([figure(swapping) - figure(quiet) for quiet, swapping in pairs])


def _peak(load: Load, server: int) -> int:
    """Return the largest resident memory of the server, in bytes, while it answers batches of the largest size, once it
    does not grow any more by that."""
    process, peak = Path(f"/proc/{server}"), 0
    for _ in range(_MOST_FLOODS):
        (process / "clear_refs").write_text(_RESET_PEAK)
        load.flood(_MAX_BATCH, _FLOOD_SECONDS)
        lines = (process / "status").read_text().splitlines()
        before = peak
        peak = max(peak, next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")))
        if peak - before < _SETTLED_BYTES:
            break
    return peak
