"""One index process as the learner sees it: its start, requests and replies, and its end."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import msgspec

from replay.embedding_index.protocol import (
    IndexMessage,
    IndexSettings,
    MessageDecoder,
    MessageType,
    SharedSlots,
    encode,
)

_BYTES = 65536
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Training must not take the cores that the step uses."""


class GoneError(Exception):
    """The process is gone."""


class IndexLink:
    """A process with slots for requests. Used by one thread; only `close` waits."""

    def __init__(
        self, settings: IndexSettings, process: subprocess.Popen[bytes], ours: socket.socket, slots: SharedSlots
    ):
        self.slots = slots
        self.since = time.monotonic()
        """When it was started."""
        self._settings = settings
        self._process = process
        self._connection = ours
        self._decoder = MessageDecoder()
        self._free = list(range(settings.slots))

    @classmethod
    def start(cls, settings: IndexSettings) -> "IndexLink":
        """Start a process, which takes a millisecond or two; it is ready once it replies.

        Raises:
            OSError: the system has no memory or no descriptor for it.
        """
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            with theirs:
                slots = SharedSlots(settings)
                undo.callback(slots.close)
                # -P: a folder named replay in the working directory must not shadow this package.
                command = [
                    sys.executable,
                    "-P",
                    "-m",
                    "replay.embedding_index.process",
                    "--connection",
                    str(theirs.fileno()),
                ]
                options = ["--slots", str(slots.descriptor), "--settings", msgspec.json.encode(settings).decode()]
                process = subprocess.Popen(
                    [*command, *options],
                    pass_fds=(theirs.fileno(), slots.descriptor),
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **_ONE_THREAD},
                )
            ours.setblocking(False)
            undo.pop_all()
            return cls(settings, process, ours, slots)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def free(self) -> int:
        """How many requests may be sent now."""
        return len(self._free)

    @property
    def waiting(self) -> int:
        """How many requests have no reply yet."""
        return self._settings.slots - len(self._free)

    def slot(self) -> int:
        """Take a free slot for a request; there must be one."""
        return self._free.pop()

    def send(self, kind: MessageType, slot: int, rows: int = 0, k: int = 0, step: int = 0) -> None:
        """Send the request that was written into a slot."""
        try:
            self._connection.send(encode(IndexMessage(kind, slot, rows, k, step)))
        except (BrokenPipeError, ConnectionError):
            # `receive` first returns the replies that it sent before its end, and then raises GoneError.
            return

    def receive(self) -> list[IndexMessage]:
        """Return the replies that have arrived; the caller releases their slots.

        Raises:
            GoneError: the process is gone.
        """
        try:
            data = self._connection.recv(_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError as exc:
            raise GoneError from exc
        if not data:
            raise GoneError
        return self._decoder.take(data)

    def release(self, slot: int) -> None:
        """Release a slot; its arrays must not be read any more."""
        self._free.append(slot)

    def close(self, seconds: float) -> None:
        """Close the connection, which ends the process; kill it if it does not end in time."""
        self._connection.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.slots.close()
