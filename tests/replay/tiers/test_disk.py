"""The disk tier's file, and the thread that reads and writes it."""

import errno
import os
import threading
from collections.abc import Callable

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core.errors import SettingsError
from anabranch.replay.tiers.disk import DiskTier

R = 24


def rows(identity):
    """Return a row for each identity that no other has."""
    each = [np.random.default_rng(int(number)).integers(0, 256, R, np.uint8) for number in identity]
    return np.array(each, np.uint8).reshape(len(identity), R)


def open_files():
    return psutil.Process().num_fds()


@pytest.fixture
def tier(tmp_path):
    tier = DiskTier.create(tmp_path / "1.rows", R, 50)
    yield tier
    tier.close()


def written(tier, slots, first=100):
    where = np.array(slots, np.int64)
    identity = np.arange(first, first + len(slots), dtype=np.uint64)
    tier.write(where, identity, rows(identity))
    return where, identity


@settings(max_examples=60)
@given(st.lists(st.tuples(st.permutations(range(50)), st.integers(0, 50)), min_size=1, max_size=6))
def test_a_slot_holds_what_was_written_last(tmp_path_factory, writes):
    """In any order of slots, with neighbours and without; a slot never written is not whole."""
    tier = DiskTier.create(tmp_path_factory.mktemp("tier") / "1.rows", R, 50)
    expected = np.zeros(50, np.uint64)
    for turn, (order, count) in enumerate(writes):
        where, identity = written(tier, order[:count], 1 + 100 * turn)
        expected[where] = identity
    found, whole = tier.read(np.arange(50), expected)
    assert whole.tolist() == (expected > 0).tolist()
    assert (found.numpy()[whole] == rows(expected[whole])).all()
    tier.close()


@pytest.mark.parametrize(("number", "sick"), [(errno.EIO, 9), (errno.ESTALE, 3), (errno.EIO, 3)])
def test_an_unreachable_disk_loses_no_row_and_a_bad_sector_loses_its_row(tmp_path, monkeypatch, number, sick):
    tier = DiskTier.create(tmp_path / "1.rows", R, 9)
    identity, read = np.arange(9, dtype=np.uint64), os.preadv
    tier.write(np.arange(9), identity, rows(identity))

    def fail(file, buffers, offset):
        if offset < 4096 + sick * tier.slot_bytes:
            raise OSError(number, os.strerror(number))
        return read(file, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr("anabranch.replay.tiers.disk.os.preadv", fail)
        if number == errno.EIO:
            assert not tier.read(np.arange(1), identity[:1])[1].any(), "one alone is lost too"
        patch.setattr("anabranch.replay.tiers.disk.os.pread", lambda file, _size, offset: fail(file, [], offset) or b"")
        if (number, sick) == (errno.EIO, 3):
            assert tier.read(np.arange(9), identity)[1].tolist() == [False] * 3 + [True] * 6
        else:
            with pytest.raises(OSError, match=os.strerror(number)):
                tier.read(np.arange(9), identity)
            why = os.strerror(number)
            assert tier.problem == f"replay.disk: {tier.path} cannot be read: {why}; its events are not replayed"
    assert tier.read(np.arange(9), identity)[1].all()
    assert tier.problem is None
    tier.close()


@pytest.mark.parametrize(
    ("row_bytes", "slot_bytes"), [(24, 32), (3056, 3064), (3064, 4096), (4088, 4096), (5000, 5008), (6200, 8192)]
)
def test_long_records_are_whole_pages_unless_that_wastes_much(tmp_path, row_bytes, slot_bytes):
    tier = DiskTier.create(tmp_path / "1.rows", row_bytes, 400)
    assert tier.slot_bytes == slot_bytes
    assert DiskTier.slots_in(tier.path.stat().st_size, row_bytes) == 400
    tier.path.write_bytes(tier.path.read_bytes()[:4096] + b"x" * 400 * slot_bytes)
    written = np.random.default_rng(0).integers(0, 256, (400, row_bytes), np.uint8)
    where, identity = np.random.default_rng(1).permutation(400)[:390], np.arange(390, dtype=np.uint64)
    tier.write(where, identity, written[:390])
    found, whole = tier.read(where, identity)
    assert whole.all()
    assert np.array_equal(found.numpy(), written[:390])
    content = np.fromfile(tier.path, np.uint8, offset=4096).reshape(400, slot_bytes)
    assert not content[where, row_bytes + 8 :].any(), "a record is written whole, so that no page is read for it"
    others = np.setdiff1d(np.arange(400), where)
    assert (content[others] == ord("x")).all()
    tier.close()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system cannot be asked to read ahead")
@pytest.mark.parametrize(("row_bytes", "asks"), [(R, True), (3200, False)], ids=["packed", "whole pages"])
def test_writes_ask_for_the_pages_that_they_change_in_part_once_reads_have_waited(
    tmp_path, monkeypatch, row_bytes, asks
):
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _file, offset, _size, _advice: asked.append(offset))
    tier = DiskTier.create(tmp_path / "1.rows", row_bytes, 50)
    where, identity, written = np.array([9, 2, 30]), np.arange(3, dtype=np.uint64), np.ones((3, row_bytes), np.uint8)
    tier.write(where, identity, written)
    assert not asked, "nothing was read yet"
    offsets = [4096 + slot * tier.slot_bytes for slot in (2, 9, 30)]
    for seconds, waited in ((0.0, True), (60.0, False)):
        monkeypatch.setattr("anabranch.replay.tiers.disk._COLD_SECONDS", seconds)
        tier.read(where, identity)
        asked.clear()
        tier.write(where, identity, written)
        assert asked == (offsets if waited and asks else [])
    tier.close()


def test_it_is_there_after_it_was_closed(tier):
    where, identity = written(tier, [3, 4, 9])
    tier.sync()
    again = DiskTier.open(tier.path)
    found, whole = again.read(where, identity)
    again.close()
    assert whole.all()
    assert (found.numpy() == rows(identity)).all()
    assert (again.id, again.slots, again.row_bytes) == (tier.id, 50, R)


@pytest.mark.parametrize("byte", [0, R - 1, R, R + 7])
def test_a_flipped_bit_is_found_wherever_it_is(tier, byte):
    where, identity = written(tier, [0, 1, 2])
    content = bytearray(tier.path.read_bytes())
    content[4096 + 1 * tier.slot_bytes + byte] ^= 16
    tier.path.write_bytes(content)
    assert tier.read(where, identity)[1].tolist() == [True, False, True]


def test_the_row_of_another_event_is_not_taken_for_this_one(tier):
    where, identity = written(tier, [5])
    assert not tier.read(where, identity + 1)[1].any()


def test_space_is_taken_at_once_and_given_back_when_it_cannot_be_had(tmp_path):
    tier = DiskTier.create(tmp_path / "1.rows", R, 10_000)
    assert (tmp_path / "1.rows").stat().st_blocks * 512 >= 10_000 * tier.slot_bytes
    tier.close()
    with pytest.raises(SettingsError, match=r"cannot give 1e\+06 GB: .*; free space there, or lower replay.disk.bytes"):
        DiskTier.create(tmp_path / "2.rows", R, 10**15 // (R + 8))
    assert [path.name for path in tmp_path.iterdir()] == ["1.rows"]


def test_slots_in_returns_how_many_fit(tmp_path):
    for size in (4096, 5000, 100_000):
        slots = DiskTier.slots_in(size, R)
        if slots:
            DiskTier.create(tmp_path / "t.rows", R, slots).close()
            assert size - R - 8 < (tmp_path / "t.rows").stat().st_size <= size


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda path: path.unlink(), "cannot be opened: No such file"),
        (lambda path: path.write_bytes(b""), "cannot be read"),
        (lambda path: path.write_bytes(b"x" * 5000), "cannot be read"),
        (lambda path: os.truncate(path, 4200), "is cut short"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b'"format":3', b'"format":9')), "another release"),
    ],
    ids=["removed", "empty", "something else", "cut short", "newer format"],
)
def test_a_file_that_cannot_be_used_is_refused_in_a_sentence(tier, harm, sentence):
    before = open_files()
    harm(tier.path)
    with pytest.raises(SettingsError, match=sentence) as caught:
        DiskTier.open(tier.path)
    assert "is its disk mounted?" in str(caught.value)
    assert open_files() == before


def _fail(_file):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_disk_that_does_not_flush_is_reported_with_its_path(tier, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("anabranch.replay.tiers.disk.os.fsync", _fail)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            tier.sync()
    why = os.strerror(errno.EIO)
    assert tier.problem == f"replay.disk: {tier.path} cannot be flushed: {why}; no checkpoint is made now"
    tier.sync()
    assert tier.problem is None


class PageCache:
    """Replaces the system calls of the disk tier: what is written is in the file, and on the disk after an fsync.

    Of one that fails the pages count as written, as with Linux: only what is written again comes to the disk.
    """

    def __init__(self, patch):
        self.dirty: set[int] = set()
        self.dirty_before: set[int] = set()
        """What was dirty before the last fsync."""
        self.lost: set[int] = set()
        """Bytes of the file that the disk does not have."""
        self.fails = 0
        self.during: Callable[[], object] = bool
        """Called by each fsync."""
        self._pwrite, self._pwritev = os.pwrite, os.pwritev
        patch.setattr("anabranch.replay.tiers.disk.os.pwrite", self.pwrite)
        patch.setattr("anabranch.replay.tiers.disk.os.pwritev", self.pwritev)
        patch.setattr("anabranch.replay.tiers.disk.os.fsync", self.fsync)

    def pwrite(self, file, content, offset):
        return self._recorded(self._pwrite(file, content, offset), offset)

    def pwritev(self, file, parts, offset):
        return self._recorded(self._pwritev(file, parts, offset), offset)

    def _recorded(self, size, offset):
        self.dirty |= set(range(offset, offset + size))
        return size

    def fsync(self, file):
        dirty, self.dirty, self.dirty_before = self.dirty, set(), self.dirty
        self.during()
        if self.fails:
            self.fails -= 1
            self.lost |= dirty
            _fail(file)
        self.lost -= dirty


def test_what_did_not_come_to_the_disk_is_written_again(tmp_path, monkeypatch):
    tier = DiskTier.create(tmp_path / "1.rows", R, 500)
    cache = PageCache(monkeypatch)
    written(tier, [3, 4, 499])
    tier.sync()
    where, identity = written(tier, [200, 5, 201])
    cache.fails = 2
    concurrent: list[tuple[np.ndarray, np.ndarray]] = []
    others = [70, 499]

    def write_concurrently():
        if not concurrent:
            concurrent.append(written(tier, others, 900))

    cache.during = write_concurrently
    for _ in range(2):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            tier.sync()
    for slot in (200, 5, 201, *others):
        assert 4096 + slot * tier.slot_bytes in cache.lost
    tier.sync()
    assert not cache.lost
    assert not cache.dirty, "what was written while it failed is on the disk too"
    for slots, names in ((where, identity), concurrent[0]):
        assert tier.read(slots, names)[1].all()
    sizes: list[int] = []
    cache.during = lambda: sizes.append(len(cache.dirty_before))
    tier.sync()
    assert sizes == [0], "and then once only"
    tier.close()


def test_a_row_that_cannot_be_read_is_left_out_of_what_is_written_again(tmp_path, monkeypatch):
    tier = DiskTier.create(tmp_path / "1.rows", R, 100)
    cache = PageCache(monkeypatch)
    written(tier, [3, 4])
    cache.fails = 1
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        tier.sync()
    read = os.pread

    def pread(file, size, offset):
        if offset == 4096 + 3 * tier.slot_bytes:
            _fail(file)
        return read(file, size, offset)

    monkeypatch.setattr("anabranch.replay.tiers.disk.os.pread", pread)
    tier.sync()
    assert len(cache.lost) == tier.slot_bytes
    assert tier.problem is None
    tier.close()


@pytest.mark.slow
def test_what_is_written_again_takes_no_newer_row_back(tmp_path, monkeypatch):
    tier = DiskTier.create(tmp_path / "1.rows", R, 100)
    cache = PageCache(monkeypatch)
    where, _ = written(tier, [3])
    cache.fails = 1
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        tier.sync()
    newer = np.array([900], np.uint64)
    writer = threading.Thread(target=tier.write, args=(where, newer, rows(newer)))
    read = os.pread

    def pread(file, size, offset):
        record = read(file, size, offset)
        if offset == 4096 + 3 * tier.slot_bytes:
            writer.start()
            writer.join(0.2)  # it has to wait, until what was read is written
        return record

    with monkeypatch.context() as patch:
        patch.setattr("anabranch.replay.tiers.disk.os.pread", pread)
        tier.sync()
    writer.join()
    assert tier.read(where, newer)[1].all()
    tier.close()
