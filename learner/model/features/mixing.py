"""Hashes of 64-bit integers, in torch, so that a pass on any device gives what the host has."""

import torch
from torch import Tensor

_ADDED = -7046029254386353131  # 0x9E3779B97F4A7C15
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mixed(key: Tensor) -> Tensor:
    """Return the hash of each int64, by the finalizer of SplitMix64 (Steele, Lea & Flood 2014)."""
    key = key + _ADDED
    key = (key ^ _shifted(key, 30)) * _FIRST
    key = (key ^ _shifted(key, 27)) * _SECOND
    return key ^ _shifted(key, 31)


def crossed(keys: list[Tensor]) -> Tensor:
    """Return one hash for what several int64 tensors of one shape have together, in their order."""
    together = torch.zeros_like(keys[0])
    for key in keys:
        together = mixed(together * _SECOND + key)
    return together


def _shifted(key: Tensor, bits: int) -> Tensor:
    """Shift to the right as if the integers had no sign."""
    return (key >> bits) & ((1 << (64 - bits)) - 1)
