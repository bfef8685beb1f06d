"""The pieces equal the file that the library writes."""

import hashlib

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from anabranch.core.failures import DamagedError
from anabranch.learner.state_dir.safetensors_file import _DTYPE_NAMES, TensorFile, digest_of, pieces_of, tensors_of
from tests.support.memory import python_memory

EACH_DTYPE = {f"t.{dtype}": torch.zeros(2, 3).to(dtype) for dtype in _DTYPE_NAMES}
FILES: dict[str, dict[str, Tensor]] = {
    "nothing": {},
    "each kind": EACH_DTYPE,
    "in any order": dict(reversed(EACH_DTYPE.items())),
    "numbers and empty ones": {
        "b": torch.tensor(3.5),
        "a": torch.zeros(0, 4),
        "c": torch.zeros(3, 0, dtype=torch.int64),
    },
    "names": {name: torch.arange(3) for name in ('"', "\\", "\n", "ä", "\U0001f600", "/", "z", "Z", "\x1f")},
    "with a gradient": {"w": torch.ones(5, requires_grad=True)},
    "of arrays whose stride is 0": {
        "empty": torch.from_numpy(np.empty(0, np.float32)),
        "one": torch.as_strided(torch.ones(1), (1,), (0,)),
    },
}


@pytest.mark.parametrize("tensors", FILES.values(), ids=FILES)
def test_the_pieces_equal_the_file_of_the_library_byte_for_byte(tensors):
    pieces = pieces_of(tensors)
    whole = b"".join(pieces)
    assert whole == save(tensors)
    assert digest_of(pieces) == hashlib.sha256(whole).hexdigest()
    found = load(whole)
    assert {name: (each.dtype, each.shape) for name, each in found.items()} == {
        name: (each.dtype, each.shape) for name, each in tensors.items()
    }


@pytest.mark.parametrize("tensors", FILES.values(), ids=FILES)
def test_a_file_in_memory_is_read_into_tensors_that_share_nothing(tensors):
    content = save(tensors)
    found = tensors_of(content, "a version")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert save({"t": found[name].contiguous()}) == save({"t": tensor.detach().contiguous()})
    assert len({each.untyped_storage()._cdata for each in found.values()}) == len(found)
    for size in range(0, len(content), 7):
        with pytest.raises(DamagedError, match="a version"):
            tensors_of(content[:size], "a version")


def test_pieces_share_the_memory_of_the_tensors():
    tensor = torch.zeros(4, dtype=torch.uint8)
    pieces = pieces_of({"t": tensor})
    tensor[2] = 7
    assert bytes(pieces[1]) == b"\0\0\x07\0"


@pytest.mark.parametrize("tensors", FILES.values(), ids=FILES)
def test_a_file_is_read_back_tensor_by_tensor(tensors, tmp_path):
    path = tmp_path / "part.safetensors"
    path.write_bytes(save(tensors))
    found = TensorFile(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert save({name: found[name]}) == save({name: tensor})
    with pytest.raises(KeyError):
        found["none"]


@pytest.mark.slow
def test_a_tensor_is_read_into_memory_of_torch_alone(tmp_path):
    """Python zeroes and copies its own objects while it holds the GIL, for a second per GB."""
    path = tmp_path / "part.safetensors"
    path.write_bytes(save({"w": torch.ones(2**24, dtype=torch.uint8)}))
    with python_memory() as most:
        assert TensorFile(path)["w"].sum() == 2**24
    assert most() < 2**20


def test_a_flipped_bit_of_the_header_never_returns_the_same_tensors(tmp_path):
    path, good = tmp_path / "part.safetensors", save({"w": torch.arange(4.0), "b": torch.ones(2, dtype=torch.bool)})
    path.write_bytes(good)
    whole = {name: tensor.tolist() for name, tensor in TensorFile(path).items()}
    outcomes = set()
    for index in range(8 + int.from_bytes(good[:8], "little")):
        for bit in range(8):
            flipped = bytearray(good)
            flipped[index] ^= 1 << bit
            path.write_bytes(flipped)
            try:
                found = {name: tensor.tolist() for name, tensor in TensorFile(path).items()}
                outcomes.add("read")
                assert found != whole
            except DamagedError:
                outcomes.add("refused")
    assert outcomes == {"read", "refused"}


@pytest.mark.parametrize("size", [0, 1, 8, 9, 40, -1])
def test_a_truncated_file_is_refused(tmp_path, size):
    path = tmp_path / "part.safetensors"
    path.write_bytes(save({"w": torch.arange(4.0)})[:size])
    with pytest.raises(DamagedError):
        TensorFile(path)["w"]
