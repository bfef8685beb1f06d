"""A deadline for a whole exchange over a socket, whatever the peer sends.

The time-out of a socket bounds each read. A peer that sends a little in time, again and again (`100 Continue`, one byte
of a header), is never late by it.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator


class SocketDeadline:
    """Shuts the watched connection down once the time of an exchange is over, which ends the read that waits for it.

    Used by one thread, for one exchange at a time. The error that the read raises is that of a closed connection:
    `expired` says whether the deadline caused it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: socket.socket | None = None
        self._exchange: object = None
        self.expired = False
        """Whether the time of the last exchange was over before its end."""

    def watch(self, connection: socket.socket) -> None:
        """Watch this connection from now on, in place of the one before; at once, if the time is over already."""
        # A separate descriptor: that of the connection may be closed meanwhile, and its number be another file's.
        own = socket.fromfd(connection.fileno(), connection.family, connection.type)  # SSLSocket has no dup
        with self._lock:
            before, self._watched = self._watched, own
            if self.expired:
                _shut_down(own)
        if before is not None:
            before.close()

    @contextlib.contextmanager
    def ends_within(self, seconds: float) -> Iterator[None]:
        """Let the exchange in this block end within `seconds`, also where it goes on over a connection of before."""
        exchange = object()
        with self._lock:
            self._exchange, self.expired = exchange, False
        timer = threading.Timer(seconds, self._expire, (exchange,))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._exchange = None

    def close(self) -> None:
        """Stop watching."""
        with self._lock:
            watched, self._watched = self._watched, None
        if watched is not None:
            watched.close()

    def _expire(self, exchange: object) -> None:
        with self._lock:
            if exchange is not self._exchange:
                return  # it ended just now
            self.expired = True
            if self._watched is not None:
                _shut_down(self._watched)


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        connection.shutdown(socket.SHUT_RDWR)
