"""The pipelines of examples/: their events, configs and models fit together, and the models learn."""

import contextlib
import functools
import itertools
import json
import runpy
import shutil
import sys
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import onnxruntime
import pytest
import torch

from anabranch import cli
from anabranch.commands.versions.export.program import export_program
from anabranch.config.loader import Config, load_config
from anabranch.ingest.events.schema import Schema
from anabranch.learner.evaluate.measures import Outcomes, measure_of
from anabranch.learner.model.device import Precision
from anabranch.learner.model.factory import build_on_device, check_model, make_task
from anabranch.learner.model.trained_set import trained_state, write_base
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.strategies.registry import build_strategy
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.learner.versions.format import Verdict, Versions, reference_to
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.model.loaded_version import load_version
from tests.pipelines import Part
from tests.support.formats import FORMATS
from tests.support.manifests import manifest_of

FOLDER = Path(__file__).parent.parent / "examples"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/pipeline.toml"))
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


class Example(NamedTuple):
    """An example in a temporary folder, and its events as the pipeline decodes them."""

    config: Config
    schema: Schema
    columns: dict[str, np.ndarray]
    events: list[dict[str, Any]]

    def train(self, rows, **changes):
        """Train on events in order, with `[learner]` except for `changes`; return the score of each step."""
        pipeline, random = self.config.pipeline, np.random.default_rng(0)
        settings = pipeline.learner.model_validate({**pipeline.learner.model_dump(), **changes})
        task = make_task(pipeline.model.task)
        strategy = build_strategy(settings.strategy, pipeline.model, task)
        torch.manual_seed(pipeline.seed)
        model = build_on_device(pipeline.model, self.config.folder, CPU)
        trainer = Trainer(TrainingSetup(model, task, strategy, self.schema, settings, CPU, Precision("fp32", None)))
        ratio = settings.replay_ratio if strategy.kind.replays and settings.replay_ratio != "auto" else 0
        scores, stored, batch = [], rows[:0], settings.batch_size
        for begin in range(0, len(rows), batch):
            new = rows[begin : begin + batch]
            old = [self._take(trainer, random.choice(stored, int(ratio * batch)))] if ratio and begin else []
            scores.append(trainer.step(self._take(trainer, new), old).score / len(new))
            stored = rows[: begin + batch]
            if len(stored) > pipeline.replay.capacity:  # a uniform sample of the past, as the reservoir keeps
                stored = random.choice(stored, pipeline.replay.capacity, replace=False)
        return trainer, np.array(scores)

    def score(self, trainer, rows):
        """Return the mean score of events in evaluation mode."""
        labelled, score = trainer.probe(self._take(trainer, rows))
        return score / labelled

    def _take(self, trainer, rows):
        return trainer.examples({name: column[rows] for name, column in self.columns.items()})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(name)`: a copy of an example with its events, made once."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp("made") / name
        shutil.copytree(FOLDER / name, folder, ignore=shutil.ignore_patterns("var", "events.jsonl", "__pycache__"))
        with contextlib.chdir(folder), mock.patch.object(sys, "path", [str(folder), *sys.path]):
            for script in sorted(Path().glob("make_*.py")):
                runpy.run_path(script.name, run_name="__main__")
        sys.modules.pop("make_events", None)
        return folder

    return make


@pytest.fixture
def copied(request, made, tmp_path, monkeypatch):
    """A copy of the example that the test names, with its events. Most have a module named `my_model`."""
    folder = tmp_path / request.param
    shutil.copytree(made(request.param), folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path[:])  # where the factory's folder is put
    sys.modules.pop("my_model", None)
    yield folder
    sys.modules.pop("my_model", None)


@pytest.fixture(scope="module")
def decoded(made):
    """`decoded(name)`: the columns and the JSON of an example's events, decoded once."""

    @functools.cache
    def decode(name):
        folder = made(name)
        schema = Schema(load_config(folder / "pipeline.toml", {}).pipeline.events)
        lines = (folder / "events.jsonl").read_bytes().splitlines()
        events = FORMATS["json"](schema).decode(lines)
        assert list(events.rejects) == []
        return dict(events.columns), [json.loads(line) for line in lines]

    return decode


@pytest.fixture
def example(copied, decoded):
    config = load_config(copied / "pipeline.toml", {})
    return Example(config, Schema(config.pipeline.events), *decoded(copied.name))


def trivial_score(task, label):
    """Return the best score of a constant answer."""
    if label.ndim == 1:
        return float(np.bincount(label).max() / len(label))
    answers = itertools.product((0, 1), repeat=label.shape[1])
    outputs = [torch.tensor(answer).float().sub(0.5).expand(len(label), -1) for answer in answers]
    return max(float(task.score(output, torch.from_numpy(label)).mean()) for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("copied", NAMES, indirect=True)
def test_the_model_fits_the_schema(example):
    model = example.config.pipeline.model
    built = build_on_device(model, example.config.folder, CPU)
    assert check_model(built, make_task(model.task), example.schema, CPU) == (example.schema.label.classes,)
    assert not model.embedding or built.get_submodule(model.embedding) is not None


@pytest.mark.slow
@pytest.mark.parametrize("copied", NAMES, indirect=True)
def test_make_events_is_deterministic(copied):
    before = Path("events.jsonl").read_bytes()
    runpy.run_path("make_events.py", run_name="__main__")
    assert Path("events.jsonl").read_bytes() == before


def gain(example, trainer, scores):
    """Return how much better the last tenth of the steps is than the constant answer to the events of these."""
    tenth = len(scores) // 10
    rows = len(scores) * example.config.pipeline.learner.batch_size
    last = example.columns["label"][:rows][-tenth * example.config.pipeline.learner.batch_size :]
    return float(scores[-tenth:].mean()) - trivial_score(trainer.task, last)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("copied", "margin", "part"), [("text", 0.4, 1.0), ("pretrained", 0.3, 0.5)], indirect=["copied"]
)
def test_it_is_better_than_the_constant_answer(example, margin, part):
    assert gain(example, *example.train(np.arange(int(part * len(example.events))))) > margin


@pytest.mark.slow
@pytest.mark.parametrize("copied", ["pretrained"], indirect=True)
def test_a_pretrained_encoder_learns_the_class_of_each_word_and_serves_it(copied):
    """The class of a word is the topic to whose list it belongs."""
    text = (copied / "pipeline.toml").read_text()
    for before, after in (
        ("length = 24}", "length = 24, words = true}"),
        ('name = "topic"\nclasses = [', 'name = "topics"\nlength = 24\nclasses = ["other", '),
        ("sequence_classifier", "token_classifier"),
        ("classes = 4}", 'classes = 5}\ntask = "token-classification"'),
    ):
        assert before in text
        text = text.replace(before, after)
    adapter, learner = text.index("[model.adapter]"), text.index("[learner]")
    (copied / "pipeline.toml").write_text(text[:adapter] + text[learner:])  # all weights train: few events suffice
    topics = runpy.run_path("make_events.py")["TOPICS"]
    of_word = {word: topic for topic, words in topics.items() for word in words.split() if word != "|"}
    events = [json.loads(line) for line in (copied / "events.jsonl").read_text().splitlines()[:1600]]
    for event in events:
        event["topics"] = [of_word.get(word, "other") for word in event["text"].split()]
        event["topics"][3] = None  # that of the fourth word is not known
    config = load_config(copied / "pipeline.toml", {})
    schema = Schema(config.pipeline.events)
    decoded = FORMATS["json"](schema).decode([json.dumps(event).encode() for event in events])
    assert not decoded.rejects
    example = Example(config, schema, dict(decoded.columns), events)
    trainer, scores = example.train(np.arange(len(events)))
    assert scores[-5:].mean() > 0.9
    publish(config, schema, trainer.model)
    served = loaded(config, schema)
    found = served.run({"text": decoded.columns["feature.text"][-1:]})
    assert found["probabilities"].shape == (1, 24, 5)
    words = events[-1]["text"].split()
    names = [schema.label.names[index] for index in found["prediction"][0, : len(words)]]
    assert np.mean([name == of_word.get(word, "other") for name, word in zip(names, words, strict=True)]) > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("copied", ["tabular"], indirect=True)
def test_the_orders_drift_in_the_middle_and_the_model_recovers(example):
    trainer, scores = example.train(np.arange(len(example.events)))
    assert gain(example, trainer, scores) > 0.15
    tenth, middle = len(scores) // 10, len(scores) // 2
    before, after = scores[middle - tenth : middle].mean(), scores[middle : middle + tenth // 2].mean()
    assert after < before - 0.1
    assert scores[-tenth:].mean() > before - 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("copied", "name", "margin"),
    [("fraud", "average_precision", 0.4), ("ranking", "ndcg_10", 0.2)],
    indirect=["copied"],
)
def test_it_orders_events_better_than_chance_does(example, name, margin):
    events, measure = np.arange(len(example.events)), measure_of(name, "two-classes", groups=True)
    trained, last = np.split(events, [int(0.9 * len(events))])
    trainer, _ = example.train(trained)
    publish(example.config, example.schema, trainer.model)
    found = loaded(example.config, example.schema).run(
        {each.name: example.columns[f"feature.{each.name}"][last] for each in example.schema.features}
    )
    log_odds = np.log(found["probabilities"])[:, 1:] - np.log(found["probabilities"])[:, :1]
    model, chance = (
        measure.value(
            Outcomes("two-classes", odds, example.columns["label"][last], example.columns["group_hash"][last])
        )
        for odds in (log_odds, np.zeros_like(log_odds))
    )
    assert model > chance + margin


@pytest.mark.slow
@pytest.mark.parametrize("copied", ["images"], indirect=True)
def test_replay_keeps_the_accuracy_on_earlier_digits(example):
    image = np.array([event["image"] for event in example.events])
    held_out, trained = np.flatnonzero(image % 10 == 0), np.flatnonzero(image % 10 != 0)
    with_replay, _ = example.train(trained)
    without, _ = example.train(trained, strategy="none")
    assert example.score(with_replay, held_out) > 0.85
    assert example.score(without, held_out) < 0.3


def publish(config, schema, model):
    """Write the model as version 1."""
    manifest = manifest_of(
        1,
        time=1.7e9,
        step=100,
        schema=schema.digest,
        encoders=schema.encoders,
        model=reference_to(config.pipeline.model),
        base=write_base(bases_in(config.state_dir), model),
    )
    Versions(config.state_dir / "versions").write(trained_state(model), manifest, Verdict("pass"))


def loaded(config, schema):
    """Return version 1 as serving loads it."""
    pipeline = config.pipeline
    deployment = Deployment(pipeline.name, schema, pipeline.model, config.folder, config.state_dir, CPU)
    return load_version(deployment, deployment.versions.manifest(1), 8)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["onnx", "torch"])
@pytest.mark.parametrize("copied", NAMES, indirect=True)
def test_an_exported_program_answers_events_as_the_version_does(example, form, tmp_path):
    schema = example.schema
    publish(example.config, schema, build_on_device(example.config.pipeline.model, example.config.folder, CPU))
    exported = export_program(example.config, "latest", tmp_path / "program", form)
    names = [feature.name for feature in schema.features]
    features = {name: example.columns[f"feature.{name}"][:1000] for name in names}
    served = loaded(example.config, schema).run(features)
    path = tmp_path / "program" / exported.file
    if form == "onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        answers = dict(zip((output.name for output in session.get_outputs()), session.run(None, features), strict=True))
    else:
        program = torch.export.load(path).module()
        answers = {name: value.numpy() for name, value in program(*map(torch.from_numpy, features.values())).items()}
    assert set(answers) == set(served)
    for name, value in served.items():
        np.testing.assert_allclose(answers[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.any_broker
@pytest.mark.process
@pytest.mark.parametrize("copied", ["text"], indirect=True)
def test_an_example_runs_from_end_to_end(copied, kafka, make_topic, free_port, monkeypatch, capsys):
    port = free_port()
    for name, value in {
        "STREAM__BOOTSTRAP_SERVERS": kafka.bootstrap,
        "STREAM__TOPICS": json.dumps([make_topic()]),
        "LEARNER__STATUS": "127.0.0.1:0",
        "SERVING__PORT": str(port),
    }.items():
        monkeypatch.setenv(f"ANABRANCH__{name}", value)
    assert cli.main(["produce", "events.jsonl"]) == 0
    offsets = capsys.readouterr().out.strip()
    config = copied / "pipeline.toml"
    with contextlib.closing(Part("learner", config)) as learner, contextlib.closing(Part("serving", config)) as serving:
        learner.until(Versions(copied / "var" / "versions").numbers)
        text = "where is my parcel: shipment, depot or locker?"
        reply = serving.until(functools.partial(predicted, port, text, offsets))
        assert [learner.stop(), serving.stop()] == [0, 0]
    assert (reply["model_name"], reply["outputs"][0]["data"]) == ("tickets", [False, True, False, False, False])


def predicted(port, text, offsets):
    """Return the reply of a version trained through these offsets; None while there is none."""
    features = runpy.run_path("make_events.py")["features"](text)
    words = {"name": "words", "shape": [1, len(features["words"])], "datatype": "BYTES", "data": features["words"]}
    length = {"name": "length", "shape": [1], "datatype": "INT64", "data": [features["length"]]}
    body = {"inputs": [words, length], "parameters": {"min_trained_through": offsets}}
    url = f"http://127.0.0.1:{port}/v2/models/tickets/infer"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=30) as response:
            return json.load(response)
    except OSError:
        return None
