"""`anabranch predict` against a serving process."""

import contextlib
import json
import os
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anabranch import cli
from anabranch.commands.predict import _answered, _Asked, _batches, _Reply, _Tensor, tensors_of
from anabranch.config.loader import load_config
from anabranch.ingest.events.schema import Schema
from anabranch.learner.versions.format import Verdict, Versions
from anabranch.serving.protocol.codec import Signature
from anabranch.serving.reporting.report import ServingReport, read_report, write_report
from tests.pipelines import Part
from tests.support.http_server import Handler, serving
from tests.support.manifests import manifest_of

CONFIG = """
[serving]
port = {port}
tokens = {{read = "lesen", admin = "verwalten"}}
"""


@pytest.fixture
def config(write_pipeline, free_port):
    return load_config(write_pipeline("127.0.0.1:1", "events", CONFIG.format(port=free_port())))


@pytest.fixture
def _serving(config):
    """A serving process that serves version 7, which answers with the index of the largest feature."""
    manifest = manifest_of(
        7, time=time.time(), step=1, schema=Schema(config.pipeline.events).digest, factory="tiny_model:build"
    )
    model = nn.Linear(3, 3)
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
        model.bias.zero_()
    Versions(config.state_dir / "versions").write(model.state_dict(), manifest, Verdict("pass"))
    with contextlib.closing(Part("serving", config.path)) as process:

        def ready():
            report = read_report(config.state_dir)
            return report if report is not None and report.ready else None

        process.until(ready)
        yield
        process.stop()


def write(config, *events):
    path = config.folder / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


@pytest.mark.process
@pytest.mark.usefixtures("_serving")
def test_each_event_gets_a_prediction_with_its_version(config, capsys):
    path = write(config, {"x": [0, 5, 0]}, {"x": [0.0, 0.0, 5.0], "y": 1})
    assert cli.main(["predict", str(path), "-c", str(config.path)]) == 0
    replies = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(reply["version"], reply["prediction"]) for reply in replies] == [("7", 1), ("7", 2)]
    assert sum(replies[0]["probabilities"]) == pytest.approx(1.0, abs=1e-3)
    assert cli.main(["predict", str(path), "--json", "-c", str(config.path)]) == 0
    assert json.loads(capsys.readouterr().out) == replies
    good, sentences = {"x": [0, 5, 0]}, ('the feature "x" is missing', "line 2: the server answered 400")
    for event, sentence in zip(({"z": 1}, {"x": [1, 2]}), sentences, strict=True):
        assert cli.main(["predict", str(write(config, good, event)), "-c", str(config.path)]) == 2
        out, err = capsys.readouterr()
        assert json.loads(out)["prediction"] == 1, "those before it are answered"
        assert sentence in err


def test_events_with_the_same_features_are_asked_about_together_and_have_their_keys():
    asked = [
        _Asked(f"line {number}", key, [{"name": name, "datatype": "FP32", "shape": [1], "data": [number]}])
        for number, (key, name) in enumerate([("a", "x"), ("b", "x"), (None, "x"), ("c", "z"), ("d", "x")])
    ]
    requests = list[Any]()

    def ask(content):
        (tensor,) = json.loads(content)["inputs"]
        requests.append(tensor["data"])
        names = _Tensor("label", "BYTES", tensor["shape"], [f"is {value}" for value in tensor["data"]])
        score = _Tensor("score", "FP32", [*tensor["shape"], 1], [value / 3 for value in tensor["data"]])
        return _Reply("7", [names, score])

    found = [each for batch in _batches(asked, 2) for each in _answered(batch, ask)]
    assert requests == [[0, 1], [2], [3], [4]]
    assert found[1] == {"key": "b", "version": "7", "label": "is 1", "score": [0.3333]}
    assert found[2] == {"version": "7", "label": "is 2", "score": [0.6667]}
    assert [each["label"] for each in found] == [f"is {number}" for number in range(5)]


@pytest.mark.parametrize(
    ("keys", "event", "given"),
    [
        ("default = [1.0, 2.0]", {}, None),
        ("default = [1.0, 2.0]", {"x": None}, None),
        ('missing = "mean"', {}, None),
        ('missing = "mean"', {"x": [1.5, float("nan")]}, [1.5, None]),
        ('missing = "mean"', {"x": [None, 2.5]}, [None, 2.5]),
        ("", {"x": [1.5, 2.5]}, [1.5, 2.5]),
    ],
)
def test_a_feature_that_an_event_lacks_is_left_to_serving_as_over_http(tmp_path, keys, event, given):
    path = tmp_path / "pipeline.toml"
    path.write_text(
        'name = "d"\n[stream]\ntopics = ["a"]\n[model]\nfactory = "m:b"\n[schema.label]\nname = "y"\nclasses = 2\n'
        f'[schema.features.x]\ndtype = "float32"\nshape = [2]\n{keys}\n[schema.features.z]\ndtype = "float32"\n'
    )
    schema = Schema(load_config(path).pipeline.events)
    signature = Signature(schema, [], 8)
    inputs = {spec.name: str(spec.metadata()["datatype"]) for spec in signature.inputs.values()}
    tensors = tensors_of(schema, {"z": 0.0, **event}, inputs, "line 1")
    assert [tensor["data"] for tensor in tensors if tensor["name"] == "x"] == ([] if given is None else [given])
    request = signature.decode(json.dumps({"inputs": tensors}).encode(), None)
    expected = np.array([1, 2] if "default" in keys else [np.nan] * 2) if given is None else given
    np.testing.assert_array_equal(request.features["x"][0], np.array(expected, np.float32))


def test_without_a_server_it_says_how_to_start_one(config, capsys):
    path = write(config, {"x": [0, 5, 0]})
    assert cli.main(["predict", str(path), "-c", str(config.path)]) == 3
    assert f'is not ready; start it: "anabranch serve -c {config.path}"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (200, b'{"inputs": ["' + b"x" * 1000 + b'"]}', "the answer is longer than 1,000 bytes"),
        (200, b"[1]", "does not answer as expected"),
        (200, b'{"inputs": 1}', "does not answer as expected"),
        (503, b"[1]", "the server answered 503: no reason"),
        (503, b'{"error": "it starts"}', "the server answered 503: it starts"),
    ],
)
def test_an_answer_that_no_server_of_ours_gives_is_one_sentence(config, capsys, monkeypatch, status, body, sentence):
    monkeypatch.setattr("anabranch.commands.versions.rollout.MOST_BYTES", 1000)

    class Other(Handler):
        def do_GET(self):
            self.reply(body, status)

    now = time.time()
    config.state_dir.mkdir()
    with serving(Other, config.pipeline.serving.port) as address:
        write_report(
            config.state_dir, ServingReport(pid=os.getpid(), started=now, time=now, address=address, ready=True)
        )
        assert cli.main(["predict", "-c", str(config.path), str(write(config, {"x": [1, 2, 3]}))]) == 3
    assert sentence in capsys.readouterr().err
