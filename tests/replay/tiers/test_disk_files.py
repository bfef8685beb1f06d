"""The disk tier's files without the checkpoints that name them, and the file below: `test_disk.py` has its faults."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from anabranch.core.errors import DependencyError
from anabranch.replay.tiers.disk import DiskTier, RecordFile
from anabranch.replay.tiers.disk_files import PAGE, find, make_way, next_path, take_back


def make(folder, *, named):
    tier = DiskTier.create(next_path(folder), 100, 9)
    if named:
        tier.mark_named()
    tier.close()
    return tier.file


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def opens(folder, file):
    tier = DiskTier.open(find(folder, file))
    tier.close()
    return tier.id == file.id


def test_a_file_that_a_checkpoint_has_named_is_put_aside_and_found_again(tmp_path, caplog):
    file = make(tmp_path, named=True)
    make_way(tmp_path)
    assert names(tmp_path) == ["1.rows.before"]
    assert "it is kept as 1.rows.before" in caplog.text
    assert opens(tmp_path, file)
    assert take_back(tmp_path, file) == tmp_path / "1.rows"
    assert names(tmp_path) == ["1.rows"]
    assert opens(tmp_path, file)


def test_starts_that_never_get_as_far_as_a_checkpoint_leave_one_file_and_take_none_that_is_aside(tmp_path):
    file = make(tmp_path, named=True)
    for number in (2, 2, 2):
        make_way(tmp_path)
        make(tmp_path, named=False)
        assert names(tmp_path) == ["1.rows.before", f"{number}.rows"]
    assert opens(tmp_path, file)


def test_one_file_at_most_is_aside(tmp_path, caplog):
    make(tmp_path, named=True)
    make_way(tmp_path)
    newer = make(tmp_path, named=True)
    make_way(tmp_path)
    assert names(tmp_path) == ["2.rows.before"]
    assert f"removing {tmp_path / '1.rows.before'}" in caplog.text
    assert opens(tmp_path, newer)


def test_who_goes_back_can_go_forth_again(tmp_path):
    old = make(tmp_path, named=True)
    make_way(tmp_path)
    new = make(tmp_path, named=True)
    take_back(tmp_path, old)
    assert names(tmp_path) == ["1.rows", "2.rows.before"]
    take_back(tmp_path, new)
    assert names(tmp_path) == ["1.rows.before", "2.rows"]
    take_back(tmp_path, old)
    assert opens(tmp_path, old)
    assert opens(tmp_path, new)


def test_a_file_goes_aside_under_a_name_that_none_has(tmp_path):
    old = make(tmp_path, named=True)
    make_way(tmp_path)
    new = make(tmp_path, named=True)
    (tmp_path / "2.rows").rename(tmp_path / "1.rows")  # as a person may
    take_back(tmp_path, old)
    assert names(tmp_path) == ["1.rows", "2.rows.before"]
    assert opens(tmp_path, old)
    assert opens(tmp_path, new)


@pytest.mark.parametrize("crash_at", [1, 2])
def test_a_crash_while_files_are_exchanged_loses_none(tmp_path, monkeypatch, crash_at):
    old = make(tmp_path, named=True)
    make_way(tmp_path)
    new = make(tmp_path, named=True)
    real, calls = Path.rename, []

    def rename(path, target):
        calls.append(path)
        if len(calls) == crash_at:
            raise KeyboardInterrupt
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        take_back(tmp_path, old)
    monkeypatch.undo()
    take_back(tmp_path, old)
    assert names(tmp_path) == ["1.rows", "2.rows.before"]
    assert opens(tmp_path, old)
    assert opens(tmp_path, new)


@pytest.mark.parametrize(
    "content", [b"", b"x" * 5000, b'{"format":2,"id":"a","row_bytes":1,"slots":1}'.ljust(4096)], ids=str
)
def test_a_file_that_does_not_say_whether_a_checkpoint_named_it_is_put_aside(tmp_path, content):
    (tmp_path / "1.rows").write_bytes(content)
    make_way(tmp_path)
    assert names(tmp_path) == ["1.rows.before"]


def test_a_file_that_cannot_be_read_for_now_is_left(tmp_path, monkeypatch):
    file = make(tmp_path, named=True)

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("anabranch.replay.tiers.disk_files.os.pread", fails)
    with pytest.raises(DependencyError, match="Input/output error"):
        make_way(tmp_path)
    with pytest.raises(DependencyError, match="Input/output error"):
        find(tmp_path, file)
    assert names(tmp_path) == ["1.rows"]


def test_a_mark_that_was_not_written_is_written_the_next_time(tmp_path, monkeypatch):
    tier = DiskTier.create(tmp_path / "1.rows", 100, 9)

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr("anabranch.replay.tiers.disk.os.pwrite", fails)
        with pytest.raises(OSError, match="Input/output"):
            tier.mark_named()
        assert "cannot be marked" in (tier.problem or "")
    tier.mark_named()
    assert tier.problem is None
    tier.close()
    make_way(tmp_path)
    assert names(tmp_path) == ["1.rows.before"]


SLOTS, SIZE = 200, 32


@pytest.fixture
def file(tmp_path):
    descriptor = os.open(tmp_path / "1.rows", os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, PAGE + SLOTS * SIZE)
    records = RecordFile(descriptor, SLOTS, SIZE)
    yield records
    records.close()


def record(number):
    return bytes([number]) * SIZE


def test_records_are_read_in_the_order_of_slots_and_an_erased_one_is_zeros(file):
    file.write(memoryview(record(1) + record(2)), 7)
    file.write(memoryview(record(3)), 199)
    file.erase(np.array([8]))
    found = file.read(np.array([7, 8, 9, 199]))
    assert [row.tobytes() for row in found] == [record(1), record(0), record(0), record(3)]


def test_only_regions_that_a_failed_sync_may_have_lost_are_written_again(file, monkeypatch):
    again: list[int] = []
    pwrite, fsync = os.pwrite, os.fsync

    def fails(_descriptor):
        raise OSError("no")

    def counted(descriptor, content, offset):
        again.append((offset - PAGE) // SIZE)
        return pwrite(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", counted)
    file.write(memoryview(record(1)), 3)
    file.sync()
    file.write(memoryview(record(2)), 130)
    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="no"):
        file.sync()
    monkeypatch.setattr(os, "fsync", fsync)
    assert again == []
    file.sync()
    assert again == [*range(128, 192)], "the region of slot 130"
    file.sync()
    assert len(again) == 64
