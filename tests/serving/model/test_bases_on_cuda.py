"""Versions on one base on a CUDA device, or on that of the recorder: they share it, and answer as on the CPU."""

import dataclasses

import numpy as np
import pytest
import torch

from anabranch.learner.model.trained_set import base_parameters
from anabranch.serving.model.graphs import capture_on
from anabranch.serving.model.loaded_version import load_version
from anabranch.serving.model.template import SharedBases
from tests.serving.model.adapted import Adapted, X
from tests.support.cuda_recorder import CudaRecorder

pytestmark = pytest.mark.usefixtures("packages_of_pretrained")
PRECISIONS = ["fp32", "bf16", "nf4"]


@pytest.fixture
def adapted(deploy, tmp_path):
    def make(precision):
        pytest.importorskip("peft")
        if precision == "nf4":
            pytest.importorskip("bitsandbytes")
        return Adapted(deploy("linear"), tmp_path, precision)

    return make


def load(model, device, numbers, **changes):
    deployment = dataclasses.replace(model.deployment, device=device, _shared=SharedBases(), **changes)
    return [load_version(deployment, deployment.versions.manifest(number), 8) for number in numbers]


def pointers(version):
    return [value.data_ptr() for value in base_parameters(version._module).values()]


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_versions_share_the_base_on_the_device_and_answer_as_on_the_cpu(adapted, cuda, precision):
    model, numbers = adapted(precision), range(1, 4)
    for number in numbers:
        model.publish(number, model.weights(number))
    versions = load(model, cuda, numbers)
    assert len({tuple(pointers(version)) for version in versions}) == 1
    assert {value.device.type for value in base_parameters(versions[0]._module).values()} <= {cuda.type, "cpu"}
    within = 0.01 if precision == "bf16" else 1e-4
    for version, expected in zip(versions, load(model, torch.device("cpu"), numbers), strict=True):
        for name, value in expected.run({"x": X}).items():
            np.testing.assert_allclose(version.run({"x": X})[name], value, rtol=within, atol=within)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_base_is_copied_to_the_device_once_and_before_requests_read_it(adapted, precision):
    model, device = adapted(precision), torch.device("cuda", 0)
    for number in range(1, 6):
        model.publish(number, model.weights(number))
    deployment = dataclasses.replace(model.deployment, device=device)
    in_use, served = [], None
    with CudaRecorder() as recorder:
        for number in range(1, 6):
            served = load_version(deployment, deployment.versions.manifest(number), 8)
            served.run({"x": X})
            in_use.append(recorder.live_bytes)
    recorder.check()
    assert max(in_use[2:]) <= in_use[1]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", PRECISIONS)
def test_graphs_of_versions_on_one_base_answer_as_without(adapted, precision):
    device, numbers = torch.device("cuda", 0), range(1, 6)
    model = adapted(precision)
    for number in numbers:
        model.publish(number, model.weights(number))
    plain = load(model, device, numbers)
    for version, expected in zip(load(model, device, numbers, capture=capture_on(device)), plain, strict=True):
        assert version._graphs is not None
        for name, value in expected.run({"x": X}).items():
            np.testing.assert_allclose(version.run({"x": X})[name], value, rtol=1e-3, atol=1e-4)
