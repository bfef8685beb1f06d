"""Linear layers in 8 bits, emulated on the CPU; without torchao all but the first test are skipped."""

import importlib.util

import pytest
import torch
from torch import nn

from anabranch.core.errors import SettingsError
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.errors import ModelError
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.device import Precision
from anabranch.learner.model.float8 import Float8
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.compatibility import conflicts
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from tests.support.facts import facts_of

CPU = torch.device("cpu")
FP8 = Precision("fp8", torch.bfloat16)
without_torchao = importlib.util.find_spec("torchao") is None
needs_torchao = pytest.mark.skipif(without_torchao, reason="torchao is not installed: anabranch[fp8]")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))


def trainer_of(schema, name, built):
    settings = LearnerSettings.model_validate({"optimizer": {"name": "adamw", "lr": 0.01}})
    return Trainer(TrainingSetup(built, Classification(), STRATEGIES[name](), schema, settings, CPU, FP8))


@pytest.mark.skipif(not without_torchao, reason="torchao is installed")
def test_without_torchao_it_is_one_sentence():
    with pytest.raises(SettingsError, match=r"learner.precision = .fp8. needs torchao: pip install 'anabranch\[fp8\]'"):
        Float8().convert(model(), ModelContext(CPU))


def test_it_does_not_go_with_sharded_weights():
    settings = LearnerSettings.model_validate({"precision": "fp8", "sharding": "fsdp", "replicas": 2})
    ((key, sentence),) = conflicts(facts_of(learner=settings))
    assert key == "learner.precision"
    assert sentence.startswith('learner.precision = "fp8" does not go with learner.sharding = "fsdp": the weights of')


@needs_torchao
@pytest.mark.filterwarnings("ignore")
class TestInEightBits:
    def test_only_layers_that_fit_are_replaced_and_keys_stay(self):
        plain, converted = model(), Float8().convert(model(), ModelContext(CPU))
        kinds = [type(layer).__name__ for layer in converted if isinstance(layer, nn.Linear)]
        assert kinds == ["Linear", "Float8Linear", "Linear"]
        assert list(converted.state_dict()) == list(plain.state_dict())
        for name, value in converted.state_dict().items():
            assert value.dtype is torch.float32
            assert torch.equal(value, plain.state_dict()[name])
        plain.load_state_dict(converted.state_dict())

    def test_a_model_without_such_a_layer_is_refused(self):
        with pytest.raises(
            ModelError, match=r'no nn\.Linear of the model has sizes that are multiples of 16; write "bf16"'
        ):
            Float8().convert(nn.Linear(3, 3), ModelContext(CPU))

    @pytest.mark.parametrize("name", ["er", "der++", "mir", "lwf", "ewc"])
    def test_it_learns_and_goes_on_from_a_checkpoint(self, schema, name):
        first, second = (trainer_of(schema, name, Float8().convert(model(), ModelContext(CPU))) for _ in range(2))
        losses = []
        for step in range(40):
            columns = fake_columns(schema, range(step, step + 13), label=[0, 1, 2])  # no multiple of 16
            columns["feature.x"][:] = torch.eye(3)[torch.from_numpy(columns["label"])].numpy()
            new = first.examples(columns)
            old = type(new)(new.features, new.label_B, new.weight_B, torch.zeros(13, 3))
            result = first.step(new, [old] * len(first.strategy.samples(13)))
            assert result.finite
            losses.append(result.loss)
        assert losses[-1] < 0.7 * losses[0]
        second.restore(first.tensors(), first.state())
        expected = first.snapshot()
        assert all(torch.equal(value, expected[key]) for key, value in second.snapshot().items())
