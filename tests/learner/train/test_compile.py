"""The compiler in front of the model, and what happens where it fails."""

import logging

import pytest
import torch
from torch import nn

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train import converters as compiled
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _reset():
    """What one test compiles, and how it falls back, is none of another's."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(suppress_errors=False):
        yield
    torch._dynamo.reset()


def make_trainer(schema, *, compile_):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))
    settings = LearnerSettings.model_validate({"compile": compile_, "optimizer": {"name": "sgd", "lr": 0.1}})
    trainer = Trainer(
        TrainingSetup(model, Classification(), STRATEGIES["er"](), schema, settings, CPU, choose_precision("fp32", CPU))
    )
    torch.manual_seed(1)
    for step in range(3):
        new = trainer.examples(fake_columns(schema, range(step * 9, step * 9 + 7 + step), label=[0, 1, 2]))
        assert trainer.step(new).finite
    return trainer


@pytest.mark.slow
def test_a_compiled_model_learns_the_same_under_the_same_names(schema, monkeypatch, caplog):
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    with caplog.at_level(logging.WARNING):
        fast = make_trainer(schema, compile_=True)
    assert caplog.records == []
    assert isinstance(fast.trained_module, torch._dynamo.OptimizedModule)
    expected = make_trainer(schema, compile_=False).snapshot()
    found = fast.snapshot()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-6), name


def test_where_compiling_fails_one_warning_says_so_and_the_model_runs_as_it_is(schema, monkeypatch, caplog):
    def broken(_graph, _inputs):
        raise OSError("there is no compiler")

    monkeypatch.setattr(compiled, "BACKEND", broken)
    with caplog.at_level(logging.WARNING, logger="anabranch.learner"):
        slow = make_trainer(schema, compile_=True)
    warned = [record.name for record in caplog.records if record.name.startswith("anabranch.learner")]
    assert warned == ["anabranch.learner.train.converters"]
    assert "there is no compiler" in caplog.text
    expected = make_trainer(schema, compile_=False).snapshot()
    assert all(torch.equal(value, expected[name]) for name, value in slow.snapshot().items())
