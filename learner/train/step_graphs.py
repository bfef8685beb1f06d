"""Whole steps as CUDA graphs: each is one launch, and what the host reads of a round is read at once.

A graph has the forward and backward pass, the gradient norm and clipping, the decision whether all is finite, and the
update, which is skipped on the device otherwise. It takes its events from fixed memory, into which those of a round are
copied at once, and counts there itself which come next: between the steps of a round the host does nothing. Numbers
and outputs stay on the device until the round ends.

Legend: N new events of a round, M replayed ones.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anabranch.core.failures import out_of_memory
from anabranch.core.users_code import in_one_line
from anabranch.learner.model.examples import Examples
from anabranch.learner.train.step_result import RoundEvents, StepResult, tensors_of

FIRST_CALLS = 3
"""Steps of a shape that run as they are, before it is recorded: libraries choose their algorithms in them."""
_MOST_GRAPHS = 4
"""Shapes of steps that are kept at once; each needs memory."""
_MOST_RECORDED = 64
"""How many are recorded in all: where shapes or learning rates keep changing, the others run as they are."""
_MOST_COUNTED = 1024
_MOST_STEPS = 32
_BLOCK_BYTES = 64 << 20
"""About as much memory as the events of a round may have at once: the others follow in a second copy."""


class DeviceStep(NamedTuple):
    """The results of a step, on the device.

    Attributes:
        numbers: float32 `[4]` or `[5]`: the sums of scores and of losses of new events, the loss, the norm of the
            gradient, and where the model has such buffers their magnitude times 0.
        output_B: the model's output for new events.
        old_R: the loss of each old event, float32; None without any.
    """

    numbers: Tensor
    output_B: Tensor
    old_R: Tensor | None


TakeStep = Callable[[Examples, Sequence[Examples]], DeviceStep]
"""Takes a step without a wait of the host, and without a change that is not on the device."""
Record = Callable[[Callable[[], object]], Callable[[], None]]
"""Records a function without running it; returns a function that runs it again, in place."""


class CudaGraphs:
    """Records functions as CUDA graphs; other threads may use the device meanwhile.

    All share one pool of memory, since no two are replayed at once, and none reads what another has left in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, function: Callable[[], object]) -> Callable[[], None]:
        """Record a function without running it; raises what it raises, and then all is as it was."""
        graph, pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.graph_pool_handle()
        stream = torch.cuda.current_stream(self._device)
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                function()
        except Exception as exc:
            self._recover(stream, pool)
            if "captur" in str(exc) and isinstance(exc.__context__, Exception):
                raise exc.__context__ from None  # why CUDA refused to end the recording
            raise
        self._pool = pool
        return graph.replay

    def _recover(self, stream: torch.cuda.Stream, pool: Any) -> None:
        """Undo what torch leaves behind where CUDA refuses to end a recording.

        That is its stream as the current one, an allocator that keeps memory which several streams have used, and a
        random generator that refuses steps outside of recordings. The end of another recording resets the generator.
        """
        torch.cuda.set_stream(stream)
        device = self._device.index if self._device.index is not None else torch.cuda.current_device()
        with contextlib.suppress(AttributeError, RuntimeError):  # where torch has ended it
            torch._C._cuda_endAllocateToPool(device, pool)
        other, own = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        with torch.cuda.graph(other, pool=own, capture_error_mode="thread_local"):
            torch.zeros(1, device=self._device)

    def renew(self) -> None:
        """Take another pool from now on: torch frees one once it has no graph."""
        self._pool = None


class _Blocks:
    """Fixed memory on the device, from which graphs read events, and to which they write what is read back."""

    def __init__(self, events: RoundEvents, like: DeviceStep) -> None:
        """Allocate it for steps with as many events as the first of `events`, whose results are `like` those given.

        Some steps fit at once, and at least two, so that one with a few more events than usual fits too.
        """
        new, old, (rows, *samples) = events.new, events.old, events.sizes[0]
        step_bytes = rows * _row_bytes(new) + (0 if old is None else sum(samples) * _row_bytes(old))
        steps = min(_MOST_STEPS, max(2, _BLOCK_BYTES // max(1, step_bytes)))
        self.new_rows, self.old_rows = steps * rows, steps * sum(samples)
        self.new = new.map(lambda value: value.new_zeros((self.new_rows, *value.shape[1:])))
        self.old = None if old is None else old.map(lambda value: value.new_zeros((self.old_rows, *value.shape[1:])))
        self.numbers = like.numbers.new_zeros((_MOST_STEPS, len(like.numbers)))
        self.output = like.output_B.new_zeros((self.new_rows, *like.output_B.shape[1:]))
        self.losses = None if like.old_R is None else like.old_R.new_zeros(self.old_rows)
        self.next = torch.zeros(3, dtype=torch.int64, device=new.label_B.device)
        """The next new row, old row and step; graphs count on."""

    def load(self, events: RoundEvents, new: slice, old: slice) -> None:
        """Copy events of a round to where graphs read them from the first row on."""
        self.next[:2].zero_()
        _copy_rows(self.new, events.new[new])
        if self.old is not None and events.old is not None:
            _copy_rows(self.old, events.old[old])

    def fits(self, events: RoundEvents) -> bool:
        """Return whether the events of each step have these columns, and fit by themselves."""
        return (
            _kinds(events) == (_kinds_of(self.new), _kinds_of(self.old))
            and max(rows for rows, *_ in events.sizes) <= self.new_rows
            and max(sum(samples) for _, *samples in events.sizes) <= self.old_rows
        )

    def pieces(self, events: RoundEvents) -> Iterator[tuple[slice, slice, slice]]:
        """Yield which steps, new and old events of a round are loaded at once."""
        first, begin, end = 0, (0, 0), (0, 0)
        for step, (rows, *samples) in enumerate(events.sizes):
            if end[0] + rows - begin[0] > self.new_rows or end[1] + sum(samples) - begin[1] > self.old_rows:
                yield slice(first, step), slice(begin[0], end[0]), slice(begin[1], end[1])
                first, begin = step, end
            end = end[0] + rows, end[1] + sum(samples)
        yield slice(first, len(events.sizes)), slice(begin[0], end[0]), slice(begin[1], end[1])

    def run(self, step: TakeStep, sizes: Sequence[int]) -> Callable[[], None]:
        """Return the function that is recorded: a step of events of these sizes, the next ones in this memory."""
        (rows, *samples), device = sizes, self.next.device
        first_B, first_R = torch.arange(rows, device=device), torch.arange(sum(samples), device=device)
        counted = torch.tensor([rows, sum(samples), 1], device=device)

        def run() -> None:
            new_B, old_R = first_B + self.next[0], first_R + self.next[1]
            new = self.new.map(lambda value: value.index_select(0, new_B))
            old = [] if self.old is None else self.old.map(lambda value: value.index_select(0, old_R)).split(samples)
            taken = step(new, old)
            self.numbers.index_copy_(0, self.next[2:], taken.numbers.unsqueeze(0))
            self.output.index_copy_(0, new_B, taken.output_B)
            if self.losses is not None and taken.old_R is not None:
                self.losses.index_copy_(0, old_R, taken.old_R)
            self.next.add_(counted)

        return run


class _RecordedStep(NamedTuple):
    """A step that is recorded.

    Attributes:
        replay: launches it.
        run: what was recorded, whose tensors it reads.
    """

    replay: Callable[[], None]
    run: Callable[[], None]


class StepGraphs:
    """Takes steps of one model by CUDA graphs, one for each shape of their events. Used by one thread.

    The first steps of a shape run as they are. So do all once one cannot be recorded, for example since the model reads
    a value on the host: then weights, optimizer and random generators are as before. A replay does not repeat what the
    model does in Python.
    """

    def __init__(
        self,
        step: TakeStep,
        model: nn.Module,
        numbers: Callable[[int], Hashable],
        record: Record,
        keep: Callable[[], Callable[[], object]],
    ) -> None:
        """Start without a graph.

        Args:
            step: takes a step.
            model: its buffers are where graphs find them as long as the model has the same ones.
            numbers: sets the learning rate of a step, and returns all numbers that a graph has as constants.
            record: records a step.
            keep: keeps what recording a step changes: gradients, and generators on the host; returns what restores it.
        """
        self._step, self._model, self._numbers, self._record, self._keep = step, model, numbers, record, keep
        self._calls: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _RecordedStep] = {}
        """By shape, the one used last at the end."""
        self._blocks: _Blocks | None = None
        self._buffers: list[Tensor] = []
        self.recorded = 0
        """How many were recorded."""
        self.refused: str | None = None
        """Why no step is recorded any more."""

    def ran(self, events: RoundEvents, number: int, result: DeviceStep) -> None:
        """Count step `number`, which ran as it is; record its shape if it has come some times before.

        `result`: shaped as what such a step returns.
        """
        key = self._key(events, events.sizes[0], number)
        if self.refused is not None or key in self._graphs:
            return
        if len(self._calls) >= _MOST_COUNTED:
            self._calls.clear()
        self._calls[key] += 1
        if self._calls[key] < FIRST_CALLS:
            return
        del self._calls[key]
        if self.recorded >= _MOST_RECORDED:
            return
        undo = self._keep()
        try:
            self._add(key, events, result)
        except Exception as exc:  # noqa: BLE001 the user's own code may raise anything, and CUDA ends a recording so
            self.discard()
            why = "the device has no memory for them" if out_of_memory(exc) else in_one_line(exc)
            self.refused = f"a step cannot be recorded: {why}"
        finally:
            undo()

    def take(
        self,
        events: RoundEvents,
        number: int,
        before_launch: Callable[[], object] = bool,
        before_wait: Callable[[], object] = bool,
    ) -> list[StepResult] | None:
        """Take consecutive steps, each by one launch, and wait for all of them at once.

        Args:
            events: of the steps.
            number: of the first step.
            before_launch: called before each step.
            before_wait: called when all are queued.

        Returns:
            Their results; None, and nothing was done, where one of them has no graph, or memory is short.
        """
        if not self._graphs or self._blocks is None:
            return None
        if not all(map(is_, self._buffers, self._model.buffers())):
            self.discard()
            return None
        if not self._blocks.fits(events) or len(events.sizes) > _MOST_STEPS:
            return None
        graphs = list[_RecordedStep]()
        for step, sizes in enumerate(events.sizes, number):
            key = self._key(events, sizes, step)
            if (graph := self._graphs.pop(key, None)) is None:
                return None
            self._graphs[key] = graph
            graphs.append(graph)
        return self._replay(self._blocks, events, graphs, before_launch, before_wait)

    def discard(self) -> None:
        """Discard all graphs: what they have as constants, such as where the optimizer's state is, has changed."""
        self._graphs.clear()
        self._calls.clear()
        self._blocks = None
        if isinstance(self._record, CudaGraphs):
            self._record.renew()

    def _key(self, events: RoundEvents, sizes: tuple[int, ...], number: int) -> Hashable:
        return sizes, _kinds(events), self._numbers(number)

    def _add(self, key: Hashable, events: RoundEvents, result: DeviceStep) -> None:
        """Record the step that `events` have."""
        if self._blocks is not None and not self._blocks.fits(events):
            self.discard()  # the others read memory for smaller steps, or such as replay nothing
        if len(self._graphs) >= _MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        buffers, blocks = list(self._model.buffers()), self._blocks or _Blocks(events, result)
        self.recorded += 1
        run = blocks.run(self._step, events.sizes[0])
        graph = _RecordedStep(self._record(run), run)
        if not all(map(is_, buffers, self._model.buffers())):
            raise RuntimeError("the model binds other tensors to its buffers, which a graph does not")
        self._graphs[key], self._blocks, self._buffers = graph, blocks, buffers

    def _replay(
        self,
        blocks: _Blocks,
        events: RoundEvents,
        graphs: Sequence[_RecordedStep],
        before_launch: Callable[[], object],
        before_wait: Callable[[], object],
    ) -> list[StepResult] | None:
        try:  # first, since no step could be undone later
            output_N = blocks.output.new_empty((len(events.new), *blocks.output.shape[1:]))
            old_M = None
            if blocks.losses is not None and events.old is not None:
                old_M = blocks.losses.new_empty(len(events.old))
        except RuntimeError as exc:
            if not out_of_memory(exc):
                raise
            return None
        blocks.next.zero_()
        for steps, new, old in blocks.pieces(events):
            blocks.load(events, new, old)
            for graph in graphs[steps]:
                before_launch()
                graph.replay()
            output_N[new] = blocks.output[: new.stop - new.start]
            if old_M is not None and blocks.losses is not None:
                old_M[old] = blocks.losses[: old.stop - old.start]
        before_wait()
        # The one wait for the device in a round.
        numbers = blocks.numbers[: len(graphs)].tolist()
        outputs = torch.split_with_sizes(output_N, [rows for rows, *_ in events.sizes])
        replayed = [sum(samples) for _, *samples in events.sizes]
        losses = [None] * len(graphs) if old_M is None else torch.split_with_sizes(old_M, replayed)
        return [
            StepResult(
                finite=all(map(math.isfinite, deciding)),
                loss=deciding[0],
                score=score,
                loss_new=loss_new,
                old_R=old_R,
                output_B=output_B,
                replayed=count,
                rows=len(output_B),
            )
            for (score, loss_new, *deciding), output_B, old_R, count in zip(
                numbers, outputs, losses, replayed, strict=True
            )
        ]


def _row_bytes(events: Examples) -> int:
    return sum(value.nbytes for value in tensors_of(events)) // max(1, len(events))


def _kinds_of(events: Examples | None) -> Hashable:
    """Return which columns examples have, and of which shape and dtype for an event."""
    if events is None:
        return None
    names = [*events.features, *events.optional]
    return *names, *((value.shape[1:], value.dtype) for value in tensors_of(events))


def _kinds(events: RoundEvents) -> tuple[Hashable, Hashable]:
    return _kinds_of(events.new), _kinds_of(events.old)


def _copy_rows(blocks: Examples, events: Examples) -> None:
    """Copy events to the first rows of blocks with the same columns."""
    for block, value in zip(tensors_of(blocks), tensors_of(events), strict=True):
        block[: len(value)].copy_(value)
