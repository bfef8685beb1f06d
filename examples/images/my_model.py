"""A small convolutional network; `embedding` is the layer before the last."""

from torch import Tensor, nn


class Digits(nn.Module):
    def __init__(self, channels: int, dim: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.embedding = nn.Sequential(nn.Linear(2 * channels * 4 * 4, dim), nn.ReLU())
        self.head = nn.Linear(dim, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.embedding(self.body(pixels[:, None])))


def build(channels: int, dim: int) -> nn.Module:
    """Return the classifier: pixels float32 [B, 8, 8] in, logits [B, 10] out."""
    return Digits(channels, dim)
