"""Writes a safetensors file from the memory of its tensors, and reads it one tensor at a time.

The library holds the GIL while it copies a tensor, into the string to write or from the one that was read. That delays
steps, and the messages by which ranks notice that another one is gone. To read a file, it maps it into memory, where a
disk error ends the process, and it reports any error on opening as a missing file.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES, open_file

Piece = bytes | memoryview
Shaped = tuple[torch.dtype, Sequence[int]]
"""The dtype and the shape of a tensor."""

_DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""The format's names of dtypes. The tensors of a file are in the reverse order of this list, the widest first."""
_METADATA = "__metadata__"
"""The entry of the header that is no tensor: what the writer says about the file."""
_ORDER = list(_DTYPE_NAMES)
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


def pieces_of(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Return the file that `safetensors.torch.save` writes of contiguous CPU tensors, byte for byte.

    The pieces share the memory of the tensors, which must not change until they are written.
    """
    return list(pieces_one_by_one(tensors))


def pieces_one_by_one(tensors: Mapping[str, Tensor]) -> Iterator[Piece]:
    """Yield the pieces of `pieces_of`; a tensor of another device is copied when its piece is due."""
    ordered = sorted(tensors.items(), key=lambda item: (-_ORDER.index(item[1].dtype), item[0]))
    yield header_of({name: (tensor.dtype, tensor.shape) for name, tensor in ordered})
    for _, tensor in ordered:
        flat = tensor.detach().cpu().reshape(-1)
        if flat.stride() != (1,):  # the stride of an empty array may be 0, which `view` refuses
            flat = flat.clone(memory_format=torch.contiguous_format)
        yield flat.view(torch.uint8).numpy().data


def header_of(entries: Mapping[str, Shaped]) -> bytes:
    """Return the beginning of the file of tensors with these dtypes and shapes, which follow in this order."""
    header, end = {}, 0
    for name, (dtype, shape) in entries.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded


class _Entry(msgspec.Struct, frozen=True):
    """The entry of a tensor in the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a file, each read onto the CPU on access.

    The constructor and access raise DamagedError for a file that is not safetensors, and OSError if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with os.fdopen(open_file(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = _header_bytes(file.read(8), size, path)
            self._entries = _entries_of(file.read(length), size - 8 - length, path)
        self._begin = 8 + length

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        return self._read(entry, *entry.data_offsets).reshape(entry.shape)

    def shape(self, name: str) -> Sequence[int]:
        """Return the shape of a tensor, which is not read."""
        return self._entries[name].shape

    def part(self, name: str, begin: int, end: int) -> Tensor:
        """Return `tensor[begin:end]` of a tensor that has at least one dimension; the rest is not read."""
        entry = self._entries[name]
        size = math.prod(entry.shape[1:]) * _DTYPES[entry.dtype].itemsize
        first = entry.data_offsets[0]
        return self._read(entry, first + begin * size, first + end * size).reshape([end - begin, *entry.shape[1:]])

    def _read(self, entry: _Entry, begin: int, end: int) -> Tensor:
        """Read bytes of a tensor, flat, without the GIL: an array of Python would be zeroed first, which holds it."""
        content = torch.empty(end - begin, dtype=torch.uint8)
        with os.fdopen(open_file(self._path), "rb") as file:
            file.seek(self._begin + begin)
            try:
                count = file.readinto(content.numpy().data)
            except OSError as exc:
                exc.filename = str(self._path)  # a descriptor's error has no name
                raise
        if count != len(content):
            raise DamagedError(f"{self._path} is truncated")
        return content.view(_DTYPES[entry.dtype])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def tensors_of(content: bytes, source: Path | str, before_piece: Callable[[], object] = bool) -> dict[str, Tensor]:
    """Return the tensors of a file that was read, each a copy in its own memory, made without the GIL.

    `before_piece` is called before each tensor.

    Raises:
        DamagedError: it is not safetensors; the error names `source`.
    """
    length = _header_bytes(content[:8], len(content), source)
    entries = _entries_of(content[8 : 8 + length], len(content) - 8 - length, source)
    data, tensors = np.frombuffer(content, np.uint8, offset=8 + length), dict[str, Tensor]()
    for name, entry in entries.items():
        before_piece()
        tensors[name] = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
        tensors[name].reshape(-1).view(torch.uint8).numpy()[...] = data[slice(*entry.data_offsets)]
    return tensors


def _header_bytes(begin: bytes, size: int, source: Path | str) -> int:
    """Return the length of the header of a file of `size` bytes, of which the first 8 have it."""
    length = int.from_bytes(begin, "little")
    if not 0 < length <= min(size - 8, MOST_BYTES):
        raise DamagedError(f"{source} is not safetensors: its header has {length} bytes")
    return length


def _entries_of(header: bytes, size: int, source: Path | str) -> dict[str, _Entry]:
    """Return what a header says of each tensor, where `size` bytes follow it."""
    raw = decoded(header, dict[str, msgspec.Raw])
    raw.pop(_METADATA, None)
    entries = {name: decoded(entry, _Entry) for name, entry in raw.items()}
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        dtype = _DTYPES.get(entry.dtype)
        if (
            dtype is None
            or min([*entry.shape, begin], default=0) < 0
            or not begin <= end <= size
            or math.prod(entry.shape) * dtype.itemsize != end - begin
        ):
            raise DamagedError(f"{source} is not safetensors: the entry of {name[:200]!r} is invalid")
    return entries


def digest_of(pieces: Iterable[Piece]) -> str:
    """Return the SHA-256 of the file that the pieces make up."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
