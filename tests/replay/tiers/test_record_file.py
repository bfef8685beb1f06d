"""The file below the disk tier: `test_disk.py` has its faults, as the tier reports them."""

import os

import numpy as np
import pytest

from anabranch.replay.tiers.disk import RecordFile
from anabranch.replay.tiers.disk_files import PAGE

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
