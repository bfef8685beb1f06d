"""The random generators that a model or a sampler may use, as plain values for a checkpoint."""

import ctypes
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator
from torch import Tensor

_TWISTER_BYTES = 4 * 624 + 4
"""Of the state of a Mersenne twister: its words, and the position of the next one."""


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


class GeneratorStates:
    """The states of all generators at one moment; much faster than plain values."""

    def __init__(self, device: torch.device, before: "GeneratorStates | None" = None) -> None:
        """Take them; `before`: earlier ones, after which nothing else was restored."""
        self._device = device
        self._cpu, self._python = torch.get_rng_state(), random.getstate()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        unused = before is not None and before._numpy.unused
        self._numpy: _NumpyState = before._numpy if before is not None and unused else _NumpyState()
        self._numpy.is_of_both = unused

    def restore(self) -> None:
        """Restore all generators as they were."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        random.setstate(self._python)
        self._numpy.restore()


class _NumpyState:
    """The state of numpy's global generator: numpy takes 50 us to read it, and as long to write it."""

    def __init__(self) -> None:
        self._state: Any = np.random.get_state(legacy=True)
        self._memory = _twister_memory()
        self.is_of_both = False
        """Whether the generator had this state before a step and after it, so that no other one was restored since."""

    @property
    def unused(self) -> bool:
        """Whether no number was taken since: none that was kept, of a pair of normal ones, nor one that was made."""
        return self._memory is not None and not self._state[3] and self._memory == _twister_memory()

    def restore(self) -> None:
        if not (self.is_of_both and self.unused):
            np.random.set_state(self._state)


def _twister_memory() -> bytes | None:
    """Return the memory of numpy's global generator, in a microsecond; None where it is no Mersenne twister."""
    generator = get_bit_generator()
    if not isinstance(generator, np.random.MT19937):
        return None
    return ctypes.string_at(generator.ctypes.state_address, _TWISTER_BYTES)


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
