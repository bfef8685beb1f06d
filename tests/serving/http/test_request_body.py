"""Bodies are read within bounds, and held bytes are counted."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from anabranch.serving.errors import BadRequestError, TooLargeError, TooManyRequestsError
from anabranch.serving.http.request_body import BodyReader, ClientDisconnectedError, DisconnectWatcher
from anabranch.serving.settings import ServingSettings

SETTINGS = ServingSettings.model_validate({"max_body_bytes": 2000, "max_held_bytes": 3000})


def sending(*chunks, hangs_up=False):
    messages: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": c, "more_body": True} for c in chunks]
    messages.append({"type": "http.disconnect"} if hangs_up else {"type": "http.request", "body": b""})

    async def receive():
        return messages.pop(0)

    return receive


def read(bodies, receive, content_length=None):
    return asyncio.run(bodies.read(receive, content_length))


def test_a_body_is_held_until_it_is_released():
    bodies = BodyReader(SETTINGS)
    body = read(bodies, sending(b"abc", b"def"), b"6")
    assert body == b"abcdef"
    assert bodies.held_bytes == 6
    bodies.add(-len(body))
    assert bodies.held_bytes == 0


def test_a_body_beyond_the_held_bytes_is_refused_until_another_is_released():
    bodies = BodyReader(SETTINGS)
    first = read(bodies, sending(b"x" * 1900))
    with pytest.raises(TooManyRequestsError, match=r"holds \d+ bytes"):
        read(bodies, sending(b"x" * 1000, b"x" * 900))
    assert bodies.held_bytes == 1900
    bodies.add(-len(first))
    read(bodies, sending(b"x" * 1900))


def test_a_body_that_is_too_long_is_not_read_to_its_end():
    bodies = BodyReader(SETTINGS)
    endless = [0]

    async def receive():
        endless[0] += 1
        return {"type": "http.request", "body": b"x" * 500, "more_body": True}

    with pytest.raises(TooLargeError, match="more than 2000 bytes"):
        read(bodies, receive)
    assert endless == [5]
    with pytest.raises(TooLargeError):
        read(bodies, receive, b"2001")
    assert endless == [5]
    with pytest.raises(BadRequestError, match="Content-Length"):
        read(bodies, receive, b"-1")
    assert bodies.held_bytes == 0


def test_a_client_that_disconnects_within_its_body_holds_no_bytes():
    bodies = BodyReader(SETTINGS)
    with pytest.raises(ClientDisconnectedError):
        read(bodies, sending(b"abc", hangs_up=True))
    assert bodies.held_bytes == 0


def test_a_client_that_disconnects_later_ends_the_wait_for_its_answer():
    async def wait():
        async with asyncio.timeout(20), DisconnectWatcher(sending(hangs_up=True)):
            await asyncio.get_running_loop().create_future()

    with pytest.raises(ClientDisconnectedError):
        asyncio.run(wait())


def test_an_answer_in_time_and_its_errors_pass_through():
    async def wait(answer):
        async with DisconnectWatcher(sending()):
            return await answer

    async def main():
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(7)
        assert await wait(answer) == 7
        failure = asyncio.get_running_loop().create_future()
        failure.set_exception(TooManyRequestsError("full"))
        with pytest.raises(TooManyRequestsError):
            await wait(failure)
        task = asyncio.ensure_future(wait(asyncio.get_running_loop().create_future()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
