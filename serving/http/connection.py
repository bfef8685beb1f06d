"""One HTTP connection: uvicorn's protocols, with limits of time and size that apply before a token is compared.

A connection is closed when no complete request head arrives in time, when a head is too long, when a chunked body has
too many tiny chunks, and when the client does not read its replies.
"""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_PATIENCE = timedelta(seconds=10)
"""From a connection, or the first byte of its next request, to a complete head; also of a TLS handshake."""
MAX_HEAD_BYTES = 64_000
PIPELINED = "anabranch.pipelined"
"""Key of the state of a request's ASGI scope: a function that returns whether the connection has sent another one."""
MAX_PIPELINED = 64
"""Requests of one connection that may wait for the answer to the one before; h11 pauses by itself after 1."""

_PIECE_BYTES = 16_384
"""Bytes that are parsed at a time while a head is awaited."""
_FREE_CHUNKS = 128
_CHUNK_BYTES = 1024
"""Least average size of chunks after the free ones: a chunk costs a tenth of a millisecond to parse."""
_REPLY_PATIENCE = timedelta(seconds=10)
_SLOWEST_BYTES = 1_000_000
"""Least bytes of waiting replies that a client reads in that time; less than 64 KiB does not count."""
_LINGER_PATIENCE = timedelta(seconds=5)
_LINGER_BYTES = 32_000_000
"""Bytes that are still received and discarded, so that a client can read a refusal while it sends its body."""


class Owner(Protocol):
    """Receives the state of a connection: whether a request is being answered, and its end."""

    def answering(self, connection: "Connection") -> None:
        """A request head is complete."""

    def waiting(self, connection: "Connection") -> None:
        """The request was answered."""

    def lost(self, connection: "Connection") -> None:
        """The connection is closed."""


class ChunkBudget:
    """Counts the chunks of one body."""

    def __init__(self) -> None:
        self._chunks = self._bytes = 0

    def add(self, chunks: int, size: int) -> bool:
        """Add `chunks` of `size` bytes, and return whether the chunks are still large enough on average."""
        self._chunks += chunks
        self._bytes += size
        return self._chunks <= _FREE_CHUNKS + self._bytes // _CHUNK_BYTES


class _ClosedTransport(asyncio.Transport):
    """Replaces a transport that is closed."""

    def is_closing(self) -> bool:
        return True

    def abort(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass


class _LingeringTransport(asyncio.Transport):
    """A transport that is closed by `close_gently`; everything else is passed to the wrapped one."""

    def __init__(self, inner: asyncio.Transport, close_gently: Callable[[], None]) -> None:
        super().__init__()
        self.inner = inner
        self.closing = False
        self._close_gently = close_gently

    def release(self) -> None:
        """Release the closed transport: with TLS it has 256 kB, and it is in a reference cycle."""
        self.closing, self.inner = True, _ClosedTransport()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.inner.get_extra_info(name, default)

    def is_closing(self) -> bool:
        return self.closing or self.inner.is_closing()

    def close(self) -> None:
        if not self.is_closing():
            self.closing = True
            self._close_gently()

    def abort(self) -> None:
        self.inner.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.closing:
            self.inner.write(data)

    def get_write_buffer_size(self) -> int:
        return self.inner.get_write_buffer_size()

    def pause_reading(self) -> None:
        self.inner.pause_reading()

    def resume_reading(self) -> None:
        if not self.is_closing():
            self.inner.resume_reading()


if TYPE_CHECKING:
    _Base = H11Protocol
else:
    _Base = object


class Connection(_Base):
    """A mix-in for uvicorn's protocols; `owner` is set before the connection is made."""

    owner: Owner

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to wait for the first request."""
        assert isinstance(transport, asyncio.Transport)
        self._outer = _LingeringTransport(transport, self._close_gently)
        self._head_bytes = self._discarded = self._unsent_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._reply_timer: asyncio.TimerHandle | None = None
        self._close_timer: asyncio.TimerHandle | None = None
        self.app_state = {**self.app_state, PIPELINED: self._has_next}
        super().connection_made(self._outer)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers, and notify the owner."""
        for timer in (self._head_timer, self._reply_timer, self._close_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._outer.release()
        self.owner.lost(self)

    def data_received(self, data: bytes) -> None:
        """Parse the data, in pieces while a head is awaited; discard it once the connection is closing."""
        while data and not self._outer.is_closing():
            awaited, before = self._awaits_head(), self.cycle
            piece, data = (data[:_PIECE_BYTES], data[_PIECE_BYTES:]) if awaited else (data, b"")
            super().data_received(piece)
            if self.cycle is not before:
                self._head_bytes = 0
                self.owner.answering(self)
            elif awaited and self._awaits_head():
                self._head_bytes += len(piece)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self.abort()
        if self._outer.is_closing():
            self._discarded += len(data)
            if self._discarded > _LINGER_BYTES:
                self.abort()
        self._await_head()

    def pause_writing(self) -> None:
        """Start the time in which the client has to read."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """Stop that time: the client has read."""
        super().resume_writing()
        if self._reply_timer is not None and not self._outer.is_closing():
            self._reply_timer.cancel()
            self._reply_timer = None

    def on_response_complete(self) -> None:
        """Notify the owner, unless the next request is being answered."""
        super().on_response_complete()
        if self.cycle.response_complete:
            self.owner.waiting(self)

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP; just close the connection if an answer has begun."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self.cycle.response_started:
            self.abort()
            return
        super().send_400_response(msg)
        if answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def abort(self) -> None:
        """Close the connection at once."""
        self._outer.abort()

    def _awaits_head(self) -> bool:
        """Return whether the next byte belongs to the head of a request."""
        raise NotImplementedError

    def _awaits_body(self) -> bool:
        """Return whether the next byte belongs to the body of a request."""
        raise NotImplementedError

    def _has_next(self) -> bool:
        """Return whether data of a request waits for the answer to the one before."""
        raise NotImplementedError

    def _await_head(self) -> None:
        """Start the timer of the first head, or of one that has begun; stop it once the head is complete."""
        if self._awaits_head() and (self.cycle is None or self._head_bytes) and not self._outer.is_closing():
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_PATIENCE.total_seconds(), self.abort)
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _await_reader(self) -> None:
        """Check periodically that the client reads, until `resume_writing` or the end of the connection."""
        self._unsent_bytes = self._outer.get_write_buffer_size()
        self._reply_timer = self.loop.call_later(_REPLY_PATIENCE.total_seconds(), self._check_reader)

    def _check_reader(self) -> None:
        if self._unsent_bytes - self._outer.get_write_buffer_size() < _SLOWEST_BYTES:
            self.abort()
        else:
            self._await_reader()

    def _close_gently(self) -> None:
        """Close once replies are sent; receive and discard an unfinished body for a while."""
        inner = self._outer.inner
        if self._awaits_body():
            if inner.can_write_eof():
                inner.write_eof()
            inner.resume_reading()
            self._close_timer = self.loop.call_later(_LINGER_PATIENCE.total_seconds(), self.abort)
        else:
            if self._reply_timer is None and inner.get_write_buffer_size():
                self._await_reader()
            inner.close()


class _H11Parser(h11.Connection):
    """h11's state machine; refuses a body of tiny chunks."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self._budget = ChunkBudget()

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._budget = ChunkBudget()
        elif isinstance(event, h11.Data) and not self._budget.add(int(event.chunk_start), len(event.data)):
            raise h11.RemoteProtocolError("the chunks of the body are too small")
        return event


class H11Connection(Connection, H11Protocol):
    """A connection parsed by h11, which is always installed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _H11Parser()

    def _awaits_head(self) -> bool:
        return self.conn.their_state is h11.IDLE

    def _awaits_body(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY

    def _has_next(self) -> bool:
        return self.conn.their_state is h11.DONE and bool(self.conn.trailing_data[0])
