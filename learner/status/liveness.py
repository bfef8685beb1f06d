"""Answers `/livez` in a separate process, and passes on all other connections to the learner.

In the learner's process an answer waits for Python's lock, and a training thread that has it may get no processor for
seconds on a busy machine. Run by its path without site packages, so that it starts in 20 ms and takes 10 MB: it imports
the standard library alone. Ends when the learner's end of the channel is closed.
"""

import contextlib
import json
import selectors
import signal
import socket
import sys
import time

PATH = b"/livez"
MOST_CONNECTIONS = 16
"""Connections that may be without a request line; one more closes the oldest."""
PATIENCE_SECONDS = 10.0
"""Longest time until a request is complete."""
MOST_HEAD_BYTES = 16_384
SILENCE_SECONDS = 60.0
"""The learner hangs when nothing in its process has run for so long."""
_THIS_MACHINE = (b"localhost", b"127.0.0.1", b"[::1]")
_POLL_SECONDS = 0.05
"""How often a part of a request is read again: it stays in the kernel, for the learner."""


class LivenessServer:
    """One run of the process."""

    def __init__(self, listener: socket.socket, channel: socket.socket, *, any_host: bool) -> None:
        """`listener` has the status address, `channel` leads to the learner; `any_host`: by any name of the host."""
        self._listener = listener
        self._channel = channel
        self._any_host = any_host
        self._ok, self._answer = True, b'{"ok": true, "problems": []}'
        self._received = time.monotonic()
        self._unread = b""
        self._waiting: dict[socket.socket, float] = {}
        """Connections without a complete request, with the time at which each has to end, the oldest first."""

    def run(self) -> None:
        """Answer until the learner has closed its end of the channel."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._channel, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select(_POLL_SECONDS if self._waiting else None)}
                if self._channel in ready and not self._receive():
                    return
                if self._listener in ready:
                    self._accept()
                for connection, end in [*self._waiting.items()]:
                    if time.monotonic() >= end or self._take(connection):
                        del self._waiting[connection]
                        connection.close()

    def _receive(self) -> bool:
        """Read what the learner says of itself, one JSON object a line; return False at the end of the channel."""
        try:
            received = self._channel.recv(65_536)
        except BlockingIOError:
            return True
        if not received:
            return False
        *lines, self._unread = (self._unread + received).split(b"\n")
        if lines:
            self._ok, self._answer, self._received = json.loads(lines[-1])["ok"], lines[-1], time.monotonic()
        return True

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has disconnected, or there is no descriptor left: it waits in the backlog
            time.sleep(_POLL_SECONDS)
            return
        connection.setblocking(False)
        if len(self._waiting) >= MOST_CONNECTIONS:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            oldest.close()
        self._waiting[connection] = time.monotonic() + PATIENCE_SECONDS

    def _take(self, connection: socket.socket) -> bool:
        """Answer a request or pass it on, and return whether this process is done with the connection."""
        try:
            head = connection.recv(MOST_HEAD_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        line, ended, _ = head.partition(b"\n")
        words = line.split()
        if not ended:
            return not head or len(head) >= MOST_HEAD_BYTES
        if len(words) < 2 or words[0] not in (b"GET", b"HEAD") or words[1].partition(b"?")[0] != PATH:
            self._pass_on(connection)
            return True
        if b"\r\n\r\n" not in head and b"\n\n" not in head:
            return len(head) >= MOST_HEAD_BYTES
        if not self._any_host and not _names_this_machine(head):
            self._pass_on(connection)
            return True
        with contextlib.suppress(OSError):  # it has disconnected
            connection.recv(len(head))
            connection.send(self._reply(with_body=words[0] == b"GET"))
        return True

    def _pass_on(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the learner takes none for now: the client may ask again
            socket.send_fds(self._channel, [b"\0"], [connection.fileno()])

    def _reply(self, *, with_body: bool) -> bytes:
        status, body = "200 OK", self._answer
        if (silent := time.monotonic() - self._received) > SILENCE_SECONDS:
            sentence = f"nothing in the learner's process has run for {silent:.0f} s; restart it if it does not go on"
            status, body = "503 Service Unavailable", json.dumps({"ok": False, "problems": [sentence]}).encode()
        elif not self._ok:
            status = "503 Service Unavailable"
        fields = f"HTTP/1.0 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return fields.encode() + (body if with_body else b"")


def _names_this_machine(head: bytes) -> bool:
    """Return whether the header `Host` has a usual name of this machine; the learner has all of them."""
    fields = (line.partition(b":") for line in head.splitlines()[1:])
    hosts = [value.strip() for name, _, value in fields if name.strip().lower() == b"host"]
    return all(host.rpartition(b":")[0] in _THIS_MACHINE or host in _THIS_MACHINE for host in hosts)


def main(listener: int, channel: int, any_host: int) -> None:
    """Run with inherited sockets. Signals to the group of the learner are for the learner, which ends this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sockets = [socket.socket(fileno=descriptor) for descriptor in (listener, channel)]
    for each in sockets:
        each.setblocking(False)
    LivenessServer(sockets[0], sockets[1], any_host=bool(any_host)).run()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
