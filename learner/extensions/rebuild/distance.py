"""How far two sets of weights are from each other: as numbers, and by their predictions.

Legend: N events of the holdout set.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from anabranch.ingest.events.block import Array
from anabranch.learner.errors import VersionError
from anabranch.learner.evaluate.event_time import EventTimePredictor
from anabranch.learner.model.features.learned import is_of_features
from anabranch.learner.model.task import Task
from anabranch.learner.model.trained_set import load_trained
from anabranch.learner.state_dir.folders import other_base
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.versions.format import Manifest, Versions
from anabranch.learner.versions.rebuilt import Distance, TensorDistance

Predict = Callable[[Mapping[str, Array]], NDArray[np.float32]]
"""Returns the output of the model as it is for each of N events, NaN where it raises."""


def compared(
    versions: Versions,
    manifest: Manifest,
    base: str | None,
    weights: Mapping[str, Tensor],
    model: nn.Module,
    setup: TrainingSetup,
    holdout: Mapping[str, Array],
) -> tuple[Distance | None, list[str]]:
    """Return how far rebuilt weights are from those of the version, and why that may be, or is not known.

    Args:
        versions: has the version.
        manifest: of the version.
        base: that of the rebuilt weights.
        weights: rebuilt, on the CPU.
        model: has the rebuilt weights, then those of the version.
        setup: of the learner.
        holdout: columns of the holdout set; empty without one.
    """
    other = other_base(manifest.base, base)
    reasons = [] if other is None else [f"it {other}"]
    try:
        published = versions.weights(manifest)
    except (VersionError, OSError) as exc:
        return None, [*reasons, f"its weights cannot be compared: {exc}"]
    if not have_same_shapes(published, weights):
        return None, [*reasons, "its weights cannot be compared: they are tensors of other names or shapes"]
    predictor = EventTimePredictor(
        model, setup.task, setup.schema, setup.device, setup.precision, output_shape=setup.output_shape
    )
    return distance(published, weights, model, setup.task, predictor.predict, holdout), reasons


def have_same_shapes(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return whether two sets of weights have tensors of the same names, shapes and types."""
    return a.keys() == b.keys() and all((a[name].shape, a[name].dtype) == (b[name].shape, b[name].dtype) for name in a)


def distance(
    version: Mapping[str, Tensor],
    rebuilt: Mapping[str, Tensor],
    model: nn.Module,
    task: Task,
    predict: Predict,
    holdout: Mapping[str, Array],
) -> Distance:
    """Return the distance; both have the same tensors. `model` has the weights of `rebuilt`, then those of `version`.

    Args:
        version: weights of the version, on the CPU.
        rebuilt: rebuilt weights, on the CPU.
        model: computes what `predict` returns.
        task: makes predictions of outputs.
        predict: see `Predict`.
        holdout: columns of the holdout set; empty without one.
    """
    each = [_between(name, version[name], rebuilt[name]) for name in version]
    different = [one for one, _, _ in each if not _equal_bits(version[one.name], rebuilt[one.name])]
    weights = [one for one in different if not is_of_features(one.name)] or different
    outputs = []
    if holdout:
        outputs.append(predict(holdout))
        load_trained(model, version)
        outputs.append(predict(holdout))
    total, others = _compared(outputs, task) if outputs else (0, 0)
    squares = sum(square for one, square, _ in each if not is_of_features(one.name))
    norms = sum(norm for one, _, norm in each if not is_of_features(one.name))
    return Distance(
        tensors=len(each),
        different=len(different),
        max_abs=max((one.max_abs for one in weights), default=0.0),
        relative=_ratio(squares, norms),
        worst=max(weights, key=lambda one: one.relative, default=None),
        holdout=total,
        other_predictions=others,
    )


def _between(name: str, version: Tensor, rebuilt: Tensor) -> tuple[TensorDistance, float, float]:
    """Return the distance of a tensor, and the sums of squares of the difference and of the version's."""
    if _equal_bits(version, rebuilt):
        return TensorDistance(name, 0.0, 0.0), 0.0, float(version.double().square().sum())
    before, difference = version.double(), rebuilt.double() - version.double()
    square, norm = float(difference.square().sum()), float(before.square().sum())
    return TensorDistance(name, float(difference.abs().max()), _ratio(square, norm)), square, norm


def _equal_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether digests are equal too: 0.0 and -0.0 are equal numbers, and NaN differs from itself."""
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def _ratio(square: float, norm: float) -> float:
    if square == 0.0:
        return 0.0
    return math.sqrt(square / norm) if norm else math.inf


def _compared(outputs: list[NDArray[np.float32]], task: Task) -> tuple[int, int]:
    """Return how many events have an output of both models, and for how many the predictions differ."""
    known = np.ones(len(outputs[0]), np.bool_)
    for output_N in outputs:
        known &= np.isfinite(output_N.reshape(len(output_N), -1)).all(axis=1)
    if not known.any():
        return 0, 0
    a, b = (task.predict(torch.from_numpy(output_N[known]))["prediction"] for output_N in outputs)
    differs = (a != b).reshape(len(a), -1).any(dim=1)
    return len(a), int(differs.sum())
