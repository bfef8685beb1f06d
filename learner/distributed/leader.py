"""One rank leads, all compute: how the leader tells the others what to do, and they do it.

Rank 0 reads the stream and has the store, the ledger, versions and checkpoints. For each step it deals events to all
ranks, itself included; all do the same step, in which gradients are averaged; what the others found out comes back.
Whatever is decided is decided by rank 0 and told in a header, so that all ranks do it or none.
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

from learner.distributed.channel import Action, Channel
from learner.distributed.data_parallel import DataParallelGroup
from learner.distributed.scatter import (
    Form,
    RankBatch,
    Slices,
    form_of,
    forms_from_json,
    forms_to_json,
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
"""What of a checkpoint all ranks take up."""
_LOSSES, _EMBEDDINGS, _OUTPUTS = 1, 2, 4
"""What the leader wants back from a step."""


class Leader(Trainer):
    """A trainer whose every step is that of all ranks. Rank 0's; the others run `follow`."""

    listens = True
    """Whether anybody looks at the losses of old events."""

    def __init__(self, channel: Channel, replicas: DataParallelGroup, **given: Any) -> None:
        """Take what a trainer takes, its ranks apart."""
        channel.tell_all(Action.BEGIN)
        super().__init__(**given, ranks=replicas)
        self._channel = channel
        self._replicas = replicas
        self._forms: list[Form] = []
        self._gathered = False

    def step(self, new: Examples, old: Sequence[Examples] = (), rows: int | None = None) -> StepResult:
        """Deal events to all ranks, and step with them; what is returned, or raised, is of all events."""
        assert rows is None
        everything = [new, *old]
        self._agree_on([form_of(each) for each in everything])
        dealt = scatter([len(each) for each in everything], self._channel.size)
        shares = [RankBatch.of(everything, slices) for slices in dealt]
        wants = _LOSSES * (self.listens and bool(old)) | _EMBEDDINGS * (self._embedding is not None)
        wants |= _OUTPUTS * self.strategy.keeps_output
        for rank in self._channel.others:
            rank_batch = shares[rank]
            numbers = [
                wants,
                self.micro_batch_size or 0,
                _bits(self.update.schedule.scale),
                *rank_batch.counts,
                *rank_batch.real,
            ]
            self._channel.tell(rank, Action.STEP, numbers, packed(rank_batch.parts))
        first, *others = shares[0].parts
        try:
            mine = super().step(first, others, shares[0].real[0])
        except RaisingEventsError as exc:
            self._channel.arrived()
            raise self._named_by_all(exc, shares, dealt) from None
        self._replicas.stepped()
        self._channel.arrived()
        self._gathered = False
        return self._together(mine, shares, wants)

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Take up the weights and the optimizer of a checkpoint, on all ranks."""
        super().restore(tensors, state)
        self._gathered = False
        flat = {
            f"{part}/{name}": value.cpu().clone() for part in _PARTS for name, value in tensors.get(part, {}).items()
        }
        self._channel.tell_all(Action.RESTORE, (), _saved(flat, state).to(self.device))

    def generators(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the states of the random generators of all ranks: those of another rank are one tensor of bytes."""
        tensors, values = super().generators()
        self._channel.tell_all(Action.GENERATORS)
        others = {_of_rank(rank): self._channel.receive_with_size(rank) for rank in self._channel.others}
        return tensors | others, values

    def restore_generators(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Put the random generators of all ranks back; a rank that the checkpoint does not know goes on from its
        seed."""
        super().restore_generators(tensors, values)
        for rank in self._channel.others:
            if (kept := tensors.get(_of_rank(rank))) is not None:
                self._channel.tell(rank, Action.GENERATORS, (), kept.to(self.device))
        self._channel.arrived()

    def snapshot(self) -> dict[str, Tensor]:
        """Copy the weights and buffers as they are now, averaged over the ranks where those have stepped apart."""
        if self._replicas.weights.sharded:
            self._channel.tell_all(Action.SNAPSHOT)
        if self._replicas.apart_now:
            self._gather()
        return super().snapshot()

    def optimizer_state(self) -> dict[str, Tensor]:
        """Copy the optimizer's tensors, of all ranks."""
        if self._replicas.weights.sharded:
            self._channel.tell_all(Action.MOMENTS)
        return super().optimizer_state()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Weights and the optimizer's tensors of all ranks, copied on the device, for a checkpoint."""
        self._gather()
        return super().tensors()

    def state(self) -> dict[str, Any]:
        """What optimizer and scaler have beside tensors, as JSON values, for a checkpoint."""
        self._gather()
        return super().state()

    def on_drift(self) -> None:
        """Hear that the stream has changed, on all ranks."""
        self._channel.tell_all(Action.DRIFT)  # first: strategies may want sums of all ranks
        super().on_drift()

    def beat(self) -> None:
        """Tell the others that the leader is there, when nothing else was told for a second."""
        if self._channel.quiet:
            self._channel.tell_all(Action.WAIT)

    def _gather(self) -> None:
        if not self._gathered:
            self._channel.tell_all(Action.GATHER)
            self._replicas.gather()
            self.strategy.gather()
            self._gathered = True

    def _agree_on(self, forms: list[Form]) -> None:
        if forms != self._forms:
            self._forms = forms
            self._channel.tell_all(Action.FORMS, (), _bytes(forms_to_json(forms)).to(self.device))

    def _named_by_all(
        self, mine: RaisingEventsError, shares: Sequence[RankBatch], dealt: Sequence[Slices]
    ) -> RaisingEventsError:
        """Return an error that names the events on which the model raises on any rank, each of which says its own."""
        named = [(list(mine.places), mine.said)]
        for rank in self._channel.others:
            named.append(json.loads(self._channel.receive_with_size(rank).cpu().numpy().tobytes()))
        sizes = [dealt[-1][group].stop for group in range(len(dealt[0]))]
        found = {
            sum(sizes[:group]) + place: said
            for (places, said), rank_batch, slices in zip(named, shares, dealt, strict=True)
            for group, place in rank_batch.whose(places, slices)
        }
        return error_of(dict(sorted(found.items())))

    def _together(self, mine: StepResult, shares: Sequence[RankBatch], wants: int) -> StepResult:
        """Put what all ranks found out in the order in which the events came."""
        picked = mine.replayed < sum(shares[0].counts[1:])
        replayed = mine.replayed * len(shares) if picked else sum(sum(rank_batch.real[1:]) for rank_batch in shares)
        ours = _pieces(mine, shares[0], wants)
        if not ours:
            return replace(mine, replayed=replayed)
        found, samples = [ours], len(shares[0].real) - 1
        groups = (
            [*range(1, samples + 1)] * bool(wants & _LOSSES) + [*range(samples + 1)] * bool(wants & _EMBEDDINGS) + [0]
        )
        for rank in self._channel.others:
            shapes = [(shares[rank].real[group], *piece.shape[1:]) for group, piece in zip(groups, ours, strict=False)]
            sizes = [math.prod(shape) for shape in shapes]
            numbers = self._channel.receive(rank, 4 * sum(sizes)).view(torch.float32)
            found.append([part.view(shape) for part, shape in zip(torch.split(numbers, sizes), shapes, strict=True)])
        whole = [torch.cat(pieces) for pieces in zip(*found, strict=True)]
        output_B = whole.pop() if wants & _OUTPUTS else mine.output_B
        embedding_N = torch.cat(whole[-samples - 1 :]) if wants & _EMBEDDINGS else None
        old_R = torch.cat(whole[:samples]) if wants & _LOSSES else None
        return replace(mine, old_R=old_R, embedding_N=embedding_N, output_B=output_B, replayed=replayed)


def follow(channel: Channel, make: Callable[[], tuple[Trainer, DataParallelGroup]]) -> None:
    """Do what the leader says until it says stop; `make` builds the trainer, together with all ranks.

    Raises:
        RankLostError: the leader is gone.
    """
    action, numbers, message = channel.hear()
    if action is Action.STOP:
        return
    assert action is Action.BEGIN
    trainer, replicas = make()
    most = trainer.micro_batch_size
    forms: list[Form] = []
    while action is not Action.STOP:
        action, numbers, message = channel.hear()
        if action is Action.STEP:
            assert message is not None
            _step(channel, trainer, replicas, forms, numbers, message, most)
        elif action is Action.FORMS:
            assert message is not None
            forms = forms_from_json(message.cpu().numpy().tobytes())
        elif action is Action.RESTORE:
            assert message is not None
            _restore(trainer, message)
        elif action is Action.GENERATORS and message is not None:
            restore_rng(*_loaded(message))
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


def _step(
    channel: Channel,
    trainer: Trainer,
    replicas: DataParallelGroup,
    forms: list[Form],
    numbers: list[int],
    message: Tensor,
    most: int | None,
) -> None:
    """Step with the leader, in micro-batches of the size that it says, or of what fits on this host."""
    wants, micro, lr_factor, *counts = numbers
    counts, real = counts[: len(forms)], counts[len(forms) :]
    rank_batch = RankBatch(unpacked(message, forms, counts), real)
    trainer.micro_batch_size = micro or None if most is None else min(micro or most, most)
    trainer.scale_learning_rate(_number(lr_factor))
    try:
        result = trainer.step(rank_batch.parts[0], rank_batch.parts[1:], real[0])
    except RaisingEventsError as exc:
        channel.reply_with_size(_bytes(json.dumps([list(exc.places), exc.said]).encode()).to(channel.device))
        return
    replicas.stepped()  # before the reply, for which the leader asks after it
    pieces = _pieces(result, rank_batch, wants)
    if pieces:
        channel.reply(torch.cat([piece.reshape(-1) for piece in pieces]).view(torch.uint8))


def _restore(trainer: Trainer, message: Tensor) -> None:
    tensors: dict[str, dict[str, Tensor]] = {part: {} for part in _PARTS}
    flat, state = _loaded(message)
    for key, value in flat.items():
        part, _, name = key.partition("/")
        tensors[part][name] = value
    trainer.restore(tensors, state)


def _pieces(result: StepResult, rank_batch: RankBatch, wants: int) -> list[Tensor]:
    """Return what a rank found out and the leader wants, without what stands in: float32, one tensor a sample."""
    pieces: list[Tensor] = []
    counts, real = rank_batch.counts, rank_batch.real
    if wants & _LOSSES:
        nowhere = rank_batch.parts[0].weight_B.new_full((sum(counts[1:]),), math.nan)
        old_R = (nowhere if result.old_R is None else result.old_R).float()
        pieces += [part[:n] for part, n in zip(torch.split(old_R, counts[1:]), real[1:], strict=True)]
    if wants & _EMBEDDINGS:
        assert result.embedding_N is not None
        parts = torch.split(result.embedding_N, [real[0], *counts[1:]])
        pieces += [part[:n] for part, n in zip(parts, real, strict=True)]
    if wants & _OUTPUTS:
        assert result.output_B is not None
        pieces.append(result.output_B.float())
    return pieces


def _of_rank(rank: int) -> str:
    """Name what a checkpoint has of the generators of a rank that is led."""
    return f"rank-{rank}"


def _saved(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Tensor:
    """Return tensors and JSON values as bytes."""
    return _bytes(safetensors.torch.save({**tensors, "/": _bytes(json.dumps(state).encode())}))


def _loaded(message: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what `_saved` made bytes of."""
    tensors = safetensors.torch.load(message.cpu().numpy().tobytes())
    return tensors, json.loads(tensors.pop("/").numpy().tobytes())


def _bits(number: float) -> int:
    """Return a number so that it travels among whole ones."""
    return int(np.float64(number).view(np.int64))


def _number(bits: int) -> float:
    return float(np.int64(bits).view(np.float64))


def _bytes(text: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy())
