"""A bag of words: the mean of the words' vectors, and a small network on it."""

import torch
from torch import Tensor, nn


class Topics(nn.Module):
    def __init__(self, buckets: int, dim: int, topics: int) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(buckets, dim, mode="sum")
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, topics))

    def forward(self, words: Tensor, length: Tensor) -> Tensor:
        positions = torch.arange(words.shape[1], device=words.device)
        is_word = positions < length[:, None]  # the others are padding
        weights = is_word.to(self.words.weight.dtype) / length[:, None]
        return self.head(self.words(words, per_sample_weights=weights))


def build(buckets: int, dim: int, topics: int) -> nn.Module:
    """Return the classifier: words int64 [B, W] and length int64 [B] in, logits [B, topics] out."""
    return Topics(buckets, dim, topics)
