"""`anabranch backtest`: what is learned from a file, and what is said of it."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from anabranch.cli import app as cli
from anabranch.commands.backtest import backtest
from anabranch.commands.backtesting.reservoir import UniformSample
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


@pytest.mark.slow
def test_accuracy_rises_over_the_file(run, file):
    code, out, err = run(file, "--every", "500", "--json")
    document = json.loads(out)
    assert (code, document["events"], document["skipped"], document["score"]) == (0, 2000, 2, "accuracy")
    accuracy = [point["recent"] for point in document["points"]]
    assert len(accuracy) == 4
    assert accuracy[0] < accuracy[-1]
    assert accuracy[-1] > 0.8
    assert err.startswith("skipped 2 events without a label or that cannot be used; the first: line 7: ")


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["none", "er", "der++", "mir"])
def test_every_kind_of_strategy_runs(example, file, strategy):
    config = load_config(example / "pipeline.toml", {"ANABRANCH__LEARNER__STRATEGY": strategy})
    assert backtest(config, file).points[-1].recent > 0.3


def test_a_file_without_labels_is_one_sentence(run: Callable[..., Any], example: Path) -> None:
    (example / "none.jsonl").write_text(json.dumps({"x": [0.0] * 64}) + "\n")
    code, out, err = run(example / "none.jsonl")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "has no event with a label" in err


def test_the_reservoir_is_a_uniform_sample_of_all_events() -> None:
    reservoir = UniformSample(seed=0, capacity=100)
    for begin in range(0, 1000, 7):
        values = torch.arange(begin, min(begin + 7, 1000)).float()
        reservoir.add(Examples({"x": values}, values.long(), torch.ones(len(values))))
    first, second = reservoir.sample((50, 50))
    sampled = torch.cat([first.label_B, second.label_B])
    assert len(sampled.unique()) == 100
    assert torch.equal(first.features["x"].long(), first.label_B)
    assert 400 < sampled.float().mean() < 600
    assert UniformSample(seed=0).sample((5,)) == []


@pytest.fixture
def late(example: Path) -> Callable[..., Path]:
    """1,000 events, one a minute; one of four is positive: its largest feature is the second, and its label comes late.

    The first argument is the delay of positives in seconds; the labels of negatives never come. Others are settings.
    """

    def write(delay: float, **labels: object) -> Path:
        text, model = (example / "pipeline.toml").read_text(), example / "my_model.py"
        model.write_text(model.read_text().replace("nn.Linear(hidden, 10)", "nn.Linear(hidden, 2)"))
        options = {"topics": ["labels"], "wait": "1h", "unmatched": "negative", **labels}
        section = "\n".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
        (example / "pipeline.toml").write_text(
            text.replace("classes = 10", "classes = 2")
            + f'\n[schema.key]\nname = "id"\n[schema.time]\nname = "t"\n[stream.labels]\n{section}\n'
        )
        random, path = np.random.default_rng(0), example / "late.jsonl"
        with path.open("w") as lines:
            for index in range(1000):
                label, x = int(random.random() < 0.25), random.uniform(0, 0.1, 64)
                x[label] = 1.0
                time = 1e9 + 60 * index
                event = {"x": x.tolist(), "y": label, "id": index, "t": time}
                lines.write(json.dumps(event | ({"known": time + delay} if label else {})) + "\n")
        return path

    return write


def test_labels_come_at_their_own_time(run: Callable[..., Any], late: Callable[..., Path]) -> None:
    """Positives that come after half an hour are learned from; the same that come after the wait are negatives."""
    code, out, err = run(late(1800.0), "--label-time", "known", "--json")
    document = json.loads(out)
    assert (code, document["events"], err) == (0, 1000, "")
    (only,) = document["runs"]
    assert (only["policy"], only["replay"]) == ("wait", True)
    assert only["labelled"] > 200
    assert 933 <= only["labelled"] + only["timed_out"] < 963, "those of the last hour wait on"
    assert document["points"][-1]["recent"] > 0.85
    assert document["points"][0]["overall_loss"] > document["points"][-1]["overall_loss"]


def test_a_label_after_the_wait_does_not_count(run: Callable[..., Any], late: Callable[..., Path]) -> None:
    (only,) = json.loads(run(late(7200.0), "--label-time", "known", "--json")[1])["runs"]
    assert (only["labelled"], only["timed_out"]) == (0, 933), "those up to an hour before the last batch of 32"
    assert 0.7 < only["overall"] < 0.8, "all are taken for negatives"


@pytest.mark.slow
def test_policies_and_replay_are_compared_side_by_side(run: Callable[..., Any], late: Callable[..., Path]) -> None:
    file = late(1800.0, early="negative-then-correct")
    document = json.loads(run(file, "--label-time", "known", "--compare", "--json")[1])
    runs = [(each["policy"], each["replay"]) for each in document["runs"]]
    policies = ("negative-then-correct", "wait", "negative")
    assert runs == [(policy, replay) for policy in policies for replay in (True, False)]
    assert document["points"][-1]["overall_loss"] == document["runs"][0]["overall_loss"]
    lines = run(file, "--label-time", "known", "--compare")[1].splitlines()
    assert lines[0].split() == ["labels", "replay", "overall", "accuracy", "overall", "loss"]
    assert [line.split()[:2] for line in lines[1:3]] == [
        ["negative-then-correct", "yes"],
        ["negative-then-correct", "no"],
    ]


@pytest.mark.slow
def test_replay_is_compared_without_late_labels_too(run: Callable[..., Any], file: Path) -> None:
    runs = json.loads(run(file, "--compare", "--json")[1])["runs"]
    assert [(each["policy"], each["replay"]) for each in runs] == [("labelled", True), ("labelled", False)]
    assert runs[0]["overall_loss"] < runs[1]["overall_loss"]


def test_no_prediction_is_by_a_model_that_has_seen_a_later_label(example: Path, late: Callable[..., Path]) -> None:
    """With a delay beyond the end of the file, and a wait as long, nothing is learned and all predictions are equal."""
    config = load_config(late(1e8, wait="10000d").parent / "pipeline.toml", {})
    result = backtest(config, example / "late.jsonl", label_time="known")
    assert (result.runs[0].labelled, result.runs[0].timed_out) == (0, 0)
    early = load_config(example / "pipeline.toml", {"ANABRANCH__STREAM__LABELS__EARLY": "negative-then-correct"})
    (all_negative,) = backtest(early, example / "late.jsonl", label_time="known").runs
    assert 0.7 < all_negative.overall < 0.8, "early negatives alone make all events negatives"


@pytest.mark.parametrize(
    ("column", "taken_out", "sentence"),
    [
        ("known", r"\[schema.time\]\nname = \"t\"\n", "name the field with the time of an event as well"),
        ("known", r"\[stream.labels\](\n.*)*", "the settings have no [stream.labels]"),
        ("x", "", "name a column of the file that has letters"),
        ("t", "", "name a column of the file that has letters"),
        ("not a name", "", "name a column of the file that has letters"),
    ],
)
def test_what_delays_no_label_is_one_sentence(
    run: Callable[..., Any], late: Callable[..., Path], example: Path, column: str, taken_out: str, sentence: str
) -> None:
    file, path = late(60.0), example / "pipeline.toml"
    path.write_text(re.sub(taken_out, "", path.read_text()))
    code, _, err = run(file, "--label-time", column)
    assert (code, err.count("\n")) == (2, 1)
    assert sentence in err
