"""A version that was rebuilt, and how far it is from the published one."""

from collections.abc import Sequence
from dataclasses import dataclass

from anabranch.learner.versions.format import Manifest


@dataclass(frozen=True)
class TensorDistance:
    """How far the tensor is that differs most.

    Attributes:
        name: of the tensor.
        max_abs: largest absolute difference of two of its numbers.
        relative: norm of the difference by the norm of the version's; infinite where that is zero.
    """

    name: str
    max_abs: float
    relative: float


@dataclass(frozen=True)
class Distance:
    """How far rebuilt weights are from those of the version.

    What [schema] learns, such as hashes of ids, is in `tensors` and `different`; in the other numbers only where no
    weight differs.

    Attributes:
        tensors: how many there are, and `different` of them are not equal bit for bit.
        different: see `tensors`.
        max_abs: largest absolute difference of two numbers.
        relative: norm of the difference of all tensors by the norm of the version's; infinite where that is zero.
        worst: the tensor with the largest relative difference; None where all are equal.
        holdout: events that both have predicted.
        other_predictions: how many of these predictions differ.
    """

    tensors: int
    different: int
    max_abs: float
    relative: float
    worst: TensorDistance | None
    holdout: int
    other_predictions: int


@dataclass(frozen=True)
class RebuildStart:
    """Where a rebuild starts.

    Attributes:
        checkpoint: number of the checkpoint; None for the start of the stream.
        step: of the checkpoint, or 0.
        damaged: sentences on newer checkpoints that precede the version, and cannot be used.
    """

    checkpoint: int | None
    step: int
    damaged: Sequence[str] = ()


@dataclass(frozen=True)
class Rebuilt:
    """A version that was rebuilt.

    Attributes:
        manifest: that of the version, with the digests of the rebuilt files.
        equal: whether the digests of all files, and of the frozen weights, are those of the version.
        deterministic: whether they have to be.
        start: where it was begun.
        steps: number of steps that were learned again.
        reasons: why the digests may differ, one sentence each.
        distance: from the version's weights; None where these are damaged or gone, or have other tensors.
    """

    manifest: Manifest
    equal: bool
    deterministic: bool
    start: RebuildStart
    steps: int
    reasons: list[str]
    distance: Distance | None
