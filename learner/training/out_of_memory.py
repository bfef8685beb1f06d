"""Handles a device that ran out of memory: smaller micro-batches; `anabranch.core.failures` detects it."""

import logging

import torch

from anabranch.core.errors import SettingsError
from learner.errors import RankTooLargeError

log = logging.getLogger(__name__)


def halve_micro_batch(rows: int, max_rows: int | None, device: torch.device, ranks: int, message: str) -> int:
    """Return half the size of the micro-batch that did not fit, and log an error.

    Args:
        rows: events of the step.
        max_rows: largest micro-batch until now; None: all of a step.
        device: on which memory ran out.
        ranks: how many train together.
        message: the error message.

    Raises:
        SettingsError: not even a few events fit.
        RankTooLargeError: there are other ranks, which wait for this one in the middle of their passes.
    """
    now = min(rows, max_rows or rows)
    half = now // 2
    if half < 2:
        raise SettingsError(
            f"model.factory: {device} runs out of memory with {now} events at once; take a smaller model, "
            f"learner.activation_checkpointing, or another learner.device: {message}"
        )
    log.info("the error of %s: %s", device, message)
    if ranks > 1:
        raise RankTooLargeError(half, oom_warning(device, half))
    log.error("%s", oom_warning(device, half))
    return half


def oom_warning(device: torch.device, rows: int) -> str:
    """Return one sentence about the smaller micro-batches and the setting for them."""
    return (
        f"{device} ran out of memory: from now on {rows} events go through the model at once, with the same gradient; "
        f"learner.micro_batch_size = {rows} does so from the start"
    )


def release(device: torch.device) -> None:
    """Free memory that torch's allocator caches."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
