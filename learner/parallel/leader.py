"""One rank leads, all compute: rank 0 sends actions to the other ranks, and they carry them out.

Rank 0 reads the stream and has the store, the ledger, versions and checkpoints. For each step it scatters events to all
row groups, whose ranks get the same ones; all ranks take the same step, in which gradients are averaged, and send their
results back. Rank 0 makes every decision and sends it in a header, so that all ranks follow it or none.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from anabranch.learner.model.examples import Examples
from anabranch.learner.model.faulty_events import RaisingEventsError, error_of
from anabranch.learner.parallel.channel import (
    ALL_REDUCE,
    MATRIX_PRODUCT,
    PARTS,
    Action,
    Channel,
    arrays_to_bytes,
    float_to_bits,
    json_from_bytes,
    json_to_bytes,
    smaller,
    tensors_to_bytes,
    to_bytes,
)
from anabranch.learner.parallel.data_parallel import DataParallelGroup
from anabranch.learner.parallel.process_group import RankAssignment, join_group
from anabranch.learner.parallel.scatter import (
    EMBEDDINGS,
    LOSSES,
    OUTPUTS,
    RankBatch,
    Slices,
    TensorLayout,
    gathered,
    groups_of,
    layout_of,
    layouts_to_json,
    packed,
    pieces_of,
    scatter,
)
from anabranch.learner.parallel.speed_check import product_or_nan, time_collective
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.train.micro_batches import num_parts
from anabranch.learner.train.parallelism import COLLECTIVE
from anabranch.learner.train.step_result import StepResult
from anabranch.learner.train.step_wrapper import StepWrapper, TakeStep
from anabranch.learner.train.trainer import Trainer

_OF_GROUP = "rank-"
"""Prefix of the name of a row group's generators in a checkpoint: of the number of its ranks along `data`."""


class Leader(StepWrapper):
    """Runs each step of a trainer on all ranks. Used by rank 0; the other ranks run `follow`."""

    def __init__(self, channel: Channel, replicas: DataParallelGroup) -> None:
        """Let the other ranks build their trainers, as this one does next."""
        channel.send_all(Action.BEGIN)
        self._channel = channel
        self._replicas = replicas
        self._mesh = replicas.mesh
        self._layouts: list[TensorLayout] = []
        self._gathered = False
        self.losses_needed = True
        """Whether the losses of old events are used; the other ranks do not send them otherwise."""

    @override
    def attach(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._limits = [int(self._channel.receive_reply(rank).view(torch.int64)) for rank in self._channel.others]
        """Most events of a micro-batch of each other rank; 0: as many as of this one."""

    @override
    def step(self, take: TakeStep, new: Examples, old: Sequence[Examples], rows: int | None) -> StepResult:
        assert rows is None
        groups, strategy = [new, *old], self._trainer.strategy
        self._send_layouts([layout_of(events) for events in groups])
        slices = scatter([len(events) for events in groups], self._mesh.rows)
        batches = [RankBatch.of(groups, of_rank) for of_rank in slices]
        flags = LOSSES * (self.losses_needed and bool(old)) | EMBEDDINGS * (self._trainer.runner.embedding is not None)
        flags |= OUTPUTS * strategy.kind.keeps_output
        max_rows = [max(of_ranks) for of_ranks in zip(*(batch.real for batch in batches), strict=True)]
        self._send_step(batches, flags, max_rows)
        first, *others = batches[0].parts
        try:
            own_result = take(first, others, batches[0].real[0])
        except RaisingEventsError as exc:
            self._channel.wait_sent()
            raise self._error_of_all(exc, batches, slices, len(new)) from None
        self._replicas.after_step()
        self._channel.wait_sent()
        self._gathered = False
        return self._merged(own_result, batches, flags, max_rows)

    @override
    def learn_features(self, columns: Mapping[str, NDArray[Any]]) -> None:
        # Of all ranks' events, on all ranks: their buffers stay the same bit for bit.
        self._channel.send_all(Action.FEATURES, (), arrays_to_bytes(columns))

    @override
    def erase_owners(self, owners: NDArray[np.int64], seed: int) -> None:
        self._channel.send_all(Action.ERASE, (seed,), arrays_to_bytes({"owner": owners}))

    @override
    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        self._gathered = False
        prefixes = tuple(prefix for wrapper in self._trainer.wrappers for prefix in wrapper.prefixes)
        others = (part for part in tensors if part.startswith(prefixes))
        flat = [(part, *named) for part in (*PARTS, *others) for named in tensors.get(part, {}).items()]
        forms = [[part, name, str(value.dtype).removeprefix("torch."), value.shape] for part, name, value in flat]
        self._channel.send_all(Action.RESTORE, (), json_to_bytes({"tensors": forms, "state": state}))
        for _, _, value in flat:
            self._channel.broadcast(value.cpu().contiguous())

    @override
    def generators(self) -> dict[str, Tensor]:
        # Those of each other row group are one tensor of bytes.
        self._channel.send_all(Action.GENERATORS)
        replies = {rank: self._channel.receive_reply(rank) for rank in self._channel.others}
        return {_of_group(self._mesh.row_group(rank)): it for rank, it in replies.items() if self._mesh.reports(rank)}

    @override
    def restore_generators(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        # A row group without a saved state continues from its seed.
        of_first = {name: value.cpu() for name, value in tensors.items() if not name.startswith(_OF_GROUP)}
        by_group = {0: tensors_to_bytes(of_first, values)} if self._mesh.splits_model else {}
        for rank in self._channel.others:
            group = self._mesh.row_group(rank)
            if (kept := by_group.get(group, tensors.get(_of_group(group)))) is not None:
                self._channel.send(rank, Action.GENERATORS, (), kept.cpu())
        self._channel.wait_sent()

    @override
    def before_copy(self, *, optimizer: bool) -> None:
        if self._replicas.weights.sharded:
            self._channel.send_all(Action.MOMENTS if optimizer else Action.SNAPSHOT)
        if self._replicas.steps_unaveraged:
            self._gather()

    @override
    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        self._gather()
        return {}

    @override
    def on_drift(self) -> None:
        self._channel.send_all(Action.DRIFT)  # before this rank: strategies may sum over all ranks

    def send_keepalive(self) -> None:
        """Send a keepalive to the other ranks when nothing was sent for a second; called between steps."""
        if self._channel.idle:
            self._channel.send_all(Action.WAIT)

    def time_devices(self) -> dict[str, float]:
        """Run the product of matrices on all ranks; return the seconds of each, and those of the collective.

        A rank that is out of memory is left out, and the collective with it.
        """
        self._channel.send_all(Action.TIME_DEVICES, [MATRIX_PRODUCT])
        device = self._channel.device
        seconds = {"rank 0": product_or_nan(device)}
        for rank in self._channel.others:
            seconds[f"rank {rank}"] = float(self._channel.receive_reply(rank).view(torch.float64))
        measured = {name: value for name, value in seconds.items() if not math.isnan(value)}
        if len(measured) == self._channel.size:
            self._channel.send_all(Action.TIME_DEVICES, [ALL_REDUCE])
            measured[COLLECTIVE] = time_collective(device)
        return measured

    def _gather(self) -> None:
        if not self._gathered:
            self._channel.send_all(Action.GATHER)
            self._replicas.gather()
            self._trainer.strategy.gather()
            self._gathered = True

    def _send_layouts(self, layouts: list[TensorLayout]) -> None:
        if layouts != self._layouts:
            self._layouts = layouts
            self._channel.send_all(Action.LAYOUTS, (), to_bytes(layouts_to_json(layouts)))

    def _send_step(self, batches: Sequence[RankBatch], flags: int, max_rows: Sequence[int]) -> None:
        """Send each rank its events, and a header with what all have to agree on.

        `max_rows`: most events of each group on a rank, without placeholders.
        """
        parts = [batch.parts for batch in batches]
        micro, messages = self._trainer.runner.micro_batch_size, packed(parts, first=self._mesh.splits_model)
        forwards = 0
        if self._replicas.weights.sharded:
            limits = [micro, *(smaller(micro, limit or None) for limit in self._limits)]
            counts = [batches[self._mesh.row_group(rank)].counts for rank in range(self._mesh.ranks)]
            forwards = max(num_parts(of_rank, limit) for of_rank, limit in zip(counts, limits, strict=True))
        common = [
            flags,
            micro or 0,
            float_to_bits(self._trainer.update.schedule.scale),
            forwards,
            messages.shape[1],
            *max_rows,
        ]
        for rank in self._channel.others:
            batch = batches[self._mesh.row_group(rank)]
            self._channel.send(rank, Action.STEP, [*common, *batch.counts, *batch.real])
        if self._channel.size > 1:
            self._channel.scatter([messages[self._mesh.row_group(rank)] for rank in range(self._mesh.ranks)])
        self._replicas.forwards = forwards

    def _error_of_all(
        self, own_error: RaisingEventsError, batches: Sequence[RankBatch], slices: Sequence[Slices], rows: int
    ) -> RaisingEventsError:
        """Return an error that names the events on which the model raises on any rank; each rank reports its own.

        Ranks that split the model name all new events; `rows`: their number.
        """
        named = [(list(own_error.indices), own_error.message)]
        named += [tuple(json_from_bytes(self._channel.receive_reply(rank))) for rank in self._channel.others]
        if self._replicas.weights.sharded:
            message = next(filter(None, (message for _, message in named)), "")
            return RaisingEventsError(range(rows), message, of_batch=True)
        sizes = [slices[-1][group].stop for group in range(len(slices[0]))]
        messages = {
            sum(sizes[:group]) + index: message
            for (indices, message), rank_batch, of_rank in zip(named, batches, slices, strict=True)
            for group, index in rank_batch.sources(indices, of_rank)
        }
        return error_of(dict(sorted(messages.items())))

    def _merged(
        self, own_result: StepResult, batches: Sequence[RankBatch], flags: int, max_rows: Sequence[int]
    ) -> StepResult:
        """Return the results of all ranks as one, in the order of the events."""
        picked = own_result.replayed < sum(batches[0].counts[1:])
        replayed = own_result.replayed * len(batches) if picked else sum(sum(batch.real[1:]) for batch in batches)
        of_all = replace(own_result, replayed=replayed, rows=sum(batch.real[0] for batch in batches))
        own_pieces = pieces_of(own_result, batches[0], flags)
        if not own_pieces:
            return of_all
        by_rank, samples, groups = [own_pieces], len(batches[0].real) - 1, groups_of(flags, len(max_rows))
        shapes = [(max_rows[group], *piece.shape[1:]) for group, piece in zip(groups, own_pieces, strict=True)]
        sizes = [math.prod(shape) for shape in shapes]
        given = self._channel, own_pieces, flags, max_rows, self._mesh.group("rows")
        for batch, values in zip(batches[1:], gathered(*given)[1:], strict=True):
            pieces = zip(torch.split(values, sizes), shapes, groups, strict=True)
            by_rank.append([piece.view(shape)[: batch.real[group]] for piece, shape, group in pieces])
        tensors = [torch.cat(pieces) for pieces in zip(*by_rank, strict=True)]
        output_B = tensors.pop() if flags & OUTPUTS else own_result.output_B
        embedding_N = torch.cat(tensors[-samples - 1 :]) if flags & EMBEDDINGS else None
        old_R = torch.cat(tensors[:samples]) if flags & LOSSES else None
        return replace(of_all, old_R=old_R, embedding_N=embedding_N, output_B=output_B)


def _of_group(group: int) -> str:
    """Return the name of the tensor that has the generators of another row group in a checkpoint."""
    return f"{_OF_GROUP}{group}"


@contextmanager
def lead(assignment: RankAssignment, settings: LearnerSettings) -> Iterator[Channel]:
    """Join the group of all ranks as its leader, and yield the channel."""
    with join_group(assignment, settings) as device:
        channel = Channel(device)
        with channel.leading():
            yield channel
