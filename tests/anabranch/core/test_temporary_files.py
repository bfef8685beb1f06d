"""Temporary folders: what a killed process has left is removed, and nothing else."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from anabranch.core.errors import AnabranchError, DependencyError, SettingsError
from anabranch.core.temporary_files import temporary_folder


def test_folders_of_killed_processes_are_removed_and_those_in_use_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    for name in ("anabranch-rebuild-killed", "anabranch-other", "elsewhere"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
    (tmp_path / "anabranch-rebuild-new").mkdir()  # its process has not locked it yet
    (tmp_path / "anabranch-rebuild-link").symlink_to(elsewhere)
    (tmp_path / "anabranch-rebuild-file").touch()
    before = {path.name for path in tmp_path.iterdir()}

    with temporary_folder("anabranch-rebuild-") as first:
        (first / "checkpoints").mkdir()
        with temporary_folder("anabranch-rebuild-") as second:
            assert list(first.iterdir())
            left = before - {"anabranch-rebuild-killed"}
            assert {path.name for path in tmp_path.iterdir()} == left | {first.name, second.name}
    assert {path.name for path in tmp_path.iterdir()} == left
    assert list(elsewhere.iterdir())


def test_a_folder_that_cannot_be_locked_is_used_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(9, "as NFS answers for a folder")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / "anabranch-rebuild-any" / "checkpoints").mkdir(parents=True)
    with temporary_folder("anabranch-rebuild-") as folder:
        assert os.access(folder, os.W_OK)
    assert [path.name for path in tmp_path.iterdir()] == ["anabranch-rebuild-any"]


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, DependencyError), (errno.EACCES, SettingsError)])
def test_a_folder_that_cannot_be_made_is_an_error_of_one_sentence(
    number: int, kind: type[AnabranchError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdtemp(*_: object) -> str:
        raise OSError(number, os.strerror(number), "/tmp/any")

    monkeypatch.setattr("tempfile.mkdtemp", mkdtemp)
    with pytest.raises(kind, match=r"temporary files \(TMPDIR\) cannot be written: ") as error:
        with temporary_folder("anabranch-rebuild-"):
            pass
    assert os.strerror(number) in str(error.value)
