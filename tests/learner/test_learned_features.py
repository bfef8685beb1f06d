"""Features that a whole learner learns on a stream, over restarts, replay and failures."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.factory import forward
from anabranch.learner.model.features.intercept import GroupIntercept, residual_of
from anabranch.learner.model.features.learned import FeatureLearning, features_of
from anabranch.learner.model.task import Classification
from anabranch.learner.model.trained_set import load_trained
from anabranch.learner.settings.compatibility import conflicts
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from tests.learner.learner_bench import CPU, ROWS, LearnerBench
from tests.support.facts import facts_of
from tests.support.strategies import small_strategy


def _schema():
    encode = {"learn": 8, "min_count": 2, "expire": "2s"}
    features = {
        "x": {"dtype": "float32", "shape": [3], "scale": "standard", "missing": "indicator"},
        "r": {"dtype": "float32", "scale": "quantile"},
        "who": {"dtype": "int64", "encode": encode},
    }
    cross = {"both": {"of": ["who", "id2"], "encode": {"hash": 16}}}
    features["id2"] = {"dtype": "int64"}
    features["group"] = {"dtype": "int64", "encode": {"learn": 8, "min_count": 1, "expire": "2s"}, "intercept": True}
    return Schema(
        SchemaSettings.model_validate({"features": features, "cross": cross, "label": {"name": "y", "classes": 3}})
    )


SCHEMA = _schema()


@pytest.fixture
def schema():
    return SCHEMA


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.ids, self.crossed = nn.Embedding(8, 4), nn.Embedding(16, 4)
        self.body = nn.Sequential(nn.Linear(15, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x, x_missing, r, who, id2, both):
        inputs = [x, x_missing, r[:, None], self.ids(who), self.crossed(both)]
        output: Tensor = self.body(torch.cat(inputs, dim=1))
        return output


def change(columns):
    """Raw values far from 0, some of them missing; ids that come, stay for a while and go."""
    begin = int(columns["offset"][0])
    generator = np.random.default_rng(begin)
    rows = len(columns["offset"])
    x = columns["feature.x"]
    x += 1000
    x[generator.random(x.shape) < 0.1] = np.nan
    columns["feature.r"][:] = generator.lognormal(0, 2, rows)
    columns["feature.who"][:] = begin // 200 + generator.integers(0, 5, rows)
    columns["feature.group"][:] = begin // 100 + generator.integers(0, 3, rows)
    columns["feature.id2"][:] = generator.integers(0, 3, rows)
    columns["time_ms"][:] = columns["offset"] * 10


@pytest.fixture
def make(tmp_path, schema):
    made = list[LearnerBench]()

    def bench(blocks, **options):
        torch.manual_seed(0)
        model = Model()
        FeatureLearning().convert(model, ModelContext(CPU, schema))
        made.append(LearnerBench(tmp_path, schema, model, blocks, **options))
        made[-1].stream.change = change
        return made[-1]

    yield bench
    for each in made:
        each.close()


def features_in(bench):
    found = features_of(bench.trainer.model)
    assert found is not None
    return found


def test_each_new_event_is_learned_from_once_and_replayed_and_held_out_ones_never(make):
    bench = make(20)
    seen = list[np.ndarray[Any, Any]]()
    bench.stream.change = lambda columns: (change(columns), seen.append(columns["feature.r"].copy()))[0]
    bench.run()
    assert bench.loop.state.rows_replay > 0
    new = 20 * (ROWS - 1)
    assert bench.loop.state.rows_new == new
    count = features_in(bench).get_buffer("feature_r.state.count")
    assert count[0].tolist() == [new]
    trained = np.delete(np.stack(seen), 5, axis=1).reshape(-1)  # row 5 of each block is held out
    knots = features_in(bench).get_buffer("feature_r.knots").numpy()
    assert np.abs(np.searchsorted(np.sort(trained), knots[[8, 16, 24]]) / new - [0.25, 0.5, 0.75]).max() < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", ["er", "der++", "lwf", "mir", "agem"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(make, name):
    def strategy():
        return small_strategy(name, **({"every": 7} if name == "lwf" else {}))

    uninterrupted = make(40, strategy=strategy())
    uninterrupted.run()
    interrupted = make(17, strategy=strategy())
    interrupted.run()
    interrupted.finish()
    interrupted.close()
    resumed = make(40, strategy=strategy())
    resumed.resume()
    resumed.run()
    for part, tensors in uninterrupted.trainer.tensors().items():
        found = resumed.trainer.tensors()[part]
        for key, value in tensors.items():
            assert torch.equal(found[key], value), (part, key)
    assert int(features_in(resumed).get_buffer("feature_who.state.totals")[0]) == 40


def test_an_event_is_scored_with_what_was_learned_before_it(make):
    bench = make(3)
    inputs = list[Tensor]()
    bench.trainer.model.body.register_forward_hook(lambda _, given, __: inputs.append(given[0].detach()))  # type: ignore[union-attr, operator]
    bench.run()
    assert not inputs[0][:, :3].any()  # nothing is known yet
    assert inputs[-1][:, :3].any()


@pytest.mark.slow
def test_a_row_that_changes_its_value_starts_again_in_the_embedding_and_the_optimizer(make):
    bench = make(30)
    restarted = list[tuple[int, ...]]()
    restart = bench.trainer.update.restart_rows

    def watched(weight, rows, like):
        before = {name: value.clone() for name, value in bench.trainer.update.optimizer.state[weight].items()}
        restart(weight, rows, like)
        restarted.append(tuple(rows.tolist()))
        assert torch.equal(weight[rows], weight[like])
        kept = [row for row in range(8) if row not in rows]
        for name, value in bench.trainer.update.optimizer.state[weight].items():
            if value.ndim:
                assert not value[rows].any()
                assert torch.equal(value[kept], before[name][kept])

    bench.trainer.update.restart_rows = watched  # type: ignore[method-assign]
    bench.run()
    assert max(map(max, restarted)) < 8
    assert len(restarted) >= 3


def test_a_step_that_is_not_finite_teaches_no_features(make):
    bench = make(6)

    def spoiled(columns):
        change(columns)
        if int(columns["offset"][0]) == 3 * ROWS:
            columns["weight"][:] = np.float32(3e38)

    bench.stream.change = spoiled
    bench.run()
    assert bench.loop.state.steps == 6
    count = int(features_in(bench).get_buffer("feature_r.state.count")[0, 0])
    assert count == bench.loop.state.rows_new == 5 * (ROWS - 1)


def test_versions_and_checkpoints_have_what_was_features_in(make):
    bench = make(8)
    bench.run()
    bench.finish()
    number = bench.versions.numbers()[-1]
    weights = bench.versions.weights(bench.versions.manifest(number))
    for name, value in bench.trainer.snapshot().items():
        assert torch.equal(weights[name], value), name
    assert "learned_features.feature_who.keys" in weights
    newest = bench.checkpoints.newest()
    assert newest is not None
    assert torch.equal(
        newest[1].tensors["model"]["learned_features.feature_r.knots"], weights["learned_features.feature_r.knots"]
    )


@pytest.mark.slow
def test_a_version_that_is_loaded_answers_as_the_learner_does_for_each_group(make, schema):
    bench = make(30)
    bench.run()
    bench.finish()
    weights = bench.versions.weights(bench.versions.manifest(bench.versions.numbers()[-1]))
    served = Model()
    FeatureLearning().convert(served, ModelContext(CPU, schema))
    load_trained(served, weights)
    features = {each.name: torch.from_numpy(each.example(12)) for each in schema.features}
    features["group"] = torch.arange(12)
    with torch.no_grad():
        found, expected = (forward(model.eval(), features) for model in (served, bench.trainer.model))
    assert torch.equal(found, expected)
    assert len(features_in(bench).of(GroupIntercept)["group"](features["group"]).unique(dim=0)) > 2


def test_an_intercept_is_learned_once_from_each_new_event_by_the_output_before_training_on_it(make):
    bench = make(20)
    bench.stream.change = lambda columns: (change(columns), columns["feature.group"].fill(0))[0]
    bench.run()
    assert bench.loop.state.rows_replay > 0
    found = features_in(bench).of(GroupIntercept)["group"]
    row = int(found.table(torch.tensor([0])))
    information = found.get_buffer("information")
    assert 0 < float(information[row].sum()) < bench.loop.state.rows_new * 2 / 3 + 1  # at most 2/3 for each event
    assert not information[: found.table.shared].any()


@pytest.mark.slow
def test_compiled_code_follows_what_is_features_in(schema, monkeypatch):
    torch.manual_seed(0)
    model = Model()
    FeatureLearning().convert(model, ModelContext(CPU, schema))
    fast = torch.compile(model, backend="eager")
    found = features_of(model)
    assert found is not None
    columns = {f"feature.{each.name}": each.example(6) for each in schema.features}
    for step in range(3):
        columns["feature.x"] = np.full((6, 3), step * 7.0, np.float32)
        columns["feature.who"] = columns["feature.group"] = np.arange(6) + step
        features = {name[8:]: torch.from_numpy(value) for name, value in columns.items()}
        assert torch.equal(forward(fast, features), forward(model, features))  # type: ignore[arg-type]
        output_B = forward(model, features)  # type: ignore[arg-type]
        residual = residual_of(Classification(), output_B, torch.zeros(6, dtype=torch.int64))
        found.observe({**columns, "time_ms": np.zeros(6, np.int64), "weight": np.ones(6, np.float32)}, residual)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("learner", "says"),
    [
        ({"replicas": 2, "sync_every": 4}, 'sync_every = 4 does not go with a learned input of [schema] = "x"'),
        ({"replicas": 2, "sharding": "fsdp"}, "have parts of the model, do not agree"),
        ({"replicas": 2, "sharding": "zero1"}, "each replica has a part of the optimizer's state"),
        ({"strategy": "ewc"}, "pulls weights towards those they had before"),
        ({"strategy": "slda"}, "this strategy does not train them"),
        ({"replicas": 2}, "intercepts learn from the outputs of all events"),
        ({"deterministic": True}, ""),
        ({"compile": True}, ""),
        *(
            ({"strategy": name}, "")
            for name in sorted(STRATEGIES.keys() - {"ewc", "slda", "ncm", "experts", "progressive"})
        ),
    ],
)
def test_what_does_not_go_with_learned_features_is_refused(schema, learner, says):
    settings = LearnerSettings.model_validate(learner)
    found = [sentence for _, sentence in conflicts(facts_of(learner=settings, schema=schema.settings))]
    assert bool(found) == bool(says)
    assert not says or any(says in sentence for sentence in found)
