"""CloudEvents 1.0 in Kafka messages, as their Kafka protocol binding has them.

In structured mode the value is a JSON object with the event in `data` or `data_base64`. In binary mode the value is the
event, and attributes are headers that begin with `ce_`.
"""

import binascii
import uuid
from base64 import b64decode
from collections.abc import Sequence
from itertools import repeat

import msgspec
import numpy as np

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.base import WHOLE_MESSAGE, Decoded, Format, Headers, Reject, joined, nothing
from anabranch.ingest.formats.json_text import decoded

_STRUCTURED = "application/cloudevents"
_JSON = "application/cloudevents+json"
_SPEC_HEADER = "ce_specversion"
_SPEC = "1.0"
_LONGEST_TYPE = 100
"""Characters of a header's value in a reason."""


class _Envelope(msgspec.Struct):
    """The attributes that every event has, and its data."""

    specversion: str
    id: str
    source: str
    type: str
    data: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    data_base64: str | None = None


class _EnvelopeError(ValueError):
    """A message is no event of CloudEvents, or none that can be read."""


class CloudEventsFormat(Format):
    """Decodes the events within messages of CloudEvents by another format; a message of neither mode is rejected."""

    def __init__(self, schema: Schema, inner: Format) -> None:
        super().__init__(schema)
        self._inner = inner
        self._decoder = msgspec.json.Decoder(_Envelope)

    def decode(self, values: Sequence[bytes], headers: Sequence[Headers] = ()) -> Decoded:
        """Decode M message values; reasons of rejects that are due to the envelope begin with `cloudevents: `."""
        data, of_data, indexes, rejects = [], [], [], []
        for index, (value, own) in enumerate(zip(values, headers or repeat(()), strict=False)):
            try:
                data.append(self._data_of(value, own))
            except _EnvelopeError as exc:
                rejects.append(Reject(index, WHOLE_MESSAGE, f"cloudevents: {exc}"))
                continue
            of_data.append(own)
            indexes.append(index)
        decoded = self._inner.decode(data, of_data)
        if not rejects:
            return decoded
        return joined([decoded.at(np.array(indexes, np.int32)), nothing(self.schema, rejects)])

    def _data_of(self, value: bytes, headers: Headers) -> bytes:
        version = content_type = None
        for name, content in headers:
            if not content:  # None where a header has no value
                continue
            if name.lower() == _SPEC_HEADER:
                version = content.decode(errors="replace")
            elif name.lower() == "content-type":
                content_type = content.decode(errors="replace").partition(";")[0].strip().lower()
        if content_type is not None and content_type.startswith(_STRUCTURED):
            if content_type != _JSON:
                raise _EnvelopeError(f"content-type {content_type[:_LONGEST_TYPE]} is not {_JSON}")
            return self._structured(value)
        if version is not None:
            _check_version(version)
            return value
        # Some producers write the structured mode without its header.
        return self._structured(value)

    def _structured(self, value: bytes) -> bytes:
        try:
            envelope = decoded(self._decoder.decode, value)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
            raise _EnvelopeError(f"neither a header {_SPEC_HEADER} nor an event in JSON: {exc}") from exc
        _check_version(envelope.specversion)
        if envelope.data is not msgspec.UNSET:
            if envelope.data_base64 is not None:
                raise _EnvelopeError("it has both data and data_base64")
            return bytes(envelope.data)
        if envelope.data_base64 is None:
            raise _EnvelopeError("it has neither data nor data_base64")
        try:
            return b64decode(envelope.data_base64, validate=True)
        except (binascii.Error, ValueError) as exc:
            raise _EnvelopeError(f"data_base64 is not base64: {exc}") from exc


def binary_headers() -> list[tuple[str, bytes]]:
    """Return the headers of a new event in binary mode, which this project has made."""
    attributes = {"specversion": _SPEC, "id": str(uuid.uuid4()), "source": "/anabranch", "type": "anabranch.event"}
    return [(f"ce_{name}", value.encode()) for name, value in attributes.items()]


def _check_version(version: str) -> None:
    if version != _SPEC:
        raise _EnvelopeError(f"specversion {version[:_LONGEST_TYPE]} is not {_SPEC}")
