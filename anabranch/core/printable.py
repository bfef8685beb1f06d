"""Text of files that others may have written, made safe for a terminal."""

import re

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""All but tab and newline: what a terminal takes for orders, and what turns the direction of a line."""


def printable(text: str) -> str:
    """Return a text with each control character replaced, so that it cannot give orders to a terminal."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)
