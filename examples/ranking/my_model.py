"""A network over the embedding of a brand in its category, and the scaled numbers."""

import torch
from torch import Tensor, nn


class Click(nn.Module):
    def __init__(self, brands: int, width: int) -> None:
        super().__init__()
        self.brand = nn.Embedding(brands, 8)
        self.category = nn.Embedding(3 + 1, 8)  # a vocabulary of 3, and row 0 for any other string
        self.scale = nn.BatchNorm1d(3)  # learns the scale of the numbers from the stream
        self.head = nn.Sequential(nn.Linear(3 * 8 + 3, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, category: Tensor, brand: Tensor, numbers: Tensor) -> Tensor:
        category, brand = self.category(category), self.brand(brand)
        return self.head(torch.cat([category, brand, category * brand, self.scale(numbers)], dim=1))


def build(brands: int, width: int) -> nn.Module:
    """Return the classifier: category, brand int64 [B], numbers float32 [B, 3] in, logits [B, 2] out."""
    return Click(brands, width)
