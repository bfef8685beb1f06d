"""Other stores, used as their documentation advises, and the copy by numpy that every store is compared with."""

import gc
import importlib.util
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.block import Array
from benchmarks.harness.events import Events

_CHUNK = 4096
Sample = Callable[[], object]


class Gather:
    """The features of events in one array, gathered by numpy."""

    def __init__(self, events: Events, rows: int, batch: int) -> None:
        floats = events.x(np.zeros(1, np.int64)).shape[1]
        self._x = np.empty((rows, floats), np.float32)
        for begin in range(0, rows, _CHUNK):
            numbers = np.arange(begin, min(rows, begin + _CHUNK))
            self._x[begin : begin + _CHUNK] = events.x(numbers)
        self._out = np.empty((batch, floats), np.float32)

    def take(self, numbers: NDArray[np.int64]) -> object:
        """Gather events into new memory."""
        return np.take(self._x, numbers, axis=0)

    def take_out(self, numbers: NDArray[np.int64]) -> object:
        """Gather events into existing memory."""
        return np.take(self._x, numbers, axis=0, out=self._out, mode="clip")


@contextmanager
def torchrl(events: Events, rows: int, batch: int, folder: Path | None) -> Iterator[Sample]:
    """A replay buffer over a storage in memory, or over a memory map in `folder`."""
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer

    logging.getLogger("torchrl").setLevel(logging.WARNING)
    storage = LazyTensorStorage(rows) if folder is None else LazyMemmapStorage(rows, scratch_dir=folder)
    buffer = ReplayBuffer(storage=storage, batch_size=batch)
    for payload in _payload(events, rows):
        buffer.extend(TensorDict(payload, batch_size=[len(payload["label"])]))
    yield buffer.sample


@contextmanager
def cpprb(events: Events, rows: int, batch: int) -> Iterator[Sample]:
    """A replay buffer of cpprb."""
    from cpprb import ReplayBuffer

    fields = {name: {"dtype": dtype, "shape": shape or 1} for name, (dtype, shape) in events.schema.payload().items()}
    buffer = ReplayBuffer(rows, fields)
    for payload in _payload(events, rows):
        buffer.add(**payload)
    yield lambda: buffer.sample(batch)


@contextmanager
def peer(name: str, events: Events, rows: int, batch: int, folder: Path) -> Iterator[Sample]:
    """Fill the peer of that name, and release its memory and its files in `folder` at the end."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        if name == "cpprb":
            opened = cpprb(events, rows, batch)
        else:
            opened = torchrl(events, rows, batch, Path(own) if name == "torchrl_memmap" else None)
        with opened as sample:
            yield sample
        del sample, opened
        gc.collect()


PEERS = {"torchrl": "torchrl", "torchrl_memmap": "torchrl", "cpprb": "cpprb"}
"""By name, the distribution that must be installed for it."""


def missing(name: str) -> bool:
    """Return whether a peer is not installed."""
    return importlib.util.find_spec(PEERS[name]) is None


def _payload(events: Events, rows: int) -> Iterator[dict[str, Array]]:
    """Yield what a store keeps of events `[0, rows)`, chunk by chunk: a peer stores and samples the same columns."""
    for begin in range(0, rows, _CHUNK):
        columns = events.columns(begin, min(_CHUNK, rows - begin))
        yield {name: columns[name] for name in events.schema.payload()}
