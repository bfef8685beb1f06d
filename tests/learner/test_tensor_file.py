"""The file is the one that the library would have written."""

import hashlib

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from learner.tensor_file import _KINDS, digest_of, pieces_of

EACH_KIND = {f"t.{kind}": torch.zeros(2, 3).to(kind) for kind in _KINDS}
FILES: dict[str, dict[str, Tensor]] = {
    "nothing": {},
    "each kind": EACH_KIND,
    "in any order": dict(reversed(EACH_KIND.items())),
    "numbers and empty ones": {
        "b": torch.tensor(3.5),
        "a": torch.zeros(0, 4),
        "c": torch.zeros(3, 0, dtype=torch.int64),
    },
    "names": {name: torch.arange(3) for name in ('"', "\\", "\n", "ä", "\U0001f600", "/", "z", "Z", "\x1f")},
    "with a gradient": {"w": torch.ones(5, requires_grad=True)},
}


@pytest.mark.parametrize("tensors", FILES.values(), ids=FILES)
def test_a_file_in_pieces_is_that_of_the_library_byte_for_byte(tensors: dict[str, Tensor]) -> None:
    pieces = pieces_of(tensors)
    whole = b"".join(pieces)
    assert whole == save(tensors)
    assert digest_of(pieces) == hashlib.sha256(whole).hexdigest()
    found = load(whole)
    assert {name: (each.dtype, each.shape) for name, each in found.items()} == {
        name: (each.dtype, each.shape) for name, each in tensors.items()
    }


def test_pieces_share_the_memory_of_the_tensors() -> None:
    tensor = torch.zeros(4, dtype=torch.uint8)
    pieces = pieces_of({"t": tensor})
    tensor[2] = 7
    assert bytes(pieces[1]) == b"\0\0\x07\0"
