"""Bounds what single events add to sums that a strategy keeps permanently.

An event whose embedding, or gradient, is a million times as long as the others would decide a class mean, a covariance
or an importance alone. Its vector is shortened to 16 times the usual length, which is a median that follows the stream
by a step for each batch (Robbins & Monro 1951).

Legend: B events, D numbers of a vector.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_FAR = 16.0
_SPREAD = 0.1
"""How far the logarithm of the usual length moves in one step at most."""


def shortened(
    vector_BD: Tensor,
    weight_B: Tensor,
    usual: Tensor,
    reduce: Callable[[Sequence[Tensor]], None] = lambda _tensors: None,
) -> Tensor:
    """Return vectors, none of which is far longer than usual; those that are not finite become 0.

    Args:
        vector_BD: of the events of a step.
        weight_B: of the events; those of weight 0 have no part in what is usual.
        usual: their usual length, a scalar on their device, 0 before the first step; it is updated in place.
        reduce: averages tensors over the ranks, where each has other events, and all have to agree.
    """
    vector_BD = torch.where(vector_BD.isfinite().all(dim=1, keepdim=True), vector_BD, 0.0)
    length_B, counts_B = torch.linalg.vector_norm(vector_BD, dim=1).to(usual.dtype), (weight_B > 0).to(usual.dtype)
    middle = length_B.median() if len(length_B) else torch.zeros_like(usual)
    sums = torch.stack([middle * counts_B.sum(), ((length_B > usual) * counts_B).sum(), counts_B.sum()])
    reduce([sums])
    first, above = sums[:2] / sums[2].clamp_min(1e-300)
    moved = torch.where(usual > 0, usual * (_SPREAD * (2 * above - 1)).exp(), first)
    usual.copy_(torch.where(sums[2] > 0, moved, usual))
    factor_B = torch.where(length_B > _FAR * usual, _FAR * usual / length_B.clamp_min(1e-300), 1.0)
    return vector_BD * factor_B[:, None].to(vector_BD.dtype)
