"""One life of the index process, as the learner sees it: its start, requests and replies, its end."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import msgspec

from anabranch.core.logs import log_arguments
from replay.embedding_index.protocol import IndexMessage, IndexSettings, MessageType, Records, SharedSlots, encode

_BYTES = 65536
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Training must not take the cores that the step uses."""


class GoneError(Exception):
    """The process is gone."""


class IndexLink:
    """A process that was just started, with slots for requests. Used by one thread; nothing here waits but `close`."""

    def __init__(
        self, settings: IndexSettings, process: subprocess.Popen[bytes], ours: socket.socket, slots: SharedSlots
    ):
        self.slots = slots
        self.since = time.monotonic()
        """When it was started."""
        self._settings = settings
        self._process = process
        self._connection = ours
        self._records = Records()
        self._free = list(range(settings.slots))

    @classmethod
    def start(cls, settings: IndexSettings) -> "IndexLink":
        """Start a process, which takes a millisecond or two; it is ready when it replies.

        Raises:
            OSError: the system has no memory or no descriptor for it.
        """
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            with theirs:
                slots = SharedSlots(settings)
                undo.callback(slots.close)
                # -P: a folder named replay where the user stands must not take this package's place.
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
                    [*command, *options, *log_arguments()],
                    pass_fds=(theirs.fileno(), slots.descriptor),
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **_ONE_THREAD},
                )
            ours.setblocking(False)
            undo.pop_all()
            return cls(settings, process, ours, slots)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def free(self) -> int:
        """How many requests may be made now."""
        return len(self._free)

    @property
    def waiting(self) -> int:
        """How many requests have had no reply."""
        return self._settings.slots - len(self._free)

    def slot(self) -> int:
        """Take a slot to write a request into; there must be a free one."""
        return self._free.pop()

    def say(self, kind: MessageType, slot: int, rows: int = 0, k: int = 0, step: int = 0) -> None:
        """Make the request that was written into a slot."""
        try:
            self._connection.send(encode(IndexMessage(kind, slot, rows, k, step)))
        except (BrokenPipeError, ConnectionError):
            # What it has said before its end is heard first.
            return

    def hear(self) -> list[IndexMessage]:
        """Return the replies that are there; their slots are to be given back.

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
        return self._records.take(data)

    def give_back(self, slot: int) -> None:
        """Let a slot be used again; nothing in it must be looked at any more."""
        self._free.append(slot)

    def close(self, seconds: float) -> None:
        """Let the process end, and kill it when it does not do so in time."""
        self._connection.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.slots.close()
