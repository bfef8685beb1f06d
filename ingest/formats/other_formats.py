"""Recognises messages that are no JSON events as a whole: what a connector or a serializer has put around them."""

import msgspec

_DEBEZIUM = {"before", "after", "op"}
_CONNECT = {"schema", "payload"}
_UNWRAP = "let the connector send the row alone (the transform ExtractNewRecordState)"


def other_format(value: bytes) -> str | None:
    """Return what the value of a rejected JSON message is, and the way out; None if it is nothing that is known."""
    if value[:1] == b"\0" and len(value) > 5:
        formats = '"json-schema"' if value[5:6] in (b"{", b"[", b'"') else '"avro" or "protobuf"'
        return (
            "it begins with the id of a schema, as serializers of a Schema Registry write it: set "
            f"stream.format = {formats}, and [stream.registry]"
        )
    try:
        document = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if is_debezium(document):
        return f'it is an envelope of Debezium, with the row in "after": {_UNWRAP}'
    if isinstance(document, dict) and document.keys() == _CONNECT:
        inner = f", and in it an envelope of Debezium: {_UNWRAP}, and" if is_debezium(document["payload"]) else ":"
        return (
            f'it is an envelope of Kafka Connect, with the event in "payload"{inner} set '
            "value.converter.schemas.enable = false"
        )
    return None


def is_debezium(document: object) -> bool:
    """Return whether the fields of an object are those of a change event."""
    return isinstance(document, dict) and document.keys() >= _DEBEZIUM
