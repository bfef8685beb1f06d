"""Handles a device that ran out of memory: smaller micro-batches; `anabranch.core.failures` detects it."""

import logging

import torch
from torch import Tensor

from anabranch.core.errors import SettingsError
from learner.errors import RankTooLargeError

log = logging.getLogger(__name__)


def halve_micro_batch(rows: int, max_rows: int | None, device: torch.device, ranks: int, said: str) -> int:
    """Return half the size of the micro-batch that did not fit, and log an error.

    Args:
        rows: events of the step.
        max_rows: largest micro-batch until now; None: all of a step.
        device: on which memory ran out.
        ranks: how many train together.
        said: the error message.

    Raises:
        SettingsError: not even a few events fit.
        RankTooLargeError: there are other ranks, which wait for this one in the middle of their passes.
    """
    now = min(rows, max_rows or rows)
    if now // 2 < 2:
        raise SettingsError(
            f"model.factory: {device} runs out of memory with {now} events at once; take a smaller model, "
            f"learner.activation_checkpointing, or another learner.device: {said}"
        )
    log.info("what %s said: %s", device, said)
    if ranks > 1:
        raise RankTooLargeError(now // 2, oom_warning(device, now // 2))
    log.error("%s", oom_warning(device, now // 2))
    return now // 2


def oom_warning(device: torch.device, rows: int) -> str:
    """Return one sentence about the smaller micro-batches and the setting for them."""
    return (
        f"{device} ran out of memory: from now on {rows} events go through the model at once, with the same gradient; "
        f"learner.micro_batch_size = {rows} does so from the start"
    )


class RngSnapshot:
    """Snapshot of torch's RNG state on the CPU and one device, for retrying a failed pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda: Tensor | None = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back(self) -> None:
        """Restore the snapshot."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


def release(device: torch.device) -> None:
    """Free memory that torch's allocator caches."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
