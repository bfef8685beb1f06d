"""Writes values as TOML: text of others, such as the name of a file, ends no string and no comment."""

import json
import math
from collections.abc import Mapping
from typing import Any

from anabranch.core.errors import SettingsError

_LONGEST_COMMENT = 200


def toml_value(value: Any) -> str:
    """Return a string, number, boolean, list or table, as TOML on one line; members that are None are left out.

    Raises:
        SettingsError: a string cannot be written as UTF-8.
    """
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        members = (f"{toml_key(key)} = {toml_value(item)}" for key, item in value.items() if item is not None)
        return f"{{{', '.join(members)}}}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # A basic string of TOML is one of JSON, but for DEL and for pairs of surrogates.
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise SettingsError(f"{json.dumps(value)[:200]} is no text that can be written as UTF-8; correct it") from exc
    return text


def toml_key(name: str) -> str:
    """Return a key, quoted where it has to be."""
    return name if name and all(c.isascii() and (c.isalnum() or c in "_-") for c in name) else toml_value(name)


def toml_comment(text: str) -> str:
    """Return a text, or its beginning, as it may be in a comment: in ASCII, with control characters escaped."""
    return json.dumps(text[:_LONGEST_COMMENT])[1:-1].replace("\x7f", "\\u007f")
