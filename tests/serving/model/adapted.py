"""A served model with an adapter, whose versions a test writes."""

import numpy as np
import torch

from anabranch.learner.model.factory import build_on_device
from anabranch.learner.model.trained_set import trained_state, write_base
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.versions.format import reference_to
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.model.loaded_version import load_version

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

    def __init__(self, publisher, folder, precision):
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

    def weights(self, seed):
        """Return adapters that are trained, as it were."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: 0.1 * torch.randn(value.shape, generator=generator)
            for name, value in trained_state(self.module).items()
        }

    def publish(self, number, weights, **changes):
        return self.publisher.publish(
            number, weights, **{"base": self.base, "model": reference_to(self.settings), **changes}
        )

    def load(self, number):
        return load_version(self.deployment, self.deployment.versions.manifest(number), 8)
