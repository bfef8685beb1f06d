"""Models and tasks that write into what they get: what is stored, held out and captured stays as it was."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.errors import ModelError
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.embedding import Embedding, TaskEmbedding
from anabranch.learner.model.examples import Examples, concat
from anabranch.learner.model.factory import eval_mode, forward, make_task
from anabranch.learner.model.growing.pool import pool_of
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.testing.stores import sample_of
from anabranch.testing.strategies import extended
from tests.learner.learner_bench import LearnerBench
from tests.support.strategies import small_strategy

CPU = torch.device("cpu")


class Dividing(nn.Sequential):
    """Divides its input in place, in training and in evaluation."""

    def forward(self, x):
        x /= 100
        x[x.isnan()] = 0.0
        output: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return output


def dividing():
    torch.manual_seed(0)
    return Dividing(nn.Linear(3, 16), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 3))


def between_100_and_200(columns):
    columns["feature.x"][:] = 100 + columns["feature.x"] % 100


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({"er", "der", "mir", "agem", "er-ace", "ewc", "lwf", "none"} & {*STRATEGIES}))
@pytest.mark.parametrize("replay", [{}, {"disk": {"bytes": "1MB"}}], ids=["memory", "disk"])
def test_the_store_has_what_the_message_had(schema, tmp_path, name, replay):
    learner = {"micro_batch_size": 8, "replay_ratio": 1.0}
    bench = LearnerBench(tmp_path, schema, dividing(), 8, replay=replay, strategy=small_strategy(name), learner=learner)
    bench.stream.change = between_100_and_200
    bench.run()
    held_out = bench.holdout.held.columns["feature.x"].astype(np.float32)
    store = bench.store
    sample = sample_of(store, 10_000, 200)
    bench.finish()
    if STRATEGIES[name].kind.replays:
        x = sample.columns["feature.x"]
        assert len(x) == 200
        assert (x.min().item(), x.max().item()) >= (100.0, 150.0)
    assert held_out.min() >= 100
    bench.close()


def test_a_second_pass_over_joined_events_is_refused_where_the_first_has_written_into_them():
    part = Examples({"x": torch.full((2, 3), 100.0)}, torch.zeros(2), torch.ones(2))
    joined = concat([part, part]).features
    forward(nn.Linear(3, 3), joined)
    forward(dividing(), joined)
    with pytest.raises(ModelError, match="the model writes into its input x, and"):
        forward(nn.Linear(3, 3), joined)
    assert part.features["x"].min() == 100


@pytest.mark.parametrize("inplace", [False, True])
def test_an_embedding_is_the_output_of_its_module(inplace):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 2)).eval()
    embedding, x = Embedding(model, "0"), torch.randn(5, 4)
    embedding.capture_next()
    with torch.no_grad():
        forward(model, {"x": x})
        expected = model[0](x)
    assert torch.equal(embedding.captured(), expected)
    assert (expected < 0).any()


def test_an_embedding_of_the_task_is_of_the_features_that_came():
    class Own(Classification):
        def embed(self, model, features):
            return features["x"].clone()

    model, x = dividing().eval(), torch.full((2, 3), 100.0)
    embedding = TaskEmbedding(model, Own(), ["x"])
    embedding.capture_next()
    forward(model, {"x": x})
    assert embedding.captured().tolist() == x.tolist() == [[100.0] * 3] * 2


@pytest.mark.parametrize("name", ["experts", "progressive"])
def test_the_router_learns_what_it_routes_by(name):
    """With an activation that overwrites the embedding, the means of classes are those of the module's output."""
    means = []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 3))
        schema = Schema(
            SchemaSettings.model_validate(
                {"features": {"x": {"dtype": "float32", "shape": [4]}}, "label": {"name": "y", "classes": 3}}
            )
        )
        strategy = extended(small_strategy(name, least=16), model, schema, embedding="0")
        settings = LearnerSettings.model_validate({"optimizer": {"name": "sgd", "lr": 0.1}})
        trainer = Trainer(
            TrainingSetup(model, Classification(), strategy, schema, settings, CPU, choose_precision("fp32", CPU))
        )
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            label_B = torch.tensor([0, 1, 2] * 4)
            x = torch.randn(12, 4, generator=generator) + label_B[:, None]
            assert trainer.step(Examples({"x": x}, label_B, torch.ones(12))).finite
        pool = pool_of(model)
        assert pool is not None
        means.append(pool.router.weight.detach().clone())
        with eval_mode(model):
            assert forward(model, {"x": x}).shape == (12, 3)
    assert torch.equal(*means)


def test_a_task_of_the_user_gets_copies(tmp_path, monkeypatch):
    source = """
from anabranch.learner.model.task import Regression
from anabranch.testing.stores import sample_of

class Own(Regression):
    def loss(self, output_B, label_B):
        label_B -= 1
        output_B.clamp_(-1, 1)
        return super().loss(output_B, label_B)

    def score(self, output_B, label_B):
        label_B.neg_()
        return super().score(output_B.zero_(), label_B)
"""
    (tmp_path / "own_task_of_copies.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    task = make_task("own_task_of_copies:Own", tmp_path)
    output_B1, label_B = torch.full((3, 1), 5.0), torch.full((3,), 4.0)
    assert task.loss(output_B1, label_B).tolist() == [4.0] * 3, "(1 - 3) squared"
    assert task.score(output_B1, label_B).tolist() == [-4.0] * 3
    assert (output_B1[:, 0].tolist(), label_B.tolist()) == ([5.0] * 3, [4.0] * 3)
    assert type(task).__name__ == "Own"
