"""A learner that records the end of every step and the writes that run: `cost_program.py FILE -c pipeline.toml`.

The file is written when the learner ends: one row for each boundary between steps, with the fields of `RECORD`.
"""

import math
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anabranch.learner import assembly as session
from anabranch.learner.__main__ import main
from anabranch.learner.loop.training_loop import Task, TrainingLoop

RECORD = np.dtype(
    [
        ("end", "f8"),  # seconds, monotonic
        ("busy", "f8"),  # CPU seconds of the loop's thread
        ("queued", "f8"),  # seconds that it was runnable without a core; NaN where the system does not report them
        ("blocked", "f8"),  # seconds in calls that checkpoint and publish, since the boundary before
        ("steps", "f8"),
        ("version", "f8"),  # the number that is being written; 0 without one
        ("checkpoint", "f8"),
        ("watching", "f8"),  # whether the thread of versions checks the served one
    ]
)


class RecordingLoop(TrainingLoop):
    """The learner's loop, which also records numbers at each boundary."""

    file = Path()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._records, self._blocked = array("d"), 0.0
        self._schedule: int | None = None
        publisher, checkpointer = self._parts.publisher, self._parts.checkpointer
        for part, name in ((publisher, "publish_if_due"), (checkpointer, "is_due"), (checkpointer, "checkpoint")):
            setattr(part, name, self._timed(getattr(part, name)))

    def run(self, stop: threading.Event, between_steps: Sequence[Task]) -> None:
        """Train, and write the records at the end."""

        def record() -> None:
            publisher, checkpointer = self._parts.publisher, self._parts.checkpointer
            busy, watching = publisher._background.busy, publisher._watching
            version = publisher.published + publisher.skipped + 1 if busy and not watching else 0
            checkpoint = checkpointer._highest if checkpointer.busy else 0
            moment = time.perf_counter(), time.thread_time(), self._queued()
            self._records.extend((*moment, self._blocked, self.state.steps, version, checkpoint, busy and watching))
            self._blocked = 0.0

        schedule = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        if schedule.exists():
            self._schedule = os.open(schedule, os.O_RDONLY)
        try:
            super().run(stop, (*between_steps, record))
        finally:
            np.save(self.file, np.frombuffer(self._records).view(RECORD))

    def _queued(self) -> float:
        return math.nan if self._schedule is None else int(os.pread(self._schedule, 100, 0).split()[1]) / 1e9

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self._blocked += time.perf_counter() - begin

        return timed


if __name__ == "__main__":
    RecordingLoop.file = Path(sys.argv[1])
    session.TrainingLoop = RecordingLoop  # type: ignore[misc]
    sys.exit(main(sys.argv[2:]))
