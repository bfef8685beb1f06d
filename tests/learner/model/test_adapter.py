"""`[model.adapter]`: which weights train, on modules of any kind, and what a name that does not fit says."""

import sys

import pytest
import torch
from torch import nn

from anabranch.core.errors import SettingsError
from anabranch.learner.errors import ModelError
from anabranch.learner.model.adapter import Adapter
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.factory import build_model, build_on_device
from anabranch.learner.model.trained_set import base_state, trained_state
from anabranch.learner.settings.model import AdapterSettings, ModelSettings
from anabranch.learner.versions.format import ModelReference, other_model, reference_to
from tests import forkserver
from tests.support.trained_set import split_state


class Net(nn.Module):
    """Convolutions, linear layers and a classifier."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(8 * 36, 64), nn.ReLU(), nn.Linear(64, 16))
        self.classifier = nn.Linear(16, 3)

    def forward(self, x):
        return self.classifier(self.body(self.features(x)))


CONTEXT = ModelContext(torch.device("cpu"))
X = torch.linspace(-1, 1, 2 * 64).reshape(2, 1, 8, 8)


def adapted(model=None, **settings):
    torch.manual_seed(1)
    return Adapter(AdapterSettings.model_validate(settings)).convert(Net() if model is None else model, CONTEXT)


def trained_names(model):
    return {name for name, value in model.named_parameters() if value.requires_grad}


class TestWhatTrains:
    def test_all_linear_layers_get_two_matrices(self):
        model = adapted(train=["classifier"], rank=4)
        assert trained_names(model) == {
            "body.1.lora_A.default.weight",
            "body.1.lora_B.default.weight",
            "body.3.lora_A.default.weight",
            "body.3.lora_B.default.weight",
            "classifier.weight",
            "classifier.bias",
        }
        assert model.body[1].lora_A.default.weight.shape == (4, 8 * 36)

    def test_targets_are_names_or_their_ends(self):
        model = adapted(targets=["features.0", "3"])
        assert {name.partition(".lora")[0] for name in trained_names(model)} == {"features.0", "body.3"}

    def test_a_name_is_not_taken_for_the_end_of_another(self):
        model = nn.ModuleDict({"fc": nn.Linear(4, 4), "block": nn.ModuleDict({"fc": nn.Linear(4, 4)})})
        assert trained_names(adapted(model, targets=["block.fc"])) == {
            "block.fc.lora_A.default.weight",
            "block.fc.lora_B.default.weight",
        }

    def test_modules_that_train_in_full_get_no_adapter(self):
        model = adapted(train=["body"], targets="all-linear")
        assert {name for name in trained_names(model) if name.startswith("body")} == {
            "body.1.weight",
            "body.1.bias",
            "body.3.weight",
            "body.3.bias",
        }

    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_it_changes_nothing_until_it_is_trained(self, precision):
        torch.manual_seed(1)
        expected = Net().eval()(X)
        model = adapted(train=["classifier"], base_precision=precision).eval()
        torch.testing.assert_close(model(X), expected, rtol=0, atol=0 if precision == "fp32" else 0.01)

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "nf4"])
    def test_it_learns_and_leaves_the_base_as_it_is(self, precision):
        model = adapted(train=["classifier"], targets=["body.1", "body.3", "features.0"], base_precision=precision)
        before = {name: value.clone() for name, value in base_state(model).items()}
        optimizer = torch.optim.Adam([value for value in model.parameters() if value.requires_grad], 0.01)
        losses = []
        for _ in range(20):
            loss = nn.functional.cross_entropy(model(X), torch.tensor([0, 2]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0] / 4
        assert all(value.any() for name, value in model.named_parameters() if "lora_B" in name)
        assert all(torch.equal(value, before[name]) for name, value in base_state(model).items())

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "nf4"])
    def test_a_base_in_half_precision_trains_in_float32(self, precision):
        model = adapted(Net().bfloat16(), train=["classifier"], base_precision=precision)
        assert {value.dtype for value in trained_state(model).values() if value.is_floating_point()} == {torch.float32}
        model(X).sum().backward()

    def test_buffers_are_trained_and_the_rest_is_the_base(self):
        model = adapted(train=["classifier"])
        trained, base = split_state(model)
        assert {"features.1.running_mean", "features.1.running_var", "features.1.num_batches_tracked"} <= {*trained}
        assert {"features.0.weight", "features.1.weight", "body.1.base_layer.weight"} <= {*base}

    def test_a_transformer_of_torch_uses_its_adapters_when_it_predicts(self):
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        model = adapted(layer, targets=["linear1", "linear2"]).eval()
        x = torch.ones(1, 3, 16)
        with torch.no_grad():
            before = model(x)
            model.linear1.lora_B.default.weight.fill_(1)
            assert not torch.allclose(model(x), before)

    def test_dropout_is_for_training_alone(self):
        model = adapted(dropout=0.5, targets=["body.1"])
        model.body[1].lora_B.default.weight.data.fill_(1)
        model.eval()
        assert torch.equal(model(X), model(X))
        model.train()
        assert not torch.equal(model(X), model(X))


class TestRefused:
    @pytest.mark.parametrize(
        ("settings", "sentence"),
        [
            (
                {"train": ["head"]},
                (
                    'model.adapter.train = "head": the model has no such module with weights, but features, '
                    "features.0, features.1, body, body.1, body.3, classifier"
                ),
            ),
            (
                {"train": ["features.2"]},
                'model.adapter.train = "features.2": the model has no such module with weights',
            ),
            (
                {"targets": ["query"]},
                (
                    'model.adapter.targets = "query": the model has no such linear layer or convolution outside '
                    "model.adapter.train, but features.0, body.1, body.3, classifier"
                ),
            ),
            (
                {"targets": ["classifier"], "train": ["classifier"]},
                'model.adapter.targets = "classifier": the model has',
            ),
            ({"targets": ["body"]}, 'model.adapter.targets = "body": the model has no such linear layer'),
            (
                {"train": ["body", "classifier"]},
                'model.adapter.targets = "all-linear": the model has no linear layer outside model.adapter.train',
            ),
        ],
    )
    def test_a_name_that_does_not_fit_is_one_sentence_with_those_that_do(self, settings, sentence):
        with pytest.raises(ModelError) as caught:
            adapted(**settings)
        assert str(caught.value).startswith(sentence)
        assert "\n" not in str(caught.value)

    def test_what_peft_cannot_adapt_is_one_sentence(self):
        model = nn.Sequential(nn.Conv2d(4, 4, 1, groups=4))
        with pytest.raises(ModelError, match=r"^model\.adapter: peft cannot adapt 0: .*rank") as caught:
            adapted(model, targets=["0"], rank=3)
        assert "\n" not in str(caught.value)

    def test_the_output_projection_of_attention_is_refused(self):
        layer = nn.TransformerEncoderLayer(16, 2, 32)
        with pytest.raises(ModelError, match='targets = "out_proj": the model has no such linear layer'):
            adapted(layer, targets=["out_proj"])

    @pytest.mark.parametrize(
        ("package", "settings", "sentence"),
        [
            ("peft", {}, r"\[model.adapter\] needs peft: pip install 'anabranch\[hf\]', or take the section out"),
            (
                "bitsandbytes",
                {"base_precision": "nf4"},
                r"base_precision = .nf4. needs bitsandbytes: pip install 'anabranch\[nf4\]', or write .bf16.",
            ),
        ],
    )
    def test_a_package_that_is_missing_is_named(self, monkeypatch, package, settings, sentence):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(SettingsError, match=sentence):
            adapted(**settings)


@pytest.mark.process
def test_nothing_is_fetched_from_the_hub():
    # In a process that has not imported it: what is imported already asks no more.
    script = (
        "import sys\n"
        "assert 'huggingface_hub' not in sys.modules\n"
        "import torch\n"
        "from torch import nn\n"
        "from anabranch.learner.model.adapter import Adapter\n"
        "from anabranch.learner.model.converter import ModelContext\n"
        "from anabranch.learner.settings.model import AdapterSettings\n"
        "Adapter(AdapterSettings()).convert(nn.Sequential(nn.Linear(4, 4)), ModelContext(torch.device('cpu')))\n"
        "from huggingface_hub import constants\n"
        "assert constants.HF_HUB_OFFLINE\n"
    )
    ran = forkserver.run(["-c", script], timeout=120)
    assert ran.returncode == 0, ran.stderr


class TestFactory:
    def test_the_adapter_is_added_before_the_base_is_decided(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sys, "path", [*sys.path])
        (tmp_path / "anabranch_test_adapter.py").write_text(
            "from torch import nn\ndef build(): return nn.Linear(4, 3)\n"
        )
        plain = build_model("anabranch_test_adapter:build", {}, tmp_path)
        assert split_state(plain) == (["weight", "bias"], [])
        (tmp_path / "anabranch_test_adapter2.py").write_text(
            "from torch import nn\ndef build(): return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))\n"
        )
        settings = ModelSettings(factory="anabranch_test_adapter2:build", adapter=AdapterSettings(train=("1",), rank=2))
        model = build_on_device(settings, tmp_path, torch.device("cpu"))
        assert split_state(model) == (
            ["0.lora_A.default.weight", "0.lora_B.default.weight", "1.weight", "1.bias"],
            ["0.base_layer.weight", "0.base_layer.bias"],
        )


def reference(**settings):
    return reference_to(ModelSettings.model_validate({"factory": "m:build", **settings}))


class TestReference:
    @pytest.mark.parametrize(
        ("then", "now", "sentence"),
        [
            ({"rank": 4}, {"rank": 8}, "it was trained with other model.adapter (rank) than [model.adapter] has now; "),
            ({"targets": ["a"]}, {"alpha": 2.0}, "it was trained with other model.adapter (alpha, targets) than "),
            ({"base_precision": "nf4"}, {}, "it was trained with other model.adapter (base_precision) than "),
            (None, {}, "it was trained without [model.adapter]; set that back to serve it"),
            (
                {},
                None,
                "it was trained with [model.adapter], which the config does not have; set that back to serve it",
            ),
        ],
    )
    def test_another_adapter_is_said_in_a_sentence(self, then, now, sentence):
        actual = reference(**({} if then is None else {"adapter": then}))
        expected = reference(**({} if now is None else {"adapter": now}))
        assert other_model(actual, expected).startswith(sentence)
        assert other_model(actual, actual) is None

    def test_dropout_is_no_difference_for_serving(self):
        assert other_model(reference(adapter={"dropout": 0.1}), reference(adapter={})) is None

    def test_it_is_json(self):
        assert reference(adapter={"targets": ["a"], "train": ["b"]}) == ModelReference(
            "m:build",
            {},
            "classification",
            {"kind": "lora", "rank": 8, "alpha": 16.0, "targets": ["a"], "train": ["b"], "base_precision": "fp32"},
        )
