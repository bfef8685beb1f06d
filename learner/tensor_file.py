"""A file of safetensors in pieces that share the memory of its tensors.

The library copies all tensors into one string, and no other thread runs Python meanwhile: the steps would wait.
"""

import hashlib
from collections.abc import Iterable, Mapping

import msgspec
import torch
from torch import Tensor

Piece = bytes | memoryview

_KINDS = {
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
"""What the format calls them; tensors lie in a file in the reverse order of their kinds, the widest first."""
_ORDER = list(_KINDS)


def pieces_of(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Return the file that `safetensors.torch.save` makes of contiguous tensors on the CPU, byte for byte.

    The tensors must stay as they are until the pieces are written.
    """
    header, pieces, end = {}, list[Piece](), 0
    for name, tensor in sorted(tensors.items(), key=lambda each: (-_ORDER.index(each[1].dtype), each[0])):
        piece = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        begin, end = end, end + piece.nbytes
        header[name] = {"dtype": _KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        pieces.append(piece)
    described = msgspec.json.encode(header)
    described += b" " * (-len(described) % 8)
    return [len(described).to_bytes(8, "little") + described, *pieces]


def digest_of(pieces: Iterable[Piece]) -> str:
    """Return the SHA-256 of a file in pieces."""
    found = hashlib.sha256()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()
