"""Where a rebuild starts, and what a manifest says of the settings."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from anabranch.core.tracing.config import TracingSettings
from ingest.config import SchemaSettings, StreamSettings
from ingest.events.partition import TopicPartition
from learner.build import LearnerSpec
from learner.checkpointing.checkpoint_copy import copy_sparse
from learner.config import GateSettings, LearnerSettings, ModelSettings
from learner.publishing.origin import origin_of, settings_of_weights
from learner.rebuilding.errors import RebuildError
from learner.rebuilding.requirements import changes_since, check_settings
from learner.rebuilding.start import in_scratch, preceding, targets
from learner.sections.mlflow_settings import MlflowSettings
from learner.state_dir.checkpoint import Checkpoint, Checkpoints
from learner.state_dir.trained_through import PartitionProgress
from learner.state_dir.version import Manifest, ModelReference
from learner.stream.partition_ledger import PartitionLedger
from replay.config import ReplaySettings
from tests.learner.learner_spec import learner_spec


def manifest(step: int, offset: int, generation: int, seen: dict[str, int] | None = None) -> Manifest:
    return Manifest(
        number=1,
        generation=generation,
        parent=None,
        time=0.0,
        step=step,
        trained_through={"events:0": PartitionProgress(offset)},
        seen_through=seen,
        metrics={},
        schema="s",
        encoders={},
        model=ModelReference("m:build", {}, "classification"),
        files={},
    )


def write(path: Path, number: int, step: int, position: int, generation: int) -> None:
    account = PartitionLedger(TopicPartition("events", 0), 0).state() | {"position": [position, 0]}
    checkpoint = Checkpoint(step, {"model": {"w": torch.zeros(1)}}, {"ledger": [account]})
    Checkpoints(path, "s", generation).write(number, checkpoint, 0.0)


def test_the_newest_checkpoint_comes_first_that_the_version_may_come_from(tmp_path: Path) -> None:
    """Checkpoint 4 is of the learner after a crash: a version of the one before may have other weights."""
    for number, step, position, generation in ((1, 10, 100, 1), (2, 20, 200, 1), (3, 30, 300, 1), (4, 15, 150, 2)):
        write(tmp_path, number, step, position, generation)
    checkpoints = Checkpoints(tmp_path, "s", 0)

    def chosen(step: int, offset: int, generation: int) -> list[int]:
        return [each.number for each in preceding(checkpoints, manifest(step, offset, generation))]

    assert chosen(25, 249, 1) == [2, 1]
    assert chosen(20, 199, 1) == [2, 1], "a version and a checkpoint of one step"
    assert chosen(20, 199, 2)[0] == 4
    assert chosen(9, 89, 1) == []
    assert chosen(25, 120, 1) == [1], "checkpoint 2 has read more than the version"


def test_what_waits_for_labels_is_read_as_far_as_it_was_seen() -> None:
    partition = TopicPartition("events", 0)
    assert targets(manifest(1, 5, 1)) == {partition: 5}
    assert targets(manifest(1, 5, 1, {"events:0": 9})) == {partition: 9}


@pytest.mark.parametrize("contents", [[], [(0, b"a" * 5000)], [(1 << 20, b"b" * 100), (3 << 20, b"c" * 100)]])
def test_a_file_of_rows_is_copied_without_what_was_never_written(
    tmp_path: Path, contents: list[tuple[int, bytes]]
) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(4 << 20)
        for offset, content in contents:
            os.pwrite(file.fileno(), content, offset)
    copy_sparse(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def spec_in(folder: Path, **changes: Any) -> LearnerSpec:
    features = {"x": {"dtype": "float32", "shape": [3]}}
    events = SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 3}})
    return learner_spec(folder, events, ModelSettings(factory="m:build"), **changes)


def test_a_rebuild_traces_and_registers_nothing(tmp_path: Path) -> None:
    more = {"tracing": TracingSettings(), "mlflow": MlflowSettings(tracking_uri="http://mlflow:5000")}
    spec = in_scratch(spec_in(tmp_path, **more), tmp_path / "scratch")
    assert (spec.tracing, spec.mlflow) == (None, None)


def test_another_device_is_named(tmp_path: Path) -> None:
    """A CPU with other instructions for vectors rounds sums in another way."""
    spec, cpu = spec_in(tmp_path), torch.device("cpu")
    origin = origin_of({}, spec.model, 7, cpu)
    assert changes_since(spec, origin, cpu) == []
    (sentence,) = changes_since(spec, msgspec.structs.replace(origin, device="cpu OTHER"), cpu)
    assert sentence.startswith(f"the version was trained on cpu OTHER, and this is {origin.device}, which rounds")


def test_settings_of_a_later_release_are_named_and_not_refused(tmp_path: Path) -> None:
    """Nobody could set them back. A section that is added has a key in both: None before."""
    spec = spec_in(tmp_path)
    older = dict(spec.settings_of_weights)
    del older["learner.batch_size"], older["stream.start"]
    version = msgspec.structs.replace(manifest(5, 9, 1), origin=origin_of(older, spec.model, 0, torch.device("cpu")))
    assert check_settings(spec, "s", version) == [
        "settings that the version's release did not have are as they are now: learner.batch_size, stream.start"
    ]
    with_disk = replace(spec, replay=ReplaySettings(disk={"bytes": "1MB"}))  # type: ignore[arg-type]
    with pytest.raises(RebuildError, match=r"replay.disk was None, and is not there; replay.disk.bytes was not there,"):
        check_settings(with_disk, "s", version)


def settings(**changes: Any) -> dict[str, Any]:
    sections = {
        "stream": {"topics": ["events"]},
        "model": {"factory": "m:build"},
        "learner": {},
        "replay": {},
        "gate": {},
    }
    merged = {name: {**section, **changes.get(name, {})} for name, section in sections.items()}
    return settings_of_weights(
        StreamSettings.model_validate(merged["stream"]),
        ModelSettings.model_validate(merged["model"]),
        LearnerSettings.model_validate(merged["learner"]),
        ReplaySettings.model_validate(merged["replay"]),
        GateSettings.model_validate(merged["gate"]),
    )


def test_settings_of_weights_have_no_secret_and_nothing_of_a_machine() -> None:
    secret = "s3cret"
    found = settings(
        stream={
            "properties": {"sasl.password": secret, "sasl.username": "u"},
            "format": "avro",
            "registry": {"url": "http://r:1", "password": secret, "user": "u"},
            "backfill": {"files": ["/home/someone/a.jsonl"], "storage": {"key": secret}},
        },
        model={"teacher": {"url": "https://host/x", "model": "t", "token": secret}},
        replay={"redis": {"url": f"redis://u:{secret}@h:1/0", "bytes": "1MB"}, "disk": {"bytes": "2MB"}},
    )
    text = repr(found)
    for each in (secret, "sasl", "/home", "redis://", "https://host", "http://r"):
        assert each not in text
    assert found["stream.backfill.files"] == ["a.jsonl"]
    assert found["model.teacher.temperature"] == 2.0
    assert "replay.device_bytes" not in found
    assert found["replay.disk.bytes"] == 2_000_000


def test_caches_matter_only_where_there_is_no_slower_tier() -> None:
    assert settings()["replay.device_bytes"] == 256_000_000
    assert settings(learner={"status": "127.0.0.1:1", "standby": True}) == settings()
    assert settings(learner={"strategy": {"name": "der", "alpha": 0.3}})["learner.strategy.alpha"] == 0.3
