"""Versions of a pretrained model are loaded in turns into two modules, and answer as if each had its own."""

import dataclasses
import gc

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.errors import VersionError
from anabranch.learner.model.factory import build_on_device
from anabranch.learner.model.trained_set import decide_trained_set, trained_state, write_base
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.versions.format import reference_to
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.model.loaded_version import load_version
from anabranch.serving.model.tensor_slots import TensorSlot
from tests.serving.conftest import Publisher
from tests.support.tokenizer import write_tokenizer

CPU = torch.device("cpu")
TEXTS = {"text": np.array([[5, 6, 7, 0, 0, 0], [8, 9, 3, 4, 0, 0]], np.int32)}
BERT = {
    "vocab_size": 13,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 8,
    "pad_token_id": 0,
}


class Pretrained:
    """A small BERT with adapters, whose versions the test writes."""

    def __init__(self, folder, **settings):
        from transformers import BertConfig, BertModel

        torch.manual_seed(0)
        BertModel(BertConfig(**BERT)).save_pretrained(folder / "model")
        tokens = {"tokenizer": str(write_tokenizer(folder / "tokenizer.json")), "length": 6}
        features = {"text": {"dtype": "string", "encode": tokens}}
        schema = Schema(SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 3}}))
        self.settings = ModelSettings.model_validate(
            {
                "factory": "anabranch.pretrained:sequence_classifier",
                "args": {"path": "model", "classes": 3},
                "adapter": {"rank": 2, "targets": "all-linear", "train": ["classifier"]},
                **settings,
            }
        )
        self.deployment = Deployment("tiny", schema, self.settings, folder, folder / "var", CPU)
        self.publisher = Publisher(self.deployment)
        self.module = build_on_device(self.settings, folder, CPU).eval()
        self.base = write_base(bases_in(folder / "var"), self.module)

    def load(self, number, **changes):
        self.publish(number, **changes)
        return load_version(self.deployment, self.deployment.versions.manifest(number), 4)

    def publish(self, number, **changes):
        weights = {**self.weights(number), **changes}
        self.publisher.publish(number, weights, base=self.base, model=reference_to(self.settings))

    def weights(self, number):
        generator = torch.Generator().manual_seed(number)
        return {
            name: 0.3 * torch.randn(value.shape, generator=generator)
            for name, value in trained_state(self.module).items()
        }

    def expected(self, number):
        """Return what the learner's module answers with the weights of a version."""
        self.module.load_state_dict(self.weights(number), strict=False)
        with torch.no_grad():
            probabilities: Tensor = self.module(torch.from_numpy(TEXTS["text"])).softmax(dim=1)
        return probabilities.numpy()


@pytest.fixture
def pretrained(tmp_path):
    return Pretrained(tmp_path)


def answers(version):
    return version.run(TEXTS)["probabilities"]


@pytest.mark.slow
def test_two_modules_take_turns_and_each_version_answers_with_its_own_weights(pretrained):
    served, modules = None, []
    for number in range(1, 7):
        version = pretrained.load(number)
        modules.append(version.module)
        np.testing.assert_array_equal(answers(version), pretrained.expected(number))
        if served is not None:
            np.testing.assert_array_equal(answers(served), pretrained.expected(number - 1))
        served = version
    assert modules[0] is not modules[1]
    assert modules == modules[:2] * 3
    assert not any(each._forward_pre_hooks for each in modules[0].modules())


@pytest.mark.slow
def test_a_version_that_requests_hold_keeps_its_weights(pretrained):
    versions = [pretrained.load(number) for number in range(1, 5)]
    for number, version in enumerate(versions, 1):
        np.testing.assert_array_equal(answers(version), pretrained.expected(number))


@pytest.mark.slow
def test_a_version_that_is_refused_leaves_nothing_in_the_module_that_it_was_loaded_into(pretrained):
    served = pretrained.load(1)
    spare = pretrained.load(2).module
    with pytest.raises(VersionError, match="is not finite"):
        pretrained.load(3, **{"classifier.bias": torch.full((3,), torch.nan)})
    for number, name, value in (
        (4, "evil", torch.zeros(1)),
        (5, "classifier.bias", torch.zeros(4)),
        (6, "encoder.model.embeddings.word_embeddings.weight", torch.zeros(13, 16)),
    ):
        with pytest.raises(VersionError, match=name):
            pretrained.load(number, **{name: value})
    np.testing.assert_array_equal(answers(served), pretrained.expected(1))
    version = pretrained.load(7)
    assert version.module is not served.module
    assert spare is not served.module
    np.testing.assert_array_equal(answers(version), pretrained.expected(7))


@pytest.mark.slow
def test_hooks_for_the_embedding_are_added_once(tmp_path):
    pretrained = Pretrained(tmp_path, embedding="pooling")
    served = None
    for number in range(1, 7):
        version = pretrained.load(number)
        own = version.run(TEXTS, embed=True)
        other = version.run({"text": TEXTS["text"][::-1].copy()}, embed=True)
        np.testing.assert_array_equal(own["probabilities"], pretrained.expected(number))
        np.testing.assert_allclose(own["embedding"], other["embedding"][::-1], rtol=1e-5)
        assert len(version.module.get_submodule("pooling")._forward_hooks) == 1
        served = version
    assert served is not None


@pytest.mark.slow
def test_a_base_is_freed_with_its_modules(pretrained):
    version = pretrained.load(1)
    kept = pretrained.deployment._shared
    del version
    pretrained.load(2)
    kept._latest = None
    gc.collect()
    assert not list(kept._templates)


@pytest.mark.slow
def test_models_of_users_are_copied_for_each_version(pretrained):
    settings = pretrained.settings.model_copy(update={"factory": "own_model:build"})
    (pretrained.deployment.folder / "own_model.py").write_text(
        "from anabranch.pretrained import sequence_classifier\n\n\n"
        "def build(path, classes, config_folder):\n"
        "    return sequence_classifier(path, classes, config_folder=config_folder)\n"
    )
    pretrained.settings, pretrained.deployment = settings, dataclasses.replace(pretrained.deployment, model=settings)
    served, modules = [pretrained.load(1)], []
    for number in (2, 3, 4, 5):
        served.append(pretrained.load(number))
        modules.append(served[-1].module)
        served.pop(0)
        np.testing.assert_array_equal(answers(served[-1]), pretrained.expected(number))
    assert len({id(each) for each in modules}) == len(modules)


class Net(nn.Module):
    """A layer, and a buffer that no version has."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2), persistent=False)


def loaded(slot, template, value):
    weights = {name: torch.full_like(own, value) for name, own in template.state_dict().items()}
    return slot.load(template, weights, CPU, plainly=True, keep=True)


@pytest.fixture
def template():
    net = Net()
    decide_trained_set(net)
    return net.requires_grad_(False)


def test_a_buffer_that_no_version_has_is_that_of_the_template_again(template):
    slot = TensorSlot()
    first = loaded(slot, template, 1.0)
    first.get_buffer("scale").zero_()
    second = loaded(slot, template, 2.0)
    assert second is first
    assert second.get_buffer("scale").tolist() == [1, 1]
    assert second.get_parameter("layer.bias").tolist() == [2, 2]


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.register_buffer("scale", torch.zeros(3), persistent=False),
        lambda module: setattr(module.layer, "bias", nn.Parameter(torch.zeros(2), requires_grad=False)),
        lambda module: delattr(module, "scale"),
    ],
)
def test_a_module_that_has_other_tensors_than_it_got_is_not_used_again(template, change):
    slot = TensorSlot()
    first = loaded(slot, template, 1.0)
    change(first)
    second = loaded(slot, template, 2.0)
    assert second is not first
    assert second.get_buffer("scale").tolist() == [1, 1]
    assert loaded(slot, template, 3.0) is second
