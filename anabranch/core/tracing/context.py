"""The trace context of W3C, as HTTP, gRPC and Kafka carry it: `traceparent` and `tracestate`.

https://www.w3.org/TR/trace-context/
"""

import re
from collections.abc import Iterable

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
MOST_LINKS = 32
"""Contexts of the events of a block or a step that are linked."""
_FORM = re.compile("(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_FLAGS = slice(53, 55)
_SAMPLED = 1
LENGTH = 55
"""Characters of version 00. A later version may have more, after a hyphen."""
_KEY = r"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
_MEMBER = re.compile(_KEY + r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]")
_MOST_MEMBERS = 32
LONGEST_STATE = 512
"""Characters of `tracestate` that are continued at most, which the standard asks for at least."""


def is_sampled(traceparent: str) -> bool | None:
    """Return whether the sender traces the request or event; None where the field is not valid."""
    if _FORM.match(traceparent) is None:
        return None
    if traceparent[LENGTH:] and (traceparent.startswith("00") or traceparent[LENGTH] != "-"):
        return None
    return bool(int(traceparent[_FLAGS], 16) & _SAMPLED)


def is_tracestate(field: str) -> bool:
    """Return whether a `tracestate` is one to continue: valid and short. OpenTelemetry logs each that is not."""
    if len(field) > LONGEST_STATE:
        return False
    members = [member for each in field.split(",") if (member := each.strip(" \t"))]
    keys = {member.partition("=")[0] for member in members}
    return len(keys) == len(members) <= _MOST_MEMBERS and all(map(_MEMBER.fullmatch, members))


def sampled_contexts(headers: Iterable[Iterable[tuple[str, bytes]]]) -> Iterable[tuple[int, str]]:
    """Yield the index of each message whose headers have a sampled `traceparent`, and the field."""
    for index, fields in enumerate(headers):
        for name, value in fields:
            if name == TRACEPARENT and value is not None:
                text = value[: LENGTH + 1].decode("ascii", "replace")
                if is_sampled(text):
                    yield index, text[:LENGTH]
                break
