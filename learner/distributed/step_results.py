"""The results of a step that the other ranks send back to the leader: of all ranks in one gather."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learner.distributed.channel import Channel
from learner.distributed.scatter import RankBatch
from learner.training.step_result import StepResult

LOSSES, EMBEDDINGS, OUTPUTS = 1, 2, 4
"""Flags: the results that the other ranks send back."""


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
