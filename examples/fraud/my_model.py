"""A network over embeddings of merchant and country, and the scaled numbers."""

import torch
from torch import Tensor, nn


class Fraud(nn.Module):
    def __init__(self, merchants: int, width: int) -> None:
        super().__init__()
        self.merchant = nn.Embedding(merchants, 8)
        self.country = nn.Embedding(4 + 1, 2)  # a vocabulary of 4, and row 0 for any other string
        self.scale = nn.BatchNorm1d(2)  # learns the scale of the numbers from the stream
        self.head = nn.Sequential(nn.Linear(8 + 2 + 2 + 1, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, merchant: Tensor, country: Tensor, numbers: Tensor, abroad: Tensor) -> Tensor:
        parts = [self.merchant(merchant), self.country(country), self.scale(numbers), abroad.float().unsqueeze(1)]
        return self.head(torch.cat(parts, dim=1))


def build(merchants: int, width: int) -> nn.Module:
    """Return the classifier: merchant, country int64 [B], numbers float32 [B, 2], abroad bool [B] in, logits [B, 2]."""
    return Fraud(merchants, width)
