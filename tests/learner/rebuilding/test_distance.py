"""How far weights are from each other, where a version also has what was learned of features."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learner.model.task import Regression
from learner.rebuilding.distance import Distance, distance

KEYS = "learned_features.feature_x.keys"


def between(version: dict[str, Tensor], rebuilt: dict[str, Tensor]) -> Distance:
    return distance(version, rebuilt, nn.Identity(), Regression(), lambda _: np.zeros(0, np.float32), {})


def test_hashes_of_ids_do_not_hide_how_far_the_weights_are() -> None:
    version = {"a": torch.tensor([3.0, 4.0]), KEYS: torch.full((9,), 2**63 - 1)}
    rebuilt = {"a": torch.tensor([3.0, 4.5]), KEYS: torch.arange(9)}
    found = between(version, rebuilt)
    assert (found.tensors, found.different, found.max_abs) == (2, 2, 0.5)
    assert found.relative == pytest.approx(0.1)
    assert found.worst is not None
    assert found.worst.name == "a"
    alone = between(version, {**version, KEYS: rebuilt[KEYS]})
    assert (alone.different, alone.relative) == (1, 0.0)
    assert alone.worst is not None
    assert alone.worst.name == KEYS
