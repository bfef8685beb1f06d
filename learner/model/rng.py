"""The random generators that a model or a sampler may use, as plain values for a checkpoint."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def rng_tensors(device: torch.device | None = None) -> dict[str, Tensor]:
    """Return the states of torch's generators: the CPU's, and every CUDA device's, or the one's given as `cuda`."""
    states = {"cpu": torch.get_rng_state()}
    if device is not None:
        states |= {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    elif torch.cuda.is_available():
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


def restore_rng(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Restore all generators, except those of missing CUDA devices; `cuda` is the current device."""
    torch.set_rng_state(tensors["cpu"])
    for name, state in tensors.items():
        device, _, index = name.partition(".")
        if device == "cuda" and torch.cuda.is_available():
            number = int(index or torch.cuda.current_device())
            if number < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, number)
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = values["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, cached))
