"""A batch crosses to the device and back by one copy each, whatever its arrays are."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.serving.model.batch_copies import joined, pinned_block, ranges_of, size_of, to_device, to_host

DTYPES = ["bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64"]
ARRAYS = st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 3), max_size=3)), min_size=1, max_size=5)


class Copies(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def arrays(kinds, rows):
    random = np.random.default_rng(0)
    return {
        f"{number}": random.integers(0, 2, (rows, *shape)).astype(dtype) for number, (dtype, shape) in enumerate(kinds)
    }


@given(ARRAYS, st.integers(1, 5))
def test_arrays_of_any_dtype_and_shape_come_out_of_a_block_as_they_went_in(kinds, rows):
    given_ = arrays(kinds, rows)
    ranges = ranges_of(given_)
    block = pinned_block(size_of(ranges), torch.device("cpu"))
    for name, array in given_.items():
        ranges[name].of(block).numpy()[...] = array
    for name, array in given_.items():
        found = ranges[name].of(block).numpy()
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)


@given(ARRAYS, st.integers(1, 5))
def test_outputs_of_any_dtype_and_shape_are_joined_and_separated(kinds, rows):
    given_ = {name: torch.from_numpy(array) for name, array in arrays(kinds, rows).items()}
    block, ranges = joined(given_)
    assert list(ranges) == list(given_)
    for name, value in given_.items():
        assert torch.equal(ranges[name].of(block), value)


def test_a_batch_crosses_by_one_copy_whatever_the_number_of_its_features():
    features = arrays([("float32", [3]), ("int64", []), ("bool", [2, 2])], 4)
    with Copies() as copies:
        tensors = to_device(features, torch.device("meta"))
    assert copies.names.count("copy_") == 1
    assert {name: (value.shape, str(value.dtype)) for name, value in tensors.items()} == {
        "0": ((4, 3), "torch.float32"),
        "1": ((4,), "torch.int64"),
        "2": ((4, 2, 2), "torch.bool"),
    }


def test_on_a_cpu_nothing_is_copied():
    features = arrays([("float32", [3])], 4)
    (tensor,) = to_device(features, torch.device("cpu")).values()
    assert tensor.data_ptr() == features["0"].ctypes.data
    assert to_host({"x": tensor})["x"].ctypes.data == tensor.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [True])
def test_a_batch_crosses_to_a_gpu_and_back_unchanged(pinned):
    device = torch.device("cuda", 0)
    features = arrays([(dtype, [3]) for dtype in DTYPES], 7)
    assert pinned_block(1, device).is_pinned() is pinned
    with Copies() as copies:
        found = to_host(to_device(features, device))
    assert copies.names.count("copy_") == 2
    for name, array in features.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype
