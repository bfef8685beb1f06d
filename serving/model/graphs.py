"""CUDA graphs of a model's runs: the host launches one graph where it launched each kernel.

A graph has fixed addresses and sizes. Batches are padded to the next of the captured sizes, and versions are loaded
into the tensors that were captured.

Legend: B rows of a batch.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anabranch.serving.model.batch_copies import ByteRange, block_to_host, joined, pinned_block, ranges_of, size_of
from anabranch.serving.protocol.tensors import Array

log = logging.getLogger("anabranch.serving")

Predict = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Features `[B, *shape]` on the device to outputs `[B, ...]` there."""
Capture = Callable[[torch.device], Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]]
"""Returns what captures functions on a device: it returns what runs a function again, and the tensor of its results."""


@dataclass(frozen=True)
class _Graph:
    host: Tensor
    arrays: Mapping[str, Array]
    """The features, views of `host`."""
    inputs: Tensor
    replay: Callable[[], None]
    outputs: Tensor
    output_ranges: Mapping[str, ByteRange]


class Graphs:
    """The graphs of one slot's tensors, by number of rows. Used by one thread at a time."""

    def __init__(self) -> None:
        self._graphs: dict[int, _Graph] = {}
        self._predict: Predict | None = None
        """What was captured: graphs read all tensors of its module, also those that are no parameters or buffers."""

    def capture(
        self,
        capture: Capture,
        predict: Predict,
        zeros: Callable[[int], dict[str, Array]],
        max_batch: int,
        device: torch.device,
    ) -> None:
        """Capture `predict` for all sizes up to `max_batch`, unless that was done before.

        `zeros` returns padding for a number of rows. Raises what `capture` and `predict` raise.
        """
        if self._graphs:
            return
        captured = capture(device)
        # The largest first: the others fit into the memory that it reserves.
        graphs = {rows: _captured(captured, predict, zeros(rows), device) for rows in reversed(sizes_up_to(max_batch))}
        self._predict = predict
        self._graphs = dict(sorted(graphs.items()))

    def run(self, features: Mapping[str, Array], padding: Mapping[str, Any]) -> dict[str, Array] | None:
        """Return the outputs for features of B rows; None if B is larger than any captured size.

        `padding` is the value of the rows that fill up the batch, for each feature.
        """
        rows = len(next(iter(features.values())))
        graph = next((graph for size, graph in self._graphs.items() if size >= rows), None)
        if graph is None:
            return None
        for name, array in graph.arrays.items():
            array[:rows] = features[name]
            array[rows:] = padding[name]
        graph.inputs.copy_(graph.host, non_blocking=True)
        graph.replay()
        outputs = block_to_host(graph.outputs, graph.output_ranges)
        return {name: array[:rows] for name, array in outputs.items()}


def _captured(
    capture: Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]],
    predict: Predict,
    zeros: Mapping[str, Array],
    device: torch.device,
) -> _Graph:
    ranges = ranges_of(zeros)
    host = pinned_block(size_of(ranges), device)
    arrays = {name: part.of(host).numpy() for name, part in ranges.items()}
    for name, array in arrays.items():
        array[...] = zeros[name]
    inputs = host.to(device, copy=True)
    output_ranges: dict[str, ByteRange] = {}

    def run() -> Tensor:
        block, found = joined(predict({name: part.of(inputs) for name, part in ranges.items()}))
        output_ranges.update(found)
        return block

    replay, outputs = capture(run)
    return _Graph(host, arrays, inputs, replay, outputs, output_ranges)


def sizes_up_to(max_batch: int) -> list[int]:
    """Return the powers of two below `max_batch`, and `max_batch`."""
    return [*(2**power for power in range((max_batch - 1).bit_length())), max_batch]


def capture_on(device: torch.device) -> Capture | None:
    """Return what captures graphs on a device; None, with a warning in the log, if it has no graphs."""
    if device.type != "cuda":
        log.warning("serving.graphs has no effect: it needs a CUDA device, but the device is %s", device)
        return None
    return CudaCapture


class CudaCapture:
    """Captures functions as CUDA graphs that share memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Return what replays a function, and its result. Raises RuntimeError when it cannot be captured."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()  # libraries allocate their workspaces at the first run, which cannot be captured
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Requests run meanwhile in another thread, and allocate.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            outputs = run()
        return graph.replay, outputs
