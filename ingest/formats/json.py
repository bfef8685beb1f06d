"""The format `json`: one object a message.

Each message is parsed by itself: joined ones could be parsed faster, but two malformed messages can join to good ones.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats import json_text
from anabranch.ingest.formats.base import Decoded, Format, Headers
from anabranch.ingest.formats.event_fields import document_of, event_reader
from anabranch.ingest.formats.event_structs import StructDecoder
from anabranch.ingest.formats.other_formats import other_format
from anabranch.ingest.settings.formats import FORMATS


class JsonFormat(Format):
    """Decodes JSON objects. Fields that the schema does not know are ignored, and their messages counted."""

    kind = FORMATS["json"]

    def __init__(self, schema: Schema) -> None:
        super().__init__(schema)
        exact, lenient, repaired = (
            event_reader(schema, make, forbid_unknown=each)
            for make, each in ((_decode, True), (_decode_repaired, False), (_decode_repaired, True))
        )
        self._decoder = StructDecoder[bytes](schema, exact, lenient, repaired=repaired)

    def decode(self, values: Sequence[bytes], headers: Sequence[Headers] = ()) -> Decoded:  # noqa: ARG002
        """Decode M message values, each one event or a reject."""
        decoded = self._decoder.decode(values)
        if not decoded.rejects:
            return decoded
        whats = [other_format(values[reject.message]) for reject in decoded.rejects]
        rejects = [
            reject if what is None else reject._replace(reason=f"{what} ({reject.reason})")
            for reject, what in zip(decoded.rejects, whats, strict=True)
        ]
        return replace(decoded, rejects=rejects)

    def pack(self, events: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the object of the one event."""
        (event,) = events
        for name, value in event.items():
            if isinstance(value, float) and math.isinf(value):  # JSON has no infinity; NaN is written as null
                raise SettingsError(f"{name} is {value}")
        return msgspec.json.encode(document_of(self.schema, event))


def _decode(kind: Any) -> Callable[[bytes], Any]:
    return msgspec.json.Decoder(kind).decode


def _decode_repaired(kind: Any) -> Callable[[bytes], Any]:
    return partial(json_text.decoded, _decode(kind))
