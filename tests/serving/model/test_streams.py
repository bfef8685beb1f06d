"""Which streams and copies a version and a batch take on a CUDA device, by the recorder that replaces torch.cuda."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.serving.model.batch_copies import joined, pinned_block, ranges_of, size_of, to_device, to_host
from anabranch.serving.model.loaded_version import load_version
from tests.support.cuda_recorder import CudaRecorder

DEVICE = torch.device("cuda", 1)
FEATURES = {"word": np.zeros((3, 2), np.int64), "size": np.ones((3, 2), np.float32)}


@pytest.fixture
def mixed(deploy):
    """A deployment on the second device of two, whose model has two features and two outputs."""
    publisher = deploy("mixed")
    publisher.deployment = dataclasses.replace(publisher.deployment, device=DEVICE)
    return publisher


def load(publisher, number):
    weights = {
        "words.weight": torch.full((8, 3), float(number)),
        "numbers.weight": torch.zeros(3, 2),
        "numbers.bias": torch.arange(3.0),
    }
    publisher.publish(number, weights=weights)
    return load_version(publisher.deployment, publisher.versions.manifest(number), 4)


def test_a_batch_is_one_copy_each_way_and_one_wait_on_the_stream_of_requests(mixed):
    with CudaRecorder(devices=2) as cuda:
        version = load(mixed, 1)
        cuda.log.clear()
        cuda.waits.clear()
        answers = version.run(FEATURES)
        assert cuda.sites("copy") == ["cpu to cuda, non_blocking", "cuda to cpu, non_blocking"]
        assert sum(cuda.waits.values()) == 1
        streams = {each.stream for each in cuda.log if each.kind in ("op", "copy")}
        assert [(stream.device, stream.priority) for stream in streams if stream] == [(DEVICE, -100)]
    cuda.check()
    assert answers["prediction"].tolist() == [2, 2, 2]


def test_loading_and_warm_up_are_not_on_the_stream_of_requests(mixed):
    with CudaRecorder(devices=2) as cuda:
        first = load(mixed, 1)
        first.run(FEATURES)
        cuda.log.clear()
        load(mixed, 2)
        streams = {each.stream for each in cuda.log if each.kind in ("op", "copy") and each.stream is not None}
        assert streams == {cuda.default_stream(DEVICE)}
        assert ("set_device", (1, "MainThread")) in cuda.calls
    cuda.check()


def test_the_first_warm_up_takes_memory_for_the_stream_of_requests(mixed):
    with CudaRecorder(devices=2) as cuda:
        load(mixed, 1)
        streams = {each.stream for each in cuda.log if each.kind in ("op", "copy") and each.stream is not None}
        assert {stream.priority for stream in streams} == {0, -100}
    cuda.check()


def test_later_versions_take_no_memory_on_the_device(mixed):
    with CudaRecorder(devices=2) as cuda:
        first, second = load(mixed, 1), load(mixed, 2)
        before = cuda.live_bytes
        for number in (3, 4, 5):
            first = second
            second = load(mixed, number)
            assert second.run(FEATURES)["probabilities"].shape == first.run(FEATURES)["probabilities"].shape
        assert cuda.live_bytes <= before
    cuda.check()


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
