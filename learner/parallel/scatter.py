"""Scatters the events of a step to the ranks, as bytes in a layout that both sides have, and gathers their results.

Legend: N row groups, b bytes of a message.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anabranch.learner.model.examples import Examples
from anabranch.learner.parallel.channel import Channel
from anabranch.learner.train.step_result import StepResult

_ALIGNMENT = 16
LOSSES, EMBEDDINGS, OUTPUTS = 1, 2, 4
"""Flags: the results that the other ranks send back."""


class Column(NamedTuple):
    """One tensor of examples: `feature.<name>`, `label`, `weight`, or the name of an optional field, `[B, *shape]`."""

    name: str
    dtype: str
    shape: tuple[int, ...]


TensorLayout = tuple[Column, ...]
"""The tensors of examples, in the order in which they are sent."""
Slices = list[slice]
"""A rank's slices of the new events and of each sample."""


def scatter(counts: Sequence[int], ranks: int) -> list[Slices]:
    """Return each rank's slices of new events and samples, balanced: ranks with fewer new events get more old ones."""
    slices: list[Slices] = [[] for _ in range(ranks)]
    total = [0] * ranks
    for count in counts:
        order = sorted(range(ranks), key=lambda rank: (total[rank], rank))
        sizes = [count // ranks] * ranks
        for rank in order[: count % ranks]:
            sizes[rank] += 1
        for rank, end in enumerate(accumulate(sizes)):
            slices[rank].append(slice(end - sizes[rank], end))
            total[rank] += sizes[rank]
    return slices


@dataclass(frozen=True)
class RankBatch:
    """A rank's part of a step: its new events and samples, and how many events of each are real.

    Where a rank has no event of a group while others do, it gets a placeholder of weight 0, so that all ranks run
    the same passes.
    """

    parts: list[Examples]
    real: list[int]

    @classmethod
    def of(cls, everything: Sequence[Examples], slices: Slices) -> "RankBatch":
        """Return the events in the slices, with placeholders for groups in which the rank has none."""
        parts = [events[where] for events, where in zip(everything, slices, strict=True)]
        padded = [part if len(part) else _placeholder(events) for part, events in zip(parts, everything, strict=True)]
        return cls(padded, [len(part) for part in parts])

    @property
    def counts(self) -> list[int]:
        """Events of each group, placeholders included."""
        return [len(part) for part in self.parts]

    def sources(self, indices: Iterable[int], slices: Slices) -> Iterator[tuple[int, int]]:
        """Yield the group of each event of this batch, by its index, and its index in the whole group.

        A placeholder is a copy of the first event of its group.
        """
        members = [(group, index) for group, count in enumerate(self.counts) for index in range(count)]
        for group, index in (members[index] for index in indices):
            yield group, slices[group].start + index if index < self.real[group] else 0


def layout_of(examples: Examples) -> TensorLayout:
    """Return the layout of examples."""
    return tuple(
        Column(name, str(value.dtype).removeprefix("torch."), tuple(value.shape[1:]))
        for name, value in _columns(examples)
    )


def packed(parts_by_group: Sequence[Sequence[Examples]], *, first: bool = False) -> Tensor:
    """Return the examples of each row group as one message of equal size, uint8 `[N, b]` on their device.

    The first row stays empty unless `first`: rank 0 sends it to itself, and to other ranks of its row group.
    """
    columns_by_rank = [[value for part in parts for _, value in _columns(part)] for parts in parts_by_group]
    sizes = [sum(_aligned(value.nbytes) for value in columns) for columns in columns_by_rank]
    device = columns_by_rank[0][0].device
    messages = torch.empty(len(sizes), max(_ALIGNMENT, *sizes), dtype=torch.uint8, device=device)
    for message, columns in [*zip(messages, columns_by_rank, strict=True)][0 if first else 1 :]:
        ends = accumulate(_aligned(value.nbytes) for value in columns)
        for value, end in zip(columns, ends, strict=True):
            begin = end - _aligned(value.nbytes)
            message[begin : begin + value.nbytes].view(value.dtype).copy_(value.reshape(-1))
    return messages


def unpacked(message: Tensor, layouts: Sequence[TensorLayout], counts: Sequence[int]) -> list[Examples]:
    """View a rank's message of `packed` as examples, given the layout and the count of each."""
    offset, groups = 0, []
    for layout, count in zip(layouts, counts, strict=True):
        tensors = {}
        for column in layout:
            dtype = getattr(torch, column.dtype)
            size = count * dtype.itemsize * _numbers(column.shape)
            tensors[column.name] = message[offset : offset + size].view(dtype).view(count, *column.shape)
            offset += _aligned(size)
        features = {name[8:]: value for name, value in tensors.items() if name.startswith("feature.")}
        optional = {name: value for name, value in tensors.items() if name.endswith("_B")}
        groups.append(Examples(features, tensors["label"], tensors["weight"], **optional))
    return groups


def layouts_to_json(layouts: Sequence[TensorLayout]) -> bytes:
    """Return layouts as JSON."""
    return json.dumps(layouts).encode()


def layouts_from_json(text: bytes) -> list[TensorLayout]:
    """Return the layouts that `layouts_to_json` wrote."""
    return [tuple(Column(name, dtype, tuple(shape)) for name, dtype, shape in layout) for layout in json.loads(text)]


def _placeholder(examples: Examples) -> Examples:
    """Return the first event with weight 0; none where there is none."""
    return examples[:1].weightless()


def _columns(examples: Examples) -> list[tuple[str, Tensor]]:
    columns = [(f"feature.{name}", value) for name, value in examples.features.items()]
    columns += [("label", examples.label_B), ("weight", examples.weight_B)]
    return [*columns, *examples.optional.items()]


def _numbers(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def pieces_of(result: StepResult, rank_batch: RankBatch, flags: int) -> list[Tensor]:
    """Return the results that `flags` name, without those of placeholder events: float32, one tensor per sample."""
    pieces: list[Tensor] = []
    counts, real = rank_batch.counts, rank_batch.real
    if flags & LOSSES:
        nowhere = rank_batch.parts[0].weight_B.new_full((sum(counts[1:]),), math.nan)
        old_R = (nowhere if result.old_R is None else result.old_R).float()
        pieces += [part[:n] for part, n in zip(torch.split(old_R, counts[1:]), real[1:], strict=True)]
    if flags & EMBEDDINGS:
        assert result.embedding_N is not None
        parts = torch.split(result.embedding_N, [real[0], *counts[1:]])
        pieces += [part[:n] for part, n in zip(parts, real, strict=True)]
    if flags & OUTPUTS:
        assert result.output_B is not None
        pieces.append(result.output_B.float())
    return pieces


def groups_of(flags: int, groups: int) -> list[int]:
    """Return the group of events that each tensor of `pieces_of` is of."""
    losses = [*range(1, groups)] * bool(flags & LOSSES)
    return losses + [*range(groups)] * bool(flags & EMBEDDINGS) + [0] * bool(flags & OUTPUTS)


def gathered(
    channel: Channel, pieces: Sequence[Tensor], flags: int, max_rows: Sequence[int], group: dist.ProcessGroup
) -> list[Tensor]:
    """Return the results of the ranks of a group on rank 0, each as one tensor with `max_rows` events of each sample.

    All ranks of the group call this.
    """
    groups = groups_of(flags, len(max_rows))
    padded = [
        nn.functional.pad(piece.reshape(-1), (0, (max_rows[group] - len(piece)) * math.prod(piece.shape[1:])))
        for piece, group in zip(pieces, groups, strict=True)
    ]
    values = torch.cat(padded) if padded else torch.empty(0)
    if group.size() == 1 or not len(values):
        return [values] * group.size()
    return channel.gather(values, group)
