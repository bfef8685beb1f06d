"""Yields to serving in threads besides the training thread, between chunks of copies and of scoring."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from learner.device_sharing.lease import Field, Servers
from learner.device_sharing.sharing import DeviceSharingSpec

_POLL_SECONDS = 5e-4
_LONGEST_SECONDS = 1.0
"""The longest that one chunk waits, so that versions and checkpoints are made in a flood of requests too."""
_REFRESH_SECONDS = 0.5


class BackgroundYield:
    """Waits while a request needs the device. Any thread may call it; the training thread has `DeviceSharing`."""

    def __init__(self, servers: Servers, stop: threading.Event, longest: float = _LONGEST_SECONDS) -> None:
        """Take the marks of the servers, read by nobody else; `longest`: seconds that a call waits at most."""
        self._servers = servers
        self._stop = stop
        self._longest = longest
        self._refresh_due = 0.0
        self._lock = threading.Lock()
        self._closed = False

    def __call__(self) -> None:
        """Return once no request waits, or the learner stops, or the call has waited long enough."""
        end = time.monotonic() + self._longest
        while self._a_request_waits() and time.monotonic() < end:
            if self._stop.wait(_POLL_SECONDS):
                return

    def close(self) -> None:
        """Unmap the marks of the servers; a thread that still calls this waits for no request any more."""
        with self._lock:
            self._closed = True
            self._servers.close()

    def _a_request_waits(self) -> bool:
        with self._lock:
            if self._closed:
                return False
            if time.monotonic() >= self._refresh_due:
                self._refresh_due = time.monotonic() + _REFRESH_SECONDS
                self._servers.refresh()
            return bool(self._servers.since(Field.WAITING))


@contextlib.contextmanager
def background_yield(
    spec: DeviceSharingSpec, state_dir: Path, device: torch.device, stop: threading.Event
) -> Iterator[Callable[[], object]]:
    """Yield what background threads call before each chunk of work on the device.

    It does nothing where the device is not shared, or is a CPU, whose cores the kernel gives to serving.
    """
    if spec.settings.policy == "exclusive" or device.type == "cpu":
        yield bool
        return
    servers = Servers(state_dir, spec.patience)
    background = BackgroundYield(servers, stop)
    try:
        yield background
    finally:
        background.close()
