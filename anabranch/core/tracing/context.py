"""The trace context of W3C, as HTTP, gRPC and Kafka carry it: `traceparent` and `tracestate`.

https://www.w3.org/TR/trace-context/
"""

import re
from collections.abc import Iterable, Mapping

Attributes = Mapping[str, str | int | float | bool]
"""Attributes of a span."""
TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
MOST_LINKS = 32
"""Contexts of the events of a block or a step, or of the requests of a batch, that are linked."""
_FORM = re.compile("(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_FLAGS = slice(53, 55)
_SAMPLED = 1
LENGTH = 55
"""Characters of version 00. A later version may have more, after a hyphen."""


def is_sampled(traceparent: str) -> bool | None:
    """Return whether the sender traces the request or event; None where the field is not valid."""
    if _FORM.match(traceparent) is None:
        return None
    if traceparent[LENGTH:] and (traceparent.startswith("00") or traceparent[LENGTH] != "-"):
        return None
    return bool(int(traceparent[_FLAGS], 16) & _SAMPLED)


def sampled_contexts(headers: Iterable[Iterable[tuple[str, bytes]]]) -> Iterable[tuple[int, str]]:
    """Yield the index of each message whose headers have a sampled `traceparent`, and the field."""
    for index, fields in enumerate(headers):
        for name, value in fields:
            if name == TRACEPARENT and value is not None:
                text = value[: LENGTH + 1].decode("ascii", "replace")
                if is_sampled(text):
                    yield index, text[:LENGTH]
                break
