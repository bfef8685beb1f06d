"""A learner in Python takes the steps of the daemon, and goes on from what it saved as if it had not stopped."""

import gc
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

import anabranch
from anabranch.commands.backtest.measure import run_backtest
from anabranch.commands.backtest.rows import EventsOfFile
from anabranch.config.loader import load_config
from tests.support.learner_batches import FIELDS, as_lines, batches, model_of

pytestmark = pytest.mark.slow

SCHEMA = anabranch.Schema(FIELDS)


def learner_of(strategy="der++", capacity=100, **arguments):
    defaults = {
        "replay": anabranch.ReplayBuffer(capacity),
        "settings": {"learner": {"batch_size": 16, "device": "cpu"}},
    }
    return anabranch.Learner(model_of(), SCHEMA, strategy, **{**defaults, **arguments})


def weights(learner):
    return {name: value.clone() for name, value in learner.model.state_dict().items()}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_a_model_learns_and_predicts():
    with learner_of(optimizer={"name": "adamw", "lr": 0.01}) as learner:
        losses = [learner.learn(batch) for batch in batches(12)]
        assert losses[-1] < losses[0] / 2
        data = batches(1, seed=9)[0]
        predictions = learner.predict({"x": data["x"], "n": data["n"]})
        assert np.mean(predictions["prediction"] == data["y"]) > 0.9
        assert predictions["probabilities"].shape == (64, 3)
        np.testing.assert_allclose(predictions["probabilities"].sum(axis=1), 1, atol=1e-5)
        measures = learner.measures()
        assert (measures["events"], measures["steps"]) == (12 * 64, 48)
        assert measures["events"] < measures["replayed"] <= 2 * measures["events"]  # der++ takes two samples
        assert measures["overall_accuracy"] > 0.7
        assert measures["overall_loss"] == pytest.approx(np.mean(losses), rel=1e-4)


@pytest.mark.parametrize("strategy", ["none", "der++"])
def test_its_steps_are_those_of_a_backtest_of_the_same_events(tmp_path, strategy):
    data = batches(6)
    # The name of the topic is part of the identity of its events.
    (tmp_path / "events").write_text("\n".join(as_lines(data)))
    (tmp_path / "pipeline.toml").write_text(
        f"""
        name = "digits"
        [stream]
        topics = ["events"]
        [schema.features.x]
        dtype = "float32"
        shape = [2]
        [schema.features.n]
        dtype = "int64"
        [schema.label]
        name = "y"
        classes = 3
        [model]
        factory = "tests.support.learner_batches:model_of"
        [learner]
        batch_size = 16
        strategy = "{strategy}"
        device = "cpu"
        [replay]
        capacity = 100
        [gate]
        holdout_fraction = 0
        """
    )
    result = run_backtest(load_config(tmp_path / "pipeline.toml", {}).pipeline, EventsOfFile(tmp_path / "events"))
    with learner_of(strategy) as learner:
        for batch in data:
            learner.learn(batch)
        measures = learner.measures()
    assert measures["overall_accuracy"] == pytest.approx(result.points[-1].overall, abs=1e-9)
    assert measures["overall_loss"] == pytest.approx(result.points[-1].overall_loss, rel=1e-6)


@pytest.mark.parametrize("strategy", ["der++", "agem", "ewc"])
def test_a_learner_goes_on_as_if_it_had_not_stopped(tmp_path, strategy):
    data = batches(4)
    with learner_of(strategy) as whole, learner_of(strategy) as first:
        for batch in data:
            whole.learn(batch)
        for batch in data[:2]:
            first.learn(batch)
        first.save(tmp_path)
        first.save(tmp_path)  # in place of what is there
        torch.rand(3)
        with learner_of(strategy).load(tmp_path) as second:
            assert second.measures() == first.measures()
            assert_same(weights(second), weights(first))
            for batch in data[2:]:
                second.learn(batch)
                first.learn(batch)  # saving has changed nothing
            assert second.measures() == whole.measures() == first.measures()
            assert_same(weights(second), weights(whole))
            assert_same(weights(first), weights(whole))


def test_the_buffer_is_that_of_the_learner():
    replay = anabranch.ReplayBuffer(50)
    with anabranch.Learner(model_of(), SCHEMA, replay=replay) as learner:
        assert len(replay) == 0
        learner.learn(batches(1)[0])
        held = {tuple(row) for row in batches(1)[0]["x"].tolist()}
        assert 50 <= len(replay) <= 52
        before = learner.measures()
        sample = replay.sample(10)
        assert {tuple(row) for row in sample["x"].tolist()} <= held
        assert sample.keys() == {"x", "n", "y"}
        assert learner.measures() == before
        with pytest.raises(anabranch.AnabranchError, match="that of a learner"):
            replay.add(batches(1)[0])
        with pytest.raises(anabranch.AnabranchError, match="give each learner an empty one"):
            anabranch.Learner(model_of(), SCHEMA, replay=replay)


def test_the_generators_of_the_notebook_are_left_alone(tmp_path):
    def state():
        return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    before = state()
    with learner_of() as learner:
        learner.learn(batches(1)[0])
        learner.predict(batches(1)[0])
        learner.save(tmp_path)
    learner_of().load(tmp_path).close()
    assert state() == before


class Named(nn.Module):
    """Takes a category and a scaled number."""

    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(4, 4), nn.Linear(5, 2)

    def forward(self, shop, amount):
        return self.linear(torch.cat([self.table(shop), amount.unsqueeze(-1)], dim=1))


def test_classes_have_their_names_and_numbers_are_scaled():
    shops, amounts = np.array(["a", "b", "c"] * 60), np.tile(np.linspace(100.0, 900.0, 20), 9)
    data = {"shop": shops, "amount": amounts, "kind": np.where(shops == "b", "return", "sale")}
    schema = anabranch.Schema.infer(data, label="kind")
    assert schema.settings.features["amount"].scale == "standard"
    optimizer = {"name": "adamw", "lr": 0.05}
    with anabranch.Learner(Named(), schema, optimizer=optimizer, settings={"learner": {"batch_size": 20}}) as learner:
        for _ in range(4):
            learner.learn(data)
        predicted = learner.predict({"shop": ["a", "b", "c"], "amount": [500.0] * 3})["prediction"]
        assert predicted.tolist() == ["sale", "return", "sale"]


def test_a_regression_predicts_numbers():
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(-1, 1)
    fields = {"features": {"x": {"dtype": "float32", "shape": [1]}}, "label": {"name": "y", "dtype": "float32"}}
    with anabranch.Learner(nn.Linear(1, 1), anabranch.Schema(fields), "none", {"name": "sgd", "lr": 0.2}) as learner:
        for _ in range(60):
            learner.learn({"x": x, "y": 3 * x[:, 0] + 1})
        np.testing.assert_allclose(learner.predict({"x": [[0.5]]})["prediction"], [2.5], atol=0.05)
        assert 0 < learner.measures()["absolute_error"] <= learner.measures()["overall_absolute_error"]


BAD = [
    ({"strategy": "derpp"}, "Learner: learner.strategy = 'derpp': write 'none', 'er'"),
    ({"optimizer": {"name": "sgd", "lr": -1}}, "Learner: learner.optimizer.lr = -1"),
    ({"settings": {"learner": {"batchsize": 8}}}, "Learner: unknown key learner.batchsize; the nearest known key"),
    ({"settings": {"learner": {"replicas": 2, "device": "cpu"}}}, "Learner: replicas and meshes need processes"),
    ({"settings": {"replay": {"capacity": 5}}}, "which is an argument: write Learner(replay=ReplayBuffer(...))"),
    ({"settings": {"task": {"calibrate": "platt"}}}, "Learner: settings have [task], by which versions answer"),
    ({"task": "regression"}, 'model.task is "regression", but schema.label has classes'),
    ({"model": nn.Linear(2, 3)}, "model.factory: the model fails"),
    ({"model": 3}, "returned int, not a torch.nn.Module"),
    ({"strategy": "ncm"}, "model.embedding"),
    ({"replay": 500}, "Learner: replay is of type int, and has to be a ReplayBuffer: write replay=ReplayBuffer(500)"),
    ({"schema": {}}, "Learner: schema is of type dict, and has to be a Schema: write Schema.infer(data, label=...)"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=range(len(BAD)))
def test_what_does_not_fit_is_said_when_the_learner_is_made(arguments, sentence):
    with pytest.raises(anabranch.AnabranchError) as error:
        anabranch.Learner(**{"model": model_of(), "schema": SCHEMA, **arguments})
    assert sentence in str(error.value)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_learns_where_gradients_are_off(mode):
    with learner_of() as learner, mode():
        assert learner.learn(batches(1)[0]) > 0
        assert learner.measures()["steps"] == 4


def test_a_learner_that_nobody_has_closed_leaves_no_thread():
    def threads():
        gc.collect()
        return {thread for thread in threading.enumerate() if thread.name == "store"}

    before, replay = threads(), anabranch.ReplayBuffer(100)
    learner = learner_of(replay=replay)
    learner.learn(batches(1)[0])
    assert len(threads() - before) == 1
    del learner
    assert len(replay.sample(8)["y"]) == 8, "its buffer can still be used"
    del replay
    assert threads() <= before


def test_what_the_model_raises_is_raised_as_it_is():
    def fail(*_):
        raise ValueError("the model's own error")

    with learner_of() as learner:
        learner.learn(batches(1)[0])
        learner.model.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="the model's own error"):
            learner.learn(batches(1)[0])


def test_what_a_learner_cannot_take_is_said(tmp_path):
    with pytest.raises(anabranch.AnabranchError, match="nowhere has no learner"):
        learner_of().load(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    with learner_of() as learner:
        with pytest.raises(anabranch.AnabranchError, match=f"{tmp_path} has no learner"):
            learner_of().load(tmp_path)
        with pytest.raises(anabranch.AnabranchError, match="event 0 of the data has no y, its label"):
            learner.learn({name: column for name, column in batches(1)[0].items() if name != "y"})
        with pytest.raises(anabranch.AnabranchError, match="the data has no event to predict"):
            learner.predict({name: column[:0] for name, column in batches(1)[0].items()})
        assert learner.measures()["events"] == 0
        learner.learn(batches(1)[0])
        learner.save(tmp_path)
        with pytest.raises(anabranch.AnabranchError, match="this learner has begun already"):
            learner.load(tmp_path)
    other = anabranch.Schema({**FIELDS, "label": {"name": "y", "classes": 4}})
    with pytest.raises(anabranch.AnabranchError, match="has another schema"):
        anabranch.Learner(model_of(4), other, "der++").load(tmp_path)
    with pytest.raises(anabranch.AnabranchError, match=r"requires no output .* has an output of shape \[3\]"):
        learner_of("er").load(tmp_path)
    with pytest.raises(anabranch.AnabranchError, match="does not fit the model, optimizer or strategy"):
        learner_of(optimizer="sgd").load(tmp_path)
    with pytest.raises(anabranch.AnabranchError, match="has what a Learner has saved, and no ReplayBuffer"):
        anabranch.ReplayBuffer(10, path=tmp_path)
    for call in (lambda: learner.learn(batches(1)[0]), learner.measures, lambda: learner.save(tmp_path)):
        with pytest.raises(anabranch.AnabranchError, match="the learner is closed"):
            call()
