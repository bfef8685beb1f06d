"""JSON in which a missing number is the bare word NaN, as Python's json and pandas write it, though no JSON has it."""

import re
from collections.abc import Callable
from typing import TypeVar

import msgspec

_T = TypeVar("_T")

_TOKENS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|NaN|Infinity', re.DOTALL)
"""A string, to its end or that of the text, or a word that is no JSON."""


def decoded(decode: Callable[[bytes], _T], text: bytes | memoryview | msgspec.Raw) -> _T:
    """Decode JSON; a text that is none since it has NaN is decoded with null instead.

    Raises:
        msgspec.DecodeError: as `decode` does; the sentence names NaN or Infinity where it has one.
    """
    try:
        return decode(text)  # type: ignore[arg-type]
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError as exc:
        words: set[bytes] = set()
        with_null = _TOKENS.sub(lambda found: _replaced(found[0], words), bytes(text))
        if not words:
            raise
        try:
            return decode(with_null)
        except msgspec.ValidationError as inner:
            raise msgspec.ValidationError(f"{inner}; NaN is read as null") from exc
        except msgspec.DecodeError:
            word = "Infinity" if b"Infinity" in words else "NaN"
            raise msgspec.DecodeError(f"{exc}: it has {word}, which is no JSON") from exc


def _replaced(token: bytes, words: set[bytes]) -> bytes:
    if token.startswith(b'"'):
        return token
    words.add(token)
    return b"null" if token == b"NaN" else token
