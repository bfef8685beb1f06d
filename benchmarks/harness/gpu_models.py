"""The models of the GPU benchmark, and the events that they learn.

Legend: B events, H and W pixels of an image.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.settings.model import ModelSettings

CLASSES = 10
_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Width and blocks of each stage of ResNet-50."""
_EXPANSION = 4


@dataclass(frozen=True)
class Workload:
    """A model, and what its learner gets.

    Attributes:
        factory: name of a function of this module.
        shape: of an event's only feature.
        dtype: of that feature.
        batch_size: new events of a step; as many old ones come with them.
        stored: events in the store, on the device.
    """

    factory: str
    args: dict[str, Any]
    shape: tuple[int, ...]
    dtype: str
    batch_size: int
    stored: int

    @property
    def schema(self) -> Schema:
        """The schema of the events."""
        return Schema(self.events)

    @property
    def events(self) -> SchemaSettings:
        """The section `[schema]`."""
        features = {"x": {"dtype": self.dtype, "shape": list(self.shape)}}
        return SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": CLASSES}})

    @property
    def model(self) -> ModelSettings:
        """The section `[model]`."""
        return ModelSettings(factory=f"{__name__}:{self.factory}", args=self.args, channels_last=len(self.shape) == 3)


def mlp(widths: Sequence[int]) -> nn.Module:
    """Linear layers of these widths with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Bottleneck(nn.Module):
    """A block of ResNet-50 (He et al. 2016): convolutions of 1, 3 and 1, with a residual connection."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = _EXPANSION * width
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, after, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        same = stride == 1 and before == after
        self.shortcut = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return torch.relu(self.body(x) + self.shortcut(x))


class ConvNet(nn.Module):
    """A convnet of the size of ResNet-50: 16 blocks and 53 convolutions."""

    def __init__(self, divisor: int, blocks: int | None) -> None:
        super().__init__()
        first = 64 // divisor
        layers: list[nn.Module] = [nn.Conv2d(3, first, 7, 2, 3, bias=False), nn.BatchNorm2d(first), nn.ReLU()]
        layers.append(nn.MaxPool2d(3, 2, 1))
        before = first
        for stage, (width, count) in enumerate(_STAGES):
            for index in range(min(count, blocks or count)):
                layers.append(Bottleneck(before, width // divisor, 2 if stage and not index else 1))
                before = _EXPANSION * width // divisor
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[B, 10]` for pixels `[B, 3, H, W]`, integers 0 to 255."""
        logits: Tensor = self.body(x.float() / 255)
        return logits


def convnet(divisor: int = 1, blocks: int | None = None) -> nn.Module:
    """Return the convnet, with all widths divided by `divisor`, and at most `blocks` blocks a stage."""
    return ConvNet(divisor, blocks)


MLP = Workload("mlp", {"widths": [784, 2800, 2600, 200, CLASSES]}, (784,), "float32", 512, 20_000)
"""10 million parameters, events of 3.1 kB."""
CONVNET = Workload("convnet", {}, (3, 224, 224), "uint8", 64, 2_000)
SMALL_MLP = Workload("mlp", {"widths": [784, 16, CLASSES]}, (784,), "float32", 16, 64)
SMALL_CONVNET = Workload("convnet", {"divisor": 16, "blocks": 1}, (3, 32, 32), "uint8", 8, 32)
