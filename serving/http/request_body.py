"""Reads request bodies within two bounds: of one body, and of all bodies held at a time."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from anabranch.serving.errors import BadRequestError, TooLargeError, TooManyRequestsError
from anabranch.serving.settings import ServingSettings

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""ASGI's `receive`."""

_WATCH_AFTER = timedelta(milliseconds=100)


class ClientDisconnectedError(Exception):
    """The client disconnected; nobody will read an answer."""


class BodyReader:
    """Reads bodies and counts the bytes held. Belongs to the event loop's thread."""

    def __init__(self, settings: ServingSettings) -> None:
        self.held_bytes = 0
        self._most_bytes = int(settings.max_body_bytes)
        self._most_held_bytes = int(settings.max_held_bytes)

    async def read(self, receive: Receive, content_length: bytes | None) -> bytes:
        """Read a complete body, and count its bytes until `add` subtracts them.

        Raises:
            TooLargeError: it is too long; no more than the limit was read.
            TooManyRequestsError: too many bytes are held already.
            ClientDisconnectedError: the client disconnected.
        """
        if content_length is not None:
            self._check(_number(content_length))
        chunks: list[bytes] = []
        size = 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnectedError
                chunk: bytes = message.get("body", b"")
                self._check(size + len(chunk))
                self.check_room(len(chunk))
                size += len(chunk)
                self.held_bytes += len(chunk)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
        except BaseException:
            self.held_bytes -= size
            raise

    def add(self, size: int) -> None:
        """Count held bytes of a body or its reply; negative when they are released."""
        self.held_bytes += size

    def check_room(self, size: int) -> None:
        """Raise TooManyRequestsError where `size` bytes more would be too many."""
        if self.held_bytes + size > self._most_held_bytes:
            raise TooManyRequestsError(f"this server holds {self.held_bytes} bytes of requests already")

    def _check(self, size: int) -> None:
        if size > self._most_bytes:
            raise TooLargeError(f"the body has more than {self._most_bytes} bytes; send fewer rows at once")


class HeldBytes:
    """The bytes that one request holds until its reply is sent, when the block ends: its body and its reply."""

    def __init__(self, bodies: BodyReader) -> None:
        self._bodies = bodies
        self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self, *_: object) -> None:
        """Hold nothing any more."""
        self._bodies.add(-self._bytes)
        self._bytes = 0

    async def read(self, receive: Receive, content_length: bytes | None) -> bytes:
        """Read and hold the body; raises what `BodyReader.read` does."""
        body = await self._bodies.read(receive, content_length)
        self._bytes += len(body)
        return body

    def add(self, size: int) -> None:
        """Hold `size` bytes more."""
        self._bytes += size
        self._bodies.add(size)


class DisconnectWatcher:
    """Cancels the task that entered it when the client disconnects, and raises ClientDisconnectedError there.

    It starts to watch after a delay: most answers are ready before, and need no second task.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None
        self._gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timer = asyncio.get_running_loop().call_later(_WATCH_AFTER.total_seconds(), self._start_watching)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
        if self._gone:
            self._task.uncancel()
            raise ClientDisconnectedError from None

    def _start_watching(self) -> None:
        self._watch = asyncio.get_running_loop().create_task(self._until_disconnected())

    async def _until_disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._task.cancel()


def _number(value: bytes) -> int:
    if not value.isdigit():
        raise BadRequestError("Content-Length is not a number")
    return int(value[:20])
