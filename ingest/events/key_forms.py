"""Forms in which producers and connectors write the key of a record, by which a tombstone's key may match no event."""

import msgspec

PLAIN = "text"
"""The form of the keys that `[schema.key]` has: the text of the value itself."""


def form_of(key: bytes) -> str:
    """Return the form of a record's key in words, as it begins a sentence's list; `PLAIN` if it is a text by itself."""
    if key[:1] in (b"{", b"["):
        try:
            value = msgspec.json.decode(key)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return PLAIN
        if isinstance(value, dict) and value.keys() == {"schema", "payload"}:
            return "Kafka Connect's schema and payload"
        return "a JSON object" if isinstance(value, dict) else "a JSON array"
    if len(key) > 1 and key[:1] == key[-1:] == b'"':
        return "a text in quotes"
    if key[:1] == b"\0" and len(key) not in (4, 8) and len(key) > 5:
        return "a record of a Schema Registry"
    try:
        text = key.decode()
    except UnicodeDecodeError:
        text = "\0"
    if all(character.isprintable() for character in text):
        return PLAIN
    return "a binary number" if len(key) in (2, 4, 8) else "bytes that are no text"
