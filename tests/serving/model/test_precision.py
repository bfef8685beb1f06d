"""`serving.precision`: the arithmetic of the model's forward pass, and what clients receive."""

import dataclasses

import httpx
import numpy as np
import pytest
import torch
from torch import nn

from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.serving.__main__ import deployment_of
from anabranch.serving.model.device import use_precision
from anabranch.serving.model.graphs import CudaCapture
from anabranch.serving.model.loaded_version import load_version
from anabranch.serving.protocol.codec import EMBEDDING
from anabranch.serving.settings import ServingSettings
from tests.support.cuda_recorder import CudaRecorder

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ROWS = {"x": np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)}


def load(publisher, **changes):
    generator = torch.Generator().manual_seed(1)
    weights = {"weight": torch.randn(3, 4, generator=generator), "bias": torch.randn(3, generator=generator)}
    deployment = dataclasses.replace(publisher.deployment, **changes)
    if not publisher.versions.numbers():
        publisher.publish(1, weights=weights)
    return load_version(deployment, publisher.versions.manifest(1), 8)


def test_bf16_computes_in_16_bits_and_answers_close_to_fp32_in_the_same_dtypes(deploy, monkeypatch):
    publisher = deploy("linear")
    dtypes: list[torch.dtype] = []
    forward = nn.Linear.forward

    def recorded(module, x):
        output = forward(module, x)
        dtypes.append(output.dtype)
        return output

    exact = load(publisher).run(ROWS)
    monkeypatch.setattr(nn.Linear, "forward", recorded)
    low = load(publisher, precision="bf16")
    assert set(dtypes) == {torch.bfloat16}, "warm-up too"
    found = low.run(ROWS)
    assert {name: array.dtype for name, array in found.items()} == {name: array.dtype for name, array in exact.items()}
    np.testing.assert_allclose(found["probabilities"], exact["probabilities"], atol=0.02)
    assert (found["probabilities"] != exact["probabilities"]).any()
    np.testing.assert_allclose(found["probabilities"].sum(axis=1), 1, rtol=1e-6)
    assert low._module.weight.dtype == torch.float32  # type: ignore[union-attr]


def test_embeddings_are_float32_in_any_precision(deploy):
    publisher = deploy("mixed")
    model = publisher.deployment.model.model_copy(update={"embedding": "numbers"})
    weights = {"words.weight": torch.ones(8, 3), "numbers.weight": torch.rand(3, 2), "numbers.bias": torch.zeros(3)}
    publisher.publish(1, weights=weights)
    version = load(publisher, model=model, precision="bf16")
    size = np.array([[1, 2], [3, 4]], np.float32)
    embedding = version.run({"word": np.zeros((2, 2), np.int64), "size": size}, embed=True)[EMBEDDING]
    assert embedding.dtype == np.float32
    np.testing.assert_allclose(embedding, size @ weights["numbers.weight"].numpy().T, rtol=0.02)


@pytest.mark.slow
def test_requests_are_answered_in_bf16(deploy, served, body_of):
    publisher = deploy("linear")
    publisher.deployment = dataclasses.replace(publisher.deployment, precision="bf16")
    load(publisher)
    with served(publisher) as running:
        reply = httpx.post(running.infer, json=body_of(2)).json()
    (probabilities,) = (output for output in reply["outputs"] if output["name"] == "probabilities")
    assert probabilities["datatype"] == "FP32"


@pytest.mark.parametrize("name", ["fp16", "tf32"])
def test_what_needs_a_cuda_device_is_refused_without_one(name):
    with pytest.raises(SettingsError, match=f'serving.precision = "{name}" needs a CUDA device, but the device is cpu'):
        use_precision(name, CPU)


def test_a_device_without_bf16_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    with pytest.raises(SettingsError, match='is not supported by cuda:0; try "fp16"'):
        use_precision("bf16", CUDA)


def test_tf32_is_for_the_whole_process_and_others_leave_it_alone(monkeypatch):
    chosen: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    for name in ("fp32", "bf16", "fp16"):
        use_precision(name, CUDA)  # type: ignore[arg-type]
    assert chosen == []
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    use_precision("tf32", CUDA)
    assert chosen == ["high"]
    assert torch.backends.cudnn.allow_tf32


def test_the_process_serves_with_the_settings(pipeline, caplog):
    config = load_config(pipeline(more='device = "cpu"\nprecision = "bf16"\ngraphs = true'))
    deployment = deployment_of(config)
    assert (deployment.precision, deployment.capture) == ("bf16", None)
    assert "serving.graphs has no effect: it needs a CUDA device" in caplog.text
    with CudaRecorder():
        deployment = deployment_of(load_config(pipeline(more='device = "cuda"\ngraphs = true')))
    assert (deployment.device, deployment.precision) == (torch.device("cuda", 0), "fp32")
    assert deployment.capture is CudaCapture


def test_the_default_is_full_precision_without_graphs():
    assert (ServingSettings().precision, ServingSettings().graphs) == ("fp32", False)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits_on_a_gpu_answer_close_to_fp32(deploy, precision):
    publisher = deploy("linear")
    exact = load(publisher, device=CUDA).run(ROWS)
    found = load(publisher, device=CUDA, precision=precision).run(ROWS)
    np.testing.assert_allclose(found["probabilities"], exact["probabilities"], atol=0.02)
