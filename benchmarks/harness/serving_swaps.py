"""Swaps: what requests notice of a new version, many times a second, and whether the old ones leave anything behind.

Turns without and with swaps alternate. The server, with the thread that loads versions, is on one core; what publishes
them and what sends requests are on the others.

`swap_added_p99_seconds` is the 99th percentile of a turn with swaps less that of the turn without before it,
`swap_memory_growth` the server's resident memory at the end over that after the first tenth of the swaps.
`swap_disk_bytes` are the bytes that the server read from the disk while it swapped: weights that were just written are
in the page cache, which both processes share, and are read from there.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType

import psutil
import torch

from benchmarks.harness import commands
from benchmarks.harness.cores import split
from benchmarks.harness.interleave import Spread
from benchmarks.harness.load import Answers, Load
from benchmarks.harness.results import Form, Results, Target
from benchmarks.harness.server import ServingProcess, binary_request
from benchmarks.harness.version_publisher import NAME, VersionPublisher

TARGETS = {
    "swap_failed": Target(0),
    "swap_added_p99_seconds": Target(0.005),
    "swap_memory_growth": Target(1.02),
}
MLP = {"factory": "mlp", "args": {"widths": [784, 900, 320, 10]}}
_EVERY = 0.1
_RATE = 200.0
_PATIENCE = 30.0
_POLL = 0.005


@dataclass(frozen=True)
class Swaps:
    """The results of some swaps.

    Attributes:
        late: from the end of each publish to its swap, as `state.json` shows it, in seconds.
        resident: the server's memory after each, in bytes.
    """

    late: list[float]
    resident: list[int]


class Publisher:
    """Publishes from a separate process, which yields to the one that sends requests."""

    def __init__(
        self,
        published: VersionPublisher,
        server: int,
        cores: set[int] | None,
        unserved: VersionPublisher | None = None,
    ) -> None:
        """`server` is the process that serves `published`; none serves `unserved`."""
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_publish, args=(theirs, published, server, cores, unserved), daemon=True)
        self._process.start()
        theirs.close()
        self._ours.recv()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        commands.end(self._ours, self._process)

    def begin(self, swaps: int, *, served: bool = True) -> None:
        """Start publishing `swaps` versions, each when it is due and the last one is served; or as much work without
        swaps: versions that no process serves, and as many polls as the last swap took."""
        self._ours.send((swaps, served))

    def end(self) -> Swaps:
        """Wait for the last swap; raises EOFError when one does not come."""
        swaps: Swaps = self._ours.recv()
        return swaps


def _publish(
    connection: Connection,
    published: VersionPublisher,
    server: int,
    cores: set[int] | None,
    unserved: VersionPublisher | None,
) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)
    os.nice(19)
    torch.set_num_threads(1)
    memory = psutil.Process(server).memory_info
    connection.send(None)
    polls = 1
    for swaps, served in commands.received(connection):
        done = Swaps([], [])
        due = time.monotonic()
        for _ in range(swaps):
            time.sleep(max(0.0, due - time.monotonic()))
            due = max(due + _EVERY, time.monotonic())
            if not served:
                assert unserved is not None
                unserved.publish()
                for _ in range(polls):
                    published.served()
                    time.sleep(_POLL)
                continue
            number = published.publish()
            begin, polls = time.monotonic(), 0
            while published.served() != number:
                polls += 1
                if time.monotonic() > begin + _PATIENCE:
                    raise TimeoutError(f"version {number} is not served")
                time.sleep(_POLL)
            done.late.append(time.monotonic() - begin)
            done.resident.append(memory().rss)
        connection.send(done)


@dataclass(frozen=True)
class Measured:
    """What a series of turns has shown: each without swaps, then with."""

    pairs: list[tuple[Answers, Answers]]
    done: Swaps
    read: int | None
    """Bytes that the server took from the disk; None where the system does not say."""

    @property
    def refused(self) -> Counter[int]:
        """How many requests failed during swaps, by status."""
        return sum((swapping.refused for _, swapping in self.pairs), Counter())

    @property
    def added_p99(self) -> Spread:
        """How much later requests were answered with swaps than without, at the 99th percentile, in seconds."""
        return Spread.of([swapping.percentile(99) - quiet.percentile(99) for quiet, swapping in self.pairs])

    @property
    def resident(self) -> tuple[float, float]:
        """The server's memory after the first tenth of the swaps and at their end, in bytes."""
        resident = self.done.resident
        tenth = max(5, len(resident) // 10)
        return statistics.median(resident[tenth : 2 * tenth]), statistics.median(resident[-tenth:])


def size(form: Form) -> tuple[int, int]:
    """Return the swaps of a round, and the rounds."""
    return ((12, 1), (20, 2), (100, 10))[form]


def under_load(root: Path, published: VersionPublisher, features: int, form: Form) -> Measured:
    """Serve the versions that are published into a folder, and send requests meanwhile."""
    swaps, rounds = size(form)
    core, others = split()
    published.publish()
    with ServingProcess(root, core) as server:
        url = f"{server.wait().address}/v2/models/{NAME}/infer"
        with (
            Load(url, *binary_request(1, features), others) as load,
            Publisher(published, server.process.pid, others) as publisher,
        ):
            load.turn(_RATE, 1.0)
            read = _disk_bytes(server.process.pid)
            pairs: list[tuple[Answers, Answers]] = []
            done = Swaps([], [])
            for _ in range(rounds):
                quiet = load.turn(_RATE, _EVERY * swaps)
                publisher.begin(swaps)
                pairs.append((quiet, load.turn(_RATE, _EVERY * swaps)))
                of_turn = publisher.end()
                done.late.extend(of_turn.late)
                done.resident.extend(of_turn.resident)
            read = None if read is None else (_disk_bytes(server.process.pid) or 0) - read
    return Measured(pairs, done, read)


def measure(results: Results, form: Form, bootstrap: str) -> None:  # noqa: ARG001 - every section takes the same
    """Measure the section."""
    swaps, rounds = size(form)
    results.title(
        f"swaps: {swaps * rounds} of an MLP of a million parameters, ten a second, {_RATE:.0f} requests a second"
    )
    with tempfile.TemporaryDirectory(dir=".", prefix="swaps-") as folder:
        root = Path(folder).resolve()
        found = under_load(root, VersionPublisher(root, MLP, 784, {"max_delay": "1ms"}), 784, form)
    first, last = found.resident
    refused, pairs, done = found.refused, found.pairs, found.done
    results.add("swap_failed", float(refused.total()), ", ".join(f"{n} with {code}" for code, n in refused.items()))
    results.add("swap_added_p99_seconds", found.added_p99)
    results.add("swap_memory_growth", last / first, f"of {first / 1e6:.0f} MB")
    if found.read is not None:
        results.add("swap_disk_bytes", float(found.read), f"of {len(done.late)} versions of 4 MB")
    results.add("swap_p99_seconds", Spread.of([swapping.percentile(99) for _, swapping in pairs]))
    results.add("swap_quiet_p99_seconds", Spread.of([quiet.percentile(99) for quiet, _ in pairs]))
    results.add("swap_noticed_seconds", Spread.of(done.late), "from the publish to the swap")
    results.add("swap_load_late_p99_seconds", max(s.late_p99 for _, s in pairs), "of the generator, part of the above")


def _disk_bytes(server: int) -> int | None:
    """Return what a process has taken from the disk so far; None where the system does not say."""
    counters = getattr(psutil.Process(server), "io_counters", None)
    return None if counters is None else int(counters().read_bytes)
