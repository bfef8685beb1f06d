"""Reads the parameters of a request, within limits."""

from typing import TypeVar

import msgspec

from anabranch.ingest.formats.json_text import decoded
from anabranch.learner.stream.trained_through import parse_trained_through
from anabranch.serving.errors import BadRequestError, shorten
from anabranch.serving.protocol.bodies import Parameters

_LONGEST_TIMEOUT_MS = 86_400_000
"""`serving.timeout` is shorter; this bounds the numbers in the clock's arithmetic."""

_MOST_PARAMETERS = 64
_LONGEST_PARAMETERS = 131_072
_LONGEST_THROUGH = 65_536
"""Bytes, or characters, of JSON: longer ones are refused before they are parsed."""
_UNSERVED = {
    "classification": "name it at an output, as an integer",
    "priority": "all requests have the same",
    "sequence_id": "requests share no state",
    "sequence_start": "requests share no state",
    "sequence_end": "requests share no state",
    "shared_memory_region": "tensors are sent in requests and replies",
    "shared_memory_byte_size": "tensors are sent in requests and replies",
    "shared_memory_offset": "tensors are sent in requests and replies",
    "timeout": "end the call in the client; timeout_ms bounds the wait for a version",
}
"""What other servers of the protocol do with a request, with the way out: a client that asks for it must not believe
that it was done."""
ABSENT = (b"", b"null")
"""The JSON of a member that was not sent, or is null."""

_T = TypeVar("_T")
_Text = bytes | memoryview | msgspec.Raw
_PARAMETERS = msgspec.json.Decoder(Parameters)


def read_parameters(text: msgspec.Raw) -> Parameters:
    """Read the parameters of a request or of one input; empty without any."""
    if bytes(text) in ABSENT:
        return {}
    if len(text) > _LONGEST_PARAMETERS:
        raise BadRequestError(f"parameters has {len(text)} bytes; it may have {_LONGEST_PARAMETERS}")
    parameters = decode_json(
        _PARAMETERS, text, "the body is not an inference request: parameters are not scalars by name"
    )
    if len(parameters) > _MOST_PARAMETERS:
        raise BadRequestError(f"there are {len(parameters)} parameters; there may be {_MOST_PARAMETERS}")
    return parameters


def check_served(parameters: Parameters, of: str) -> Parameters:
    """Return the parameters of a request or of one of its tensors; those that this server ignores change no answer.

    Raises:
        BadRequestError: one of them asks for what this server does not do.
    """
    for name, value in parameters.items():
        if name in _UNSERVED and value:
            raise BadRequestError(
                f"{of} has the parameter {name} = {shorten(repr(value))}, which this server does not serve: "
                f"{_UNSERVED[name]}"
            )
    return parameters


def read_flag(parameters: Parameters, name: str, default: bool) -> bool:
    """Return a parameter that is true or false; raises BadRequestError where it is something else."""
    value = parameters.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequestError(f"{name} is {shorten(repr(value))}; write true or false")
    return value


def read_count(parameters: Parameters, name: str) -> int:
    """Return a parameter that is a number of 1 or more, 0 without it; raises BadRequestError for something else."""
    value = parameters.get(name)
    if value is None:
        return 0
    if type(value) is not int or value < 1:
        raise BadRequestError(f"{name} is {shorten(repr(value))}; write how many, 1 or more")
    return value


def decode_json(decoder: msgspec.json.Decoder[_T], text: _Text, otherwise: str) -> _T:
    """Decode JSON, or raise BadRequestError with the sentence that begins with `otherwise`."""
    try:
        return decoded(decoder.decode, text)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadRequestError(f"{otherwise}: {shorten(str(exc))}") from exc
    except RecursionError as exc:
        raise BadRequestError(f"{otherwise}: it is nested too deeply") from exc


def read_freshness(parameters: Parameters) -> tuple[dict[str, int], float | None]:
    """Return `min_trained_through`, by `topic:partition`, and `timeout_ms`; raises BadRequestError."""
    through = parameters.get("min_trained_through")
    timeout_ms = parameters.get("timeout_ms")
    if through is not None and not isinstance(through, str):
        raise BadRequestError(f'min_trained_through is {shorten(repr(through))}; write it like "events:0=4711"')
    if through is not None and len(through) > _LONGEST_THROUGH:
        raise BadRequestError(f"min_trained_through has {len(through)} characters; it may have {_LONGEST_THROUGH}")
    if timeout_ms is not None and (isinstance(timeout_ms, bool | str) or timeout_ms < 0):
        raise BadRequestError(f"timeout_ms is {shorten(repr(timeout_ms))}; write a number of milliseconds")
    if timeout_ms is not None and through is None:
        raise BadRequestError("timeout_ms bounds the wait for min_trained_through, which the request does not have")
    if timeout_ms is not None:
        timeout_ms = min(timeout_ms, _LONGEST_TIMEOUT_MS)
    try:
        return parse_trained_through(through) if through is not None else {}, timeout_ms
    except ValueError as exc:
        raise BadRequestError(f"min_trained_through: {shorten(str(exc))}") from exc
