"""Decompression of record batches within a bound: a few kilobytes can be gigabytes once decompressed."""

import gzip
import io
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kafka import codec as codecs

_CHUNK_BYTES = 65_536
_XERIAL_HEADER_BYTES = 16


class InflatedTooLargeError(Exception):
    """The decompressed size exceeds the limit."""


def inflate(compression_type: int, data: bytes, limit: int) -> bytearray:
    """Return what was compressed, by the number that Kafka has for the codec.

    Raises:
        InflatedTooLargeError: it is more than `limit` bytes.
        Exception: the data are damaged; each codec raises its own errors.
    """
    return _CODECS[compression_type](data, limit)


def _read(stream: Any, limit: int) -> bytearray:
    inflated = bytearray()
    while chunk := stream.read(_CHUNK_BYTES):
        inflated += chunk
        if len(inflated) > limit:
            raise InflatedTooLargeError
    return inflated


def _gzip(data: bytes, limit: int) -> bytearray:
    with gzip.GzipFile(fileobj=io.BytesIO(data), mode="r") as stream:
        return _read(stream, limit)


def _lz4(data: bytes, limit: int) -> bytearray:
    with codecs.lz4.LZ4FrameFile(io.BytesIO(data)) as stream:
        return _read(stream, limit)


def _zstd(data: bytes, limit: int) -> bytearray:
    with codecs.zstd.ZstdDecompressor().stream_reader(data, read_across_frames=True) as stream:
        return _read(stream, limit)


def _snappy(data: bytes, limit: int) -> bytearray:
    inflated = bytearray()
    for block in _snappy_blocks(data):
        if len(inflated) + _snappy_length(block) > limit:
            raise InflatedTooLargeError
        inflated += codecs.snappy.decompress(block)
    return inflated


def _snappy_blocks(data: bytes) -> Iterator[bytes]:
    """Yield the blocks of Java's framing, or else all as one."""
    if not codecs._detect_xerial_stream(data):
        yield data
        return
    begin = _XERIAL_HEADER_BYTES
    while begin < len(data):
        (size,) = struct.unpack_from("!I", data, begin)
        yield data[begin + 4 : begin + 4 + size]
        begin += 4 + size


def _snappy_length(block: bytes) -> int:
    """Return the decompressed size in a block's head, a varint of 32 bits, which snappy checks."""
    length = 0
    for index, byte in enumerate(block[:5]):
        length |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            break
    return length


_CODECS: Mapping[int, Callable[[bytes, int], bytearray]] = {1: _gzip, 2: _snappy, 3: _lz4, 4: _zstd}
