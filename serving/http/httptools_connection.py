"""A connection parsed by httptools, which must be installed to import this module."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from anabranch.serving.http.connection import MAX_PIPELINED, ChunkBudget, Connection


class _RefusedError(Exception):
    """Raised in a callback of the parser: the request is answered 400."""


class HttpToolsConnection(Connection, HttpToolsProtocol):  # type: ignore[misc]
    """A connection with limits that httptools itself does not have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_body = False
        self._budget = ChunkBudget()

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP; just close the connection if earlier requests wait for their answers."""
        if self.pipeline:
            self.abort()
        else:
            super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        """Start to count the body; refuse too many pipelined requests."""
        self._in_body = True
        self._budget = ChunkBudget()
        super().on_headers_complete()
        if len(self.pipeline) > MAX_PIPELINED:
            raise _RefusedError("too many requests wait on one connection")

    def on_chunk_header(self) -> None:
        """Count a chunk."""
        self._count(1, 0)

    def on_body(self, body: bytes) -> None:
        """Count the bytes of a chunk, or of a body of known length."""
        self._count(0, len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Await the next head: the body is complete."""
        self._in_body = False
        super().on_message_complete()

    def _awaits_head(self) -> bool:
        return not self._in_body

    def _awaits_body(self) -> bool:
        return self._in_body

    def _has_next(self) -> bool:
        return bool(self.pipeline)

    def _count(self, chunks: int, size: int) -> None:
        if not self._budget.add(chunks, size):
            raise _RefusedError("the chunks of the body are too small")
