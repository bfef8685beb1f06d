"""Streams on which memories are compared: each brings its events unevenly in another way.

Legend: N events of a stream, C classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anabranch.ingest.events.block import Array
from benchmarks.harness.pipeline import BrokenRunError, Outcome

EVENTS = 12_000
"""Of each stream, or fewer."""
MODEL = {"factory": "averaged_pixels_mlp", "args": {"widths": [784, 100, 100, 10]}, "embedding": "body.1.3"}
"""It predicts with the average of its weights: the last ones alone differ by two points between equal runs."""
_REGIMES = 4
_REGIME_EVENTS = 1000
_WRONG_FRACTION = 0.3
_LONGEST_BURST = 500
_TAIL = (2500, 0.01)
"""Events of the most frequent class, and the fraction of it that the rarest has."""

Images = tuple[Array, NDArray[np.int64]]
"""Pixels, uint8 `[N, 784]`, and labels."""


@dataclass(frozen=True)
class MemoryStream:
    """A stream of one seed.

    Attributes:
        columns: the features.
        label: int64 `[N]`.
        classes: C.
        model: the section `[model]`.
        score: of a learner that has trained on it, in per cent.
    """

    columns: Mapping[str, Array]
    label: NDArray[np.int64]
    classes: int
    model: Mapping[str, Any]
    score: Callable[[Outcome], float]


def class_incremental(train: Images, test: Images, seed: int) -> MemoryStream:
    """Two digits after one another, five times; the mean accuracy over digits at the end."""
    x, y = _some(train, seed, EVENTS)
    order = np.argsort(y // 2, kind="stable")
    return _images(x[order], y[order], test)


def long_tailed(train: Images, test: Images, seed: int) -> MemoryStream:
    """Digits in random order, the rarest a hundredth as often as the most frequent; the mean accuracy over digits."""
    generator, (x, y) = np.random.default_rng(seed), train
    most, least = _TAIL
    parts = [
        generator.permutation(np.flatnonzero(y == digit))[: int(most * least ** (rank / 9))]
        for rank, digit in enumerate(generator.permutation(10))
    ]
    order = generator.permutation(np.concatenate(parts))
    return _images(x[order], y[order], test)


def bursts(train: Images, test: Images, seed: int) -> MemoryStream:
    """Each image from 5 to 500 times with other noise, most of them seldom; the mean accuracy over digits."""
    generator, (x, y) = np.random.default_rng(seed), train
    lengths = np.minimum(5 / (1 - generator.random(EVENTS)), _LONGEST_BURST).astype(np.int64)
    images = generator.permutation(len(y))[:EVENTS]
    order = np.repeat(images, lengths[: len(images)])[:EVENTS]
    noise = generator.normal(0, 12, (len(order), 784)) * (x[order] > 0)
    return _images(np.clip(x[order] + noise, 0, 255).astype(np.uint8), y[order], test)


def recurring(train: Images, test: Images, seed: int) -> MemoryStream:
    """Images rotated by a quarter more after each 1,000, three times around; the mean accuracy over rotations."""
    x, y = _some(train, seed, EVENTS)
    turns = np.arange(len(y)) // _REGIME_EVENTS % _REGIMES
    for turn in range(_REGIMES):
        x[turns == turn] = _rotated(x[turns == turn], turn)
    all_turns = np.concatenate([_rotated(test[0], turn) for turn in range(_REGIMES)])
    return _images(x, y, (all_turns, np.tile(test[1], _REGIMES)))


def label_noise(train: Images, test: Images, seed: int) -> MemoryStream:
    """As `class_incremental`, with three of ten labels replaced by a random one."""
    clean, generator = class_incremental(train, test, seed), np.random.default_rng(seed + 100)
    events = len(clean.label)
    wrong = generator.random(events) < _WRONG_FRACTION
    label = np.where(wrong, generator.integers(0, 10, events), clean.label)
    return MemoryStream(clean.columns, label, clean.classes, clean.model, clean.score)


IMAGES: dict[str, Callable[[Images, Images, int], MemoryStream]] = {
    "class_incremental": class_incremental,
    "long_tailed": long_tailed,
    "bursts": bursts,
    "recurring": recurring,
    "label_noise": label_noise,
}
"""Streams out of MNIST."""


def natural(columns: Mapping[str, Array], label: NDArray[np.int64], model: Mapping[str, Any]) -> MemoryStream:
    """A stream with natural drift: the accuracy over the whole stream, of predictions before training on them."""
    return MemoryStream(columns, label, 2, {**model, "embedding": "body.3"}, lambda outcome: 100 * prequential(outcome))


def prequential(outcome: Outcome) -> float:
    """Return the accuracy over the whole stream, of predictions made before training on them."""
    if "overall" not in outcome.report.accuracy:
        raise BrokenRunError("the learner's report has no accuracy over the whole stream")
    return outcome.report.accuracy["overall"]


def _some(train: Images, seed: int, n: int) -> Images:
    """Return n images in the order of the seed."""
    order = np.random.default_rng(seed).permutation(len(train[1]))[:n]
    return train[0][order], train[1][order]


def _rotated(x: Array, quarters: int) -> Array:
    return np.rot90(x.reshape(-1, 28, 28), quarters, (1, 2)).reshape(len(x), 784)


def _images(x: Array, y: NDArray[np.int64], test: Images) -> MemoryStream:
    def score(outcome: Outcome) -> float:
        with torch.no_grad():
            right = outcome.model(torch.from_numpy(np.ascontiguousarray(test[0]))).argmax(dim=1).numpy() == test[1]
        return 100 * float(np.mean([right[test[1] == digit].mean() for digit in range(10)]))

    return MemoryStream({"x": np.ascontiguousarray(x)}, y, 10, MODEL, score)
