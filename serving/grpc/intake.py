"""Bounds the memory of messages that arrive: gRPC holds each of them, uncounted, until it is complete."""

import asyncio

import grpc

from anabranch.serving.errors import BadRequestError, TooManyRequestsError

_GRACE_SECONDS = 1.0
"""How long a message may be on its way while others wait for their turn."""


class Intake:
    """Reads messages, some at a time. Belongs to the thread of one event loop.

    A message that has no turn stays with its client, but for the window of HTTP/2. While calls wait for a turn, one
    that takes longer than a second to send its message is refused, so that such calls cannot keep out the others.
    """

    def __init__(self, most: int) -> None:
        """`most`: messages that are read at a time, at least 1."""
        self._turns = asyncio.Semaphore(most)
        self._waiting = 0
        self._ends: dict[asyncio.Timeout, float] = {}
        """When each turn in progress ends, if others wait."""

    async def read(self, context: grpc.aio.ServicerContext) -> bytes:
        """Return the message of a call.

        Raises:
            BadRequestError: there is none.
            TooManyRequestsError: it is slow, and others wait.
        """
        await self._await_turn()
        end = asyncio.get_running_loop().time() + _GRACE_SECONDS
        limit = asyncio.timeout_at(end if self._waiting else None)
        try:
            async with limit:
                self._ends[limit] = end
                message = await context.read()
        except TimeoutError:
            raise TooManyRequestsError(
                f"the message did not arrive within {_GRACE_SECONDS:g} s, and other calls wait for their turn"
            ) from None
        finally:
            self._ends.pop(limit, None)
            self._turns.release()
        if message is grpc.aio.EOF:
            raise BadRequestError("the call has no message")
        assert isinstance(message, bytes)
        return message

    async def _await_turn(self) -> None:
        self._waiting += 1
        if self._turns.locked():
            for limit, end in self._ends.items():
                if not limit.expired():
                    limit.reschedule(end)
        try:
            await self._turns.acquire()
        finally:
            self._waiting -= 1
