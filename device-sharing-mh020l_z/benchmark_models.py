"""Models that the benchmarks train, as a pipeline file names them: this file is copied into its folder.

Legend: B events, F numbers of an event, C columns of categories, D dimensions of an embedding.
"""

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp(widths: Sequence[int]) -> nn.Module:
    """Layers of these widths with ReLU between them: the first is that of the features, the last the classes.

    Weights are uniform by Glorot and Bengio 2010 and biases 0, as where the published figures come from: with torch's
    own smaller weights ER is two points worse on Split-MNIST at a learning rate of 0.01.
    """
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        linear = nn.Linear(before, after)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class LowRank(nn.Module):
    """A frozen layer, and a trained product of two small matrices that is added to it (LoRA: Hu et al. 2021)."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = linear.requires_grad_(False)
        self.lora_a = nn.Linear(linear.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both."""
        output: Tensor = self.base_layer(x) + self.lora_b(self.lora_a(x))
        return output


def adapted_mlp(widths: Sequence[int], rank: int) -> nn.Module:
    """The layers of `mlp`, frozen, each but the last with a trained product of this rank."""
    layers = list(mlp(widths))
    return nn.Sequential(
        *(LowRank(layer, rank) if isinstance(layer, nn.Linear) else layer for layer in layers[:-1]), layers[-1]
    )


def pixels_mlp(widths: Sequence[int]) -> nn.Module:
    """The same on pixels, integers 0 to 255, as fractions of 255."""
    return nn.Sequential(Fractions(), mlp(widths))


class Fractions(nn.Module):
    """Pixels as fractions of 255."""

    def forward(self, x: Tensor) -> Tensor:
        """Return float32 for any numbers."""
        return x.float() / 255


def convnet(channels: int = 16) -> nn.Module:
    """Two convolutions over images of 28 x 28 in rows of 784, and a linear layer to ten classes."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * 49, 10),
    )


class Tabular(nn.Module):
    """Numbers brought to about the same size, categories embedded, and layers over both."""

    def __init__(
        self, middle: Sequence[float], scale: Sequence[float], categories: Sequence[int], hidden: int, classes: int
    ) -> None:
        super().__init__()
        self.register_buffer("middle", torch.tensor(middle))
        self.register_buffer("scale", torch.tensor(scale))
        dims = [min(16, 2 + count // 4) for count in categories]
        self.embeddings = nn.ModuleList(nn.Embedding(count, dim) for count, dim in zip(categories, dims, strict=True))
        self.body = mlp([len(middle) + sum(dims), hidden, hidden, classes])

    def forward(self, num: Tensor, cat: Tensor | None = None) -> Tensor:
        """Return logits `[B, C]` for numbers `[B, F]` and, where there are any, categories, int64 `[B, C]`."""
        parts = [((num - self.middle) / self.scale).clamp(-5, 5)]  # what is missing is far off
        if cat is not None:
            parts += [embed(cat[:, column]) for column, embed in enumerate(self.embeddings)]
        logits: Tensor = self.body(torch.cat(parts, dim=1))
        return logits


def tabular(
    middle: Sequence[float], scale: Sequence[float], categories: Sequence[int], hidden: int = 64, classes: int = 2
) -> nn.Module:
    """Make a `Tabular`."""
    return Tabular(middle, scale, categories, hidden, classes)


class Averaged(nn.Module):
    """A model that keeps an average of its weights and predicts with it.

    Each forward pass in training adds the weights to the average, with a factor that falls from 1 to `1 - decay`: an
    average over about the last `1 / parts` of the steps, until that reaches `1 / (1 - decay)` steps. The idea
    is the slow model of CLS-ER (Arani et al. 2022) without its part in the loss, older as Polyak's averaging.
    """

    def __init__(self, body: nn.Module, decay: float, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.body = body
        self.average = _with_buffers(copy.deepcopy(body))
        self.least = 1 - decay
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the weights in training, and of their average otherwise."""
        if not self.training:
            averaged: Tensor = self.average(x)
            return averaged
        with torch.no_grad():
            factor = (self.parts / (self.parts + self.steps)).clamp_min(self.least)
            for name, weight in self.body.named_parameters():
                self.average.get_buffer(name).lerp_(weight, factor.to(weight.dtype))
            self.steps += 1
        logits: Tensor = self.body(x)
        return logits


def _with_buffers(module: nn.Module) -> nn.Module:
    """Make buffers of all parameters: a learner refuses passes that change frozen parameters."""
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            part.register_buffer(name, weight.detach().clone())
    return module


class Shifted(nn.Module):
    """Images of 28 x 28 in rows of 784; in training each is shifted at random, by up to `most` pixels either way."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        """Return images `[B, 784]`, of the dtype of those that it takes; what is shifted in is 0."""
        if not self.training:
            return x
        padded = functional.pad(x.reshape(-1, 28, 28), (self.most,) * 4)
        begin = torch.randint(0, 2 * self.most + 1, (2, len(x), 1), device=x.device) + torch.arange(28, device=x.device)
        event = torch.arange(len(x), device=x.device)[:, None, None]
        return padded[event, begin[0, :, :, None], begin[1, :, None]].flatten(1)


def averaged_pixels_mlp(widths: Sequence[int], decay: float = 0.999, parts: int = 9, shift: int = 0) -> nn.Module:
    """Make a `pixels_mlp` that predicts with the average of its weights, and in training shifts images by up to `shift`
    pixels."""
    body = pixels_mlp(widths)
    return Averaged(nn.Sequential(Shifted(shift), body) if shift else body, decay, parts)


def text_student(
    path: str, classes: int, layers: int, last_width: int, parts: int, *, config_folder: Path
) -> nn.Module:
    """The first layers of a pretrained encoder of texts, and a new linear layer on their pooled output.

    The last of the layers keeps `last_width` neurons of its feed-forward part. The model predicts with the average of
    its weights over about the last `1 / parts` of the steps.
    """
    from anabranch.pretrained import sequence_classifier

    model = sequence_classifier(path, classes, config_folder=config_folder)
    stack = model.get_submodule("encoder.model.encoder")
    stack.layer = stack.get_submodule("layer")[:layers]  # type: ignore[index]
    last = stack.layer[-1]
    last.intermediate.dense, last.output.dense = narrowed(last.intermediate.dense, last.output.dense, last_width)
    return Averaged(model, 0.999, parts)


def narrowed(first: nn.Linear, second: nn.Linear, width: int) -> tuple[nn.Linear, nn.Linear]:
    """Return two layers with only those neurons between them whose weights before and after are the largest."""
    sizes = first.weight.norm(dim=1) * second.weight.norm(dim=0)
    kept = sizes.topk(width).indices.sort().values
    narrow_first, narrow_second = nn.Linear(first.in_features, width), nn.Linear(width, second.out_features)
    with torch.no_grad():
        narrow_first.weight.copy_(first.weight[kept])
        narrow_first.bias.copy_(first.bias[kept])
        narrow_second.weight.copy_(second.weight[:, kept])
        narrow_second.bias.copy_(second.bias)
    return narrow_first, narrow_second
