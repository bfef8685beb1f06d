"""A small model for tests of split models."""

from itertools import pairwise

import torch
from torch import nn


def mlp(*widths):
    """Return layers from 3 features by `widths`, 16 without any, to 3 classes; always with the same weights."""
    torch.manual_seed(0)
    sizes = [*pairwise((3, *(widths or (16,)), 3))]
    return nn.Sequential(*(module for size in sizes for module in (nn.Linear(*size), nn.Tanh())))[:-1]
