"""`anabranch backtest`: what is learned from a file, and what is said of it."""

import json
import sys

import numpy as np
import pytest
import torch

from anabranch.cli import app as cli
from anabranch.commands.backtest import _Reservoir, backtest
from anabranch.config.loader import load_config
from learner.strategies.examples import Examples


@pytest.fixture(autouse=True)
def _own_factory(monkeypatch):
    """Lets each test import the factory in its folder."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    sys.modules.pop("my_model", None)
    yield
    sys.modules.pop("my_model", None)


@pytest.fixture
def file(example):
    """2,000 events whose class is the index of their largest feature, one without a label and one that is no event."""
    random = np.random.default_rng(0)
    path = example / "stream.jsonl"
    lines = []
    for label in random.integers(10, size=2000).tolist():
        x = random.uniform(0, 0.1, 64)
        x[label] = 1.0
        lines.append(json.dumps({"x": x.tolist(), "y": label}))
    lines[5:5] = [json.dumps({"x": [0.0] * 64}), "nonsense"]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def run(example, capsys):
    def call(*arguments):
        code = cli.main(["backtest", *map(str, arguments), "-c", str(example / "pipeline.toml")])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_accuracy_rises_over_the_file(run, file):
    code, out, err = run(file, "--every", "500", "--json")
    document = json.loads(out)
    assert (code, document["events"], document["skipped"], document["score"]) == (0, 2000, 2, "accuracy")
    accuracy = [point["recent"] for point in document["points"]]
    assert len(accuracy) == 4
    assert accuracy[0] < accuracy[-1]
    assert accuracy[-1] > 0.8
    assert err.startswith("skipped 2 events without a label or that cannot be used; the first: line 7: ")


def test_the_screen_is_a_table(run, file):
    lines = run(file)[1].splitlines()
    assert lines[0].split() == ["events", "recent", "accuracy", "overall", "accuracy", "loss"]
    assert lines[-1].split()[0] == "2,000"


def test_each_event_is_scored_before_it_is_trained_on(example, file):
    lines = file.read_text().splitlines()[:1] * 32
    file.write_text("\n".join(lines))
    config = load_config(example / "pipeline.toml", {"ANABRANCH__LEARNER__BATCH_SIZE": "32"})
    (point,) = backtest(config, file).points
    assert point.overall in (0.0, 1.0), "one prediction for one event that was never seen"


@pytest.mark.parametrize("strategy", ["none", "er", "der++", "mir"])
def test_every_kind_of_strategy_runs(example, file, strategy):
    config = load_config(example / "pipeline.toml", {"ANABRANCH__LEARNER__STRATEGY": strategy})
    assert backtest(config, file).points[-1].recent > 0.3


def test_a_file_without_labels_is_one_sentence(run, example):
    (example / "none.jsonl").write_text(json.dumps({"x": [0.0] * 64}) + "\n")
    code, out, err = run(example / "none.jsonl")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "has no event with a label" in err


def test_the_reservoir_is_a_uniform_sample_of_all_events():
    reservoir = _Reservoir(seed=0, capacity=100)
    for begin in range(0, 1000, 7):
        values = torch.arange(begin, min(begin + 7, 1000)).float()
        reservoir.add(Examples({"x": values}, values.long(), torch.ones(len(values))))
    first, second = reservoir.sample((50, 50))
    sampled = torch.cat([first.label_B, second.label_B])
    assert len(sampled.unique()) == 100
    assert torch.equal(first.features["x"].long(), first.label_B)
    assert 400 < sampled.float().mean() < 600
    assert _Reservoir(seed=0).sample((5,)) == []
