"""One rank leads, all compute: rank 0 sends actions to the other ranks, and they carry them out.

Rank 0 reads the stream and has the store, the ledger, versions and checkpoints. For each step it scatters events to all
ranks, itself included; all take the same step, in which gradients are averaged; the other ranks send their results
back. Rank 0 makes every decision and sends it in a header, so that all ranks follow it or none.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from learner.device_health.sniff_test import COLLECTIVE, product_or_nan, time_collective
from learner.distributed.channel import Action, Channel
from learner.distributed.data_parallel import DataParallelGroup
from learner.distributed.scatter import (
    RankBatch,
    Slices,
    TensorLayout,
    layout_of,
    layouts_from_json,
    layouts_to_json,
    packed,
    scatter,
    unpacked,
)
from learner.model.faulty_events import RaisingEventsError, error_of
from learner.model.rng import restore_rng, rng_tensors, rng_values
from learner.strategies.examples import Examples
from learner.training.step_result import StepResult
from learner.training.trainer import Trainer

_PARTS = ("model", "optimizer", "strategy")
"""The parts of a checkpoint that all ranks restore."""
_LOSSES, _EMBEDDINGS, _OUTPUTS = 1, 2, 4
"""Flags: the results of a step that the other ranks send back."""
_PRODUCT, _COLLECTIVE = 0, 1
"""Parts of the sniff test."""


class Leader(Trainer):
    """A trainer that runs each step on all ranks. Used by rank 0; the other ranks run `follow`."""

    def __init__(self, channel: Channel, replicas: DataParallelGroup, **given: Any) -> None:
        """Take the same arguments as `Trainer`, except `ranks`."""
        channel.send_all(Action.BEGIN)
        super().__init__(**given, ranks=replicas)
        self._channel = channel
        self._replicas = replicas
        self._layouts: list[TensorLayout] = []
        self._gathered = False
        self._losses_needed = True

    def set_losses_needed(self, *, needed: bool) -> None:
        """Set whether the losses of old events are used; the other ranks do not send them otherwise."""
        self._losses_needed = needed

    def step(self, new: Examples, old: Sequence[Examples] = (), rows: int | None = None) -> StepResult:
        """Scatter events to all ranks and take a step; the result, or the error, covers all events."""
        assert rows is None
        groups = [new, *old]
        self._send_layouts([layout_of(events) for events in groups])
        slices = scatter([len(events) for events in groups], self._channel.size)
        batches = [RankBatch.of(groups, of_rank) for of_rank in slices]
        flags = _LOSSES * (self._losses_needed and bool(old)) | _EMBEDDINGS * (self._embedding is not None)
        flags |= _OUTPUTS * self.strategy.keeps_output
        for rank in self._channel.others:
            rank_batch = batches[rank]
            numbers = [
                flags,
                self.micro_batch_size or 0,
                _bits(self.update.schedule.scale),
                *rank_batch.counts,
                *rank_batch.real,
            ]
            self._channel.send(rank, Action.STEP, numbers, packed(rank_batch.parts))
        first, *others = batches[0].parts
        try:
            own_result = super().step(first, others, batches[0].real[0])
        except RaisingEventsError as exc:
            self._channel.wait_sent()
            raise self._error_of_all(exc, batches, slices) from None
        self._replicas.after_step()
        self._channel.wait_sent()
        self._gathered = False
        return self._merged(own_result, batches, flags)

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Restore the weights and the optimizer of a checkpoint, on all ranks."""
        super().restore(tensors, state)
        self._gathered = False
        flat = {
            f"{part}/{name}": value.cpu().clone() for part in _PARTS for name, value in tensors.get(part, {}).items()
        }
        self._channel.send_all(Action.RESTORE, (), _saved(flat, state).to(self.device))

    def generators(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the states of the random generators of all ranks; those of each other rank are one tensor of bytes."""
        tensors, values = super().generators()
        self._channel.send_all(Action.GENERATORS)
        others = {_of_rank(rank): self._channel.receive_with_size(rank) for rank in self._channel.others}
        return tensors | others, values

    def restore_generators(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the random generators of all ranks; a rank without a saved state continues from its seed."""
        super().restore_generators(tensors, values)
        for rank in self._channel.others:
            if (kept := tensors.get(_of_rank(rank))) is not None:
                self._channel.send(rank, Action.GENERATORS, (), kept.to(self.device))
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
        self._channel.send_all(Action.SNIFF, [_PRODUCT])
        seconds = {"rank 0": product_or_nan(self.device)}
        for rank in self._channel.others:
            seconds[f"rank {rank}"] = float(self._channel.receive_bytes(rank, 8).view(torch.float64))
        measured = {name: value for name, value in seconds.items() if not math.isnan(value)}
        if len(measured) == self._channel.size:
            self._channel.send_all(Action.SNIFF, [_COLLECTIVE])
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
            self._channel.send_all(Action.LAYOUTS, (), _bytes(layouts_to_json(layouts)).to(self.device))

    def _error_of_all(
        self, own_error: RaisingEventsError, batches: Sequence[RankBatch], slices: Sequence[Slices]
    ) -> RaisingEventsError:
        """Return an error that names the events on which the model raises on any rank; each rank reports its own."""
        named = [(list(own_error.indices), own_error.message)]
        for rank in self._channel.others:
            named.append(json.loads(self._channel.receive_with_size(rank).cpu().numpy().tobytes()))
        sizes = [slices[-1][group].stop for group in range(len(slices[0]))]
        messages = {
            sum(sizes[:group]) + index: message
            for (indices, message), rank_batch, of_rank in zip(named, batches, slices, strict=True)
            for group, index in rank_batch.sources(indices, of_rank)
        }
        return error_of(dict(sorted(messages.items())))

    def _merged(self, own_result: StepResult, batches: Sequence[RankBatch], flags: int) -> StepResult:
        """Return the results of all ranks as one, in the order of the events."""
        picked = own_result.replayed < sum(batches[0].counts[1:])
        replayed = own_result.replayed * len(batches) if picked else sum(sum(batch.real[1:]) for batch in batches)
        own_pieces = _pieces(own_result, batches[0], flags)
        if not own_pieces:
            return replace(own_result, replayed=replayed)
        by_rank, samples = [own_pieces], len(batches[0].real) - 1
        groups = (
            [*range(1, samples + 1)] * bool(flags & _LOSSES) + [*range(samples + 1)] * bool(flags & _EMBEDDINGS) + [0]
        )
        for rank in self._channel.others:
            shapes = [
                (batches[rank].real[group], *piece.shape[1:]) for group, piece in zip(groups, own_pieces, strict=False)
            ]
            sizes = [math.prod(shape) for shape in shapes]
            numbers = self._channel.receive_bytes(rank, 4 * sum(sizes)).view(torch.float32)
            by_rank.append([part.view(shape) for part, shape in zip(torch.split(numbers, sizes), shapes, strict=True)])
        tensors = [torch.cat(pieces) for pieces in zip(*by_rank, strict=True)]
        output_B = tensors.pop() if flags & _OUTPUTS else own_result.output_B
        embedding_N = torch.cat(tensors[-samples - 1 :]) if flags & _EMBEDDINGS else None
        old_R = torch.cat(tensors[:samples]) if flags & _LOSSES else None
        return replace(own_result, old_R=old_R, embedding_N=embedding_N, output_B=output_B, replayed=replayed)


def follow(channel: Channel, make: Callable[[], tuple[Trainer, DataParallelGroup]]) -> None:
    """Carry out the leader's actions until STOP; `make` builds the trainer, together with all ranks.

    Raises:
        RankLostError: the leader is gone.
    """
    action, numbers, message = channel.receive()
    if action is Action.STOP:
        return
    assert action is Action.BEGIN
    trainer, replicas = make()
    max_rows = trainer.micro_batch_size
    layouts: list[TensorLayout] = []
    while action is not Action.STOP:
        action, numbers, message = channel.receive()
        if action is Action.STEP:
            assert message is not None
            _step(channel, trainer, replicas, layouts, numbers, message, max_rows)
        elif action is Action.LAYOUTS:
            assert message is not None
            layouts = layouts_from_json(message.cpu().numpy().tobytes())
        elif action is Action.RESTORE:
            assert message is not None
            _restore(trainer, message)
        elif action is Action.GENERATORS and message is not None:
            restore_rng(*_loaded(message), channel.device)
        elif action is Action.GENERATORS:
            channel.reply_with_size(_saved(rng_tensors(channel.device), rng_values()).to(channel.device))
        elif action is Action.GATHER:
            replicas.gather()
            trainer.strategy.gather()
        elif action is Action.DRIFT:
            trainer.on_drift()
        elif action is Action.SNAPSHOT:
            trainer.snapshot()
        elif action is Action.MOMENTS:
            trainer.optimizer_state()
        elif action is Action.SNIFF and numbers == [_COLLECTIVE]:
            time_collective(channel.device)
        elif action is Action.SNIFF:
            seconds = torch.tensor([product_or_nan(channel.device)], dtype=torch.float64, device=channel.device)
            channel.reply(seconds.view(torch.uint8))


def _step(
    channel: Channel,
    trainer: Trainer,
    replicas: DataParallelGroup,
    layouts: list[TensorLayout],
    numbers: list[int],
    message: Tensor,
    max_rows: int | None,
) -> None:
    """Take a step with the leader, in micro-batches of its size, or smaller ones that fit on this host."""
    flags, micro, lr_factor, *counts = numbers
    counts, real = counts[: len(layouts)], counts[len(layouts) :]
    rank_batch = RankBatch(unpacked(message, layouts, counts), real)
    trainer.set_micro_batch_size(micro or None if max_rows is None else min(micro or max_rows, max_rows))
    trainer.scale_learning_rate(_number(lr_factor))
    try:
        result = trainer.step(rank_batch.parts[0], rank_batch.parts[1:], real[0])
    except RaisingEventsError as exc:
        channel.reply_with_size(_bytes(json.dumps([list(exc.indices), exc.message]).encode()).to(channel.device))
        return
    replicas.after_step()  # before the reply: the leader receives it after its own
    pieces = _pieces(result, rank_batch, flags)
    if pieces:
        channel.reply(torch.cat([piece.reshape(-1) for piece in pieces]).view(torch.uint8))


def _restore(trainer: Trainer, message: Tensor) -> None:
    tensors: dict[str, dict[str, Tensor]] = {part: {} for part in _PARTS}
    flat, state = _loaded(message)
    for key, value in flat.items():
        part, _, name = key.partition("/")
        tensors[part][name] = value
    trainer.restore(tensors, state)


def _pieces(result: StepResult, rank_batch: RankBatch, flags: int) -> list[Tensor]:
    """Return the results that `flags` name, without those of placeholder events: float32, one tensor per sample."""
    pieces: list[Tensor] = []
    counts, real = rank_batch.counts, rank_batch.real
    if flags & _LOSSES:
        nowhere = rank_batch.parts[0].weight_B.new_full((sum(counts[1:]),), math.nan)
        old_R = (nowhere if result.old_R is None else result.old_R).float()
        pieces += [part[:n] for part, n in zip(torch.split(old_R, counts[1:]), real[1:], strict=True)]
    if flags & _EMBEDDINGS:
        assert result.embedding_N is not None
        parts = torch.split(result.embedding_N, [real[0], *counts[1:]])
        pieces += [part[:n] for part, n in zip(parts, real, strict=True)]
    if flags & _OUTPUTS:
        assert result.output_B is not None
        pieces.append(result.output_B.float())
    return pieces


def _of_rank(rank: int) -> str:
    """Return the name of the tensor that has the generators of another rank in a checkpoint."""
    return f"rank-{rank}"


def _saved(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
    """Return tensors and JSON values as bytes."""
    return _bytes(safetensors.torch.save({**tensors, "/": _bytes(json.dumps(state).encode())}))


def _loaded(message: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and values that `_saved` turned into bytes."""
    tensors = safetensors.torch.load(message.cpu().numpy().tobytes())
    return tensors, json.loads(tensors.pop("/").numpy().tobytes())


def _bits(number: float) -> int:
    """Return the bits of a float as an integer, to be sent in a header."""
    return int(np.float64(number).view(np.int64))


def _number(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))


def _bytes(text: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy())
