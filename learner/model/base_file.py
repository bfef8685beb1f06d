"""Writes the base of a module, before the first version or checkpoint that names it."""

import logging

from torch import nn

from learner.model.trained_set import base_state
from learner.state_dir.bases import Bases
from learner.state_dir.safetensors_file import digest_of, pieces_one_by_one

log = logging.getLogger(__name__)


def base_digest(module: nn.Module) -> str | None:
    """Return the SHA-256 of the file of a module's base; None where it has none."""
    tensors = base_state(module)
    return digest_of(pieces_one_by_one(tensors)) if tensors else None


def write_base(bases: Bases, module: nn.Module) -> str | None:
    """Write the base of a module unless it is there and intact, and return its SHA-256; None where it has no base.

    Raises:
        OSError: it cannot be written, or the one that is there cannot be read.
    """
    sha256 = base_digest(module)
    if sha256 is not None and not bases.is_intact(sha256):
        tensors = base_state(module)
        bases.write(sha256, pieces_one_by_one(tensors))
        size = sum(tensor.nbytes for tensor in tensors.values())
        log.info("the frozen weights of the model, %.1f MB, are in %s", size / 1e6, bases.path / sha256)
    return sha256
