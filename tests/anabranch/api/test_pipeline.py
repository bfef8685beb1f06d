"""A pipeline is started, asked and stopped from Python; what keeps it from starting is the sentence of its process."""

import json

import numpy as np
import pytest

import anabranch
from anabranch import cli
from anabranch.commands.init.command import write_example
from tests.support.waiting import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.slow


def test_settings_schema_and_versions_are_those_of_the_file(pipeline):
    found = anabranch.Pipeline.from_toml(pipeline.path, ["learner.batch_size=8"])
    assert (found.settings.learner.batch_size, found.settings.serving.max_batch) == (8, 64)
    assert found.schema.label.names == ("sale", "return")
    assert (found.load().version, found.load("newest").version) == (2, 3)
    assert found.status()["learner"]["condition"] == "not running"
    assert repr(found) == f"Pipeline(orders, {pipeline.path})"
    with pytest.raises(anabranch.AnabranchError, match=r"serving of .* is not ready: see status"):
        found.client()
    found.stop()


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("learner.batch_siz=8", "there is no key batch_siz; the nearest known key"),
        ("learner.batch_size=0", "learner.batch_size = 0"),
    ],
)
def test_wrong_settings_are_one_sentence(pipeline, assignment, sentence):
    with pytest.raises(anabranch.AnabranchError, match=sentence):
        anabranch.Pipeline.from_toml(pipeline.path, [assignment])


@pytest.mark.process
def test_what_ends_a_part_at_its_start_is_raised(pipeline):
    pipeline.path.with_name("orders_model.py").write_text("def build():\n    raise ValueError('no weights')\n")
    found = anabranch.Pipeline.from_toml(pipeline.path)
    with pytest.raises(anabranch.AnabranchError, match=r"orders_model:build.*no weights"):
        found.start()
    assert found.status()["learner"]["condition"] == "not running"
    with pytest.raises(anabranch.AnabranchError, match="no weights"):
        found.run()


@pytest.mark.process
@pytest.mark.services
@pytest.mark.timeout(300)
def test_a_pipeline_runs_in_a_block(tmp_path, kafka, make_topic, free_port):
    folder = tmp_path / "mine"
    write_example(folder)
    assignments = [
        f"stream.bootstrap_servers={kafka.bootstrap}",
        f"stream.topics={json.dumps([make_topic(1)])}",
        "learner.status=127.0.0.1:0",
        f"serving.port={free_port()}",
    ]
    path = folder / "pipeline.toml"
    options = [part for each in assignments for part in ("--set", each)]
    assert cli.main(["produce", str(folder / "events.jsonl"), "-c", str(path), *options]) == 0
    pipeline = anabranch.Pipeline.from_toml(path, assignments)
    with pipeline:
        assert {part: pipeline.status()[part]["condition"] for part in ("learner", "serving")} == {
            "learner": "running",
            "serving": "running",
        }
        with pytest.raises(anabranch.AnabranchError, match="has been started already"):
            pipeline.start()

        def served():
            report = pipeline.status()["serving"]
            return report["condition"] == "running" and report["report"]["ready"]

        wait_until(served, pipeline.status)
        data = {"x": np.zeros((3, 64), np.float32)}
        with pipeline.client(timeout=PATIENCE_SECONDS) as client:
            found = client.predict(data)
        model = pipeline.load(int(found["model_version"][0]))
        np.testing.assert_allclose(model.predict(data)["probabilities"], found["probabilities"], atol=1e-5)
    assert pipeline.status()["learner"]["condition"] == "not running"
    assert (folder / "var" / "learner.log").stat().st_mode & 0o77 == 0
