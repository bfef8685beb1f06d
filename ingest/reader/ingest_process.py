"""The ingest process as the learner's side of it: a child process, the connection to it, and the shared ring."""

import logging
import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

from anabranch.core.logs import log_arguments
from anabranch.ingest.events.block import BlockLayout
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.ingest.transport.protocol import FromIngest, ToIngest, receive_in_learner, send
from anabranch.ingest.transport.shared_ring import SharedRing

PROGRAM = ("-m", "anabranch.ingest")
"""The arguments of Python that start the process."""

_SETTINGS = "ANABRANCH__"
_ONE_HEAP = {
    "MALLOC_ARENA_MAX": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
}
"""Makes memory that one thread freed available to the others, and keeps it for the next rows.

Otherwise glibc keeps a heap for each thread and returns large arrays to the system, which clears new pages for the next
ones, and Arrow uses another allocator. With it, the memory of a process that reads files does not grow with
their rows. Not where only topics are read, since librdkafka's threads would wait for each other.
"""

log = logging.getLogger(__name__)


class IngestProcess:
    """At most one child process at a time; may be started again after `close`. Used by one thread."""

    def __init__(self, layout: BlockLayout, stream: StreamSettings, program: Sequence[str] = PROGRAM) -> None:
        self._layout = layout
        self._program = program
        self._buffer_bytes = int(stream.buffer_bytes)
        self._reads_files = stream.backfill is not None
        self._readable = select.poll()
        self.popen: subprocess.Popen[bytes] | None = None
        """The child process; None before `start` and after `close`."""
        self.connection: Connection | None = None
        """Becomes readable when the process sends a message; None before `start` and after `close`."""
        self.ring: SharedRing | None = None
        """The slots that the process writes blocks into; None before `start` and after `close`."""

    @property
    def has_died(self) -> bool:
        """Whether the process that was started has ended by itself."""
        return self.popen is not None and self.popen.poll() is not None

    @property
    def ended_by(self) -> int | None:
        """The signal that has ended the process; None if it runs, or has ended in another way."""
        code = None if self.popen is None else self.popen.poll()
        return None if code is None or code >= 0 else -code

    def kill(self) -> None:
        """End the process at once, if it has not ended by itself, and wait for its end."""
        if self.popen is not None:
            self.popen.kill()
            self.popen.wait()

    def start(self) -> None:
        """Start the process; it waits for the message `Begin`."""
        ours, theirs = socket.socketpair()
        ring = SharedRing(self._layout, self._buffer_bytes)
        with theirs:
            # -P: a folder named ingest in the working directory must not be imported instead of this package.
            command = [sys.executable, "-P", *self._program, "--connection", str(theirs.fileno()), "--ring"]
            command += [str(ring.descriptor), *log_arguments()]
            self.popen = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), ring.descriptor),
                stdin=subprocess.DEVNULL,
                env=without_settings(reads_files=self._reads_files),
            )
        self.connect(Connection(ours.detach()), ring)

    def connect(self, connection: Connection, ring: SharedRing) -> None:
        """Use this connection and ring, until `close`."""
        self.ring, self.connection = ring, connection
        # Connection.poll makes a selector each time, which takes longer than to receive a message.
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for a message, and return whether one has come, or the process has closed its side."""
        return self.connection is not None and bool(self._readable.poll(seconds * 1000))

    def send(self, message: ToIngest) -> None:
        """Send a message, if there is a process; the message is lost if the process has died."""
        if self.connection is not None:
            try:
                send(self.connection, message)
            except (BrokenPipeError, ConnectionError):
                log.debug("the ingest process is gone; the next poll starts another one")

    def receive(self) -> FromIngest:
        """Receive the next message; raises EOFError or OSError when the process has closed its side."""
        assert self.connection is not None
        return receive_in_learner(self.connection)

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` for the process to end, kill it if it has not, and close the connection and ring."""
        if self.popen is not None:
            try:
                self.popen.wait(seconds)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
        if self.connection is not None:
            self.connection.close()
        if self.ring is not None:
            self.ring.close()
        self.popen = self.connection = self.ring = None


def without_settings(*, reads_files: bool = False) -> dict[str, str]:
    """Return the environment without variables of settings: ingest receives its own, and must not see tokens.

    The threads of a process that reads files share one heap, unless the environment has other values.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
    return _ONE_HEAP | kept if reads_files else kept
