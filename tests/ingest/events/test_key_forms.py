"""The forms of keys that producers and connectors write."""

import struct

import pytest

from anabranch.ingest.events.key_forms import PLAIN, form_of


@pytest.mark.parametrize(
    ("key", "form"),
    [
        (b"10", PLAIN),
        ("k\u00e9y-1 of {x}".encode(), PLAIN),
        (b"", PLAIN),
        (b"{bad", PLAIN),
        (b'{"id": 11}', "a JSON object"),
        (b"[11]", "a JSON array"),
        (b'{"schema": {"type": "struct"}, "payload": {"id": 12}}', "Kafka Connect's schema and payload"),
        (b'"13"', "a text in quotes"),
        (struct.pack(">q", 14), "a binary number"),
        (struct.pack(">i", 14), "a binary number"),
        (b"\x00\x00\x00\x00\x01\x1e", "a record of a Schema Registry"),
        (b"\xff\xfe\x00", "bytes that are no text"),
    ],
)
def test_the_form_of_a_key_is_named(key, form):
    assert form_of(key) == form
