"""Custom tasks: found by import string, and used by the learner and by serving."""

import pytest
import torch
from torch import nn

from anabranch.core.errors import SettingsError
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.errors import ModelError
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.embedding import Embedding, TaskEmbedding
from anabranch.learner.model.factory import check_model, make_task
from anabranch.learner.model.task import Classification, Embeds, MultiLabel, TokenClassification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.settings.strategies import StrategySettings
from anabranch.learner.strategies.registry import STRATEGIES, build_strategy
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer

CPU = torch.device("cpu")
SOURCE = """
import torch
from anabranch.learner.model.task import Classification

class Focal(Classification):
    def loss(self, output, label):
        losses = super().loss(output, label)
        return (1 - torch.exp(-losses)) ** 2 * losses

    def predict(self, output):
        return super().predict(output) | {"margin": output.topk(2).values.diff().neg()[:, 0]}

    def embed(self, model, features):
        return model[0](features["x"])

class Half:
    def loss(self, output, label):
        return output

def fails():
    raise ValueError("no such luck")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_task", raising=False)
    (tmp_path / "own_task.py").write_text(SOURCE)
    return tmp_path


def test_a_custom_task_is_trained(folder, schema):
    task = make_task("own_task:Focal", folder)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    assert check_model(model, task, schema, CPU) == (3,)
    settings = LearnerSettings.model_validate({"precision": "fp32"})
    trainer = Trainer(
        TrainingSetup(model, task, STRATEGIES["er-ace"](), schema, settings, CPU, choose_precision("fp32", CPU))
    )
    new = trainer.examples(fake_columns(schema, range(6), label=[0, 1, 2]))
    losses = Classification().loss(model(new.features["x"]), new.label_B).detach()
    expected = ((1 - torch.exp(-losses)) ** 2 * losses).mean()
    assert trainer.step(new).loss == pytest.approx(expected.item(), rel=1e-5)
    assert list(task.predict(torch.zeros(2, 3))) == ["prediction", "probabilities", "margin"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("own_task:Half", 'model.task = "own_task:Half": Half has no method check'),
        ("own_task:Whole", r'model.task = "own_task:Whole": .*own_task.py has no function or class Whole'),
        ("own_task:fails", 'model.task = "own_task:fails" fails: ValueError: no such luck'),
        ("nowhere:Task", 'model.task = "nowhere:Task": no module named nowhere'),
    ],
)
def test_what_is_no_task_is_refused(folder, name, sentence):
    with pytest.raises(ModelError, match=sentence):
        make_task(name, folder)


def test_a_name_that_is_neither_a_task_nor_an_import_string_is_refused():
    with pytest.raises(
        ValueError, match="neither classification nor multilabel nor regression nor token-classification nor an"
    ):
        ModelSettings(factory="m:build", task="clasification")


def test_a_strategy_for_classes_takes_a_task_that_is_one_of_classes(folder):
    model = ModelSettings(factory="m:build", task="own_task:Focal")
    build_strategy(StrategySettings(name="er-ace"), model, make_task("own_task:Focal", folder))
    build_strategy(StrategySettings(name="ncm"), model, make_task("own_task:Focal", folder))
    with pytest.raises(SettingsError, match=r'model.embedding is ""'):
        build_strategy(StrategySettings(name="ncm"), model, Classification())


class TestEmbed:
    def test_embeddings_come_from_the_task(self, folder, schema):
        """As the model was before the step, new events first."""
        torch.manual_seed(0)
        task = make_task("own_task:Focal", folder)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        assert isinstance(task, Embeds)
        settings = LearnerSettings.model_validate({"micro_batch_size": 4})
        arguments = (model, task, STRATEGIES["er"](), schema, settings, CPU, choose_precision("fp32", CPU))
        trainer = Trainer(TrainingSetup(*arguments, TaskEmbedding(model, task, ["x"])))
        new, old = (trainer.examples(fake_columns(schema, range(n, n + 5), label=[0, 1, 2])) for n in (0, 50))
        with torch.no_grad():
            expected = model[0](torch.cat([new.features["x"], old.features["x"]]))
        result = trainer.step(new, [old])
        assert result.embedding_N is not None
        # Of sums of numbers up to 55, some of which are almost zero, in micro-batches of other sizes.
        assert torch.allclose(result.embedding_N, expected, atol=1e-4)
        assert model.training

    def test_a_task_may_replace_a_named_module(self, folder, schema):
        found = []
        for by_task in (True, False):
            torch.manual_seed(0)
            model, task = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 3)), make_task("own_task:Focal", folder)
            assert isinstance(task, Embeds)
            embedding = TaskEmbedding(model, task, ["x"]) if by_task else Embedding(model, "0")
            arguments = (model, task, STRATEGIES["ncm"](), schema, LearnerSettings(), CPU)
            trainer = Trainer(TrainingSetup(*arguments, choose_precision("fp32", CPU), embedding))
            trainer.step(trainer.examples(fake_columns(schema, range(6), label=[0, 1, 2])))
            found.append(trainer.snapshot()["1.weight"])
        assert torch.equal(*found)

    def test_what_is_no_embedding_is_refused(self):
        class Odd:
            def embed(self, _model, features):
                return features["x"][0]

        model = nn.Linear(3, 3)
        embedding = TaskEmbedding(model, Odd(), ["x"])
        embedding.capture_next()
        model(torch.zeros(4, 3))
        with pytest.raises(ModelError, match=r"embed returned torch.float32 \[3\] for 4 events, but it needs floats"):
            embedding.captured()


@pytest.mark.slow
def test_labels_of_several_classes_are_scored_as_the_field_does():
    from sklearn.metrics import jaccard_score  # takes half a second

    generator = torch.Generator().manual_seed(0)
    output, label = torch.randn(200, 5, generator=generator), torch.rand(200, 5, generator=generator) < 0.3
    label[:20], output[:10] = False, -1.0
    task = MultiLabel()
    predicted = task.predict(output)
    assert predicted["prediction"].dtype == torch.bool
    assert torch.equal(predicted["prediction"], predicted["probabilities"] > 0.5)
    score = task.score(output, label)
    assert score[:10].tolist() == [1.0] * 10
    reference = jaccard_score(label.numpy(), predicted["prediction"].numpy(), average="samples", zero_division=1.0)
    assert float(score.mean()) == pytest.approx(reference)
    expected = torch.stack([nn.BCEWithLogitsLoss()(*each) for each in zip(output, label.float(), strict=True)])
    assert torch.allclose(task.loss(output, label), expected)


def test_a_position_without_logits_is_neither_right_nor_wrong_and_has_no_class():
    output = torch.tensor([[[3.0, 1.0], [0.0, 2.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]])
    label = torch.tensor([[0, 0, 0], [-100, 1, -100]])
    task = TokenClassification()
    assert task.score(output, label).tolist() == [0.5, 0.0]
    assert task.predict(output)["prediction"].tolist() == [[0, 1, -100], [1, -100, -100]]
