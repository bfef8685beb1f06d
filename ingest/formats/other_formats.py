"""Recognises messages that are of another format as a whole: what a connector or a serializer has put around them."""

import msgspec

DEBEZIUM = frozenset({"before", "after", "op"})
"""Fields of an envelope of Debezium."""
_CONNECT = {"schema", "payload"}
CLOUD_EVENT = {"specversion", "id", "source", "type"}
_PLAIN = "let the producer send events as they are, and leave compression to Kafka (compression.type)"
_MAGIC = {
    b"\x1f\x8b": f"it is compressed with gzip: {_PLAIN}",
    b"\x28\xb5\x2f\xfd": f"it is compressed with zstd: {_PLAIN}",
    b"Obj\x01": "it is an Avro file: let the producer send each record with a serializer of a Schema Registry",
    b"PAR1": "it is a Parquet file, which [stream.backfill] reads, and no message",
    b"\xef\xbb\xbf": "it begins with a byte order mark: let the producer write UTF-8 without one",
    b"\xff\xfe": "it is UTF-16: let the producer write UTF-8",
    b"\xfe\xff": "it is UTF-16: let the producer write UTF-8",
}
UNWRAP = 'name the fields of a row by field = "after.NAME"'


def other_format(value: bytes) -> str | None:
    """Return what the value of a rejected JSON message is, and the way out; None if it is nothing that is known."""
    if value[:1] == b"\0" and len(value) > 5:
        formats = '"json-schema"' if value[5:6] in (b"{", b"[", b'"') else '"avro" or "protobuf"'
        return (
            "it begins with the id of a schema, as serializers of a Schema Registry write it: set "
            f"stream.format = {formats}, and [stream.registry]"
        )
    for magic, what in _MAGIC.items():
        if value.startswith(magic):
            return what
    document = _document(value)
    if is_debezium(document):
        return 'it is an envelope of Debezium, with the row in "after": set stream.envelope = "debezium"'
    if isinstance(document, dict) and document.keys() == _CONNECT:
        if is_debezium(document["payload"]):
            return 'it is an envelope of Debezium, within one of Kafka Connect: set stream.envelope = "debezium"'
        return 'it is an envelope of Kafka Connect, with the event in "payload": set stream.envelope = "connect"'
    if isinstance(document, dict) and document.keys() >= CLOUD_EVENT:
        return 'it is an event of CloudEvents: set stream.envelope = "cloudevents"'
    return None


def not_binary(value: bytes) -> str | None:
    """Return what the value of a rejected message of a binary format is, and the way out; None if nothing is known."""
    if isinstance(_document(value), dict):
        return other_format(value) or 'it is a JSON object: set stream.format = "json"'
    return next((what for magic, what in _MAGIC.items() if value.startswith(magic)), None)


def _document(value: bytes) -> object:
    if value.lstrip()[:1] != b"{":
        return None
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def is_debezium(document: object) -> bool:
    """Return whether the fields of an object are those of a change event."""
    return isinstance(document, dict) and document.keys() >= DEBEZIUM
