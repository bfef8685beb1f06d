"""Whether a network is fast enough to be served within `serving.slo`: it is timed in turns with the model."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import nn

from ingest.events.schema import Schema
from learner.model.factory import forward, sample
from learner.strategies.base import eval_mode

_PASSES = 15
"""Passes of each module with a number of rows, the first of which are not counted."""
_UNCOUNTED = 3
_TOLERANCE = 1.1
"""How much longer than the model's a pass may take that counts as equally long: clocks and other processes differ."""


@dataclass(frozen=True)
class ServedBatch:
    """What serving allows for one run of the model: `serving.max_batch` rows, within `serving.slo` less
    `serving.max_delay`."""

    rows: int
    within: timedelta


class LatencyBound:
    """Compares passes of one row, and of the largest batch of serving, with the time that serving has for them.

    Measured on the learner's device in float32: where serving has another one, the bound is an estimate. A network that
    is about as fast as the model is never too slow, since the model is served.
    """

    def __init__(self, batch: ServedBatch, schema: Schema, clock: Callable[[], float] = time.perf_counter) -> None:
        """Take `clock`, which returns seconds."""
        self._batch, self._schema, self._clock = batch, schema, clock

    def exceeded(
        self, model: nn.Module, other: nn.Module, device: torch.device, before_pass: Callable[[], object]
    ) -> str | None:
        """Return a sentence where `other` is too slow, and slower than the model; None if it is not.

        `before_pass` is called before each pass, outside of the measured time.
        """
        within = self._batch.within.total_seconds()
        for rows in sorted({1, self._batch.rows}):
            usual, its = self._medians((model, other), rows, device, before_pass)
            if its > max(within, _TOLERANCE * usual):
                return (
                    f"a pass of {rows} rows takes {its * 1e3:.3g} ms, and the model's {usual * 1e3:.3g} ms; "
                    f"serving.slo less serving.max_delay is {within * 1e3:.3g} ms"
                )
        return None

    def _medians(
        self, modules: tuple[nn.Module, nn.Module], rows: int, device: torch.device, before_pass: Callable[[], object]
    ) -> tuple[float, float]:
        """Return the median seconds of a pass of each module, which take turns."""
        features = sample(self._schema, rows, device)
        seconds: tuple[list[float], list[float]] = ([], [])
        with torch.no_grad(), eval_mode(modules[0]), eval_mode(modules[1]):
            for _ in range(_PASSES):
                for module, spent in zip(modules, seconds, strict=True):
                    before_pass()
                    _wait(device)
                    begin = self._clock()
                    forward(module, features)
                    _wait(device)
                    spent.append(self._clock() - begin)
        return statistics.median(seconds[0][_UNCOUNTED:]), statistics.median(seconds[1][_UNCOUNTED:])


def _wait(device: torch.device) -> None:
    """Wait for the work of the device: only then is it measured."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
