"""A network over embeddings of the categories and the scaled numbers."""

import torch
from torch import Tensor, nn


class Outcome(nn.Module):
    def __init__(self, products: int, width: int) -> None:
        super().__init__()
        self.product = nn.Embedding(products, 16)
        self.channel = nn.Embedding(3 + 1, 4)  # a vocabulary of 3, and row 0 for any other string
        self.scale = nn.BatchNorm1d(3)  # learns the scale of the numbers from the stream
        self.head = nn.Sequential(nn.Linear(16 + 4 + 3, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, product: Tensor, channel: Tensor, numbers: Tensor) -> Tensor:
        parts = [self.product(product), self.channel(channel), self.scale(numbers)]
        return self.head(torch.cat(parts, dim=1))


def build(products: int, width: int) -> nn.Module:
    """Return the classifier: product int64 [B], channel int64 [B], numbers float32 [B, 3] in, logits [B, 3] out."""
    return Outcome(products, width)
