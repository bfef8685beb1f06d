"""How far the host runs ahead of a device: what it has queued there cannot be called back."""

from collections import deque

import torch

MOST_AHEAD = 2
"""Micro-batches that are queued on the device at a time."""


class LaunchLimiter:
    """Called by the thread that trains, before each micro-batch. A CPU has no queue, and nothing is done there."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: deque[torch.cuda.Event] = deque()

    def wait(self) -> None:
        """Return when no more than two micro-batches are queued, the one to come counted."""
        if self._cuda:
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record()
            self._marks.append(mark)
            while len(self._marks) >= MOST_AHEAD:
                self._marks.popleft().synchronize()

    def drain(self) -> None:
        """Return when nothing is queued."""
        while self._marks:
            self._marks.popleft().synchronize()
