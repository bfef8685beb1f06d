"""Embeddings of events, and the results of a step for the store."""

from typing import cast

import pytest
import torch
from torch import Tensor, nn

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.errors import ModelError
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.embedding import Embedding
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer

CPU = torch.device("cpu")


def make_trainer(schema, model, embedding):
    settings = LearnerSettings.model_validate({"optimizer": {"name": "sgd", "lr": 0.1}})
    precision = choose_precision("fp32", CPU)
    return Trainer(
        TrainingSetup(model, Classification(), STRATEGIES["er"](), schema, settings, CPU, precision, embedding)
    )


def examples(trainer, schema, begin, n):
    return trainer.examples(fake_columns(schema, range(begin, begin + n), label=[0, 1, 2]))


def test_the_embedding_is_what_the_module_gives_out_before_the_step_new_events_first(schema, make_model):
    model, plain = make_model(), make_model()
    trainer = make_trainer(schema, model, Embedding(model, "2"))
    new, old = examples(trainer, schema, 0, 5), examples(trainer, schema, 50, 3)
    result = trainer.step(new, [old])
    assert result.embedding_N is not None
    with torch.no_grad():
        expected = plain[:3](torch.cat([new.features["x"], old.features["x"]]))  # type: ignore[index]
    assert torch.equal(result.embedding_N, expected)
    alone = trainer.step(examples(trainer, schema, 9, 1))
    assert alone.embedding_N is not None
    assert alone.embedding_N.shape == (1, 8)


def test_the_loss_of_each_old_event_is_returned(schema, make_model):
    trainer, plain = make_trainer(schema, make_model(), None), make_model()
    new, old = examples(trainer, schema, 0, 5), examples(trainer, schema, 50, 3)
    result = trainer.step(new, [old])
    output = plain(torch.cat([new.features["x"], old.features["x"]]))
    expected = nn.functional.cross_entropy(output[5:], old.label_B, reduction="none")
    assert result.old_R is not None
    assert torch.allclose(result.old_R, expected)
    assert not result.old_R.requires_grad
    assert result.embedding_N is None
    assert trainer.step(new).old_R is None


def test_a_module_that_is_not_there_is_refused_with_the_names_of_those_that_are(make_model):
    with pytest.raises(ModelError, match=r'model.embedding = "body": the model has no such module, but 0, 1, 2, 3'):
        Embedding(make_model(), "body")


def test_a_module_that_takes_no_part_is_refused(make_model):
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return cast("Tensor", self.used(x))

    model = Idle()
    embedding = Embedding(model, "idle")
    embedding.capture_next()
    model(torch.zeros(2, 3))
    with pytest.raises(ModelError, match=r'model.embedding = "idle": the module gives out no tensor'):
        embedding.captured()
