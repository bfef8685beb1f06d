"""How far two sets of weights are from each other, also where a version has what was learned of features."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from anabranch.learner.extensions.rebuild.distance import distance
from anabranch.learner.model.task import Classification, Regression

KEYS = "learned_features.feature_x.keys"


def between(version, rebuilt):
    model, task = nn.Module(), Classification()
    return distance({"w": version}, {"w": rebuilt}, model, task, lambda _: pytest.fail("there is no holdout set"), {})


def test_tensors_differ_if_their_digests_do():
    zeros = torch.zeros(2, 3)
    assert between(zeros, zeros.clone()).different == 0
    negative = between(zeros, -zeros)
    assert (negative.different, negative.max_abs, negative.relative) == (1, 0.0, 0.0)
    undefined = torch.tensor([1.0, math.nan])
    assert between(undefined, undefined.clone()).different == 0
    assert between(torch.tensor(1), torch.tensor(3)).max_abs == 2.0, "a counter has no dimension"
    assert between(torch.empty(0), torch.empty(0)).different == 0


def test_the_difference_is_relative_to_the_norm_of_the_version():
    found = between(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    assert (found.tensors, found.different, found.max_abs, found.relative) == (1, 1, 0.5, 0.1)
    assert between(torch.zeros(2), torch.ones(2)).relative == math.inf


def between_files(version, rebuilt):
    return distance(version, rebuilt, nn.Identity(), Regression(), lambda _: np.zeros(0, np.float32), {})


def test_hashes_of_ids_do_not_hide_how_far_the_weights_are():
    version = {"a": torch.tensor([3.0, 4.0]), KEYS: torch.full((9,), 2**63 - 1)}
    rebuilt = {"a": torch.tensor([3.0, 4.5]), KEYS: torch.arange(9)}
    found = between_files(version, rebuilt)
    assert (found.tensors, found.different, found.max_abs) == (2, 2, 0.5)
    assert found.relative == pytest.approx(0.1)
    assert found.worst is not None
    assert found.worst.name == "a"
    alone = between_files(version, {**version, KEYS: rebuilt[KEYS]})
    assert (alone.different, alone.relative) == (1, 0.0)
    assert alone.worst is not None
    assert alone.worst.name == KEYS
