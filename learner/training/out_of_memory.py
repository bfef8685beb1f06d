"""A device that is out of memory: what a step is made smaller by; `anabranch.core.failures` says how it is told."""

import logging

import torch
from torch import Tensor

from anabranch.core.errors import SettingsError
from learner.errors import RankTooLargeError

log = logging.getLogger(__name__)


def smaller(rows: int, most: int | None, device: torch.device, ranks: int, said: str) -> int:
    """Return half of the micro-batch that did not fit, and say so loudly.

    Args:
        rows: events of the step.
        most: events of a micro-batch until now; None: all.
        device: on which memory ran out.
        ranks: how many train together.
        said: its own words.

    Raises:
        SettingsError: not even a few events fit.
        RankTooLargeError: there are other ranks, which wait in the middle of their passes for what does not come.
    """
    now = min(rows, most or rows)
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


def oom_warning(device: torch.device, most: int) -> str:
    """Say what was done about it."""
    return (
        f"{device} ran out of memory: from now on {most} events go through the model at once, with the same gradient; "
        f"learner.micro_batch_size = {most} does so from the start"
    )


class Dice:
    """The state of torch's generators on the CPU and on one device, to throw the same numbers again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda: Tensor | None = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back(self) -> None:
        """Throw from here on what was thrown since."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


def release(device: torch.device) -> None:
    """Give memory back that torch keeps for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
