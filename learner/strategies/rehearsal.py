"""Old events as a step learns from them."""

from collections.abc import Sequence

import torch

from learner.strategies.base import OUTPUT, Examples
from replay.plan import Draw

_FEATURE = "feature."


def rehearsal(draw: Draw, draws: Sequence[int]) -> list[Examples]:
    """Make examples of a draw, dealt among the `draws` that the strategy asks for: fewer each when fewer came, and
    none when there is not one for each.

    Their weight is 0 where there is no label. The draw's importance makes up for how events were kept and drawn:
    where `[schema.weight]` is declared, heavy events are kept more often than light ones, and the rehearsed loss
    is that of the stream all the same.
    """
    columns = draw.columns
    labelled, label, weight = columns["labelled"], columns["label"], draw.importance
    # Mostly all are; to look is to wait for a device that is not the host. Both are copied: they are whole then, and
    # nobody else's.
    if labelled.is_cpu and labelled.numpy().all():
        label, weight = label.clone(memory_format=torch.contiguous_format), weight.clone()
    else:
        known = labelled.reshape(-1, *[1] * (label.dim() - 1))
        label = torch.where(known, label, torch.zeros_like(label))
        weight = torch.where(labelled, weight, 0.0)
    features = {name.removeprefix(_FEATURE): column for name, column in columns.items() if name.startswith(_FEATURE)}
    everything, n, wanted = Examples(features, label, weight, columns.get(OUTPUT)), len(draw), sum(draws)
    if len(draws) == 1:
        return [everything]
    ends = [sum(draws[: place + 1]) * n // wanted for place in range(len(draws))]
    parts = [everything[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return parts if all(map(len, parts)) else []
