"""Handles a device that ran out of memory; `anabranch.core.failures` detects it.

A step continues in smaller micro-batches. Where not even those fit, the settings are wrong, or other processes hold the
memory of a shared device for a moment: then the learner waits, and ends with exit code 1 if that takes too long.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch

from anabranch.core.backoff import Backoff
from anabranch.core.errors import SettingsError
from anabranch.core.failures import Failure, failure_of, out_of_memory
from anabranch.learner.errors import MemoryShortageError, RankTooLargeError

_RETRIES = 7
_BACKOFF = Backoff(timedelta(seconds=0.5), timedelta(seconds=8), retry_at_once=True)
"""Half a minute in all, at most."""
_POLL_SECONDS = 0.1
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_REQUESTED = re.compile(r"Tried to allocate ([\d.]+) (\w+)")
_IN_USE = re.compile(r"this process has ([\d.]+) (\w+) memory in use")

_T = TypeVar("_T")

log = logging.getLogger(__name__)


class MemoryUse(NamedTuple):
    """The memory of a CUDA device, in bytes: free now, what this process may use, and what it has reserved."""

    free: int
    limit: int
    own: int


def is_shared(device: torch.device) -> bool:
    """Return whether other processes may use a device's memory, and return it later."""
    return device.type == "cuda"


def memory_use(device: torch.device) -> MemoryUse | None:
    """Return the use of a CUDA device's memory; None where CUDA cannot report it."""
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:
        return None
    limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return MemoryUse(free, limit, torch.cuda.memory_reserved(device))


def memory_error(
    device: torch.device, message: str, advice: str, *, undone: bool
) -> SettingsError | MemoryShortageError:
    """Return the error for work that does not fit on a device.

    Args:
        device: on which memory ran out.
        message: torch's message, which has the size of the request and this process's part.
        advice: a sentence on the setting to change, without the message.
        undone: whether the work has changed nothing, so that it can be repeated.

    Returns:
        SettingsError if this process alone explains it, as it does on a device that only one process uses.
    """
    if not is_shared(device) or explained_by_own(memory_use(device), message):
        return SettingsError(f"{advice}: {message}")
    return MemoryShortageError(_shortage(device, message), undone=undone)


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
        MemoryShortageError: not even a few events fit now, since other processes use the device.
        RankTooLargeError: there are other ranks, which wait for this one in the middle of their passes.
    """
    now = min(rows, max_rows or rows)
    half = now // 2
    if half < 2:
        advice = (
            f"model.factory: {device} runs out of memory with {now} events at once; take a smaller model, "
            "learner.activation_checkpointing, or another learner.device"
        )
        raise memory_error(device, message, advice, undone=ranks == 1)
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


def free_cached_memory(device: torch.device) -> None:
    """Return the blocks that torch's allocator caches to the device, for other processes and larger blocks."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class MemoryRetry:
    """Repeats work that ran out of memory, a few times with a back-off. Used by one thread; any may read `waiting`."""

    def __init__(
        self, device: torch.device, stop: threading.Event, while_waiting: Sequence[Callable[[], object]] = ()
    ) -> None:
        """Take what `stop` ends early, and what is called repeatedly during a wait."""
        self._device = device
        self._stop = stop
        self._while_waiting = while_waiting
        self.waiting: str | None = None
        """One sentence while it waits for memory."""

    def __call__(self, work: Callable[[], _T], *, repeatable: bool = True, undone: bool = True) -> _T:
        """Return the result of `work`.

        Args:
            work: is called again after it ran out of memory.
            repeatable: whether it changes nothing when it runs out of memory; if not, only a MemoryShortageError that
                says so is followed by another call.
            undone: of the MemoryShortageError that this raises.

        Raises:
            MemoryShortageError: there is too little memory still, or the wait was stopped.
            Exception: the error of `work` has another cause.
        """
        message: str | None = None
        for retries in range(_RETRIES + 1):
            if message is not None:  # after the handler of the error, which references tensors
                free_cached_memory(self._device)
                self._wait(_BACKOFF.seconds_after(retries), message)
            try:
                return work()
            except Exception as exc:
                message = self._shortage(exc, repeatable=repeatable, undone=undone, last=retries == _RETRIES)
                if message is None:
                    raise
        raise AssertionError

    def _shortage(self, error: Exception, *, repeatable: bool, undone: bool, last: bool) -> str | None:
        """Return the message of work that ran out of memory and may be repeated; None for the error of other work.

        `last`: whether it was the last attempt. For the other arguments and errors see `__call__`.
        """
        if not self._is_of_a_moment(error, repeatable=repeatable):
            return None
        message = " ".join(str(error).split())
        if last or self._stop.is_set():
            raise MemoryShortageError(_shortage(self._device, message), undone=undone) from error
        return message

    def _is_of_a_moment(self, error: Exception, *, repeatable: bool) -> bool:
        """Return whether the same work may succeed later."""
        if isinstance(error, MemoryShortageError):
            return error.undone
        if isinstance(error, SettingsError):  # from a part that does not distinguish the cause
            if failure_of(error) is not Failure.MEMORY or not is_shared(self._device):
                return False
            return not explained_by_own(memory_use(self._device), str(error.__cause__))
        return repeatable and out_of_memory(error)

    def _wait(self, seconds: float, message: str) -> None:
        if not seconds:
            return
        self.waiting = f"waits for memory of {self._device}: {message}"
        log.warning("%s is short of memory, the next attempt is in %.1f s: %s", self._device, seconds, message)
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._stop.wait(min(left, _POLL_SECONDS)):
            for call in self._while_waiting:
                call()
        self.waiting = None


def explained_by_own(use: MemoryUse | None, message: str) -> bool:
    """Return whether the request would not fit if this process were the only one on the device."""
    if use is None:
        return False
    return max(use.own, _bytes_in(_IN_USE, message)) + _bytes_in(_REQUESTED, message) > use.limit


def _bytes_in(pattern: re.Pattern[str], message: str) -> int:
    found = pattern.search(message)
    return int(float(found[1]) * _UNITS.get(found[2], 0)) if found is not None else 0


def _shortage(device: torch.device, message: str) -> str:
    """Return a sentence that names what is known about a device without memory."""
    use = memory_use(device) if is_shared(device) else None
    known = ""
    if use is not None:
        known = f": {use.free / 1e9:.2f} GB are free, and this process has reserved {use.own / 1e9:.2f} GB of the "
        known += f"{use.limit / 1e9:.2f} GB that it may use; other processes have the rest"
    return f"{device} has too little memory{known}; the learner ends, and continues from its checkpoint: {message}"
