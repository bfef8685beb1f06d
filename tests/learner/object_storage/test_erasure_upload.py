"""Logs of erasures of several hosts: what one of them has recorded is in the log of each one that starts later."""

from datetime import timedelta

import pytest

from anabranch.core.object_store.bucket import Bucket
from anabranch.learner.errors import SecondLearnerError, StorageError
from anabranch.learner.object_storage.erasure_upload import ERASURES, ErasureUpload, fetch_erasures, stored_erasures
from anabranch.learner.object_storage.lease import Lease
from anabranch.replay.erasure.erased_events import ByKey, ByRange
from anabranch.replay.erasure.erasure_log import NAME, SECRET_FILE, Applied, ErasureLog


class Host:
    """A state directory; its log of erasures is uploaded by a learner that takes the lease at once."""

    def __init__(self, folder, bucket):
        folder.mkdir(exist_ok=True)
        self.folder, self.bucket = folder, bucket

    def start(self):
        """Fetch the log, as a learner of the next generation."""
        self.lease = Lease(self.bucket, timedelta(hours=1), "one holder")
        self.lease.acquire(0)
        self.fetched = fetch_erasures(self.bucket, self.folder)
        self.upload = ErasureUpload(self.folder, self.bucket, self.lease)

    def erase(self, *firsts):
        """Record erasures of one event each."""
        self.log().append([ByRange(time=1.0, by="command", partition="t#0[0]", first=n, last=n) for n in firsts])

    def erase_key(self, number):
        """Record the erasure of a key."""
        self.log().append([ByKey(time=1.0, by="command", key_hash=f"{number:016x}", up_to={"t#0[0]": 9})])

    def apply(self, through):
        """Record that erasures are applied."""
        self.log().append(Applied(time=1.0, through=through, store=0, holdout=0))

    def log(self):
        """Return the log as it is now."""
        log = ErasureLog(self.folder / NAME)
        log.refresh()
        return log

    def erased(self):
        """Return the events whose erasure is pending, in the order of their records."""
        log = self.log()
        return [record.first for record in log.since(log.through) if isinstance(record, ByRange)]

    def keys(self):
        """Return the keys whose erasure is pending."""
        log = self.log()
        return [int(record.key_hash, 16) for record in log.since(log.through) if isinstance(record, ByKey)]


@pytest.fixture
def host(tmp_path):
    """Starts a host: `host("a")`."""
    bucket = Bucket(f"memory://{tmp_path.name}/", {})

    def started(name):
        made = Host(tmp_path / name, bucket)
        made.start()
        return made

    return started


def test_without_an_erasure_there_is_no_log(host):
    assert host("a").upload.advance()
    b = host("b")
    assert not (b.folder / NAME).exists()
    assert stored_erasures(b.folder) is None


def test_another_host_has_the_log_and_its_secret(host):
    a = host("a")
    a.erase(1, 2)
    assert a.upload.advance()
    b = host("b")
    assert b.fetched
    for name in (SECRET_FILE, NAME):
        assert (b.folder / name).read_bytes() == (a.folder / name).read_bytes()
        assert (b.folder / name).stat().st_mode & 0o777 == 0o600
    b.erase_key(7)
    assert b.keys() == [7]


def test_what_a_host_has_not_uploaded_yet_stays(host):
    a = host("a")
    a.erase(1)
    a.upload.advance()
    a.erase(2)
    before = (a.folder / NAME).read_bytes()
    again = host("a")
    assert (again.folder / NAME).read_bytes() == before
    assert not again.fetched


@pytest.mark.parametrize("more", [(), (3, 4), (5, 6, 7)], ids=["equal", "longer", "longer still"])
@pytest.mark.parametrize("applied", [False, True], ids=["pending", "applied"])
def test_records_of_a_host_that_was_cut_off_follow_those_of_its_successor(host, more, applied):
    a = host("a")
    a.erase(1)
    a.upload.advance()
    a.erase(2)  # cut off
    if applied:
        a.apply(2)
    b = host("b")
    b.erase(50, *more)
    b.upload.advance()
    again = host("a")
    assert again.erased() == [1, 50, *more, 2], "the checkpoints of the successor count its records"
    again.upload.advance()
    assert host("c").erased() == [1, 50, *more, 2]


def test_a_host_that_is_ahead_of_an_equal_log_loses_nothing(host):
    """A was cut off with more records than its successor has."""
    a = host("a")
    a.erase(1)
    a.upload.advance()
    a.erase(2, 3, 4)
    b = host("b")
    b.erase(50)
    b.upload.advance()
    assert host("a").erased() == [1, 50, 2, 3, 4]


@pytest.mark.parametrize("packed", ["a", "b"])
def test_records_that_one_log_has_packed_are_not_recorded_twice(host, packed):
    a = host("a")
    a.erase_key(1)
    a.erase_key(2)
    a.upload.advance()
    b = host("b")
    for each in (a, b):
        each.apply(2)
    {"a": a, "b": b}[packed].log().compact()
    b.erase_key(3)
    b.upload.advance()
    a.erase_key(4)
    again = host("a")
    assert again.keys()[-2:] == [3, 4]
    assert again.log().count == 4


def test_a_host_that_was_fenced_off_changes_neither_log_nor_secret(host):
    """The first erasure of a pipeline reaches both: each has made a secret."""
    a = host("a")
    a.erase_key(1)
    b = host("b")
    b.erase_key(1)
    b.erase_key(2)
    b.upload.advance()
    with pytest.raises(SecondLearnerError):
        a.upload.advance()
    assert b.bucket.read(ERASURES) == stored_erasures(b.folder)
    assert (a.folder / SECRET_FILE).read_bytes() != (b.folder / SECRET_FILE).read_bytes()
    for name in ("c", "b", "a"):
        assert host(name).keys() == [1, 2]


def test_a_late_write_of_a_host_that_was_fenced_off_is_merged(host):
    a = host("a")
    a.erase_key(1)
    a.upload.advance()
    b = host("b")
    a.erase_key(2)
    late = stored_erasures(a.folder)
    assert late is not None
    a.bucket.write(ERASURES, late)  # its request arrives now
    b.erase_key(3)
    assert not b.upload.advance() or b.upload.is_current()
    assert sorted(b.keys()) == sorted(host("c").keys()) == [1, 2, 3]


def test_a_line_that_is_only_begun_is_not_uploaded(host):
    a = host("a")
    a.erase(1)
    with (a.folder / NAME).open("ab") as file:
        file.write(b"half")
    a.upload.advance()
    assert host("b").erased() == [1]


def test_a_log_that_was_deleted_is_uploaded_again(host):
    a = host("a")
    a.erase(1)
    a.upload.advance()
    a.bucket.delete([ERASURES])
    a.erase(2)
    a.upload._due = 0.0
    assert a.upload.advance()
    assert host("b").erased() == [1, 2]


def test_an_object_that_no_learner_has_written_is_not_read_whole(host, monkeypatch):
    a, b = host("a"), host("b")
    a.start()
    a.erase(1)
    a.upload.advance()
    monkeypatch.setattr("anabranch.learner.object_storage.erasure_upload._MOST_BYTES", 64)
    with pytest.raises(StorageError, match=r"erasures cannot be used: .* and at most 64 are read"):
        b.start()
