"""A backtest of data in Python is that of the command on a file of the same events."""

import random

import numpy as np
import pyarrow as pa
import pytest
import torch

import anabranch
from anabranch.commands.backtest.measure import run_backtest
from anabranch.commands.backtest.rows import EventsOfFile
from anabranch.config.loader import load_config
from tests.support.learner_batches import FIELDS, as_lines, batches, model_of

pytestmark = pytest.mark.slow

SCHEMA = anabranch.Schema(FIELDS)
LEARNER = {"batch_size": 16, "device": "cpu"}
PIPELINE = """
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
strategy = "der++"
device = "cpu"
[replay]
capacity = 100
"""


@pytest.fixture(scope="module")
def data():
    made = batches(6)
    return {name: np.concatenate([each[name] for each in made]) for name in ("x", "n", "y")}


def test_it_is_the_backtest_of_the_command(tmp_path, data):
    (tmp_path / "events.jsonl").write_text("\n".join(as_lines([data])))
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    spec = load_config(tmp_path / "pipeline.toml", {}).pipeline
    expected = run_backtest(spec, EventsOfFile(tmp_path / "events.jsonl"), every=64).points
    settings = anabranch.Pipeline.from_toml(tmp_path / "pipeline.toml")
    before = torch.get_rng_state().tolist(), random.getstate()
    pipeline = settings.backtest(data, every=64)
    table = pa.table({**data, "x": data["x"].tolist()})
    options = {"replay": anabranch.ReplayBuffer(100), "settings": {"learner": LEARNER}, "every": 64}
    model = model_of()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    given = anabranch.backtest(table, model, SCHEMA, "der++", **options)
    named = anabranch.backtest(data, "tests.support.learner_batches:model_of", SCHEMA, "der++", **options)
    assert (torch.get_rng_state().tolist(), random.getstate()) == before
    assert len(expected) > 4
    for found in (pipeline, given, named):
        columns = {"events": "events", "overall_accuracy": "overall", "overall_loss": "overall_loss"}
        columns |= {"constant_accuracy": "constant_recent", "accuracy": "recent"}
        for name, field in columns.items():
            values = [getattr(point, field) for point in expected]
            np.testing.assert_array_equal(np.asarray(found[name]), values, err_msg=name)
    assert isinstance(given, pa.Table)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_a_frame_of_pandas_gives_one(data):
    frame = pytest.importorskip("pandas").DataFrame({**data, "x": data["x"].tolist()}).set_index("n", drop=False)
    found = anabranch.backtest(frame, model_of(), SCHEMA, "none", settings={"learner": LEARNER}, every=64)
    assert list(found.columns)[:3] == ["events", "accuracy", "overall_accuracy"]
    assert found.index.tolist() == list(range(len(found)))


def test_a_regression_has_errors_and_what_cannot_be_tested_is_said(data):
    fields = {"features": {"x": {"dtype": "float32", "shape": [2]}}, "label": {"name": "y", "dtype": "float32"}}
    schema, model = anabranch.Schema(fields), torch.nn.Linear(2, 1)
    found = anabranch.backtest(data, model, schema, "none", settings={"learner": LEARNER})
    assert found["overall_absolute_error"][-1] > 0
    for arguments, sentence in [
        (
            {"data": {"x": data["x"], "y": ["a"] * len(data["x"])}},
            "the data has no event with a label .*: row 1: Expected",
        ),
        ({"data": 3}, "data is of type int"),
        ({"model": torch.nn.Linear(3, 1)}, "the model fails"),
        ({"every": 0}, "every = 0 has to be 1 or more events"),
        ({"schema": {}}, "schema is of type dict, and has to be a Schema"),
        ({"strategy": "best"}, "learner.strategy = "),
    ]:
        with pytest.raises(anabranch.AnabranchError, match=sentence):
            anabranch.backtest(**{"data": data, "model": model, "schema": schema, **arguments})
