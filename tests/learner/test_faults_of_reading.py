"""Reading checkpoints and versions: damaged ones are refused, and unreachable ones are neither refused nor deleted."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from anabranch.learner.checkpoints.checkpointer import CheckpointPruning
from anabranch.learner.checkpoints.erase_checkpoints import Eraser
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints
from anabranch.learner.errors import CheckpointError, VersionError
from anabranch.learner.loop.resume import ResumePoint
from anabranch.learner.state_dir.folders import Storage
from anabranch.learner.versions.format import RegistryState, Verdict, Versions
from anabranch.replay.erasure.erased_events import ByKey, ErasedEvents
from anabranch.replay.erasure.erasure_log import ErasureLog
from tests.support.manifests import manifest_of

ERRORS = pytest.mark.parametrize(
    "number", [errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES], ids=lambda number: errno.errorcode[number]
)


FILES_OF_A_CHECKPOINT = ["manifest.json", "state.json", "model.safetensors", "holdout.safetensors"]


@contextmanager
def failing(path, number):
    """Make all calls of the operating system for `path` fail."""

    def refusing(real):
        def call(name, *args, **kwargs):
            if isinstance(name, str | Path) and Path(name) == path:
                raise OSError(number, os.strerror(number), str(name))
            return real(name, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "listdir", "scandir", "lstat"):
            patch.setattr(os, name, refusing(getattr(os, name)))
        yield


def checkpoint_of(number):
    tensors = {"model": {"w": torch.full((4,), float(number))}, "rng": {}, "holdout": {}}
    return Checkpoint(number, tensors, {"ledger": [], "number": number})


@pytest.fixture
def checkpoints(tmp_path):
    made = Checkpoints(tmp_path / "var" / "checkpoints", "schema", 1)
    for number in (1, 2, 3):
        made.write(number, checkpoint_of(number), 0.0)
    return made


def erased():
    return ErasedEvents([ByKey(number=1, time=0.0, by="command", key_hash="00" * 8, up_to={})])


def path_of(checkpoints, number, name):
    return checkpoints.path / str(number) / ("" if name == "manifest.json" else "rank-0") / name


@ERRORS
@pytest.mark.parametrize("name", FILES_OF_A_CHECKPOINT)
def test_no_older_checkpoint_is_used_instead_of_an_unreachable_one_and_none_is_deleted(
    checkpoints, name, number, tmp_path
):
    with failing(path_of(checkpoints, 3, name), number), pytest.raises(OSError, match=name) as caught:
        ResumePoint.newest(checkpoints, ErasureLog(tmp_path / "erasures.log"))
    assert caught.value.errno == number
    checkpoints.write(4, checkpoint_of(4), 0.0)
    CheckpointPruning(checkpoints, 4).prune()
    assert checkpoints.numbers() == [1, 2, 3, 4]


@ERRORS
def test_a_checkpoint_folder_that_cannot_be_listed_is_an_error(checkpoints, number, tmp_path):
    for path in (checkpoints.path, path_of(checkpoints, 3, "manifest.json")):
        with failing(path, number), pytest.raises(OSError, match="checkpoints"):
            ResumePoint.newest(checkpoints, ErasureLog(tmp_path / "erasures.log"))
    assert checkpoints.numbers() == [1, 2, 3]


@ERRORS
@pytest.mark.parametrize("name", FILES_OF_A_CHECKPOINT)
def test_the_eraser_deletes_no_unreachable_checkpoint(checkpoints, name, number, tmp_path):
    eraser = Eraser(checkpoints, erased())
    with failing(path_of(checkpoints, 2, name), number), pytest.raises(OSError, match=name):
        eraser.run()
    assert checkpoints.numbers() == [1, 2, 3]
    eraser.run()
    assert checkpoints.numbers() == [1, 2, 3]


def flip(path):
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")


def become_fifo(path):
    path.unlink()
    os.mkfifo(path)


def become_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def become_directory(path):
    path.unlink()
    path.mkdir()


def nest(path):
    path.write_bytes(b'{"z":' + b"[" * 100_000)


def point_outside(path):
    """Put a name outside the folder into a manifest; delete another file."""
    if path.name != "manifest.json":
        path.unlink()
        return
    manifest = json.loads(path.read_bytes())
    manifest["files"]["rank-0/segment-9./../../../../victim"] = "00"
    path.write_text(json.dumps(manifest))


def of_another(path):
    """Replace a manifest by that of another checkpoint; truncate another file."""
    if path.name == "manifest.json":
        path.write_bytes((path.parent.parent / "1" / path.name).read_bytes())
    else:
        os.truncate(path, 1)


DAMAGES = pytest.mark.parametrize(
    "damage", [flip, become_fifo, become_link, become_directory, nest, point_outside, of_another]
)


@DAMAGES
@pytest.mark.parametrize("name", FILES_OF_A_CHECKPOINT)
def test_a_damaged_checkpoint_is_refused_and_kept_until_enough_newer_ones_are_intact(checkpoints, name, damage):
    damage(path_of(checkpoints, 3, name))
    found = checkpoints.newest()
    assert found is not None
    assert (found[0], found[1].state["number"]) == (2, 2)
    for number, left in ((4, [2, 3, 4]), (5, [4, 5])):
        checkpoints.write(number, checkpoint_of(number), 0.0)
        CheckpointPruning(checkpoints, 2).prune()
        assert checkpoints.numbers() == left


@DAMAGES
def test_an_error_is_raised_and_nothing_is_deleted_if_all_checkpoints_are_damaged(checkpoints, damage, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for number in checkpoints.numbers():
        if number != 1:
            damage(path_of(checkpoints, number, "manifest.json"))
    flip(path_of(checkpoints, 1, "model.safetensors"))
    sentence = (
        r"there are checkpoints in .*checkpoints \(1, 2, 3\), and none can be used: checkpoint 3: .*; restore one "
        ".* or begin again by"
    )
    with pytest.raises(CheckpointError, match=sentence):
        ResumePoint.newest(checkpoints, ErasureLog(tmp_path / "erasures.log"))
    nest(path_of(checkpoints, 1, "manifest.json"))
    with pytest.raises(OSError, match="all checkpoints are damaged, and are deleted once there is an intact one"):
        Eraser(checkpoints, erased()).run()
    assert checkpoints.numbers() == [1, 2, 3]
    checkpoints.write(4, checkpoint_of(4), 0.0)
    Eraser(checkpoints, erased()).run()
    assert checkpoints.numbers() == [4]
    assert victim.read_text() == "precious"


def test_a_checkpoint_that_is_a_link_is_refused_and_its_target_is_not_deleted(checkpoints, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (checkpoints.path / "3").rename(elsewhere)
    (checkpoints.path / "3").symlink_to(elsewhere)
    shutil.move(checkpoints.path / "2" / "rank-0", tmp_path / "parts")
    (checkpoints.path / "2" / "rank-0").symlink_to(tmp_path / "parts")
    (tmp_path / "parts" / "precious").write_text("precious")
    found = checkpoints.newest()
    assert found is not None
    assert found[0] == 1
    Eraser(checkpoints, erased()).run()
    assert checkpoints.numbers() == [1]
    assert (elsewhere / "manifest.json").exists()
    assert (tmp_path / "parts" / "precious").exists()


@pytest.mark.parametrize("name", ["²", "\N{ARABIC-INDIC DIGIT ONE}", "9" * 30, "01"])
def test_folders_whose_names_are_no_numbers_are_ignored(checkpoints, name):
    shutil.copytree(checkpoints.path / "3", checkpoints.path / name)
    assert (checkpoints.numbers(), Storage(checkpoints.path).highest()) == ([1, 2, 3], 3)
    checkpoints.storage.clean()
    assert (checkpoints.path / name).exists()


@pytest.fixture
def versions(tmp_path):
    made = Versions(tmp_path / "versions")
    for number in (1, 2):
        manifest = manifest_of(number, generation=3 - number, step=1, task="regression")
        made.write({"w": torch.ones(2)}, manifest, Verdict("pass"))
    made.write_state(RegistryState(serving=2))
    return Versions(tmp_path / "versions")


@ERRORS
def test_an_unreachable_version_is_not_refused(versions, number):
    manifest, folder = versions.manifest(2), versions.directory(2)
    reads: dict[Path, Callable[[], object]] = {
        folder / "manifest.json": lambda: versions.manifest(2),
        folder / "verdict.json": lambda: versions.verdict(2),
        folder / "model.safetensors": lambda: versions.weights(manifest),
        versions.path / "state.json": versions.state,
        versions.path: versions.numbers,
    }
    for path, read in reads.items():
        with failing(path, number), pytest.raises(OSError, match=path.name) as caught:
            read()
        assert caught.value.errno == number
        read()


@ERRORS
def test_an_unreachable_generation_is_read_again(versions, number):
    with failing(versions.directory(1) / "manifest.json", number):
        assert versions.stale([1, 2]) == set()
        with pytest.raises(OSError, match="manifest"):
            versions.generation()
    assert versions.stale([1, 2]) == {2}
    assert versions.generation() == 2


@pytest.mark.parametrize("damage", [flip, become_fifo, become_link, become_directory, nest, point_outside])
def test_a_damaged_version_is_refused(versions, damage):
    manifest, folder = versions.manifest(2), versions.directory(2)
    damage(folder / "model.safetensors")
    damage(folder / "manifest.json")
    with pytest.raises(VersionError, match="model"):
        versions.weights(manifest)
    with pytest.raises(VersionError, match="manifest"):
        versions.manifest(2)
    if damage is not point_outside:
        damage(folder / "verdict.json")
        damage(versions.path / "state.json")
        with pytest.raises(VersionError, match="verdict"):
            versions.verdict(2)
        with pytest.raises(VersionError, match="state"):
            versions.state()
