"""What versions of a model with experts have in common: frozen experts, and how large one is."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from learner.model.growing.parts import POOL, parts_in, pool_of
from learner.state_dir.version import Versions


def frozen_parts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the frozen experts, each with one row an expert."""
    layers = {name: value for name, value in weights.items() if name.startswith(f"{POOL}.layers.")}
    stacked = {name: value for name, value in layers.items() if ".open_" not in name}
    return {**stacked, f"{POOL}.shift": weights[f"{POOL}.shift"]}


def changed_numbers(state_dir: Path) -> tuple[int, int]:
    """Return how many numbers of experts differ in the last version from any version since they were frozen, and how
    many versions had a frozen expert."""
    versions = Versions(state_dir / "versions")
    every = [versions.weights(versions.manifest(number)) for number in versions.numbers()]
    last, changed, compared = frozen_parts(every[-1]), 0, 0
    for weights in every[:-1]:
        compared += parts_in(weights) > 1
        for name, value in frozen_parts(weights).items():
            changed += int((value != last[name][: len(value)]).sum())
    return changed, compared


def part_sizes(model: nn.Module) -> tuple[float, float]:
    """Return the parameters of an expert, and these with its class means in the router, as fractions of the model
    without experts."""
    pool = pool_of(model)
    assert pool is not None
    base = sum(each.numel() for name, each in model.named_parameters() if not name.startswith(POOL))
    own = sum(each.numel() for name, each in pool.named_parameters() if "open_" in name)
    of_router = sum(each.numel() for each in pool.router.parameters())
    largest = int(torch.bincount(pool.router.owner).max())
    return own / base, (own + of_router * largest / len(pool.router.owner)) / base
