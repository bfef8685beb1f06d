"""Errors of requests; each class is one thing that the client can do about it.

DeviceError (a RuntimeError)                start the process again: the device failed, or had no memory
AnabranchError
`-- RequestError                         status, sentence
    |-- BadRequestError                  400  fix the request
    |   `-- FramingError                 400  specify the end of the body in one way
    |-- UnauthorizedError                401  send a token of this server
    |-- ForbiddenError                   403  send the admin token, or send the request as the sentence explains
    |-- NotFoundError                    404  ask for what exists; the sentence names it
    |-- ConflictError                    409  first change what the sentence names
    |-- TooLargeError                    413  send less at once
    |-- UnsupportedEncodingError         415  send the body as it is, not compressed
    |-- HeadersError                     431  send fewer header fields
    |-- TooManyRequestsError             429  send fewer requests at a time; retry after `retry_after`
    |-- UnavailableError                 503  retry after `retry_after`, or ask another server
    |-- FailedError                      500  nothing: see the server log
    `-- DeadlineExceededError            504  the answer took too long
"""

from datetime import timedelta
from typing import ClassVar

from anabranch.core.errors import AnabranchError

_LONGEST_REPEATED = 100


def shorten(text: str) -> str:
    """Truncate text of a request after 100 characters, for a sentence."""
    return text if len(text) <= _LONGEST_REPEATED else f"{text[:_LONGEST_REPEATED]}..."


class RequestError(AnabranchError):
    """A request is refused; `str()` is the sentence that the client gets."""

    status: ClassVar[int] = 500
    retry_after: ClassVar[timedelta | None] = None
    closes: ClassVar[bool] = False
    """Whether the connection is closed after the answer."""


class BadRequestError(RequestError):
    """The request does not fit the protocol or the model."""

    status = 400


class FramingError(BadRequestError):
    """The end of the request's body is specified in two ways, so the start of the next request is unknown."""

    closes = True


class HeadersError(RequestError):
    """The request has more header fields than this server accepts."""

    status = 431
    closes = True


class UnauthorizedError(RequestError):
    """The request has no token of this server."""

    status = 401


class ForbiddenError(RequestError):
    """The request's token, or the page that it comes from, does not permit the request."""

    status = 403


class NotFoundError(RequestError):
    """There is no such model, version or address."""

    status = 404


class ConflictError(RequestError):
    """The request contradicts the present state: a version is pinned, or cannot be served."""

    status = 409


class TooLargeError(RequestError):
    """The body is longer, or has more rows, than this server accepts at once."""

    status = 413


class UnsupportedEncodingError(RequestError):
    """The body is compressed."""

    status = 415


class TooManyRequestsError(RequestError):
    """More requests at a time than this server has room for."""

    status = 429
    retry_after = timedelta(seconds=1)


class UnavailableError(RequestError):
    """There is no version yet, too little memory for now, or the server stops or starts again."""

    status = 503
    retry_after = timedelta(seconds=1)


class FailedError(RequestError):
    """The model fails on every input."""

    status = 500


class DeviceError(RuntimeError):
    """The device failed, or had no memory at start: the process ends with exit code 1, and is started again.

    No AnabranchError: those end the process with a code after which it is not started again.
    """


class DeadlineExceededError(RequestError):
    """The time that a request may take is over."""

    status = 504
