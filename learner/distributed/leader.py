"""One rank leads, all compute: rank 0 sends actions to the other ranks, and they carry them out.

Rank 0 reads the stream and has the store, the ledger, versions and checkpoints. For each step it scatters events to all
row groups, whose ranks get the same ones; all ranks take the same step, in which gradients are averaged, and send their
results back. Rank 0 makes every decision and sends it in a header, so that all ranks follow it or none.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.device_health.sniff_test import COLLECTIVE, product_or_nan, time_collective
from learner.distributed.channel import Action, Channel
from learner.distributed.data_parallel import DataParallelGroup
from learner.distributed.messages import (
    ALL_REDUCE,
    MATRIX_PRODUCT,
    PARTS,
    arrays_to_bytes,
    float_to_bits,
    json_from_bytes,
    json_to_bytes,
    smaller,
    tensors_to_bytes,
    to_bytes,
)
from learner.distributed.scatter import (
    RankBatch,
    Slices,
    TensorLayout,
    layout_of,
    layouts_to_json,
    packed,
    scatter,
)
from learner.distributed.step_results import EMBEDDINGS, LOSSES, OUTPUTS, gathered, groups_of, pieces_of
from learner.model.faulty_events import RaisingEventsError, error_of
from learner.model.features.learned import Columns
from learner.strategies.examples import Examples
from learner.training.micro_batches import num_parts
from learner.training.pipelined.search import OtherStageError
from learner.training.step_result import StepResult
from learner.training.trainer import Trainer

_OF_GROUP = "rank-"
"""Prefix of the name of a row group's generators in a checkpoint: of the number of its ranks along `data`."""


class Leader(Trainer):
    """A trainer that runs each step on all ranks. Used by rank 0; the other ranks run `follow`."""

    def __init__(self, channel: Channel, replicas: DataParallelGroup, **given: Any) -> None:
        """Take the same arguments as `Trainer`, except `ranks`."""
        channel.send_all(Action.BEGIN)
        super().__init__(**given, ranks=replicas)
        self._channel = channel
        self._replicas = replicas
        self._mesh = replicas.mesh
        self._layouts: list[TensorLayout] = []
        self._gathered = False
        self._losses_needed = True
        self._limits = [int(channel.receive_reply(rank).view(torch.int64)) for rank in channel.others]
        """Most events of a micro-batch of each other rank; 0: as many as of this one."""

    def set_losses_needed(self, *, needed: bool) -> None:
        """Set whether the losses of old events are used; the other ranks do not send them otherwise."""
        self._losses_needed = needed

    def step_without_features(self, new: Examples, old: Sequence[Examples] = (), rows: int | None = None) -> StepResult:
        """Scatter events to all ranks and take a step; the result, or the error, covers all events."""
        assert rows is None
        groups = [new, *old]
        self._send_layouts([layout_of(events) for events in groups])
        slices = scatter([len(events) for events in groups], self._mesh.rows)
        batches = [RankBatch.of(groups, of_rank) for of_rank in slices]
        flags = LOSSES * (self._losses_needed and bool(old)) | EMBEDDINGS * (self._embedding is not None)
        flags |= OUTPUTS * self.strategy.keeps_output
        max_rows = [max(of_ranks) for of_ranks in zip(*(batch.real for batch in batches), strict=True)]
        self._send_step(batches, flags, max_rows)
        first, *others = batches[0].parts
        try:
            own_result = super().step_without_features(first, others, batches[0].real[0])
        except RaisingEventsError as exc:
            self._channel.wait_sent()
            raise self._error_of_all(exc, batches, slices) from None
        self._replicas.after_step()
        self._channel.wait_sent()
        self._gathered = False
        return self._merged(own_result, batches, flags, max_rows)

    def learn_features(self, columns: Columns, output_B: Tensor | None = None) -> None:
        """Learn features from the new events of all ranks, on all ranks: their buffers stay the same bit for bit."""
        if self._learned is not None:
            self._channel.send_all(Action.FEATURES, (), arrays_to_bytes(self._learned.needed(columns)))
            super().learn_features(columns, output_B)

    def erase_owners(self, owners: NDArray[np.int64], seed: int) -> None:
        """Erase what features have learned of owners alone, on all ranks."""
        self._channel.send_all(Action.ERASE, (seed,), arrays_to_bytes({"owner": owners}))
        super().erase_owners(owners, seed)

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Restore the weights and the optimizer of a checkpoint, on all ranks."""
        super().restore(tensors, state)
        self._gathered = False
        flat = [(part, *named) for part in PARTS for named in tensors.get(part, {}).items()]
        forms = [[part, name, str(value.dtype).removeprefix("torch."), value.shape] for part, name, value in flat]
        self._channel.send_all(Action.RESTORE, (), json_to_bytes({"tensors": forms, "state": state}))
        for _, _, value in flat:
            self._channel.broadcast(value.cpu().contiguous())

    def generators(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the states of the generators of all row groups; those of each other group are one tensor of bytes."""
        tensors, values = super().generators()
        self._channel.send_all(Action.GENERATORS)
        replies = {rank: self._channel.receive_reply(rank) for rank in self._channel.others}
        others = {_of_group(self._mesh.row_group(rank)): it for rank, it in replies.items() if self._mesh.reports(rank)}
        return tensors | others, values

    def restore_generators(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the random generators of all ranks; a row group without a saved state continues from its seed."""
        super().restore_generators(tensors, values)
        of_first = {name: value.cpu() for name, value in tensors.items() if not name.startswith(_OF_GROUP)}
        by_group = {0: tensors_to_bytes(of_first, values)} if self._mesh.splits_model else {}
        for rank in self._channel.others:
            group = self._mesh.row_group(rank)
            if (kept := by_group.get(group, tensors.get(_of_group(group)))) is not None:
                self._channel.send(rank, Action.GENERATORS, (), kept.cpu())
        self._channel.wait_sent()

    def snapshot(self) -> Mapping[str, Tensor]:
        """Copy the weights and buffers as they are now, averaged over the ranks where those have diverged."""
        if self._replicas.weights.sharded:
            self._channel.send_all(Action.SNAPSHOT)
        if self._replicas.weights_diverged:
            self._gather()
        return super().snapshot()

    def optimizer_state(self) -> Mapping[str, Tensor]:
        """Copy the optimizer's tensors of all ranks."""
        if self._replicas.weights.sharded:
            self._channel.send_all(Action.MOMENTS)
        return super().optimizer_state()

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Copy the weights and the optimizer's tensors of all ranks, for a checkpoint."""
        self._gather()
        return super().tensors()

    def state(self) -> dict[str, Any]:
        """Return the state of optimizer and scaler besides their tensors, as JSON values, for a checkpoint."""
        self._gather()
        return super().state()

    def on_drift(self) -> None:
        """Apply a change of the stream, on all ranks."""
        self._channel.send_all(Action.DRIFT)  # first: strategies may sum over all ranks
        super().on_drift()

    def send_keepalive(self) -> None:
        """Send a keepalive to the other ranks when nothing was sent for a second."""
        if self._channel.idle:
            self._channel.send_all(Action.WAIT)

    def sniff(self) -> dict[str, float]:
        """Run the sniff test on all ranks; return the seconds of each, and those of the collective.

        A rank that is out of memory is left out, and the collective with it.
        """
        self._channel.send_all(Action.SNIFF, [MATRIX_PRODUCT])
        seconds = {"rank 0": product_or_nan(self.device)}
        for rank in self._channel.others:
            seconds[f"rank {rank}"] = float(self._channel.receive_reply(rank).view(torch.float64))
        measured = {name: value for name, value in seconds.items() if not math.isnan(value)}
        if len(measured) == self._channel.size:
            self._channel.send_all(Action.SNIFF, [ALL_REDUCE])
            measured[COLLECTIVE] = time_collective(self.device)
        return measured

    def _gather(self) -> None:
        if not self._gathered:
            self._channel.send_all(Action.GATHER)
            self._replicas.gather()
            self.strategy.gather()
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
        micro, messages = self.micro_batch_size, packed(parts, first=self._mesh.splits_model)
        forwards = 0
        if self._replicas.weights.sharded and not self._fallback.shrunk:
            limits = [micro, *(smaller(micro, limit or None) for limit in self._limits)]
            counts = [batches[self._mesh.row_group(rank)].counts for rank in range(self._mesh.ranks)]
            forwards = max(num_parts(of_rank, limit) for of_rank, limit in zip(counts, limits, strict=True))
        common = [flags, micro or 0, float_to_bits(self.update.schedule.scale), forwards, messages.shape[1], *max_rows]
        for rank in self._channel.others:
            batch = batches[self._mesh.row_group(rank)]
            self._channel.send(rank, Action.STEP, [*common, *batch.counts, *batch.real])
        if self._channel.size > 1:
            self._channel.scatter([messages[self._mesh.row_group(rank)] for rank in range(self._mesh.ranks)])
        self._replicas.expect_forwards(forwards)

    def _error_of_all(
        self, own_error: RaisingEventsError, batches: Sequence[RankBatch], slices: Sequence[Slices]
    ) -> RaisingEventsError:
        """Return an error that names the events on which the model raises on any rank; each rank reports its own."""
        named = [(list(own_error.indices), own_error.message)]
        reasons: dict[int, str] = {}
        for rank in self._channel.others:
            indices, message = json_from_bytes(self._channel.receive_reply(rank))
            if self._mesh.reports(rank):
                named.append((indices, message))
            elif message and not message.startswith(OtherStageError.__name__):
                reasons[self._mesh.row_group(rank)] = message
        named = [
            (indices, reasons.get(group, message) if message.startswith(OtherStageError.__name__) else message)
            for group, (indices, message) in enumerate(named)
        ]
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
