"""Where a rebuild starts, and what a manifest says of the settings."""

import importlib
import os
import sys
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import torch

from anabranch.core.tracing.settings import TracingSettings
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings
from anabranch.learner.checkpoints.checkpoint_copy import copy_sparse
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints
from anabranch.learner.extensions.rebuild.start import (
    RebuildError,
    changes_since,
    check_settings,
    in_scratch,
    preceding,
    targets,
)
from anabranch.learner.settings.learner import GateSettings, LearnerSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.settings.track import TrackSettings
from anabranch.learner.stream.partition_ledger import PartitionLedger
from anabranch.learner.versions.origin import origin_of, settings_of_weights
from anabranch.replay.settings import ReplaySettings
from tests.learner.learner_spec import learner_spec
from tests.support.extend_pages import follow
from tests.support.manifests import manifest_of

ON_SHELF = {"tiers": {"shelf": {"factory": "tests.support.shelf:ShelfFactory", "bytes": "1MB"}}}


def manifest(step, offset, generation, seen=None):
    return manifest_of(1, generation=generation, step=step, through={"events:0": offset}, seen_through=seen, schema="s")


def write(path, number, step, position, generation):
    account = PartitionLedger(TopicPartition("events", 0), 0).state() | {"position": [position, 0]}
    checkpoint = Checkpoint(step, {"model": {"w": torch.zeros(1)}}, {"ledger": [account]})
    Checkpoints(path, "s", generation).write(number, checkpoint, 0.0)


def test_the_newest_checkpoint_comes_first_that_the_version_may_come_from(tmp_path):
    """Checkpoint 4 is of the learner after a crash: a version of the one before may have other weights."""
    for number, step, position, generation in ((1, 10, 100, 1), (2, 20, 200, 1), (3, 30, 300, 1), (4, 15, 150, 2)):
        write(tmp_path, number, step, position, generation)
    checkpoints = Checkpoints(tmp_path, "s", 0)

    def chosen(step, offset, generation):
        return [each.number for each in preceding(checkpoints, manifest(step, offset, generation))]

    assert chosen(25, 249, 1) == [2, 1]
    assert chosen(20, 199, 1) == [2, 1], "a version and a checkpoint of one step"
    assert chosen(20, 199, 2)[0] == 4
    assert chosen(9, 89, 1) == []
    assert chosen(25, 120, 1) == [1], "checkpoint 2 has read more than the version"


def test_what_waits_for_labels_is_read_as_far_as_it_was_seen():
    partition = TopicPartition("events", 0)
    assert targets(manifest(1, 5, 1)) == {partition: 5}
    assert targets(manifest(1, 5, 1, {"events:0": 9})) == {partition: 9}


@pytest.mark.parametrize("contents", [[], [(0, b"a" * 5000)], [(1 << 20, b"b" * 100), (3 << 20, b"c" * 100)]])
def test_a_file_of_rows_is_copied_without_what_was_never_written(tmp_path, contents):
    with (tmp_path / "a").open("wb") as file:
        file.truncate(4 << 20)
        for offset, content in contents:
            os.pwrite(file.fileno(), content, offset)
    copy_sparse(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def spec_in(folder, **changes):
    features = {"x": {"dtype": "float32", "shape": [3]}}
    events = SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 3}})
    return learner_spec(folder, events, ModelSettings(factory="m:build"), **changes)


def test_a_rebuild_traces_and_tracks_nothing_and_reads_no_answers(tmp_path):
    more = {"tracing": TracingSettings(), "track": TrackSettings(kind="tensorboard")}
    spec = in_scratch(spec_in(tmp_path, **more), tmp_path / "scratch")
    assert (spec.tracing, spec.track, spec.gate.live) == (None, None, False)


def test_another_device_is_named(tmp_path):
    """A CPU with other instructions for vectors rounds sums in another way."""
    spec, cpu = spec_in(tmp_path), torch.device("cpu")
    origin = origin_of({}, spec, cpu)
    assert changes_since(spec, origin, cpu) == []
    (sentence,) = changes_since(spec, msgspec.structs.replace(origin, device="cpu OTHER"), cpu)
    assert sentence.startswith(f"the version was trained on cpu OTHER, and this is {origin.device}, which rounds")


def test_a_strategy_of_the_user_that_has_changed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    module = follow("strategy", tmp_path)
    learner = LearnerSettings.model_validate({"strategy": f"{module}:SharedReplay"})
    spec, cpu = spec_in(tmp_path, learner=learner), torch.device("cpu")
    importlib.import_module(module)
    monkeypatch.setattr(sys.modules[module], "__file__", str(tmp_path / f"{module}.py"))
    origin = origin_of({}, spec, cpu)
    (tmp_path / f"{module}.py").write_text("# another")
    assert changes_since(spec, origin, cpu) == [
        f"the file of module {module} is not the one that the version was made with"
    ]


def test_settings_of_a_later_release_are_named_and_not_refused(tmp_path):
    """Nobody could set them back. A section that is added has a key in both: None before."""
    spec = spec_in(tmp_path)
    older = settings_of_weights(spec)
    del older["learner.batch_size"], older["stream.start"]
    version = msgspec.structs.replace(manifest(5, 9, 1), origin=origin_of(older, spec, torch.device("cpu")))
    assert check_settings(spec, "s", version) == [
        "settings that the version's release did not have are as they are now: learner.batch_size, stream.start"
    ]
    with_disk = spec.with_changes(replay=ReplaySettings.model_validate({"disk": {"bytes": "1MB"}}))
    with pytest.raises(RebuildError, match=r"replay.disk was None, and is not there; replay.disk.bytes was not there,"):
        check_settings(with_disk, "s", version)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"learner": LearnerSettings.model_validate({"replicas": 2})}, "learner.replicas = 2 train together"),
        (
            {"replay": ReplaySettings.model_validate({"redis": {"url": "redis://h/0", "bytes": "1MB"}})},
            "its stored events are in replay.redis alone",
        ),
        ({"replay": ReplaySettings.model_validate(ON_SHELF)}, "its stored events are in replay.tiers.shelf alone"),
        (
            {"model": ModelSettings.model_validate({"factory": "m:f", "teacher": {"version": {}}})},
            "model.teacher.version names no number",
        ),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(tmp_path, changes, sentence):
    with pytest.raises(RebuildError, match=f"cannot be rebuilt: {sentence}"):
        check_settings(spec_in(tmp_path).with_changes(**changes), "s", manifest(5, 9, 1))


def settings(**changes):
    sections = {
        "stream": {"topics": ["events"]},
        "model": {"factory": "m:build"},
        "learner": {},
        "replay": {},
        "gate": {},
    }
    merged = {name: {**section, **changes.get(name, {})} for name, section in sections.items()}
    spec = SimpleNamespace(
        stream=StreamSettings.model_validate(merged["stream"]),
        model=ModelSettings.model_validate(merged["model"]),
        learner=LearnerSettings.model_validate(merged["learner"]),
        replay=ReplaySettings.model_validate(merged["replay"]),
        gate=GateSettings.model_validate(merged["gate"]),
        search=None,
    )
    return settings_of_weights(cast("PipelineSettings", spec))


def test_settings_of_weights_have_no_secret_and_nothing_of_a_machine():
    secret = "s3cret"
    found = settings(
        stream={
            "properties": {"sasl.password": secret, "sasl.username": "u"},
            "format": "avro",
            "registry": {"url": "http://r:1", "password": secret, "user": "u"},
            "backfill": {"files": ["/home/someone/a.jsonl"], "storage": {"key": secret}},
        },
        model={"teacher": {"url": "https://host/x", "model": "t", "token": secret}},
        replay={
            "tiers": {"shelf": ON_SHELF["tiers"]["shelf"] | {"password": secret}},
            "redis": {"url": f"redis://u:{secret}@h:1/0", "bytes": "1MB"},
            "disk": {"bytes": "2MB"},
        },
    )
    text = repr(found)
    for each in (secret, "sasl", "/home", "redis://", "https://host", "http://r"):
        assert each not in text
    assert found["stream.backfill.files"] == ["a.jsonl"]
    assert found["model.teacher.temperature"] == 2.0
    assert "replay.device_bytes" not in found
    assert found["replay.disk.bytes"] == 2_000_000


def test_caches_matter_only_where_there_is_no_slower_tier():
    assert settings()["replay.device_bytes"] == 256_000_000
    assert settings(learner={"status": "127.0.0.1:1", "standby": True}) == settings()
    assert settings(learner={"strategy": {"name": "der", "alpha": 0.3}})["learner.strategy.alpha"] == 0.3


def test_the_length_of_rounds_matters_only_where_bits_depend_on_it():
    longer = {"round": "1s"}
    assert settings(learner=longer) != settings()
    exact = {"deterministic": True}
    assert settings(learner=exact | longer) == settings(learner=exact)
