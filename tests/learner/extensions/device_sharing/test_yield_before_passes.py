"""Training yields before every pass of the model, whatever the pass is for."""

import re
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.device.lease import hold_server
from anabranch.learner.extensions.device_sharing.extension import DeviceSharing, device_sharing, step_hooks
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.embedding import Embedding, TaskEmbedding
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import DeviceSharingSettings, LearnerSettings
from anabranch.learner.settings.pipeline import ServedSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.micro_batches import StepHooks
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.testing.strategies import extended
from tests.support.strategies import small_strategy

CPU = torch.device("cpu")
ROWS, MICRO_BATCH = 32, 16


class EmbeddingTask(Classification):
    """A task that computes embeddings, in a pass for them alone."""

    def embed(self, model, features):
        """Return the logits."""
        logits: Tensor = model(features["x"])
        return logits


class Said:
    """Records passes (F), and where training may yield (|)."""

    def __init__(self, schema, strategy, task=None, **settings):
        self.text = ""
        self.indices: list[int] = []
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Identity(), nn.Linear(8, 3))
        model.register_forward_pre_hook(self._run)
        options = LearnerSettings.model_validate({"micro_batch_size": MICRO_BATCH, **settings})
        kind = small_strategy(strategy, **({"every": 1} if strategy in {"ewc", "lwf"} else {}))
        extended(kind, model, schema)
        embedding: Any = Embedding(model, "2") if kind.kind.embeds else None
        if isinstance(task, EmbeddingTask):
            embedding = TaskEmbedding(model, task, ["x"])
        self.trainer = Trainer(
            TrainingSetup(
                model, task or Classification(), kind, schema, options, CPU, choose_precision("fp32", CPU), embedding
            ),
            hooks=StepHooks(self._may_yield),
        )
        self._schema = schema

    def step(self, rows=ROWS):
        """Take a step, and return what was recorded."""
        self.text, self.indices = "", []
        samples = self.trainer.strategy.samples(rows)
        self.trainer.step(self.events(0, rows), [self.events(1000, n) for n in samples])
        assert self.indices == list(range(len(self.indices)))
        return self.text

    def events(self, first, rows):
        return self.trainer.examples(fake_columns(self._schema, range(first, first + rows), label=[0, 1, 2]))

    def _may_yield(self, index):
        self.text += "|"
        self.indices.append(index)

    def _run(self, _model, inputs):
        assert len(inputs[0]) <= MICRO_BATCH + 1
        self.text += "F"


@pytest.mark.parametrize(
    ("strategy", "passes"),
    [
        ("none", 2),
        ("er", 4),
        ("er-ace", 4),
        ("der", 4),
        ("der++", 7),
        ("mir", 10 + 2 + 10 + 4),
        ("agem", 4),
        ("ewc", 2 + 1),
        ("lwf", 2 + 2),
        ("ncm", 2),
        ("slda", 2),
        ("experts", 2),
        ("progressive", 2),
    ],
)
def test_training_may_yield_before_every_pass_of_every_strategy(schema, strategy, passes):
    said = Said(schema, strategy)
    said.step()
    assert said.step() == "|F" * passes


def test_every_strategy_is_tested():
    (mark,) = test_training_may_yield_before_every_pass_of_every_strategy.pytestmark  # type: ignore[attr-defined]
    assert {strategy for strategy, _ in mark.args[1]} == set(STRATEGIES)


@pytest.mark.parametrize(("strategy", "passes"), [("er", 4 + 4), ("mir", 22 + 4 + 4)])
def test_training_may_yield_before_the_passes_of_a_task_that_embeds(schema, strategy, passes):
    assert Said(schema, strategy, EmbeddingTask()).step() == "|F" * passes


def test_training_may_yield_before_the_passes_of_a_probe(schema):
    said = Said(schema, "none")
    for _ in range(2):
        said.text, said.indices = "", []
        said.trainer.probe(said.events(0, ROWS))
        assert (said.text, said.indices) == ("|F|F", [0, 1])


def test_training_may_yield_before_passes_that_search_events_which_raise(schema):
    said = Said(schema, "er")

    def fail(_model, inputs, _output):
        if (inputs[0] == 7.0).any():
            raise ValueError("seven")

    said.trainer.model.register_forward_hook(fail)
    new = said.events(0, ROWS)
    new.features["x"][3] = 7.0
    with pytest.raises(Exception, match="seven"):
        said.trainer.step(new, [said.events(1000, ROWS)])
    assert re.fullmatch(r"(\|F)+", said.text)


@pytest.mark.parametrize("strategy", ["er", "mir", "ewc", "lwf"])
def test_no_time_is_counted_twice(tmp_path, schema, monkeypatch, strategy):
    """Of training and of yielding together, all passes of a step have no more than there was."""
    monkeypatch.setattr("anabranch.learner.extensions.device_sharing.extension.step_back", lambda nice: f"nice {nice}")
    shared = DeviceSharingSettings(), ServedSettings(slo=timedelta(milliseconds=20), timeout=timedelta(hours=1))
    with (
        hold_server(tmp_path, shared[1].slo) as mark,
        device_sharing(*shared, tmp_path, CPU, threading.Event()) as sharing,
    ):
        assert isinstance(sharing, DeviceSharing)
        said = Said(schema, strategy)
        said.trainer.runner._before_micro_batch = step_hooks(
            sharing, said.trainer.runner.launch_context
        ).before_micro_batch
        asked = 0

        def answer():
            nonlocal asked
            asked += 1
            if asked % 3 == 0:
                mark.rest()

        sharing.begin(said.trainer, lambda: 4, answer)
        begin = time.monotonic()
        for _ in range(5):
            mark.run()
            said.step()
            sharing.pause()
        seconds = time.monotonic() - begin
    assert 0 < sharing._yielded < seconds
    assert 0 < sharing._trained < seconds
    assert sharing._trained + sharing._yielded <= seconds
