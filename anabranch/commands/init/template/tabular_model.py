"""A network over the numbers and the words of events, to begin with. Replace `build` by your own."""

import torch
from torch import Tensor, nn


class Tabular(nn.Module):
    def __init__(self, numbers: int, words: dict[str, int], outputs: int, width: int) -> None:
        super().__init__()
        self.names = list(words)
        self.words = nn.ModuleList(nn.Embedding(size, 16) for size in words.values())
        inputs = numbers + 16 * len(words)
        first, second = nn.Linear(inputs, width), nn.Linear(width, width)
        self.body = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(width, outputs))

    def forward(self, *one: Tensor, **features: Tensor) -> Tensor:
        if one:  # a single feature is passed by position
            features = {(self.names or ["x"])[0]: one[0]}
        numbers = [value for name, value in features.items() if name not in self.names]
        # asinh: large values become small ones. shape[0], not len(): an export takes any number of rows.
        parts = [value.float().asinh().reshape(value.shape[0], -1) for value in numbers]
        parts += [embed(features[name]) for name, embed in zip(self.names, self.words, strict=True)]
        outputs: Tensor = self.body(torch.cat(parts, dim=1))
        return outputs


def build(numbers: int, words: dict[str, int], outputs: int, width: int = 64) -> nn.Module:
    """Return the network: `numbers` floats and the ids of words of each event in, `outputs` floats out."""
    return Tabular(numbers, words, outputs, width)
