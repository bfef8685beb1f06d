"""Files that are there whole or not at all."""

import itertools
import os

from anabranch.core.atomic_files import write_durably


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
