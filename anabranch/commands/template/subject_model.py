"""A network over the numbers and the words of events, to begin with. Replace `build` by your own."""

import torch
from torch import Tensor, nn


class Network(nn.Module):
    def __init__(self, numbers: list[str], words: dict[str, int], outputs: int, width: int) -> None:
        super().__init__()
        self._numbers, self._words = numbers, list(words)
        self.scale = nn.BatchNorm1d(len(numbers)) if numbers else nn.Identity()  # learns the scale from the stream
        self.embeddings = nn.ModuleList(nn.Embedding(size, 8) for size in words.values())
        inputs = len(numbers) + 8 * len(words)
        self.head = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, outputs))

    def forward(self, *one: Tensor, **features: Tensor) -> Tensor:
        if one:  # a single feature is passed by position
            features = {(self._numbers or self._words)[0]: one[0]}
        parts = [embed(features[name]) for embed, name in zip(self.embeddings, self._words, strict=True)]
        if self._numbers:
            parts.append(self.scale(torch.stack([features[name].float() for name in self._numbers], dim=1)))
        outputs: Tensor = self.head(torch.cat(parts, dim=1))
        return outputs


def build(numbers: list[str], words: dict[str, int], outputs: int, width: int = 64) -> nn.Module:
    """Return the network: numbers [B] and ids [B] in, `outputs` floats for each event out."""
    return Network(numbers, words, outputs, width)
