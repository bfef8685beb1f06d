"""The compiler in front of the model, and what happens where it fails."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ingest.events.schema import Schema
from ingest.kafka.fake import fake_columns
from learner.config import LearnerSettings
from learner.model.device import choose_precision
from learner.model.task import Classification
from learner.strategies.registry import STRATEGIES
from learner.training import compile as compiled
from learner.training.trainer import Trainer

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    """What one test compiles, and how it falls back, is none of another's."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(suppress_errors=False):
        yield
    torch._dynamo.reset()


def make_trainer(schema: Schema, *, compile_: bool) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))
    settings = LearnerSettings.model_validate({"compile": compile_, "optimizer": {"name": "sgd", "lr": 0.1}})
    trainer = Trainer(
        *(model, Classification(), STRATEGIES["er"](), schema, settings, CPU, choose_precision("fp32", CPU))
    )
    torch.manual_seed(1)
    for step in range(3):
        new = trainer.examples(fake_columns(schema, range(step * 9, step * 9 + 7 + step), label=[0, 1, 2]))
        assert trainer.step(new).finite
    return trainer


@pytest.mark.slow
def test_a_compiled_model_learns_the_same_under_the_same_names(
    schema: Schema, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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


def test_where_compiling_fails_one_warning_says_so_and_the_model_runs_as_it_is(
    schema: Schema, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_graph: Any, _inputs: Any) -> Any:
        raise OSError("there is no compiler")

    monkeypatch.setattr(compiled, "BACKEND", broken)
    with caplog.at_level(logging.WARNING, logger="learner"):
        slow = make_trainer(schema, compile_=True)
    assert [record.name for record in caplog.records if record.name.startswith("learner")] == [
        "learner.training.compile"
    ]
    assert "there is no compiler" in caplog.text
    expected = make_trainer(schema, compile_=False).snapshot()
    assert all(torch.equal(value, expected[name]) for name, value in slow.snapshot().items())
