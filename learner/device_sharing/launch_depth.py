"""Limits how far the host runs ahead of a CUDA device: queued work cannot be cancelled."""

from collections import deque

import torch

MOST_AHEAD = 2
"""Micro-batches that are queued on the device at a time."""


class LaunchLimiter:
    """Limits the micro-batches that are queued on a CUDA device; does nothing on a CPU. Used by the training thread."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: deque[torch.cuda.Event] = deque()

    def wait(self) -> None:
        """Wait until at most `MOST_AHEAD` micro-batches are queued, including the next one; call it before each."""
        if self._cuda:
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record()
            self._marks.append(mark)
            while len(self._marks) >= MOST_AHEAD:
                self._marks.popleft().synchronize()

    def drain(self) -> None:
        """Wait until nothing is queued."""
        while self._marks:
            self._marks.popleft().synchronize()
