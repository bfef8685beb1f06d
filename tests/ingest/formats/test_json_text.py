"""JSON with NaN, as Python and pandas write it."""

import json
import math
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.ingest.formats.json_text import decoded

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.just(math.nan), st.text(), st.just('\\"NaN')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def without_nan(value):
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) else value


@given(VALUES)
def test_what_python_writes_is_read_with_null_for_each_nan(value):
    assert decoded(msgspec.json.decode, json.dumps(value).encode()) == without_nan(value)


@pytest.mark.parametrize("text", [b'{"x": Na}', b"[1,]", b'"NaN', b"", b'{"x": "NaN",}', b"\xff"])
def test_other_text_that_is_no_json_has_the_reason_of_the_decoder(text):
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)) as caught:
        decoded(msgspec.json.decode, text)
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)) as plain:
        msgspec.json.decode(text)
    assert str(caught.value) == str(plain.value)


@pytest.mark.parametrize("text", [b"[Infinity]", b"[-Infinity]", b"[NaN, Infinity]"])
def test_infinity_is_named(text):
    with pytest.raises(msgspec.DecodeError, match=r"^JSON is malformed: .*: it has Infinity, which is no JSON$"):
        decoded(msgspec.json.decode, text)


def test_a_nan_where_null_is_none_of_the_values_is_named():
    with pytest.raises(msgspec.ValidationError, match=r"Expected `float`, got `null`.*; NaN is read as null"):
        decoded(msgspec.json.Decoder(list[float]).decode, b"[NaN]")


@pytest.mark.parametrize("text", [b'{"a": NaN, "' + b'\\"' * 500_000, b'[NaN, "' * 100_000, b'"' * 1_000_001 + b"NaN"])
def test_hostile_text_takes_time_in_proportion_to_its_length(text):
    began = time.process_time()
    with pytest.raises((msgspec.DecodeError, RecursionError)):
        decoded(msgspec.json.decode, text)
    assert time.process_time() - began < 5
