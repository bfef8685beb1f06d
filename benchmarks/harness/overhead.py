"""A learner in this process on events from memory, in turns with a plain PyTorch loop in the same thread.

Legend: B new events of a step, F features.
"""

import contextlib
import functools
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch

from anabranch.ingest.events.block import Array, Block, Coverage
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.reader.cursors import Partition
from anabranch.ingest.reader.reader import BlockReader
from anabranch.learner.assembly import learn
from anabranch.learner.evaluate.baselines import Baselines
from anabranch.learner.evaluate.outcomes import StreamOutcomes
from anabranch.learner.extensions.input_drift.extension import InputDrift
from anabranch.learner.loop import learning_step
from anabranch.learner.loop.reporter import Reporter
from anabranch.learner.loop.training_loop import Task, TrainingLoop
from anabranch.learner.settings.pipeline import PipelineSettings
from benchmarks.harness.baseline_loop import plain_steps
from benchmarks.harness.pipeline import Stream, pipeline

FEATURES = 64
BLOCK = 4096
"""Events of a block at most, as many as an ingest process sends at once of events as narrow."""


class MemorySource:
    """A topic without an end, whose blocks of `rows` events are in memory."""

    history = hold_out = problem = None
    reads_history = False
    unknown_fields = overweight = 0

    def __init__(self, schema: Schema, rows: int) -> None:
        self._columns, random = fake_columns(schema, range(BLOCK)), np.random.default_rng(0)
        self._columns["feature.x"] = random.random((BLOCK, self._columns["feature.x"].shape[1]), np.float32)
        self._columns["label"] = random.integers(schema.label.classes or 1, size=BLOCK)
        self._rows = rows
        self._sent = 0
        self.ends_time: float | None = None
        self.letters_dropped, self.tombstones = Counter[str](), Counter[str]()
        self.partitions: Sequence[Partition] = [Partition(TopicPartition("memory", 0), 0, None)]

    def poll(self, _timeout: timedelta) -> Block:
        """Return the next block."""
        begin, rows, self._sent = self._sent * self._rows, self._rows, self._sent + 1
        first = begin % BLOCK
        columns: Mapping[str, Array] = {
            **{name: column[first : first + rows] for name, column in self._columns.items()},
            "offset": np.arange(begin, begin + rows),
            "outcome": np.zeros(rows, np.uint8),
            "reason": np.zeros(rows, np.uint8),
        }
        return Block(columns, (Coverage(0, begin, begin + rows),))

    def open(self, *_: object, **_named: object) -> None:
        """All blocks are there."""

    def receive(self) -> None:
        """All blocks are there."""

    def release(self, _block: Block) -> None:
        """Blocks are new each time."""

    def commit(self, _offsets: Mapping[int, int]) -> None:
        """There is no broker."""

    def close(self) -> None:
        """There is nothing to close."""


class Turns:
    """Times the loop's thread and the plain loop in turns: seconds of CPU time a step, of each."""

    def __init__(self, plain: Callable[[], None], steps: int, rounds: int, stop: threading.Event) -> None:
        """Take the fewest steps of a turn, and after how many turns `stop` is set; one more is first, to warm up."""
        self.learner: list[float] = []
        self.plain: list[float] = []
        self.parts: list[float] = []
        """What `timed` functions have taken of the CPU time of the learner, where nothing else uses its core."""
        self._plain, self._least, self._rounds, self._stop = plain, steps, rounds, stop
        self._begin, self._step, self._wall = 0.0, 0, 0.0
        self._spent = {"round": 0.0, "second": 0.0}
        self._numbers: Iterator[int] = count()

    def __call__(self, step: int) -> None:
        """After enough steps end a turn of the learner, take one of the plain loop, and begin the next of the learner.

        Called between two rounds of steps.
        """
        if (steps := step - self._step) < self._least:
            return
        begin = time.thread_time()
        for _ in range(steps):
            self._plain()
        end = time.thread_time()
        if number := next(self._numbers):
            self.learner.append((begin - self._begin) / steps)
            self.plain.append((end - begin) / steps)
            of_seconds = self._spent["second"] / (time.monotonic() - self._wall)  # also of the plain loop's
            self.parts.append(self._spent["round"] / (begin - self._begin) + of_seconds)
        if number == self._rounds:
            self._stop.set()
        self._begin, self._step, self._wall = time.thread_time(), step, time.monotonic()
        self._spent = {"round": 0.0, "second": 0.0}

    def timed(self, function: Callable[..., Any], each: str) -> Callable[..., Any]:
        """Return a function that adds its CPU time to that of the turn. It is called `each` round, or second."""

        @functools.wraps(function)
        def run(*args: Any, **named: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*args, **named)
            finally:
                self._spent[each] += time.thread_time() - begin

        return run


MEASURING: Sequence[tuple[Any, str, str]] = (
    (learning_step, "predictions_of", "round"),
    (Baselines, "add", "round"),
    (StreamOutcomes, "add", "round"),
    (InputDrift, "trained", "second"),
    (InputDrift, "settle", "second"),
    (Reporter, "_measures", "second"),
    (Reporter, "_classes", "second"),
    (Reporter, "_baselines", "second"),
)
"""Functions of the loop's thread that compute measures and drift of inputs, and when; none calls another one. Those of
a second are called more often, but work for a share of the time."""


def measure(
    batch: int,
    rows: int,
    steps: int,
    rounds: int,
    optimizer: Mapping[str, Any],
    widths: Sequence[int],
    parts: Sequence[tuple[Any, str, str]] = (),
) -> Turns:
    """Return CPU seconds a step of the loop's thread, and of a plain loop, over turns of at least `steps` steps.

    Both have one thread of torch, and train on as many old events as new ones. Blocks have `rows` events, a divisor of
    `BLOCK`. `widths`: of the model, from its inputs to its classes. `parts`: functions whose time is `Turns.parts`,
    by their owners.
    """
    model = {"factory": "mlp", "args": {"widths": [*widths]}}
    described = {
        "features": {"x": {"dtype": "float32", "shape": [widths[0]]}},
        "label": {"name": "y", "classes": widths[-1]},
    }
    sections = {
        "learner": {"batch_size": batch, "optimizer": optimizer, "max_grad_norm": float("inf")},
        "replay": {"capacity": 10_000},
        "versions": {"publish_every": "1s"},
        "checkpoints": {"every": "30s"},
    }
    document = pipeline(Stream("localhost:9", "memory", described, 0), model, 0, sections)
    document["model"]["factory"] = "benchmarks.harness.models:mlp"
    run, stop = TrainingLoop.run, threading.Event()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        plain = plain_steps(model, optimizer, batch, widths[0])
        turns = Turns(plain, steps, rounds, stop)

        def run_in_turns(loop: TrainingLoop, stop: threading.Event, tasks: Sequence[Task]) -> None:
            run(loop, stop, (*tasks, lambda: turns(loop.state.steps)))

        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(patch.object(TrainingLoop, "run", run_in_turns))
            for owner, name, each in parts:
                stack.enter_context(patch.object(owner, name, turns.timed(getattr(owner, name), each)))
            spec = PipelineSettings.model_validate(document).below(Path(folder))
            source = MemorySource(Schema(spec.events), rows)
            learn(spec, stop, source=cast("BlockReader", source))
    finally:
        torch.set_num_threads(threads)
    return turns
