"""TOML that a parser reads back, whatever text it is made of."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.config.toml_text import toml_comment, toml_key, toml_value
from anabranch.core.errors import SettingsError

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    texts | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@given(texts, values)
def test_a_value_is_read_back_as_it_was(key, value):
    assert tomllib.loads(f"{toml_key(key)} = {toml_value(value)}") == {key: value}


@given(st.text(max_size=20))
def test_a_comment_ends_where_its_line_does(text):
    lines = f"# of {toml_comment(text)}\na = 1"
    assert len(lines.splitlines()) == 2
    assert tomllib.loads(lines) == {"a": 1}


def test_a_text_that_is_no_unicode_is_one_sentence():
    with pytest.raises(SettingsError, match=r'"\\udcff" is no text that can be written as UTF-8'):
        toml_value(["\udcff"])
