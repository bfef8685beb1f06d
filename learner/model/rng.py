"""The random generators that a model or a sampler may use, as plain values for a checkpoint."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_rng(seed: int, *, python: bool) -> None:
    """Seed torch's generators; `python`: Python's and numpy's too, on which the ranks of a row group have to agree."""
    torch.manual_seed(seed)
    if python:
        random.seed(seed)
        np.random.seed(seed % 2**32)


def rng_tensors(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's generators: the CPU's, and as `cuda` the device's if it is a CUDA device."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":  # not those of all devices: a learner on the CPU must not initialize CUDA
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def generators_now(device: torch.device) -> Callable[[], None]:
    """Return what restores all generators as they are now; much faster than plain values."""
    cpu, python, legacy = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore() -> None:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        random.setstate(python)
        np.random.set_state(legacy)

    return restore


def rng_values() -> dict[str, Any]:
    """Return the states of Python's and numpy's global generators as JSON values."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
    }


def restore_rng(tensors: Mapping[str, Tensor], values: Mapping[str, Any], device: torch.device) -> None:
    """Restore all generators; that of a CUDA device if this process computes on one, whatever its number."""
    torch.set_rng_state(tensors["cpu"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = values["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), position, has_gauss, cached))
