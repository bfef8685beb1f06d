"""The demo's stream: scikit-learn's handwritten digits, shifted and noisy so that it can be long, class after class.

Legend: R images of the data set, 64 pixels each, in the order of rows.
"""

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anabranch.core.errors import SettingsError

CLASSES = 10
ENDLESS_PHASE = 2_000
"""Events of a class in a row where the stream has no end."""
MALFORMED_EVERY = 1_000
POISONED_EVENTS = 3_000
"""Events in a row whose labels are wrong, where the stream has no end: five seconds at the default rate."""
POISONED_FROM = 30_000
"""Events before them: by then the gate has enough held-out events to decide."""
SWAPPED_LABELS = (4, 9)
"""The digits of a poisoned phase, each labelled as the other."""
POISONED_EVERY = 90_000
"""Events between the beginnings of two poisoned phases."""
_HELD_OUT_FRACTION = 0.2
_NOISE = 0.06

Images = NDArray[np.float32]


@dataclass(frozen=True)
class Digits:
    """Pixels float32 `[R, 64]` in 0..1 and labels int64 `[R]`, in two parts that share no image."""

    stream_pixels: Images
    stream_labels: NDArray[np.int64]
    request_pixels: Images
    request_labels: NDArray[np.int64]


@dataclass(frozen=True)
class Message:
    """One message of the stream, and the class that the stream is at."""

    value: bytes
    phase: int
    malformed: bool = False
    poisoned: bool = False
    """Whether its label is wrong on purpose."""


def load_digits(seed: int) -> Digits:
    """Load the data set from scikit-learn's wheel, and set a fifth of it aside for requests.

    Raises:
        SettingsError: scikit-learn is not installed.
    """
    sklearn = importlib.util.find_spec("sklearn")
    if sklearn is None or sklearn.origin is None:
        raise SettingsError("the demo's data is not installed: pip install 'anabranch[embedded]'")
    # Read as scikit-learn does; to import it, with scipy, takes a second and a half.
    rows = np.loadtxt(Path(sklearn.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    pixels = (rows[:, :-1] / 16).astype(np.float32)
    labels = rows[:, -1].astype(np.int64)
    order = np.random.default_rng(seed).permutation(len(labels))
    asked, streamed = np.split(order, [int(len(order) * _HELD_OUT_FRACTION)])
    return Digits(pixels[streamed], labels[streamed], pixels[asked], labels[asked])


def messages(digits: Digits, seed: int, events: int | None) -> Iterator[Message]:
    """Yield the stream: `events` messages in ten phases of one class; without `events` it repeats and has no end.

    One message in a thousand is malformed, in ways that take turns. A stream without end has poisoned phases, in which
    two digits have each other's label: the gate has to refuse what is trained on them. The same seed gives the same
    stream.
    """
    rng = np.random.default_rng(seed + 1)
    rows_of = [np.flatnonzero(digits.stream_labels == label) for label in range(CLASSES)]
    for number in count() if events is None else range(events):
        phase = number // ENDLESS_PHASE % CLASSES if events is None else number * CLASSES // events
        poisoned = events is None and is_poisoned(number)
        digit = int(rng.choice(SWAPPED_LABELS)) if poisoned else phase
        image = vary(digits.stream_pixels[rng.choice(rows_of[digit])], rng)
        label = sum(SWAPPED_LABELS) - digit if poisoned else digit
        malformed = number % MALFORMED_EVERY == MALFORMED_EVERY // 2
        value = _malformed(image, label, number // MALFORMED_EVERY) if malformed else encode(image, label)
        yield Message(value, phase, malformed, poisoned)


def is_poisoned(number: int) -> bool:
    """Whether the event of this number is in a poisoned phase of a stream without end."""
    return number >= POISONED_FROM and (number - POISONED_FROM) % POISONED_EVERY < POISONED_EVENTS


def vary(image: Images, rng: np.random.Generator) -> Images:
    """Return an image `[64]` shifted by up to a pixel each way, with noise on it, in 0..1."""
    down, right = rng.integers(-1, 2, size=2)
    framed = np.zeros((10, 10), np.float32)
    framed[1:9, 1:9] = image.reshape(8, 8)
    shifted = framed[1 - down : 9 - down, 1 - right : 9 - right].reshape(64)
    noisy = shifted + rng.normal(0, _NOISE, 64)
    return np.clip(noisy, 0, 1).astype(np.float32)


def encode(image: Images, label: int) -> bytes:
    """Return one event of the example pipeline as JSON."""
    return json.dumps({"x": rounded(image), "y": label}, separators=(",", ":")).encode()


def rounded(image: Images) -> list[float]:
    """Return pixels with three decimals, which keeps messages small."""
    return [round(float(value), 3) for value in image]


def _malformed(image: Images, label: int, turn: int) -> bytes:
    pixels = rounded(image)
    kinds = (
        encode(image, label)[:-20],
        json.dumps({"x": pixels[:63], "y": label}).encode(),
        json.dumps({"x": pixels, "y": 12}).encode(),
        json.dumps({"x": [*pixels[:63], "dark"], "y": label}).encode(),
        json.dumps({"y": label}).encode(),
        json.dumps({"x": [*pixels[:63], 1e999], "y": label}).encode(),
    )
    return kinds[turn % len(kinds)]
