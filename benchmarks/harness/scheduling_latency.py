"""The time from the wake-up of a process until it has a core: how fast others on the core yield."""

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

_SHORTEST, _LONGEST = 0.001, 0.005


class SchedulingLatency:
    """A process that sleeps for random times and records how late it wakes; it ends with the context."""

    def __init__(self, cores: set[int] | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, cores), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> "SchedulingLatency":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ours.close()
        self._process.join()

    def turn(self, seconds: float) -> NDArray[np.float64]:
        """Sleep and wake for `seconds`; return how late each wake-up was, in seconds, float64."""
        self._ours.send(seconds)
        late: NDArray[np.float64] = self._ours.recv()
        return late


def _serve(connection: Connection, cores: set[int] | None) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)
    generator = np.random.default_rng(0)
    while True:
        try:
            seconds = connection.recv()
        except EOFError:
            return
        late, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            due = time.perf_counter() + float(generator.uniform(_SHORTEST, _LONGEST))
            time.sleep(max(0.0, due - time.perf_counter()))
            late.append(time.perf_counter() - due)
        connection.send(np.array(late))
