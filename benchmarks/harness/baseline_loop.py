"""A plain PyTorch loop: batches from memory, forward, backward, update."""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import perf_counter, process_time
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from anabranch.learner.settings.learner import OptimizerSettings
from anabranch.learner.train.optimizers import build_optimizer
from benchmarks.harness import commands, models

_POOL_ROWS = 20_000
"""More rows than the CPU caches hold, as in a stream and a store."""


@dataclass(frozen=True)
class Loop:
    """What the loop trains.

    Attributes:
        model: factory and arguments, as in a pipeline file.
        optimizer: the section of a pipeline file.
        batch_size: new events a step; as many old ones come with them.
        cores: that the loop may use; None: any.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any]
    batch_size: int
    cores: set[int] | None


class BaselineLoop:
    """The loop in a separate process, which waits between turns; it ends with the context."""

    def __init__(self, loop: Loop) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(loop, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.busy = 0.0
        """CPU seconds per step of the last turn."""

    def __enter__(self) -> "BaselineLoop":
        self._ours.recv()  # it is ready
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        commands.end(self._ours, self._process)

    def turn(self, seconds: float) -> float:
        """Train for `seconds`, and return the steps a second."""
        self._ours.send(seconds)
        steps, taken, busy = self._ours.recv()
        self.busy = busy / steps
        rate: float = steps / taken
        return rate


def _serve(loop: Loop, connection: Connection) -> None:
    if loop.cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, loop.cores)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # as the learner does: else the loop is half as fast once units are dead
    step = plain_steps(loop.model, loop.optimizer, loop.batch_size)
    step()
    connection.send("ready")
    for seconds in commands.received(connection):
        begin, busy, steps = perf_counter(), process_time(), 0
        while perf_counter() - begin < seconds:
            step()
            steps += 1
        connection.send((steps, perf_counter() - begin, process_time() - busy))


def plain_steps(
    described: Mapping[str, Any], optimizer_settings: Mapping[str, Any], batch_size: int, features: int = 784
) -> Callable[[], None]:
    """Return a function that takes one step on as many old events as new ones, from memory; for the rest see `Loop`."""
    torch.manual_seed(0)
    model: nn.Module = getattr(models, described["factory"])(**described["args"]).train()
    optimizer = build_optimizer(OptimizerSettings.model_validate(optimizer_settings), model.parameters())
    classes = int(described["args"].get("widths", [10])[-1])
    x, y = torch.rand(_POOL_ROWS, features), torch.randint(0, classes, (_POOL_ROWS,))
    generator, begin_next = np.random.default_rng(0), 0

    def step() -> None:
        nonlocal begin_next
        begin = begin_next
        begin_next = (begin_next + batch_size) % (_POOL_ROWS - batch_size)
        new = slice(begin, begin + batch_size)
        old: Tensor = torch.from_numpy(generator.integers(0, _POOL_ROWS, batch_size))
        features, label = torch.cat([x[new], x[old]]), torch.cat([y[new], y[old]])
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(model(features), label).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step
