"""Files of the state directory: read only where they are files, below their folder, and written whole or not at all."""

import errno
import itertools
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.core.atomic_files import write_durably
from anabranch.core.failures import DamagedError, Failure, failure_of
from anabranch.core.files import check_names, number_of, open_file, read_file


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


MAKERS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "directory": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link": lambda path: (path.with_name("other").write_bytes(b"x"), path.symlink_to(path.with_name("other"))),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "socket": make_socket,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
def test_only_a_regular_file_is_opened_and_nothing_is_waited_for(make, flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    path = Path("manifest.json")
    make(path)
    with pytest.raises(DamagedError, match=r"manifest\.json is not a regular file"):
        open_file(path, flags)


def test_what_replaces_a_file_as_it_is_opened_is_refused(tmp_path, monkeypatch):
    path, real = tmp_path / "manifest.json", os.open

    def replaced(name, flags):
        path.unlink()
        os.mkfifo(path)
        return real(name, flags)

    path.write_bytes(b"{}")
    monkeypatch.setattr("anabranch.core.files.os.open", replaced)
    with pytest.raises(DamagedError, match="is not a regular file"):
        read_file(path)


def test_a_document_is_not_read_beyond_its_bound(tmp_path):
    path = tmp_path / "manifest.json"
    path.write_bytes(b"12345")
    assert read_file(path) == read_file(path, 5) == b"12345"
    with pytest.raises(DamagedError, match="has 5 bytes, more than 4"):
        read_file(path, 4)


def test_a_missing_file_is_missing_and_an_error_of_reading_names_the_file(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "manifest.json")

    class Failing:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            os.close(self.fileno())

        def fileno(self):
            return descriptors[-1]

        def read(self, _size):
            raise OSError(errno.EIO, "Input/output error")

    descriptors: list[int] = []
    path = tmp_path / "weights"
    path.write_bytes(b"x")
    monkeypatch.setattr(
        "anabranch.core.files.os.fdopen", lambda descriptor, _mode: (descriptors.append(descriptor), Failing())[1]
    )
    with pytest.raises(OSError, match="weights") as caught:
        read_file(path)
    assert failure_of(caught.value) is Failure.AWAY


def test_numbers_of_folders_are_plain_ones():
    assert [number_of(name) for name in ("0", "1", "42", "9" * 18)] == [0, 1, 42, int("9" * 18)]
    for name in (
        "²",
        "\N{ARABIC-INDIC DIGIT ONE}",
        "",
        "-1",
        "+1",
        "01",
        "1.",
        ".tmp-1-2",
        "9" * 19,
        "9" * 5000,
        "1\n",
    ):
        assert number_of(name) is None


def test_names_of_files_stay_below_their_folder():
    check_names(["model.safetensors", "a-b_C.9"])
    check_names(["rank-0/segment-9.2.safetensors", "rank-0/state.json"], "rank-0/")
    for name in ("", ".", "..", "../x", "/etc/hostname", "a/b", "a\n", "a\0", "é", "rank-0/../x", "a" * 10 + "/"):
        with pytest.raises(DamagedError, match="is not the name of a file"):
            check_names([name])
    for name in ("state.json", "rank-0/", "rank-0/..", "rank-0/a/../../b", "rank-0//x", "rank-1/x", "./rank-0/x"):
        with pytest.raises(DamagedError, match="is not the name of a file"):
            check_names([name], "rank-0/")


def test_no_more_than_some_megabytes_of_a_large_file_wait_to_be_synced(tmp_path, monkeypatch):
    """A sync of another file may wait for them, and a version is one."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    large, small = os.urandom(11_000_000), os.urandom(1000)
    pieces = [small, memoryview(b""), memoryview(large), *[small] * 5000, large]
    write_durably(tmp_path / "file", pieces)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert synced[-1] == sum(map(len, pieces))
    assert max(after - before for before, after in itertools.pairwise([0, *synced])) <= 8_000_000
