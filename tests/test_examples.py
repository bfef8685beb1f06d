"""The pipelines of examples/: their events, configs and models fit together, and the models learn."""

import contextlib
import itertools
import json
import runpy
import shutil
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from anabranch.cli import app as cli
from anabranch.config.loader import Config, load_config
from ingest.events.schema import Schema
from ingest.formats.registry import FORMATS
from learner.model.device import Precision
from learner.model.factory import build_model, check_model, make_task
from learner.model.task import Task
from learner.state_dir.version import Versions
from learner.strategies.registry import build_strategy
from learner.training.trainer import Trainer
from tests.pipelines import Part

FOLDER = Path(__file__).parent.parent / "examples"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/pipeline.toml"))
CPU = torch.device("cpu")


class Example(NamedTuple):
    """An example in a temporary folder, and its events as the pipeline decodes them."""

    config: Config
    schema: Schema
    columns: dict[str, np.ndarray]
    events: list[dict[str, Any]]

    def train(self, rows: np.ndarray, **changes: Any) -> tuple[Trainer, np.ndarray]:
        """Train on events in order, with `[learner]` except for `changes`; return the score of each step."""
        pipeline, random = self.config.pipeline, np.random.default_rng(0)
        settings = pipeline.learner.model_validate({**pipeline.learner.model_dump(), **changes})
        task = make_task(pipeline.model.task)
        strategy = build_strategy(settings.strategy, pipeline.model, task)
        torch.manual_seed(pipeline.seed)
        model = build_model(pipeline.model.factory, pipeline.model.args, self.config.folder)
        trainer = Trainer(model, task, strategy, self.schema, settings, CPU, Precision("fp32", None))
        ratio = settings.replay_ratio if strategy.replays and settings.replay_ratio != "auto" else 0
        scores, stored, batch = [], rows[:0], settings.batch_size
        for begin in range(0, len(rows), batch):
            new = rows[begin : begin + batch]
            old = [self._take(trainer, random.choice(stored, int(ratio * batch)))] if ratio and begin else []
            scores.append(trainer.step(self._take(trainer, new), old).score / len(new))
            stored = rows[: begin + batch]
            if len(stored) > pipeline.replay.capacity:  # a uniform sample of the past, as the reservoir keeps
                stored = random.choice(stored, pipeline.replay.capacity, replace=False)
        return trainer, np.array(scores)

    def score(self, trainer: Trainer, rows: np.ndarray) -> float:
        """Return the mean score of events in evaluation mode."""
        labelled, score = trainer.probe(self._take(trainer, rows))
        return score / labelled

    def _take(self, trainer: Trainer, rows: np.ndarray) -> Any:
        return trainer.examples({name: column[rows] for name, column in self.columns.items()})


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """More threads only wait for each other with models of this size."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def copied(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the example that the test names, with its events. All examples have a module named `my_model`."""
    folder = tmp_path / request.param
    shutil.copytree(FOLDER / request.param, folder, ignore=shutil.ignore_patterns("var", "events.jsonl", "__pycache__"))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", sys.path[:])  # where the factory's folder is put
    runpy.run_path("make_events.py", run_name="__main__")
    sys.modules.pop("my_model", None)
    yield folder
    sys.modules.pop("my_model", None)


@pytest.fixture
def example(copied: Path) -> Example:
    config = load_config(copied / "pipeline.toml", {})
    schema = Schema(config.pipeline.events)
    lines = (copied / "events.jsonl").read_bytes().splitlines()
    decoded = FORMATS["json"](schema).decode(lines)
    assert list(decoded.rejects) == []
    return Example(config, schema, decoded.columns, [json.loads(line) for line in lines])


def trivial_score(task: Task, label: np.ndarray) -> float:
    """Return the best score of a constant answer."""
    if label.ndim == 1:
        return float(np.bincount(label).max() / len(label))
    answers = itertools.product((0, 1), repeat=label.shape[1])
    outputs = [torch.tensor(answer).float().sub(0.5).expand(len(label), -1) for answer in answers]
    return max(float(task.score(output, torch.from_numpy(label)).mean()) for output in outputs)


@pytest.mark.parametrize("copied", NAMES, indirect=True)
def test_the_model_fits_the_schema(example: Example) -> None:
    model = example.config.pipeline.model
    built = build_model(model.factory, model.args, example.config.folder)
    assert check_model(built, make_task(model.task), example.schema, CPU) == (example.schema.label.classes,)
    assert not model.embedding or built.get_submodule(model.embedding) is not None


@pytest.mark.parametrize("copied", NAMES, indirect=True)
def test_make_events_is_deterministic(copied: Path) -> None:
    before = Path("events.jsonl").read_bytes()
    runpy.run_path("make_events.py", run_name="__main__")
    assert Path("events.jsonl").read_bytes() == before


@pytest.mark.parametrize(("copied", "margin"), [("tabular", 0.15), ("text", 0.4)], indirect=["copied"])
def test_it_is_better_than_the_constant_answer(example: Example, margin: float) -> None:
    trainer, scores = example.train(np.arange(len(example.events)))
    last = len(example.events) // 10
    trivial = trivial_score(trainer.task, example.columns["label"][-last:])
    assert scores[-len(scores) // 10 :].mean() > trivial + margin


@pytest.mark.parametrize("copied", ["tabular"], indirect=True)
def test_the_orders_drift_in_the_middle_and_the_model_recovers(example: Example) -> None:
    _, scores = example.train(np.arange(len(example.events)))
    tenth, middle = len(scores) // 10, len(scores) // 2
    before, after = scores[middle - tenth : middle].mean(), scores[middle : middle + tenth // 2].mean()
    assert after < before - 0.1
    assert scores[-tenth:].mean() > before - 0.05


@pytest.mark.parametrize("copied", ["images"], indirect=True)
def test_replay_keeps_the_accuracy_on_earlier_digits(example: Example) -> None:
    image = np.array([event["image"] for event in example.events])
    held_out, trained = np.flatnonzero(image % 10 == 0), np.flatnonzero(image % 10 != 0)
    with_replay, _ = example.train(trained)
    without, _ = example.train(trained, strategy="none")
    assert example.score(with_replay, held_out) > 0.85
    assert example.score(without, held_out) < 0.3


@pytest.mark.any_broker
@pytest.mark.process
@pytest.mark.parametrize("copied", ["text"], indirect=True)
def test_an_example_runs_from_end_to_end(copied: Path, kafka, make_topic, free_port, monkeypatch, capsys) -> None:
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
        reply = serving.until(partial(predicted, port, "where is my parcel: shipment, depot or locker?", offsets))
        assert [learner.stop(), serving.stop()] == [0, 0]
    assert (reply["model_name"], reply["outputs"][0]["data"]) == ("tickets", [False, True, False, False, False])


def predicted(port: int, text: str, offsets: str) -> Any:
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
