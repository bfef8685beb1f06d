"""Writes a safetensors file from the memory of its tensors, and reads it one tensor at a time.

The library copies all tensors into one string while it holds the GIL, which delays steps. To read a file, it maps it
into memory, where a disk error ends the process, and it reports any error on opening as a missing file.
"""

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES, open_file

Piece = bytes | memoryview

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
_ORDER = list(_DTYPE_NAMES)
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


def pieces_of(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Return the file that `safetensors.torch.save` writes of contiguous CPU tensors, byte for byte.

    The pieces share the memory of the tensors, which must not change until they are written.
    """
    header, pieces, end = {}, list[Piece](), 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-_ORDER.index(item[1].dtype), item[0])):
        flat = tensor.detach().reshape(-1)
        if flat.stride() != (1,):  # the stride of an empty array may be 0, which `view` refuses
            flat = flat.clone(memory_format=torch.contiguous_format)
        piece = flat.view(torch.uint8).numpy().data
        begin, end = end, end + piece.nbytes
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        pieces.append(piece)
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    return [len(encoded).to_bytes(8, "little") + encoded, *pieces]


class TensorFile(Mapping[str, Tensor]):
    """The tensors of a file, each read onto the CPU on access.

    The constructor and access raise DamagedError for a file that is not safetensors, and OSError if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with os.fdopen(open_file(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size - 8, MOST_BYTES):
                raise DamagedError(f"{path} is not safetensors: its header has {length} bytes")
            self._entries = decoded(file.read(length), dict[str, _Entry])
        self._begin, self._bytes = 8 + length, size - 8 - length
        for name, entry in self._entries.items():
            self._check(name, entry)

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        begin, end = entry.data_offsets
        content = bytearray(end - begin)
        with os.fdopen(open_file(self._path), "rb") as file:
            file.seek(self._begin + begin)
            if file.readinto(content) != len(content):
                raise DamagedError(f"{self._path} is truncated")
        dtype = _DTYPES[entry.dtype]
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _check(self, name: str, entry: "_Entry") -> None:
        begin, end = entry.data_offsets
        dtype = _DTYPES.get(entry.dtype)
        if (
            dtype is None
            or min([*entry.shape, begin], default=0) < 0
            or not begin <= end <= self._bytes
            or math.prod(entry.shape) * dtype.itemsize != end - begin
        ):
            raise DamagedError(f"{self._path} is not safetensors: the entry of {name[:200]!r} is invalid")


class _Entry(msgspec.Struct, frozen=True):
    """The entry of a tensor in the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def digest_of(pieces: Iterable[Piece]) -> str:
    """Return the SHA-256 of the file that the pieces make up."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()
