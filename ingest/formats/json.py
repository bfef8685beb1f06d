"""The format `json`: one object a message.

Each message is parsed by itself: joined ones could be parsed faster, but two malformed messages can join to good ones.
"""

from collections.abc import Sequence
from functools import partial

import msgspec

from ingest.events.schema import Schema
from ingest.formats.base import Decoded, Headers
from ingest.formats.event_structs import StructDecoder, event_type
from ingest.formats.json_text import decoded


class JsonFormat:
    """Decodes JSON objects. Fields that the schema does not know are ignored, and their messages counted."""

    def __init__(self, schema: Schema) -> None:
        exact, lenient = (
            partial(decoded, msgspec.json.Decoder(event_type(schema, forbid_unknown=each)).decode)
            for each in (True, False)
        )
        self._decoder = StructDecoder[bytes](schema, exact, lenient)

    def decode(self, values: Sequence[bytes], headers: Sequence[Headers] = ()) -> Decoded:  # noqa: ARG002
        """Decode M message values, each one event or a reject."""
        return self._decoder.decode(values)
