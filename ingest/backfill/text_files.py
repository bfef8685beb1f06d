"""Files of text that other programs wrote: unpacked, and named for what they are where they are no lines of JSON.

The history and the commands that read files share it, so that a file has the same events for each of them.
"""

import gzip
import io
from collections.abc import Callable
from typing import BinaryIO, cast

import msgspec

from anabranch.ingest.formats.json_text import decoded

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_BINARY = {
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ\x00": "compressed with xz",
    b"\x04\x22\x4d\x18": "compressed with lz4",
    b"\xff\x06\x00\x00": "compressed with snappy",
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "Parquet",
    b"Obj\x01": "Avro",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
"""What files begin with, and what they are then."""
_START_BYTES = 8


def unpacked(file: BinaryIO, name: str) -> BinaryIO:
    """Return a file as it is, or its content where it is compressed with gzip, as its first bytes or its name say."""
    is_packed = name.endswith(".gz") or start_of(file).startswith(_GZIP)
    return cast("BinaryIO", gzip.GzipFile(fileobj=file)) if is_packed else file


def start_of(file: BinaryIO) -> bytes:
    """Return the first bytes of a file of which nothing was read yet; they are read again."""
    if isinstance(file, io.BufferedReader | gzip.GzipFile):
        return bytes(file.peek(_START_BYTES)[:_START_BYTES])
    start = file.read(_START_BYTES)
    file.seek(0)
    return start


def other_format(start: bytes) -> str | None:
    """Return what a file with these first bytes is, if it is no text in UTF-8."""
    for magic, what in _BINARY.items():
        if start.startswith(magic):
            return what
    return "UTF-16 or UTF-32" if b"\0" in start[:4] else None


def other_than_lines(first: bytes, following: Callable[[], bytes | None]) -> str | None:
    """Return why a file has no JSON lines, and what to do, given its first line with content; None where it may have.

    `following` returns the next line with content, if there is one. A line that is torn is no event; where the next one
    is none either, the objects span several lines.
    """
    what = other_format(first)
    if what is not None:
        return f"it is {what}; write it as UTF-8, plain or compressed with gzip"
    if first.lstrip().startswith(b"["):
        return "it begins with a list, and an event is one object in a line; `jq -c '.[]'` writes them so"
    if first.lstrip().startswith(b"{") and _is_torn(first):
        second = following()
        if second is not None and not _is_object(second):
            return "its objects span several lines, and an event is one line; `jq -c .` writes them so"
    return None


def _is_torn(line: bytes) -> bool:
    try:
        decoded(msgspec.json.decode, line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        return "truncated" in str(exc)
    return False


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(decoded(msgspec.json.decode, line), dict)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
