"""A backup has all that belongs to a state directory, whatever the pipeline uses, also while the learner runs."""

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from anabranch import cli
from anabranch.commands.checkpoints.backup import IN_PARTS, LEFT_OUT, Backup, back_up
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.core.start_report import starting
from anabranch.core.stream_secret import StreamSecret
from anabranch.core.temporary_files import temporary_folder
from anabranch.ingest.events.schema import Schema
from anabranch.learner.checkpoints.format import RANK, Checkpoint, Checkpoints
from anabranch.learner.object_storage.opening import lease_storage
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.state_dir.lock import lock_state_directory
from anabranch.learner.state_dir.undo_file import read_undo
from anabranch.learner.versions.format import RegistryState, Verdict, Versions, reference_to
from anabranch.replay.erasure.erased_events import ByRange
from anabranch.replay.erasure.erasure_log import NAME as ERASURES
from anabranch.replay.erasure.erasure_log import ErasureLog
from tests.pipelines import Learner, adds_up
from tests.support.manifests import manifest_of

REFERENCE = Path(__file__).parents[3] / "docs" / "reference.md"
FROZEN = b"frozen weights"


class Stopped:
    """The state directory of a learner that does not run, with files of all kinds."""

    def __init__(self, config):
        self.config = config
        self.state_dir = config.state_dir
        self.schema = Schema(config.pipeline.events).digest
        self.checkpoints = Checkpoints(self.state_dir / "checkpoints", self.schema, 1)
        self.versions = Versions(self.state_dir / "versions")
        with lock_state_directory(self.state_dir):
            StreamSecret.open(self.state_dir)
        for number in (1, 2, 3):
            self.checkpoint(number)

    def checkpoint(self, number):
        parts = {"model": {"w": torch.full((100,), float(number))}, "same": {"w": torch.ones(100)}}
        self.checkpoints.write(number, Checkpoint(10 * number, parts, {"ledger": []}), float(number))

    def version(self, number, base=None):
        manifest = manifest_of(
            number,
            time=1.0,
            step=10 * number,
            schema=self.schema,
            model=reference_to(self.config.pipeline.model),
            base=base,
        )
        self.versions.write({"w": torch.full((9,), float(number))}, manifest, Verdict("pass"))


@pytest.fixture
def stopped(example):
    return Stopped(load_config(example / "pipeline.toml"))


def test_the_copy_is_a_state_directory(stopped, tmp_path):
    import hashlib

    sha256 = hashlib.sha256(FROZEN).hexdigest()
    bases_in(stopped.state_dir).write(sha256, [FROZEN])
    stopped.version(1)
    stopped.version(2, sha256)
    stopped.versions.write_state(RegistryState(serving=2))
    target = tmp_path / "backup"
    assert back_up(stopped.config, target) == Backup(str(target), 3, 30, 3.0, [2, 1], 2, [], [])
    checkpoints, versions = Checkpoints(target / "checkpoints", stopped.schema, 1), Versions(target / "versions")
    assert checkpoints.numbers() == [1, 2, 3]
    for number in (1, 2, 3):
        assert checkpoints.part(number, "model")["w"].tolist() == [float(number)] * 100
    shared = target / "checkpoints"
    assert (shared / "1" / RANK / "same.safetensors").samefile(shared / "3" / RANK / "same.safetensors")
    assert versions.weights(versions.manifest(2))["w"].tolist() == [2.0] * 9
    assert versions.verdict(1) == Verdict("pass")
    assert versions.state().serving == 2
    assert bases_in(target).is_intact(sha256)
    assert StreamSecret.read(target).value == StreamSecret.read(stopped.state_dir).value  # type: ignore[union-attr]
    with lock_state_directory(target) as generation:
        assert generation == 2


def test_whatever_else_is_there_is_in_it_unless_it_is_named_as_left_out(stopped, tmp_path):
    table = REFERENCE.read_text().partition("## The state directory")[2].partition("\n## ")[0]
    for path in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE):
        name = path.partition("/")[0]
        if name not in IN_PARTS and not (stopped.state_dir / name).exists():
            (stopped.state_dir / name).mkdir() if "/" in path else (stopped.state_dir / name).touch()
    (stopped.state_dir / "of-a-later-release.json").write_text("{}")
    (stopped.state_dir / "of-a-later-release").mkdir()
    (stopped.state_dir / "of-a-later-release" / "file").touch()
    (stopped.state_dir / ERASURES).write_bytes(b'{"complete": 1}\n{"being wri')
    target = tmp_path / "backup"
    back_up(stopped.config, target)
    there = {path.name for path in stopped.state_dir.iterdir()}
    assert {path.name for path in target.iterdir()} == there - LEFT_OUT
    assert (target / "of-a-later-release" / "file").exists()
    assert (target / ERASURES).read_bytes() == b'{"complete": 1}\n'


def test_reports_of_processes_are_not_in_it(stopped, tmp_path):
    before = {path.name for path in stopped.state_dir.iterdir()}
    (stopped.state_dir / "learner.json").touch()
    with starting(stopped.state_dir, "learner"), starting(stopped.state_dir, "serving"):
        back_up(stopped.config, tmp_path / "backup")
    assert {path.name for path in (tmp_path / "backup").iterdir()} == before - {"learner.lock"}


@pytest.mark.parametrize("gone", ["file", "folder", "folder/file", "folder/inner"])
def test_what_the_learner_removes_meanwhile_is_not_in_it(stopped, tmp_path, monkeypatch, gone):
    inner = stopped.state_dir / "folder" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent, stopped.state_dir):
        (folder / "file").write_text("1")
    listed, is_file, is_dir, list_folder = stopped.state_dir / gone, Path.is_file, Path.is_dir, os.scandir

    def remove():
        shutil.rmtree(listed) if is_dir(listed) else listed.unlink(missing_ok=True)

    def remove_once_listed(path):
        entries = [*list_folder(path)]
        if not isinstance(path, int) and Path(path) == listed.parent:
            monkeypatch.undo()
            remove()
        return contextlib.nullcontext(entries)

    def remove_once_seen(path):
        seen = is_dir(path) if gone == "folder" else is_file(path)
        if path == listed:
            remove()
        return seen

    if "/" in gone:
        monkeypatch.setattr("shutil.os.scandir", remove_once_listed)
    else:
        monkeypatch.setattr(Path, "is_dir" if gone == "folder" else "is_file", remove_once_seen)
    target = tmp_path / "backup"
    back_up(stopped.config, target)
    monkeypatch.undo()
    assert not (target / gone).exists()
    rest = {"file", "folder/file", "folder/inner/file"}
    assert {path for path in rest if (target / path).exists()} == {path for path in rest if not path.startswith(gone)}


def test_a_file_that_cannot_be_copied_is_an_error(stopped, tmp_path, monkeypatch):
    (stopped.state_dir / "folder").mkdir()
    (stopped.state_dir / "folder" / "file").write_text("1")

    def fail(*_, **__):
        raise shutil.Error([(str(stopped.state_dir / "folder" / "file"), "", "no space left")])

    monkeypatch.setattr("shutil.copytree", fail)
    with pytest.raises(SettingsError, match="no space left"):
        back_up(stopped.config, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()


def test_it_is_made_completely_or_not_at_all(stopped, tmp_path, monkeypatch):
    target = tmp_path / "backup"
    target.mkdir()
    (target / "mine").touch()
    with pytest.raises(SettingsError, match="is not an empty folder"):
        back_up(stopped.config, target)
    (target / "mine").unlink()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as later:
        later.setattr("anabranch.learner.checkpoints.checkpoint_copy.copy_rows", full)
        with pytest.raises(SettingsError, match="cannot be written: No space left"):
            back_up(stopped.config, target)
    assert [*tmp_path.glob("*backup*")] == [target]
    assert not list(target.iterdir())
    with temporary_folder(".backup.tmp-", tmp_path) as killed:
        (killed / "new").mkdir()
        shutil.copytree(killed, copy := tmp_path / "copy")
    copy.rename(killed)  # as a process that was killed leaves it
    back_up(stopped.config, target)
    assert [*tmp_path.glob("*backup*")] == [target]


def test_a_newest_checkpoint_that_is_deleted_or_undone_meanwhile_is_copied_again(stopped, tmp_path, monkeypatch):
    from anabranch.learner.checkpoints import checkpoint_copy

    changes: list[Callable[[], object]] = [
        lambda: stopped.checkpoints.delete(3),
        lambda: (stopped.state_dir / "undo.json").write_text('{"format": 1, "records": []}'),
        lambda: stopped.checkpoints.delete(1),
    ]
    copy = checkpoint_copy.copy_rows

    def copy_rows(*args):
        copy(*args)
        changes.pop(0)()

    monkeypatch.setattr(checkpoint_copy, "copy_rows", copy_rows)
    made = back_up(stopped.config, tmp_path / "backup")
    assert (made.checkpoint, made.older) == (2, [])
    assert Checkpoints(tmp_path / "backup" / "checkpoints", stopped.schema, 1).numbers() == [2]
    changes += [lambda n=n: (stopped.checkpoint(n), stopped.checkpoints.delete(n - 1)) for n in (4, 5, 6)]  # type: ignore[misc]
    stopped.checkpoints.delete(2)
    stopped.checkpoint(3)
    with pytest.raises(
        SettingsError, match=r"stayed until it was copied.*: raise checkpoints.keep, or stop the learner"
    ):
        back_up(stopped.config, tmp_path / "second")


def test_what_is_damaged_is_left_out_and_said(stopped, tmp_path):
    stopped.version(1)
    stopped.version(2)
    for path in ("checkpoints/3/rank-0/model.safetensors", "versions/1/model.safetensors"):
        (stopped.state_dir / path).write_bytes(b"damaged")
    made = back_up(stopped.config, tmp_path / "backup")
    assert (made.checkpoint, made.older, made.versions) == (2, [1], 1)
    assert [sentence[: len("checkpoint 3")] for sentence in made.damaged] == ["checkpoint 3", "version 1: /"[:12]]
    for number in (1, 2):
        (stopped.state_dir / f"checkpoints/{number}/rank-0/model.safetensors").write_bytes(b"damaged")
    with pytest.raises(SettingsError, match="stayed until it was copied, or can be read"):
        back_up(stopped.config, tmp_path / "second")


def test_a_state_that_only_the_object_store_has_is_backed_up(example, tmp_path):
    url, path = f"file://{tmp_path}/bucket", example / "pipeline.toml"
    path.write_text(f'{path.read_text()}\n[storage]\nurl = "{url}"\nmode = "only"\n')
    config, other = load_config(path), tmp_path / "other"
    schema = Schema(config.pipeline.events).digest
    with (
        lock_state_directory(other) as generation,
        lease_storage(StorageSettings(url=url, mode="only"), other, generation) as held,
    ):
        ErasureLog(other / ERASURES).append([ByRange(time=0.0, by="command", partition="t#0[0]", first=1, last=2)])
        stored = Checkpoints(other, schema, held.lease.generation, held.checkpoints)
        stored.write(7, Checkpoint(70, {"model": {"w": torch.ones(9)}}, {"ledger": []}), 1.0)
    made = back_up(config, tmp_path / "backup")
    assert (made.checkpoint, made.older) == (7, [])
    assert Checkpoints(tmp_path / "backup" / "checkpoints", schema, 1).part(7, "model")["w"].tolist() == [1.0] * 9


def test_the_command_prints_what_is_in_it_and_makes_it_for_this_user_alone(stopped, tmp_path, capsys):
    arguments = ["checkpoints", "backup", str(tmp_path / "a"), "-c", str(stopped.config.path)]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.startswith("backed up checkpoint 3 of step 30, written at 1970-")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    arguments[2] = str(tmp_path / "b")
    assert cli.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["older"] == [2, 1]


STREAM = """
[stream.labels]
topics = ["{labels}"]
wait = "1h"
unmatched = "drop"
bytes = "5MB"
[schema.key]
name = "id"
[schema.features.z]
dtype = "float32"
"""
REST = """
batch_size = 8
[replay]
capacity = 100
disk.bytes = "1MB"
[checkpoints]
every = "100ms"
[versions]
publish_every = "100ms"
"""
MODEL = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, z):
        return self.linear(torch.cat([x, z.reshape(-1, 1)], 1))

def build():
    return Two()
"""
EVENTS, LABELLED = 120, 80


@pytest.mark.services
@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("of_z", "more"),
    [
        ('scale = "standard"\nmissing = "mean"', ""),
        ("", '\n[search]\npromote = "auto"\nspace = {"learner.optimizer.lr" = [1e-6, 1.0]}\n'),
    ],
    ids=["learned-features", "search"],
)
@pytest.mark.parametrize("runs", [True, False], ids=["while-it-runs", "when-it-does-not"])
def test_a_learner_with_all_features_goes_on_from_a_backup(
    kafka, make_topic, produce, write_pipeline, tmp_path, of_z, more, runs
):
    topic, labels = make_topic(1), make_topic(1)
    path = write_pipeline(kafka.bootstrap, topic, REST + more, MODEL, stream=STREAM.format(labels=labels) + of_z)
    config = load_config(path)

    def send(first, last, *, labelled=False):
        numbers = range(first, last)
        if labelled:
            produce(kafka.bootstrap, labels, [{"id": str(i), "y": i % 3} for i in numbers])
        else:
            produce(
                kafka.bootstrap,
                topic,
                [{"id": str(i), "x": [float(i % 3 == k) for k in range(3)], "z": float(i)} for i in numbers],
            )

    def command(*arguments):
        return cli.main([*arguments, "-c", str(path)])

    def has_settled(report, waiting):
        return report.labels is not None and report.labels.waiting == waiting and adds_up(report)

    target = tmp_path / "backup"
    learner = Learner(path)
    with contextlib.closing(learner):
        send(0, EVENTS)
        send(0, LABELLED, labelled=True)
        learner.wait_for(lambda report: has_settled(report, EVENTS - LABELLED) and report.checkpoint)
        assert learner.stop() == 0
    if not more:
        assert command("undo", "--offsets", f"{topic}[0]@5..6", "--yes") == 0
    learner = Learner(path)
    with contextlib.closing(learner):
        learner.wait_for(lambda report: has_settled(report, EVENTS - LABELLED))
        assert command("erase", "--key", "3", "--key", "100", "--yes") == 0
        before = learner.wait_for(lambda report: has_settled(report, EVENTS - LABELLED - 1))
        if runs:
            assert command("checkpoints", "backup", str(target)) == 0
        assert learner.stop() == 0
    if not runs:
        assert command("checkpoints", "backup", str(target)) == 0
    secret, undone = StreamSecret.read(config.state_dir), read_undo(config.state_dir)
    shutil.rmtree(config.state_dir)
    shutil.copytree(target, config.state_dir)

    learner = Learner(path)
    with contextlib.closing(learner):
        report = learner.wait_for(lambda report: has_settled(report, EVENTS - LABELLED - 1))
        assert (report.erased, report.erased_through, report.outcomes) == (2, 2, before.outcomes)
        send(LABELLED, EVENTS, labelled=True)
        report = learner.wait_for(lambda report: has_settled(report, 0))
        learned = report.labels.ended["trained"] + report.labels.ended["held_out"]
        assert (report.problems, learned) == ([], EVENTS - 1 if more else EVENTS - 3)
        assert report.skipped.get("undone", 0) == (0 if more else 2)
        assert learner.stop() == 0
    restored = StreamSecret.read(config.state_dir)
    assert secret is not None
    assert restored is not None
    assert restored.value == secret.value
    assert read_undo(config.state_dir) == undone
    assert Versions(config.state_dir / "versions").numbers()
