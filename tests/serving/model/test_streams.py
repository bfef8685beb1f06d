"""Which streams and copies a version takes on a CUDA device, by the recorder that replaces torch.cuda."""

import dataclasses

import numpy as np
import pytest
import torch

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
