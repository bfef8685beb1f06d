"""How late a thread of the learner wakes up, while others publish, score and make checkpoints.

A thread that wakes up needs the interpreter's lock, as the loop's thread does after each operation of torch. A thread
that keeps it delays both.
"""

import contextlib
import os
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.core import job_thread
from anabranch.ingest.reader.reader import BlockReader
from anabranch.learner.assembly import learn
from anabranch.learner.versions.scores import VersionScoring
from benchmarks.harness.gpu_learner import MemorySource, Saving, spec_of
from benchmarks.harness.gpu_models import Workload

WORKLOAD = Workload("mlp", {"widths": [784, 900, 320, 10]}, (784,), "float32", 128, 20_000)
"""A million parameters, as the part `mlp` has; 20,000 stored events of 3.1 kB."""
SAVING = Saving(publish=1.0, checkpoint=5.0)
_SLEEP_SECONDS = 0.0005
_WARM_UP_SECONDS = 3.0
ACTIVITIES = {"publisher": "publish", "checkpointer": "checkpoint", "gate": "score"}
"""What may go on while the loop runs, by the name of its thread, and of the score within the publisher's."""


class Activities:
    """What the threads other than that of the loop do now."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()

    def now(self) -> list[str]:
        """Return the keys of what goes on; `loop` where there is nothing but the loop."""
        running = [key for name, key in ACTIVITIES.items() if self._running[name]]
        if "score" in running:
            running.remove("publish")
        return running or ["loop"]

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the learner that runs in this process."""
        start, score = job_thread.BackgroundWorker.start, VersionScoring.score

        def started(worker: job_thread.BackgroundWorker, work: Callable[[], object]) -> None:
            start(worker, lambda: self._during(threading.current_thread().name, work))

        def scored(scoring: VersionScoring, *arguments: Any) -> Any:
            return self._during("gate", lambda: score(scoring, *arguments))

        job_thread.BackgroundWorker.start = started  # type: ignore[method-assign]
        VersionScoring.score = scored  # type: ignore[method-assign]
        try:
            yield
        finally:
            job_thread.BackgroundWorker.start = start  # type: ignore[method-assign]
            VersionScoring.score = score  # type: ignore[method-assign]

    def _during(self, name: str, work: Callable[[], Any]) -> Any:
        self._running[name] += 1
        try:
            return work()
        finally:
            self._running[name] -= 1


def late_wakeups(seconds: float, warm_up: float = _WARM_UP_SECONDS) -> Mapping[str, NDArray[np.float64]]:
    """Return by how many seconds the probe's wake-ups were late, by what went on, from a learner of `WORKLOAD`.

    What the probe waited for a core, which other processes had, is not counted where the system reports it.
    """
    late, activities, stop, source = (
        defaultdict[str, list[float]](list),
        Activities(),
        threading.Event(),
        MemorySource(WORKLOAD),
    )

    def probe() -> None:
        source.running.wait()
        while not source.polled:
            time.sleep(0.01)
        time.sleep(warm_up)
        with _queued_seconds() as queued:
            end, before = time.perf_counter() + seconds, queued()
            while (begin := time.perf_counter()) < end:
                time.sleep(_SLEEP_SECONDS)
                passed, now, running = time.perf_counter() - begin, queued(), activities.now()
                for each in running:
                    late[each].append(max(0.0, passed - _SLEEP_SECONDS - (now - before)))
                before = now
        stop.set()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    source.running.set()
    thread = threading.Thread(target=probe, daemon=True)
    try:
        with tempfile.TemporaryDirectory() as folder, activities.followed():
            thread.start()
            spec = spec_of(WORKLOAD, Path(folder), "cpu", SAVING, "exclusive")
            learn(spec, stop, source=cast("BlockReader", source))
    finally:
        torch.set_num_threads(threads)
    return {name: np.array(values) for name, values in late.items()}


@contextlib.contextmanager
def _queued_seconds() -> Iterator[Callable[[], float]]:
    """A function that returns for how long this thread was ready and had no core; 0 where the system does not say."""
    try:
        descriptor = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
    except OSError:
        yield lambda: 0.0
        return
    try:
        yield lambda: int(os.pread(descriptor, 96, 0).split()[1]) / 1e9
    finally:
        os.close(descriptor)
