"""The random generators that a model or a sampler may use, as plain values for a cut."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def rng_tensors() -> dict[str, Tensor]:
    """Return the states of torch's generators: the CPU's, and every CUDA device's."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def rng_values() -> dict[str, Any]:
    """Return the states of Python's and numpy's global generators as JSON values."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }


def restore_rng(tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Put all generators back; those of CUDA devices that are not there are left out."""
    torch.set_rng_state(tensors["cpu"])
    for name, state in tensors.items():
        device, _, index = name.partition(".")
        if device == "cuda" and torch.cuda.is_available() and int(index) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, int(index))
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = values["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, cached))
