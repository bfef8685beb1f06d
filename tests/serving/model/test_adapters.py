"""Versions with adapters alone: served on one base, and one that is hostile is refused by one sentence."""

import dataclasses
import hashlib
import json
import os
import pickle

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from anabranch.learner.errors import VersionError
from anabranch.learner.model.trained_set import base_parameters, trained_state
from anabranch.learner.settings.model import AdapterSettings
from anabranch.learner.versions.format import reference_to
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.model.loaded_version import load_version
from anabranch.serving.rollout.hot_swap import VersionSwapper
from tests.serving.model.adapted import Adapted, X


@pytest.fixture
def adapted(deploy, tmp_path):
    return lambda precision="fp32": Adapted(deploy("linear"), tmp_path, precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "nf4"])
def test_serving_computes_what_the_learner_does_and_versions_share_the_base(adapted, precision):
    model = adapted(precision)
    versions = []
    for number in (1, 2):
        model.publish(number, model.weights(number))
        versions.append(model.load(number))
    for number, version in zip((1, 2), versions, strict=True):
        model.module.load_state_dict(model.weights(number), strict=False)
        with torch.no_grad():
            expected = model.module(torch.from_numpy(X)).softmax(dim=1)
        assert torch.equal(torch.from_numpy(version.run({"x": X})["probabilities"]), expected)
    first, second = (base_parameters(version._module) for version in versions)
    assert {name: value.data_ptr() for name, value in first.items()} == {
        name: value.data_ptr() for name, value in second.items()
    }
    assert {value.dtype for value in first.values()} >= {
        "fp32": {torch.float32},
        "bf16": {torch.bfloat16, torch.float32},
        "nf4": {torch.uint8, torch.float32},
    }[precision]


@pytest.mark.parametrize("precision", ["bf16", "nf4"])
def test_serving_in_half_precision_rounds_no_more_than_on_a_base_in_full(adapted, precision):
    model = adapted(precision)
    model.publish(1, model.weights(1))
    full = model.load(1).run({"x": X})["probabilities"]
    half = dataclasses.replace(model.deployment, precision="bf16")
    probabilities = load_version(half, half.versions.manifest(1), 8).run({"x": X})["probabilities"]
    assert probabilities.dtype == np.float32
    np.testing.assert_allclose(probabilities, full, atol=0.1)
    assert not np.array_equal(probabilities, full)


A = "body.0.lora_A.default.weight"


def rewritten(path, content):
    """Replace the weights of a version, with the digest in its manifest."""
    (path / "model.safetensors").write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest["files"]["model.safetensors"] = hashlib.sha256(content).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))


def renamed(path, name):
    """Let the manifest name another file as the weights."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    manifest["files"] = {name: hashlib.sha256(b"").hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))


def without(weights):
    return {name: value for name, value in weights.items() if name != A}


@pytest.mark.parametrize(
    ("change", "tamper", "sentence"),
    [
        (None, lambda path: rewritten(path, pickle.dumps(os.system)), "model.safetensors is not safetensors: "),
        (None, lambda path: rewritten(path, (2**63).to_bytes(8, "little") + b"{}"), "is not safetensors: .*[Hh]eader"),
        (None, lambda path: renamed(path, "/etc/passwd"), "'/etc/passwd' is not the name of a file"),
        (
            None,
            lambda path: renamed(path, "../../model.safetensors"),
            r"'\.\./\.\./model\.safetensors' is not the name",
        ),
        (lambda weights: {**weights, A: torch.zeros(2, 5)}, None, rf"{A}.*\[2, 5\].*\[2, 4\]"),
        (lambda weights: {**weights, A: torch.zeros(2**12, 4)}, None, rf"{A}.*\[4096, 4\].*\[2, 4\]"),
        (without, None, f"missing {A}, unexpected none"),
        (lambda weights: {**weights, "evil": torch.zeros(1)}, None, "unexpected evil"),
        (
            lambda weights: {**weights, "body.0.base_layer.weight": torch.zeros(64, 4)},
            None,
            "tensors for frozen weights: body.0.base_layer.weight",
        ),
        (lambda weights: {**weights, A: torch.full((2, 4), torch.nan)}, None, "is not finite"),
    ],
)
def test_a_hostile_adapter_is_refused_by_one_sentence_and_the_served_version_stays(adapted, change, tamper, sentence):
    model = adapted()
    swap = VersionSwapper(model.deployment, 8, ServingMetrics(CollectorRegistry()), lambda: None, pytest.fail)
    model.publish(1, model.weights(1))
    assert swap.poll()
    path = model.publish(2, model.weights(2) if change is None else change(model.weights(2)))
    if tamper is not None:
        tamper(path)

    assert not swap.poll()

    assert swap.current is not None
    assert swap.current.number == 1
    (problem,) = swap.problems
    assert problem.startswith("a version is refused: ")
    assert "\n" not in problem
    with pytest.raises(VersionError, match=sentence):
        model.load(2)


def test_a_version_with_another_adapter_is_refused_with_the_key(adapted):
    model = adapted()
    swap = VersionSwapper(model.deployment, 8, ServingMetrics(CollectorRegistry()), lambda: None, pytest.fail)
    other = model.settings.model_copy(update={"adapter": AdapterSettings(rank=2, alpha=4, train=("head",))})
    model.publish(1, model.weights(1), model=reference_to(other))

    assert not swap.poll()

    (problem,) = swap.problems
    assert "it was trained with other model.adapter (alpha) than [model.adapter] has now; set them back" in problem


def test_settings_of_a_version_build_nothing(adapted):
    model = adapted()
    reference = reference_to(model.settings)
    assert reference.adapter is not None
    reference.adapter["rank"] = 2**40  # would take all memory, if it were used
    model.publish(1, model.weights(1), model=reference)
    assert sorted(trained_state(model.load(1)._module)) == sorted(model.weights(1))
