"""The model of the example pipeline. Replace `build` by your own: any function that returns an nn.Module."""

from torch import nn


def build(hidden: int = 128) -> nn.Module:
    """Return a small classifier: features float32 [B, 64] in, logits [B, 10] out."""
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10))
