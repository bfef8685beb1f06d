"""Why a request is not answered with a prediction; each class is one thing that the client can do about it.

AnabranchError
`-- RequestError             status, sentence
    |-- BadRequestError      400  fix the request
    |   `-- FramingError     400  say in one way alone where the body ends
    |-- TokenError           401  send a token that this server knows
    |-- ForbiddenError       403  send the admin token, or ask from where the sentence says
    |-- UnknownError         404  ask for what is there; the sentence names it
    |-- ConflictError        409  change first what the sentence names
    |-- TooLargeError        413  send less at once
    |-- EncodedError         415  send the body as it is, not compressed
    |-- HeadersError         431  send fewer header fields
    |-- CrowdedError         429  send less at a time; come again after `retry_after`
    |-- BusyError            503  come again after `retry_after`, or go elsewhere
    |-- FailedError          500  nothing: the fault is ours, and is in the log
    `-- LateError            504  the answer took too long
"""

from datetime import timedelta
from typing import ClassVar

from anabranch.core.errors import AnabranchError

_LONGEST_REPEATED = 100


def shorten(text: str) -> str:
    """Cut what a sentence repeats of a request after 100 characters."""
    return text if len(text) <= _LONGEST_REPEATED else f"{text[:_LONGEST_REPEATED]}..."


class RequestError(AnabranchError):
    """A request that gets no prediction; `str()` is the sentence that the client reads."""

    status: ClassVar[int] = 500
    retry_after: ClassVar[timedelta | None] = None
    closes: ClassVar[bool] = False
    """Whether the connection is closed after the answer."""


class BadRequestError(RequestError):
    """The request does not fit the protocol or the model."""

    status = 400


class FramingError(BadRequestError):
    """It can be told in two ways where the request's body ends, so nobody knows where the next request begins."""

    closes = True


class HeadersError(RequestError):
    """The request has more header fields than this server takes."""

    status = 431
    closes = True


class TokenError(RequestError):
    """The request has no token, or one that this server does not know."""

    status = 401


class ForbiddenError(RequestError):
    """The request's token, or the page that it comes from, is not for what it asks."""

    status = 403


class UnknownError(RequestError):
    """There is no such model, version or address."""

    status = 404


class ConflictError(RequestError):
    """What is asked for goes against what stands: a pin, or a version that cannot be served."""

    status = 409


class TooLargeError(RequestError):
    """The body is longer, or has more rows, than this server takes at once."""

    status = 413


class EncodedError(RequestError):
    """The body is compressed."""

    status = 415


class CrowdedError(RequestError):
    """More requests at a time than this server has room for."""

    status = 429
    retry_after = timedelta(seconds=1)


class BusyError(RequestError):
    """No version to answer with yet, or the server is stopping: no client's doing."""

    status = 503
    retry_after = timedelta(seconds=1)


class FailedError(RequestError):
    """The model fails on every input."""

    status = 500


class LateError(RequestError):
    """The time that a request may take is over."""

    status = 504
