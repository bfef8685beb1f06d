"""`anabranch backtest`: what is learned from a file, and what is said of it."""

import csv
import itertools
import json
import re
import signal
import sys
import threading
from typing import get_args

import numpy as np
import pytest

from anabranch.commands.backtest.measure import run_backtest
from anabranch.commands.backtest.rows import EventsInMemory, EventsOfFile, RowsRead, blocks_of
from anabranch.commands.backtest.sweep import run_sweep, values_of
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.ingest.events.block import Outcome
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.features import Number
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings
from anabranch.learner.loop import stored_events
from anabranch.learner.loop.learning_step import LearningStep
from anabranch.replay.build import build_store
from anabranch.replay.store import Store
from tests.support.tokenizer import write_tokenizer
from tests.support.waiting import PATIENCE_SECONDS, wait_until


@pytest.fixture(autouse=True)
def _own_factory(monkeypatch):
    """Lets each test import the factory and the task in its folder."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    for name in ("my_model", "my_task"):
        sys.modules.pop(name, None)
    yield
    for name in ("my_model", "my_task"):
        sys.modules.pop(name, None)


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
def run(example, anabranch):
    return lambda *arguments: anabranch("backtest", *arguments, "-c", example / "pipeline.toml")


@pytest.mark.slow
def test_accuracy_rises_over_the_file(run, file):
    code, out, err = run(file, "--every", "500", "--json")
    document = json.loads(out)
    assert (code, document["skipped"], document["score"]) == (0, 2, "accuracy")
    assert 50 < document["held_out"] < 150, "as the gate of the pipeline needs"
    assert document["events"] + document["held_out"] == 2000
    accuracy = [point["recent"] for point in document["points"]]
    assert len(accuracy) == 4
    assert accuracy[0] < accuracy[-1]
    assert accuracy[-1] > 0.8
    assert err.startswith("skipped 2 events without a label or that cannot be used; the first: line 7: ")


@pytest.mark.slow
def test_the_screen_is_a_table(run, file):
    lines = run(file)[1].splitlines()
    assert lines[0].split() == ["events", "recent", "accuracy", "constant", "overall", "accuracy", "constant", "loss"]
    events, *others = lines[lines.index("") - 1].split()
    assert (events[:2], len(others)) == ("1,", 5)
    always, last, blank, head, *rest = lines[lines.index("") + 1 :]
    assert always.startswith("always answering ")
    assert last.startswith("the last label: recent ")
    assert "; of late the model is better than the last label by " in last
    assert (blank, head.split()) == ("", ["measure", "window", "value", "95", "%", "interval", "constant"])
    names = ["balanced_accuracy", "macro_f1", "log_loss", "top_5", "ece"]
    assert [line.split()[:2] for line in rest[: len(names)]] == [[name, "now"] for name in names]
    assert re.fullmatch(r"versions: \d+, of which the gate holds back \d+", rest[len(names) + 1])


OWN = """
from anabranch.learner.model.task import Classification, TaskMeasure

def of(prediction, label):
    if (label == 3).any():
        raise LookupError("a three")
    return 1.0

class Own(Classification):
    measures = [TaskMeasure("right", lambda prediction, label: (prediction == label).mean()), TaskMeasure("odd", of)]
"""


@pytest.mark.slow
def test_measures_of_ones_own_are_shown_and_one_that_raises_is_named(run, example, file):
    (example / "my_task.py").write_text(OWN)
    file.write_text("\n".join(file.read_text().splitlines()[:1000]))
    pipeline = example / "pipeline.toml"
    pipeline.write_text(pipeline.read_text().replace('"classification"', '"my_task:Own"'))
    code, out, err = run(file, "--json")
    assert code == 0, err
    document = json.loads(out)
    measures = {each["name"]: each for each in document["measures"]}
    assert "odd" not in measures
    assert measures["right"]["value"] == pytest.approx(document["points"][-1]["overall"])
    assert measures["right"]["lower"] <= measures["right"]["value"] <= measures["right"]["upper"]
    (warning,) = [each for each in document["warnings"] if each.startswith("the measure")]
    assert warning == f'the measure "odd" of model.task raised LookupError: a three, on {document["held_out"]} events'
    assert warning in run(file)[1].replace("\n", " ")


@pytest.fixture
def shops(example, file):
    """A pipeline whose events have a country too, which the model does not see, and another one where it fails."""
    random, lines = np.random.default_rng(3), []
    for line in file.read_text().splitlines()[:800]:
        if '"y"' in line:
            event = json.loads(line) | {"country": random.choice(["DE", "FR", "LI"], p=[0.6, 0.395, 0.005])}
            lines.append(json.dumps(event | ({"y": 0, "x": [1.0] * 64} if event["country"] == "FR" else {})))
    file.write_text("\n".join(lines) + "\n")
    (example / "my_model.py").write_text(COUNTRY)
    text = (example / "pipeline.toml").read_text().replace("[schema.features.x]", FEATURES)
    (example / "pipeline.toml").write_text(text.replace("[gate]\nholdout_fraction = 0.05", GATE))
    return file


FEATURES = """[schema.features.country]
dtype = "string"
encode = {vocab = ["DE", "FR", "LI"]}

[schema.features.x]"""
GATE = """[gate]
slices = ["country"]
holdout_fraction = 0.3"""
COUNTRY = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 10)

    def forward(self, x, country):
        return self.body(x)

def build(**_):
    return Model()
"""


@pytest.mark.slow
def test_the_last_version_is_shown_by_slice(run, shops):
    code, out, err = run(shops, "--json")
    assert code == 0, err
    document = json.loads(out)
    slices = document["slices"]
    assert slices.keys() >= {"country = DE", "country = FR"}
    assert sum(each["rows"] for each in slices.values()) == document["held_out"]
    assert slices["country = FR"]["constant"] == 1.0
    shown = " ".join(run(shops)[1].split())
    assert f"country = DE {slices['country = DE']['accuracy']:.1%} of {slices['country = DE']['rows']} events" in shown


def test_each_event_is_scored_before_it_is_trained_on(example, file):
    lines = file.read_text().splitlines()[:1] * 32
    file.write_text("\n".join(lines))
    config = load_config(example / "pipeline.toml", {"ANABRANCH__LEARNER__BATCH_SIZE": "32"})
    (point,) = run_backtest(config.pipeline, EventsOfFile(file)).points
    assert point.overall in (0.0, 1.0), "one prediction for one event that was never seen"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["none", "er", "der++", "mir"])
def test_every_kind_of_strategy_runs(example, file, strategy):
    config = load_config(example / "pipeline.toml", {"ANABRANCH__LEARNER__STRATEGY": strategy})
    assert run_backtest(config.pipeline, EventsOfFile(file)).points[-1].recent > 0.3


def test_a_file_without_labels_is_one_sentence(run, example):
    (example / "none.jsonl").write_text(json.dumps({"x": [0.0] * 64}) + "\n")
    code, out, err = run(example / "none.jsonl")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "has no event with a label" in err


@pytest.fixture
def late(example):
    """1,000 events, one a minute; one of four is positive: its largest feature is the second, and its label comes late.

    The first argument is the delay of positives in seconds; the labels of negatives never come. Others are settings.
    """

    def write(delay, **labels):
        text, model = (example / "pipeline.toml").read_text(), example / "my_model.py"
        model.write_text(model.read_text().replace("nn.Linear(hidden, 10)", "nn.Linear(hidden, 2)"))
        options = {"topics": ["labels"], "wait": "1h", "unmatched": "negative", **labels}
        section = "\n".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
        (example / "pipeline.toml").write_text(
            text.replace("classes = 10", "classes = 2").replace("holdout_fraction = 0.05", "holdout_fraction = 0")
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


def test_labels_come_at_their_own_time(run, late, example):
    """Positives that come after half an hour are learned from; the same that come after the wait are negatives."""
    code, out, err = run(late(1800.0), "--label-time", "known", "--json")
    document = json.loads(out)
    assert (code, document["events"], err) == (0, 1000, "")
    (only,) = document["runs"]
    assert (only["policy"], only["replay"]) == ("wait", True)
    assert only["labelled"] > 200
    assert 933 <= only["labelled"] + only["timed_out"] < 963, "those of the last hour wait on"
    last = document["points"][-1]
    assert last["recent"] > 0.85
    positives = sum(json.loads(line)["y"] for line in (example / "late.jsonl").read_text().splitlines()) / 1000
    assert last["constant_overall"] == pytest.approx(document["baselines"][0]["overall"])
    measures = {(each["name"], each["window"]): each for each in document["measures"]}
    precision = measures["average_precision", "now"]
    assert precision["constant"] == pytest.approx(positives)
    assert positives < precision["lower"] < precision["value"] < precision["upper"] <= 1
    assert measures["average_precision", "faded"]["value"] == pytest.approx(precision["value"], abs=0.01)
    assert document["points"][0]["overall_loss"] > document["points"][-1]["overall_loss"]


def test_a_label_after_the_wait_does_not_count(run, late):
    (only,) = json.loads(run(late(7200.0), "--label-time", "known", "--json")[1])["runs"]
    assert (only["labelled"], only["timed_out"]) == (0, 933), "those up to an hour before the last batch of 32"
    assert 0.7 < only["overall"] < 0.8, "all are taken for negatives"


def test_a_measure_that_the_task_has_not_is_one_sentence(run, late, example):
    file = late(1800.0)
    with (example / "pipeline.toml").open("a") as settings:
        settings.write("[gate.measures]\nndcg_10 = 0.01\n")
    code, out, err = run(file)
    assert (code, out) == (2, "")
    assert '"ndcg_10" is no measure of this task, which has average_precision' in err


@pytest.mark.slow
def test_a_wrong_time_of_an_event_lets_no_other_label_come_early(run, late):
    path = late(1800.0)
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for index in (500, 512):  # within a batch of 32, and the first of one
        events[index]["t"] += 3 * 365 * 86_400
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    (only,) = json.loads(run(path, "--label-time", "known", "--json")[1])["runs"]
    assert only["labelled"] > 200
    assert 930 <= only["labelled"] + only["timed_out"] < 963, "those of the last hour wait on"


@pytest.mark.slow
def test_policies_and_replay_are_compared_side_by_side(run, late):
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
def test_replay_is_compared_without_late_labels_too(run, file):
    runs = json.loads(run(file, "--compare", "--json")[1])["runs"]
    assert [(each["policy"], each["replay"]) for each in runs] == [("labelled", True), ("labelled", False)]
    assert runs[0]["overall_loss"] < runs[1]["overall_loss"]


def test_no_prediction_is_by_a_model_that_has_seen_a_later_label(example, late):
    """With a delay beyond the end of the file, and a wait as long, nothing is learned and all predictions are equal."""
    config = load_config(late(1e8, wait="10000d").parent / "pipeline.toml", {})
    result = run_backtest(config.pipeline, EventsOfFile(example / "late.jsonl"), label_time="known")
    assert (result.runs[0].labelled, result.runs[0].timed_out) == (0, 0)
    early = load_config(example / "pipeline.toml", {"ANABRANCH__STREAM__LABELS__EARLY": "negative-then-correct"})
    (all_negative,) = run_backtest(early.pipeline, EventsOfFile(example / "late.jsonl"), label_time="known").runs
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
def test_what_delays_no_label_is_one_sentence(run, late, example, column, taken_out, sentence):
    file, path = late(60.0), example / "pipeline.toml"
    path.write_text(re.sub(taken_out, "", path.read_text()))
    code, _, err = run(file, "--label-time", column)
    assert (code, err.count("\n")) == (2, 1)
    assert sentence in err


TABLE = """
name = "table"
[stream]
topics = ["none"]
[schema.features.x]
{feature}
[schema.label]
name = "y"
classes = 2
[model]
factory = "my_model:build"
[learner]
batch_size = 32
[learner.optimizer]
name = "adamw"
lr = 0.02
"""
MODEL = """
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {parts}
    def forward(self, x):
        {forward}
def build():
    return Model()
"""
LINEAR = "self.out = nn.Linear(3, 2)", "return self.out(x)"
EMBEDDED = "self.table, self.out = nn.Embedding(64, 8), nn.Linear(8, 2)", "return self.out(self.table(x))"


@pytest.fixture
def table(tmp_path):
    """Writes a pipeline with one feature, a model and 3,000 events of two classes; returns the file of the events."""

    def write(feature, model, value, more=""):
        (tmp_path / "pipeline.toml").write_text(TABLE.format(feature=feature) + more)
        (tmp_path / "my_model.py").write_text(MODEL.format(parts=model[0], forward=model[1]))
        random, path = np.random.default_rng(0), tmp_path / "table.jsonl"
        label = random.integers(2, size=3000).tolist()
        path.write_text("".join(json.dumps({"x": value(each, random), "y": each}) + "\n" for each in label))
        return path

    return write


def vector(label, random):
    return [float(each) for each in random.standard_normal(3) + 2 * (2 * label - 1)]


def user(label, random):
    return f"u{2 * random.integers(20) + label}"


FLOATS = 'dtype = "float32"\nshape = [3]'


def overall(file, **options):
    return (
        run_backtest(load_config(file.parent / "pipeline.toml", {}).pipeline, EventsOfFile(file), **options)
        .runs[0]
        .overall
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "model", "value"),
    [
        (f'{FLOATS}\nscale = "standard"', LINEAR, vector),
        (f'{FLOATS}\nscale = "robust"', LINEAR, vector),
        (f'{FLOATS}\nscale = "quantile"', LINEAR, vector),
        ('dtype = "string"\nencode = {learn = 64, min_count = 1}', EMBEDDED, user),
    ],
    ids=["standard", "robust", "quantile", "vocabulary"],
)
def test_features_are_learned_as_in_the_pipeline(table, feature, model, value):
    assert overall(table(feature, model, value)) > 0.9, "0.5 to 0.75 without them"


@pytest.mark.slow
def test_intercepts_are_learned_as_in_the_pipeline(table):
    more = "[schema.features.z]\ndtype = 'float32'\ndefault = 0.0\n"
    bias = "self.bias = nn.Parameter(torch.zeros(2))", "return self.bias.expand(len(z), 2)"
    file = table('dtype = "string"\nencode = {learn = 64, min_count = 1}\nintercept = true', bias, user, more)
    text = (file.parent / "my_model.py").read_text().replace("forward(self, x)", "forward(self, z)")
    (file.parent / "my_model.py").write_text("import torch\n" + text)
    assert overall(file) > 0.9, "the constant of the model alone is at 0.5"


BY_CLASS = '[replay]\nadmission = "class-balanced"\nsampling = "loss"\ncapacity = 100\n'


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "replay"), [*zip(get_args(Number), itertools.cycle(["", BY_CLASS]))])
def test_every_dtype_of_the_schema_is_replayed(table, dtype, replay):
    """The class is whether the value is at least 60, or true."""

    def value(label, random):
        number = 60 * label + int(random.integers(60))
        return bool(label) if dtype == "bool" else float(number) if dtype.startswith("float") else number

    whole = "self.norm, self.out = nn.BatchNorm1d(1), nn.Linear(1, 2)", "return self.out(self.norm(x.float()[:, None]))"
    assert overall(table(f'dtype = "{dtype}"', whole, value, replay)) > 0.9


class TestTheStoreOfABacktest:
    """It is that of the pipeline."""

    @pytest.fixture
    def stores(self, monkeypatch):
        """Those that backtests have built."""
        built: list[Store] = []

        def build(*given, **named):
            built.append(build_store(*given, **named))
            return built[-1]

        monkeypatch.setattr(stored_events, "build_store", build)
        return built

    @pytest.mark.slow
    @pytest.mark.parametrize("tier", ["", 'disk = {bytes = "1MB"}\n', 'redis = {url = "redis://h:1", bytes = "1MB"}\n'])
    def test_holds_what_the_settings_say_in_memory(self, table, stores, tier):
        file = table(FLOATS, LINEAR, vector, BY_CLASS + tier)
        before = {*file.parent.iterdir()}
        assert overall(file) > 0.9
        (store,) = stores
        assert (store.capacity, [tier.name for tier in store.tiers.all]) == (100, ["device"])
        new = {*file.parent.rglob("*")} - before
        assert [path for path in new if "__pycache__" not in path.parts] == []

    @pytest.mark.slow
    def test_replays_by_the_ratio_that_is_measured(self, table, monkeypatch):
        """A stream that retains everything replays nothing; a part is held out, by which that is measured."""
        replayed = []
        take = LearningStep.take

        def counted(step, *given):
            taken = take(step, *given)
            replayed.append(sum(each.result.replayed for each in taken if each.result is not None))
            return taken

        monkeypatch.setattr(LearningStep, "take", counted)
        file = table(FLOATS, LINEAR, vector, 'replay_ratio = "auto"\n[gate]\nholdout_fraction = 0.1\n')
        text = (file.parent / "pipeline.toml").read_text().replace('replay_ratio = "auto"\n', "")
        text = text.replace("[learner]\n", '[learner]\nreplay_ratio = "auto"\n')
        (file.parent / "pipeline.toml").write_text(text)
        result = run_backtest(load_config(file.parent / "pipeline.toml", {}).pipeline, EventsOfFile(file), compare=True)
        assert sum(replayed) == 0
        assert result.runs[0].overall == result.runs[1].overall
        assert result.events + result.held_out == 3000
        assert 200 < result.held_out < 400


@pytest.mark.slow
def test_a_run_is_the_same_next_to_others(table):
    dropped = "self.drop, self.out = nn.Dropout(0.5), nn.Linear(3, 2)", "return self.out(self.drop(x))"
    file = table(FLOATS, dropped, vector)
    assert overall(file) == overall(file, compare=True)


@pytest.mark.slow
def test_events_on_which_the_model_raises_are_left_out(table, caplog):
    raising = LINEAR[0], "assert (x[:, 0] < 4.0).all()\n        return self.out(x)"
    file = table(FLOATS, raising, vector)
    assert overall(file) > 0.9
    assert "the model raises on none[0]@" in caplog.text


@pytest.mark.slow
def test_a_model_that_raises_on_all_events_is_named(table):
    raising = LINEAR[0], "assert not (x != 0).any(), 'only zeros'\n        return self.out(x)"
    file = table(FLOATS, raising, vector)
    with pytest.raises(
        SettingsError, match=r"no event of .*table.jsonl could be scored: the model raised on .*only zeros"
    ):
        overall(file)


@pytest.mark.slow
def test_a_text_that_a_tokenizer_cannot_encode_is_left_out_and_named(tmp_path, table):
    backtracks = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    path = write_tokenizer(tmp_path / "tokenizer.json", pre_tokenizer=backtracks)
    feature = {"dtype": "string", "encode": {"tokenizer": str(path), "length": 4}}
    schema = Schema(SchemaSettings.model_validate({"features": {"t": feature}, "label": {"name": "y", "classes": 2}}))
    spec = load_config(table(FLOATS, LINEAR, vector).parent / "pipeline.toml", {}).pipeline
    texts = [{"t": text, "y": 1} for text in ("good", "a" * 40 + "!", "bad")]
    with EventsInMemory(texts).open(schema, "none") as source:
        read = RowsRead(source)
        (columns,) = blocks_of(read, spec.stream, schema, HoldOut(fraction=0, seed=0))
    assert columns["outcome"].tolist() == [Outcome.PENDING, Outcome.DEAD_LETTERED, Outcome.PENDING]
    assert str(read.first_fault).startswith("row 2: the tokenizer cannot encode a text: ")


@pytest.mark.slow
def test_versions_are_judged_and_a_worse_one_is_held_back(table):
    """The labels of the last third are turned around: what is learned from them is worse on old held-out events."""
    file = table(FLOATS, LINEAR, vector, "[gate]\nholdout_fraction = 0.3\nmin_rows = 50\n")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for event in lines[2000:]:
        event["y"] = 1 - event["y"]
    file.write_text("".join(json.dumps(event) + "\n" for event in lines))
    result = run_backtest(load_config(file.parent / "pipeline.toml", {}).pipeline, EventsOfFile(file), every=150)
    assert [each.number for each in result.versions] == [*range(1, len(result.versions) + 1)]
    serving = [each.serving for each in result.versions]
    for each, before in zip(result.versions, [None, *serving], strict=False):
        assert each.serving == (before if each.verdict == "fail" else each.number)
    assert any(each.verdict == "pass" for each in result.versions)
    held_back = [each for each in result.versions if each.verdict == "fail"]
    assert held_back
    assert all(each.events > 1000 and each.reasons for each in held_back)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".jsonl"])
def test_each_event_is_written_with_its_prediction(run, file, suffix):
    path = file.with_name(f"predictions{suffix}")
    document = json.loads(run(file, "--output", path, "--json")[1])
    if suffix == ".parquet":
        rows = pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    elif suffix == ".csv":
        with path.open(newline="") as lines:
            rows = [{name: json.loads(cell or "null") for name, cell in row.items()} for row in csv.DictReader(lines)]
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == document["events"]
    last = document["points"][-1]
    assert np.mean([row["prediction"] == row["label"] for row in rows]) == pytest.approx(last["overall"])
    assert np.mean([row["loss"] for row in rows]) == pytest.approx(last["overall_loss"], rel=1e-4)
    assert all(int(np.argmax(row["probabilities"])) == row["prediction"] for row in rows)
    assert rows[0]["version"] is None
    assert rows[-1]["version"] == document["versions"][-2]["serving"]
    assert [row["event"] for row in rows] == sorted({row["event"] for row in rows} - {5, 6})


@pytest.mark.slow
def test_values_of_a_setting_are_compared_on_the_same_events(run, file):
    code, out, err = run(file, "--sweep", "learner.optimizer.lr=0.01,1e-6,0.011", "--json")
    document = json.loads(out)
    assert (code, err, document["key"], document["measure"]) == (0, "", "learner.optimizer.lr", "accuracy")
    good, bad, like = document["values"]
    assert [each["value"] for each in document["values"]] == ["0.01", "1e-6", "0.011"]
    assert [each["best"] for each in document["values"]].count(True) == 1
    assert not bad["best"]
    assert bad["worse"] > bad["worse_lower"] > 0.2
    other = like if good["best"] else good
    assert other["worse_lower"] < other["worse"] < 0.05
    assert all(each["lower"] < each["score"] < each["upper"] for each in document["values"])
    alone = json.loads(run(file, "--set", "learner.optimizer.lr=0.01", "--json")[1])
    assert good["score"] == pytest.approx(alone["points"][-1]["overall"])
    assert len(alone["versions"]) == good["versions"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--sweep", "learner.batch_size=32"), "write SECTION.KEY=VALUE,VALUE,... with two or more different values"),
        (("--sweep", "learner.batch_sise=32,64"), "--set learner.batch_sise: "),
        (("--sweep", "learner.batch_size=32,many"), "batch_size"),
        (("--sweep", "seed=1,2", "--compare"), "--sweep shows one line for each value"),
        (("--output", "x.xlsx"), "name a file that ends with .parquet, .csv, .jsonl"),
        (("--output", "no/such/folder/x.csv"), "--output no/such/folder/x.csv cannot be written: No such file"),
    ],
)
def test_what_cannot_be_swept_or_written_is_one_sentence(run, file, options, sentence):
    code, _, err = run(file, *options)
    assert (code, err.count("\n")) == (2, 1)
    assert sentence in err


def test_a_backtest_that_fails_leaves_the_files_as_they_were(run, file):
    path, before = file.with_name("old.csv"), file.read_bytes()
    path.write_text("old")
    code, _, err = run(file, "--output", file)
    assert (code, err) == (2, f"anabranch: --output {file} is the file that is read: name another\n")
    assert run(file.with_name("missing.jsonl"), "--output", path)[0] == 2
    assert (path.read_text(), file.read_bytes()) == ("old", before)
    assert not [*file.parent.glob(".old*")]


@pytest.mark.slow
def test_a_backtest_with_late_labels_reads_no_answers_of_servers(late, monkeypatch):
    """Those are of other events, and a topic of Kafka, which may have the verdict on the versions of the backtest."""
    monkeypatch.setattr("anabranch.learner.assembly.ServedAnswers", None)
    file = late(60.0)
    path = file.with_name("pipeline.toml")
    path.write_text(f'{path.read_text()}\n[serving.stream]\ntopics = ["events"]\noutput = "answers"\n')
    spec = load_config(path, {}).pipeline
    assert spec.measured_answers is not None
    assert run_backtest(spec, EventsOfFile(file), label_time="known").events


@pytest.mark.slow
def test_a_backtest_sends_no_curves_and_registers_no_version(table, monkeypatch):
    monkeypatch.setattr("anabranch.learner.assembly.open_track", None)
    tracked = table(FLOATS, LINEAR, vector, '[track]\nkind = "mlflow"\nurl = "http://127.0.0.1:9"\n')
    assert overall(tracked) > 0


def test_commas_within_brackets_and_quotes_separate_no_values():
    text = 'learner.optimizer={name="adamw", lr=0.1},"a,b",[1, 2]'
    assert values_of(text) == ("learner.optimizer", ['{name="adamw", lr=0.1}', '"a,b"', "[1, 2]"])


@pytest.mark.slow
def test_a_rare_class_is_swept_by_the_measure_of_the_gate(table):
    rare = "[gate]\nholdout_fraction = 0.2\nmeasures = {average_precision = 0.01}\n"
    file = table(FLOATS, LINEAR, vector, rare)
    spec = load_config(file.parent / "pipeline.toml", {}).pipeline
    optimizer = spec.learner.optimizer.model_copy(update={"lr": 1e-7})
    slow = spec.with_changes(learner=spec.learner.model_copy(update={"optimizer": optimizer}))
    result = run_sweep("lr", {"fast": spec, "slow": slow}, EventsOfFile(file))
    assert result.measure == "average_precision"
    fast, other = result.values
    assert (fast.best, other.best) == (True, False)
    assert fast.score > other.score
    assert other.worse_lower > 0


@pytest.mark.slow
def test_it_calls_back_and_ends_once_its_event_is_set(example, file):
    stop, seen = threading.Event(), []

    def progress(each):
        seen.append(each)
        if each.events >= 500:
            stop.set()

    spec = load_config(example / "pipeline.toml", {}).pipeline
    result = run_backtest(spec, EventsOfFile(file), compare=True, progress=progress, stop=stop)
    assert result.stopped
    assert 500 <= result.events <= 500 + spec.learner.batch_size
    assert result.points[-1].events == result.events
    assert len(result.runs) == 1, "no other run begins"
    parts = [each.part for each in seen]
    assert parts == sorted(parts)
    assert all(each.runs == 2 for each in seen)


@pytest.mark.slow
def test_events_in_memory_are_those_of_a_file(example, file):
    events = [json.loads(line) for line in file.read_text().splitlines() if line != "nonsense"]
    file.write_text("".join(json.dumps(each) + "\n" for each in events))
    spec = load_config(example / "pipeline.toml", {}).pipeline
    results = [run_backtest(spec, rows) for rows in (EventsOfFile(file), EventsInMemory(events))]
    assert results[0].points[-1].overall == results[1].points[-1].overall
    assert results[0].events == results[1].events


@pytest.mark.slow
@pytest.mark.process
def test_ctrl_c_prints_what_there_is(example, file, spawn, tmp_path):
    file.write_text(file.read_text() * 100)
    arguments = "backtest", file, "--every", "500", "--json", "-c", example / "pipeline.toml"
    process = spawn("-m", "anabranch", *arguments, environment={"TMPDIR": str(tmp_path)})
    wait_until(lambda: [*tmp_path.glob("anabranch-backtest-*/versions/*/manifest.json")], every=0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    document = json.loads(out)
    assert (process.returncode, document["stopped"]) == (0, True)
    assert "stopping on SIGINT" in err
    assert "Traceback" not in err
    assert 0 < document["points"][-1]["events"] == document["events"] < 190_000
    assert document["versions"]
    assert not [*tmp_path.glob("anabranch-backtest-*")]
