"""A learner with a teacher as processes: a module, and a served version over HTTP that goes away and comes back."""

import contextlib

import pytest
import torch

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.versions.format import Verdict, Versions, reference_to
from anabranch.serving.reporting.report import read_report
from tests.pipelines import Part, adds_up, events, total
from tests.support.manifests import manifest_of
from tests.support.ports import first_free_port

MODEL = """
import torch
from torch import nn

def build():
    return nn.Linear(3, 3)

def teach():
    teacher = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        teacher.weight.copy_(20 * torch.eye(3))
    return teacher
"""
CONFIG = """
batch_size = 16
optimizer = {name = "sgd", lr = 0.5}
[versions]
publish_every = "100ms"
[checkpoints]
every = "200ms"
[gate]
holdout_fraction = 0.1
[model.teacher]
"""
DISTIL = 'unlabelled = "distil"'


def unlabelled(count):
    return [{"x": event["x"]} for event in events(count)]


def weights_of(learner):
    versions = Versions(learner.state_dir / "versions")
    return versions.weights(versions.manifest(versions.numbers()[-1]))


@pytest.mark.parametrize(
    "ranks",
    [
        "",
        pytest.param('replicas = 2\nsharding = "none"\n', marks=pytest.mark.slow),
        pytest.param('replicas = 2\nsharding = "fsdp"\n', marks=pytest.mark.slow),
    ],
)
def test_events_without_labels_are_learned_from_a_module_once_each_also_after_a_kill(
    ranks, kafka, make_topic, produce, write_pipeline, start
):
    topic = make_topic()
    text = ranks + CONFIG + 'factory = "tiny_model:teach"\n'
    config = write_pipeline(kafka.bootstrap, topic, text, MODEL, stream=DISTIL)
    learner = start(config)
    produce(kafka.bootstrap, topic, unlabelled(600))
    learner.wait_for(lambda each: each.checkpoint is not None and each.outcomes["trained"] >= 200)
    learner.kill()
    learner = start(config)
    produce(kafka.bootstrap, topic, [*unlabelled(300), *events(300)])
    report = learner.wait_for(lambda each: total(each) == 1200)
    assert adds_up(report)
    assert report.outcomes["trained"] + report.outcomes["held_out"] == 1200
    assert 0 < report.outcomes["held_out"] < 100, "of the labelled ones alone"
    assert report.teacher is not None
    assert report.teacher.up
    assert set(filter(report.teacher.rows.get, report.teacher.rows)) == {"answered"}
    assert 'anabranch_learner_teacher_rows_total{result="answered"}' in learner.get("/metrics")
    assert learner.metric("learner_teacher_up") == 1.0
    assert learner.stop() == 0
    weights = weights_of(learner)
    output = torch.eye(3) @ weights["weight"].T + weights["bias"]
    assert output.argmax(dim=1).tolist() == [0, 1, 2], "the student has learned what the teacher says"


@pytest.mark.slow
def test_a_server_as_the_teacher_goes_away_and_comes_back_and_labelled_events_are_learned_meanwhile(
    kafka, make_topic, produce, write_pipeline, start, tmp_path
):
    folder, topic = tmp_path / "teacher", make_topic()
    folder.mkdir()
    config = write_pipeline(kafka.bootstrap, topic, CONFIG.replace("[model.teacher]\n", ""), MODEL)
    text = config.read_text().replace('"tiny_model:build"', '"tiny_model:teach"')
    (folder / "tiny_model.py").write_text(MODEL)
    port = first_free_port()
    (folder / "pipeline.toml").write_text(f"{text}[serving]\nport = {port}\n")
    publish(folder)

    def served():
        return Part("serving", folder / "pipeline.toml")

    with contextlib.closing(served()) as server:
        server.until(lambda: (found := read_report(folder / "var")) and found.ready)
        teacher = f'url = "http://127.0.0.1:{port}"\nmodel = "test"\ntimeout = "60s"\n'
        learner = start(write_pipeline(kafka.bootstrap, topic, CONFIG + teacher, MODEL, stream=DISTIL))
        produce(kafka.bootstrap, topic, unlabelled(320))
        learned = learner.wait_for(lambda each: total(each) == 320)
        assert learned.outcomes["trained"] == 320
        assert learned.warnings == []
        server.kill()
    produce(kafka.bootstrap, topic, [*events(320), *unlabelled(320)])
    away = learner.wait_for(lambda each: total(each) == 960)
    assert away.skipped == {"untaught": 320}
    assert away.outcomes["trained"] + away.outcomes["held_out"] == 640
    assert [
        warning for warning in away.warnings if f"the teacher at http://127.0.0.1:{port} cannot be reached" in warning
    ]
    assert away.problems == [], "it is healthy without its teacher"
    with contextlib.closing(served()) as server:
        server.until(lambda: (found := read_report(folder / "var")) and found.ready and found.pid == server.process.pid)

        sent, report_now = 960, away
        while not (report_now.teacher and report_now.teacher.up):  # one batch after the back-off is the trial
            produce(kafka.bootstrap, topic, events(16))
            sent += 16
            report_now = learner.wait_for(lambda each, sent=sent: total(each) == sent)  # type: ignore[misc]
        produce(kafka.bootstrap, topic, unlabelled(320))
        back = learner.wait_for(lambda each: total(each) == sent + 320)
        assert back.skipped == {"untaught": 320}
        assert adds_up(back)
        assert learner.stop() == 0


def publish(folder):
    """Publish a version of the teacher's pipeline."""
    schema = Schema(
        SchemaSettings.model_validate(
            {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": {"name": "y", "classes": 3}}
        )
    )
    manifest = manifest_of(1, schema=schema.digest, model=reference_to(ModelSettings(factory="tiny_model:teach")))
    Versions(folder / "var" / "versions").write({"weight": 20 * torch.eye(3)}, manifest, Verdict("pass"))
