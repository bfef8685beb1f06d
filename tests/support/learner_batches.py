"""A model of two features and three classes, and batches that it learns."""

import json

import numpy as np
import torch
from torch import nn

FIELDS = {
    "features": {"x": {"dtype": "float32", "shape": [2]}, "n": {"dtype": "int64"}},
    "label": {"name": "y", "classes": 3},
}


class Model(nn.Module):
    """Takes both features."""

    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, classes))

    def forward(self, x, n):
        return self.body(torch.cat([x, n.float().unsqueeze(-1)], dim=1))


def model_of(classes=3):
    """Return the model with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Model(classes)


def batches(count, seed=0):
    """Return batches of 64 events whose class is the third of the plane in which `x` is."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        y = random.integers(0, 3, 64)
        angle = 2 * np.pi * (y + random.uniform(0.1, 0.9, 64)) / 3
        x = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32) * 3
        made.append({"x": x, "n": random.integers(0, 2, 64), "y": y})
    return made


def as_lines(made):
    """Yield the events of batches as JSON lines."""
    for batch in made:
        for x, n, y in zip(batch["x"].tolist(), batch["n"].tolist(), batch["y"].tolist(), strict=True):
            yield json.dumps({"x": x, "n": n, "y": y})
