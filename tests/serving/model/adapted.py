"""A served model with an adapter, whose versions a test writes."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.config import ModelSettings
from learner.model.base_file import write_base
from learner.model.factory import build_on_device
from learner.model.trained_set import trained_state
from learner.state_dir.bases import bases_in
from learner.state_dir.version import reference_to
from serving.model.deployment import Deployment
from serving.model.loaded_version import ServedVersion, load_version

MODEL = """
import torch
from torch import nn


def build():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    return Net(body, nn.Linear(64, 3))


class Net(nn.Module):
    def __init__(self, body, head):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x):
        return self.head(self.body(x))
"""
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


class Adapted:
    """A served model with an adapter, whose versions the test writes."""

    def __init__(self, publisher: Any, folder: Path, precision: str) -> None:
        (folder / "anabranch_adapted_model.py").write_text(MODEL)
        self.publisher = publisher
        plain: Deployment = publisher.deployment
        self.settings = ModelSettings.model_validate(
            {
                "factory": "anabranch_adapted_model:build",
                "adapter": {"rank": 2, "train": ["head"], "base_precision": precision},
            }
        )
        self.deployment = Deployment(
            plain.name, plain.schema, self.settings, folder, plain.state_dir, torch.device("cpu")
        )
        self.module = build_on_device(self.settings, folder, torch.device("cpu")).eval()
        self.base = write_base(bases_in(plain.state_dir), self.module)

    def weights(self, seed: int) -> dict[str, Tensor]:
        """Return adapters that are trained, as it were."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: 0.1 * torch.randn(value.shape, generator=generator)
            for name, value in trained_state(self.module).items()
        }

    def publish(self, number: int, weights: dict[str, Tensor], **changes: Any) -> Path:
        return self.publisher.publish(
            number, weights, **{"base": self.base, "model": reference_to(self.settings), **changes}
        )

    def load(self, number: int) -> ServedVersion:
        return load_version(self.deployment, self.deployment.versions.manifest(number), 8)
