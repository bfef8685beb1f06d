"""Where messages have the id of their schema."""

import uuid

import pytest

from anabranch.ingest.schema_registry.message_ids import FIRST_MESSAGE, HEADER, SchemaIdError, locate

GUID = uuid.UUID("6d3bd7ad-7a5c-4a71-9ad2-7c1b93a4a1a7")
NUMBER = b"\0\0\0\x02\x01"


@pytest.mark.parametrize(
    ("value", "headers", "expected"),
    [
        (NUMBER + b"abc", [], (513, 5)),
        (b"\x01" + GUID.bytes + b"abc", [], (str(GUID), 17)),
        (b"abc", [("trace", b"x"), (HEADER, b"\x01" + GUID.bytes)], (str(GUID), 0)),
        (b"abc", [(HEADER, NUMBER)], (513, 0)),
        (NUMBER + b"abc", [(HEADER, b"\0\0\0\0\x07")], (7, 0)),
        (NUMBER + b"abc", [("__key_schema_id", b"\0\0\0\0\x07")], (513, 5)),
        (b'{"x": 1}', [], (None, 0)),
        (b"", [], (None, 0)),
    ],
)
def test_an_id_is_a_number_or_a_guid_in_the_value_or_in_a_header(value, headers, expected):
    located = locate(value, headers, has_indexes=False)
    assert (located.id, located.begin) == expected
    assert located.indexes == FIRST_MESSAGE


@pytest.mark.parametrize(
    ("written", "indexes"),
    [(b"\0", (0,)), (b"\x02\x02", (1,)), (b"\x04\x02\x06", (1, 3)), (b"\x02\xac\x02", (150,)), (b"\x02\0", (0,))],
)
def test_message_indexes_follow_the_id(written, indexes):
    assert locate(NUMBER + written + b"abc", [], has_indexes=True) == (513, indexes, 5 + len(written))
    assert locate(b"abc", [(HEADER, NUMBER + written)], has_indexes=True) == (513, indexes, 0)


@pytest.mark.parametrize(
    ("value", "headers", "sentence"),
    [
        (b"\0\0\0", [], "the id of its schema has 3 of 5 bytes"),
        (b"\x01" + GUID.bytes[:9], [], "the id of its schema has 10 of 17 bytes"),
        (b"abc", [(HEADER, b"\x01" + GUID.bytes[:-1])], "the id of its schema has 16 of 17 bytes"),
        (b"abc", [(HEADER, b"\x07")], f"the header {HEADER} does not begin with a byte 0 or 1"),
        (b"abc", [(HEADER, b"")], f"the header {HEADER} does not begin with a byte 0 or 1"),
        (b"\0\xde\xad\xbe\xef\0", [], "the id of its schema is 3735928559, and no registry has ids above 2147483647"),
        (NUMBER, [], "the message indexes after the id of its schema are not complete"),
        (NUMBER + b"\x04\x02", [], "the message indexes after the id of its schema are not complete"),
        (NUMBER + b"\xff" * 9, [], "the message indexes after the id of its schema are not complete"),
        (NUMBER + b"\x01", [], "-1 message indexes follow the id of its schema"),
        (NUMBER + b"\xfe\xff\xff\xff\x0f", [], "2147483647 message indexes follow the id of its schema"),
    ],
)
def test_an_id_that_is_not_complete_is_named(value, headers, sentence):
    with pytest.raises(SchemaIdError, match=sentence):
        locate(value, headers, has_indexes=True)
