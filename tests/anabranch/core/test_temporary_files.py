"""Temporary folders: what a killed process has left is removed, and nothing else."""

import errno
import fcntl
import os
import shutil
import stat

import pytest

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.temporary_files import remove_left, temporary_folder


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def left_by_a_kill(prefix="anabranch-rebuild-"):
    """Return a temporary folder with contents whose process has ended without removing it."""
    with temporary_folder(prefix) as folder:
        (folder / "checkpoints").mkdir()
        (folder / "events").touch()
        copy = folder.with_name("copy")
        shutil.copytree(folder, copy)
    copy.rename(folder)
    return folder


def test_folders_of_killed_processes_are_removed_and_those_in_use_are_not(tmp_path):
    killed = left_by_a_kill()
    other = left_by_a_kill("anabranch-other-")
    with temporary_folder("anabranch-rebuild-") as first:
        assert not killed.exists()
        (first / "checkpoints").mkdir()
        with temporary_folder("anabranch-rebuild-") as second:
            assert (first / "checkpoints").exists()
            assert {*tmp_path.iterdir()} == {other, first, second}
    assert {*tmp_path.iterdir()} == {other}


def test_no_folder_that_a_person_made_renamed_or_copied_is_removed(tmp_path):
    elsewhere = left_by_a_kill("elsewhere-")
    mine = [tmp_path / f"anabranch-rebuild-{name}" for name in ("4711", "mine", "backup24", "copied00", "moved123")]
    for folder in mine[:3]:
        folder.mkdir()
        (folder / "model.safetensors").touch()
    shutil.copytree(elsewhere, mine[3])
    left_by_a_kill("anabranch-rebuild-").rename(mine[4])
    (tmp_path / "anabranch-rebuild-linked00").symlink_to(elsewhere)
    (tmp_path / "anabranch-rebuild-file0000").touch()
    before = sorted(tmp_path.rglob("*"))
    with temporary_folder("anabranch-rebuild-"):
        pass
    assert sorted(tmp_path.rglob("*")) == before


def test_no_folder_of_another_user_is_removed(monkeypatch):
    folder = left_by_a_kill()
    with monkeypatch.context() as as_another:
        as_another.setattr(os, "geteuid", lambda: os.getuid() + 1)
        remove_left("anabranch-rebuild-")
    assert folder.exists()


def test_what_a_removal_that_was_killed_has_left_is_removed_later(tmp_path, monkeypatch):
    folder = left_by_a_kill()
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)
        remove_left("anabranch-rebuild-")
    assert folder.exists()
    remove_left("anabranch-rebuild-")
    assert not list(tmp_path.iterdir())


def test_it_is_for_this_user_alone_and_may_be_elsewhere(tmp_path):
    above, umask = tmp_path / "above", os.umask(0)
    above.mkdir()
    try:
        with temporary_folder("anabranch-rebuild-", above) as folder:
            assert folder.parent == above
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        os.umask(umask)
    assert not list(above.iterdir())


def test_a_folder_that_cannot_be_locked_is_used_all_the_same(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(9, "as NFS answers for a file")

    left = left_by_a_kill()
    monkeypatch.setattr(fcntl, "flock", flock)
    with temporary_folder("anabranch-rebuild-") as folder:
        assert os.access(folder, os.W_OK)
    assert list(tmp_path.iterdir()) == [left]


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, DependencyError), (errno.EACCES, SettingsError)])
def test_a_folder_that_cannot_be_made_is_an_error_of_one_sentence(number, kind, monkeypatch):
    def mkdtemp(**_):
        raise OSError(number, os.strerror(number), "/tmp/any")

    monkeypatch.setattr("tempfile.mkdtemp", mkdtemp)
    with pytest.raises(kind, match=r"temporary files \(TMPDIR\) cannot be written: ") as error:
        with temporary_folder("anabranch-rebuild-"):
            pass
    assert os.strerror(number) in str(error.value)
