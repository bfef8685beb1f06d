"""Write events.jsonl: scikit-learn's handwritten digits, two classes at a time.

The 1,797 images come in with the package, nothing is downloaded. Each is written eight times, shifted by up to a pixel
and with noise. First come all events of the classes 0 and 1, then those of 2 and 3, and so on: no class comes back.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

COPIES = 8
CLASSES_AT_A_TIME = 2
NOISE = 0.05


def digits() -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(0)
    data = load_digits()
    padded = np.pad(data.images / 16, ((0, 0), (1, 1), (1, 1)))
    for first in range(0, 10, CLASSES_AT_A_TIME):
        images = np.flatnonzero((data.target >= first) & (data.target < first + CLASSES_AT_A_TIME))
        for image in random.permutation(np.repeat(images, COPIES)):
            pixels = varied(padded[image], random)
            yield {"image": int(image), "pixels": pixels.round(3).tolist(), "digit": int(data.target[image])}


def varied(padded: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return an image [8, 8] shifted by up to a pixel each way, with noise, in 0..1; it is given with a margin."""
    down, right = random.integers(0, 3, size=2)
    shifted = padded[down : down + 8, right : right + 8]
    return np.clip(shifted + random.normal(0.0, NOISE, (8, 8)), 0.0, 1.0)


def main() -> None:
    with Path("events.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(digit) + "\n" for digit in digits())


if __name__ == "__main__":
    main()
