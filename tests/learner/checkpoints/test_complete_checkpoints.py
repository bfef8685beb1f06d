"""With `[storage]` a checkpoint has the rows of the disk tier too: a host without its file goes on from it."""

import shutil

import numpy as np
import pytest
import torch

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.learner.checkpoints import parts
from anabranch.learner.checkpoints.erase_checkpoints import CheckpointRewriter
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints, write_rows
from anabranch.learner.checkpoints.rows_file import ErasedRows, RowsFile
from anabranch.learner.state_dir import folders as storage
from anabranch.learner.state_dir.folders import Folder
from anabranch.learner.state_dir.safetensors_file import TensorFile
from anabranch.replay.row_source import RowSource
from anabranch.replay.tiers import disk
from anabranch.replay.tiers.disk import DiskTier
from tests.learner.checkpoints.store_bench import Bench

DISK = {"disk": {"bytes": "200kB"}, "device_bytes": "4096"}


@pytest.fixture
def make(tmp_path, schema):
    """`make(**options)`: a store with a disk tier and complete checkpoints."""
    benches: list[Bench] = []

    def begin(*, complete=True, **options):
        benches.append(Bench(tmp_path, schema, {**DISK, **options}, complete=complete))
        return benches[-1]

    yield begin
    for bench in benches:
        bench.close()


def on_a_fresh_host(bench, **options):
    """Restore the newest checkpoint on a host that has the checkpoints alone."""
    bench.close()
    shutil.rmtree(bench.path / "replay")
    bench.options = {**bench.options, **options}
    return bench.resume()


def replaced(bench):
    """Add events and checkpoint so often that events were replaced and segments merged."""
    for number in range(12):
        bench.add(700 if number == 0 else 130)
        bench.checkpoint()


def test_a_fresh_host_has_the_events_and_the_rows_in_the_same_slots(make):
    bench = make()
    replaced(bench)
    assert bench.store is not None
    held, rows, slots = bench.held, bench.payload(), bench.store.event_table.slots.tolist()
    assert on_a_fresh_host(bench) == bench.number
    assert bench.store is not None
    assert (bench.held, bench.store.event_table.slots.tolist()) == (held, slots)
    assert bench.payload() == rows
    assert bench.store.lost == 0


@pytest.mark.slow
@pytest.mark.parametrize(("most", "first", "more"), [(7, 140, 26), (100, 700, 130)])
def test_a_fresh_host_has_the_rows_of_a_store_in_many_pieces(make, monkeypatch, most, first, more):
    """A checkpoint writes what is new, and at most as much again, or a piece."""
    bench = make()
    monkeypatch.setattr(parts, "most_events", lambda *_: most)
    for number in range(12):
        before = bench.files(bench.number) if number else {}
        bench.add(more if number else first)
        bench.checkpoint()
        counts = {path: len(RowsFile(path)) for name, path in bench.files(bench.number).items() if name[:4] == "rows"}
        assert max(counts.values()) <= most
        written = sum(count for path, count in counts.items() if path.name not in before)
        assert written <= (more + max(more, most) if number else first)
    held, rows = bench.held, bench.payload()
    on_a_fresh_host(bench)
    assert (bench.held, bench.payload()) == (held, rows)
    bench.add(more)
    bench.checkpoint()
    held, rows = bench.held, bench.payload()
    on_a_fresh_host(bench)
    assert (bench.held, bench.payload()) == (held, rows)


def test_the_next_checkpoint_of_a_fresh_host_has_the_changes_alone(make):
    bench = make()
    replaced(bench)
    before = bench.files(bench.number)
    on_a_fresh_host(bench)
    bench.add(5)
    bench.checkpoint()
    carried = {name: path for name, path in bench.files(bench.number).items() if name in before}
    assert {"segment", "rows"} == {name.partition("-")[0] for name in carried}
    assert all(path.samefile(before[name]) for name, path in carried.items())
    held, rows = bench.held, bench.payload()
    on_a_fresh_host(bench)
    assert (bench.held, bench.payload()) == (held, rows)
    for _ in range(3):  # and one that is restored where the new file is
        bench.add(200)
        bench.checkpoint()
    held, rows = bench.held, bench.payload()
    bench.resume()
    assert (bench.held, bench.payload()) == (held, rows)


def test_a_host_with_the_file_reads_no_rows_of_checkpoints(make, monkeypatch):
    bench = make()
    replaced(bench)
    rows = bench.payload()
    monkeypatch.setattr(Checkpoints, "rows", lambda *_: pytest.fail("rows are read"))
    for path in bench.checkpoints.path.glob("*/rank-0/rows-*"):
        path.write_bytes(b"")
    bench.resume()
    assert bench.payload() == rows


@pytest.mark.parametrize("complete", [True, False])
def test_after_the_setting_has_changed_the_next_checkpoint_has_all_rows_or_none(make, *, complete):
    bench = make(complete=not complete)
    bench.add(500)
    bench.checkpoint()
    bench.complete = complete
    bench.resume()
    bench.add(10)
    bench.checkpoint()
    rows = [name for name in bench.files(2) if name.startswith("rows-")]
    assert rows == (["rows-2.safetensors"] if complete else [])
    if complete:
        before = bench.payload()
        on_a_fresh_host(bench)
        assert bench.payload() == before
    else:
        with pytest.raises(SettingsError, match="cannot be opened"):
            on_a_fresh_host(bench)


@pytest.mark.parametrize(
    "options", [{"disk": {"bytes": "16kB"}, "capacity": 100}, {"disk": None, "device_bytes": "1MB"}]
)
def test_a_fresh_host_may_have_other_tiers(make, options):
    """In fewer slots, or in memory: the rows get new slots, and the next checkpoint has all events."""
    bench = make(capacity=300)
    replaced(bench)
    rows = bench.payload()
    on_a_fresh_host(bench, **options)
    assert bench.store is not None
    assert len(bench.held) >= min(300, bench.store.capacity)
    assert bench.payload() == {offset: rows[offset] for offset in bench.held}
    bench.add(1)
    bench.checkpoint()
    assert f"segment-{bench.number}.safetensors" in bench.files(bench.number)
    assert len([name for name in bench.files(bench.number) if name.startswith("segment-")]) == 1
    rows = bench.payload()
    on_a_fresh_host(bench) if options["disk"] else bench.resume()
    assert bench.payload() == rows


def test_starts_on_a_fresh_host_that_write_no_checkpoint_leave_one_file(make):
    bench = make()
    bench.add(300)
    bench.checkpoint()
    on_a_fresh_host(bench)
    for _ in range(3):
        bench.resume()
        assert len(list((bench.path / "replay").iterdir())) == 1
    bench.checkpoint()
    rows = bench.payload()
    bench.resume()
    assert bench.payload() == rows


def test_a_damaged_file_of_rows_costs_a_fresh_host_its_events(make, caplog):
    bench = make()
    bench.add(700)
    bench.checkpoint()
    bench.add(100)
    bench.checkpoint(keep=1)
    held = bench.held
    path = bench.files(2)["rows-2.safetensors"]
    content = bytearray(path.read_bytes())
    content[-200] ^= 1
    path.write_bytes(content)
    on_a_fresh_host(bench)
    assert bench.held == held[:700]
    assert bench.store is not None
    assert bench.store.lost == 100
    assert "does not have its digest; going on without the events that were stored in it" in caplog.text
    bench.checkpoint()
    rows = bench.payload()
    on_a_fresh_host(bench)
    assert (bench.payload(), bench.store.lost) == (rows, 0)


def test_a_row_that_is_damaged_in_the_tier_is_the_only_one_that_a_fresh_host_loses(make):
    bench = make()
    bench.add(100)
    assert bench.store is not None
    bench.store.tiers.sync()
    tier, slot = bench.store.tiers.slow[-1], int(bench.store.event_table.slots[40])
    assert isinstance(tier, DiskTier)
    tier.erase(np.array([slot]))
    bench.checkpoint()
    held = bench.held
    on_a_fresh_host(bench)
    assert bench.held == held[:40] + held[41:]
    assert bench.store.lost == 1


def test_a_checkpoint_whose_rows_cannot_be_read_fails_and_leaves_the_earlier_one(make, monkeypatch):
    bench = make()
    bench.add(100)
    bench.checkpoint()
    bench.add(100)

    def fails(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(DiskTier, "read", fails)
        with pytest.raises(OSError, match="Input/output"):
            bench.checkpoint()
    assert bench.store is not None
    bench.store.end_snapshot(1, written=False)
    assert bench.checkpoints.numbers() == [1]
    bench.checkpoint()
    rows = bench.payload()
    on_a_fresh_host(bench)
    assert bench.payload() == rows


class CountedRows(RowSource):
    """Rows that record how many are read at once."""

    def __init__(self, count, row_bytes):
        self.count, self._row_bytes, self.most = count, row_bytes, 0

    @property
    def row_bytes(self):
        return self._row_bytes

    def __len__(self):
        return self.count

    def read(self, positions):
        self.most = max(self.most, len(positions))
        rows = np.broadcast_to((positions % 251).astype(np.uint8)[:, None], (len(positions), self._row_bytes))
        return torch.from_numpy(rows.copy()), positions % 7 != 3


def test_rows_are_written_and_read_in_parts_of_a_megabyte(tmp_path, monkeypatch):
    rows, written = CountedRows(5000, 2048), list[int]()
    write = storage.write_durably

    def counted(path, pieces):
        write(path, (written.append(len(piece)) or piece for piece in pieces))

    monkeypatch.setattr(storage, "write_durably", counted)
    write_rows(Folder(tmp_path), "rows.safetensors", rows)
    assert rows.most * rows.row_bytes <= 2**20
    assert max(written) <= 2**20 < sum(written)
    file = RowsFile(tmp_path / "rows.safetensors")
    positions = np.sort(np.random.default_rng(0).choice(5000, 900, replace=False))
    found, valid = file.read(positions)
    assert (valid == (positions % 7 != 3)).all()
    expected = torch.from_numpy((positions % 251).astype(np.uint8) * valid)
    assert torch.equal(found, expected[:, None].expand(-1, 2048))


class TestFilesOfAnotherTime:
    """The file of the disk tier has the id that the checkpoint names, and other rows."""

    def test_a_file_of_a_backup_is_not_used_for_a_later_checkpoint(self, make, caplog):
        bench = make()
        bench.add(500)
        bench.checkpoint()
        bench.close()
        shutil.copytree(bench.path / "replay", bench.path / "backup")
        bench.resume()
        bench.add(500)
        bench.checkpoint()
        rows = bench.payload()
        bench.close()
        shutil.rmtree(bench.path / "replay")
        (bench.path / "backup").rename(bench.path / "replay")
        bench.resume()
        assert bench.payload() == rows
        assert "is from another time than checkpoint 2" in caplog.text
        bench.add(10)
        bench.checkpoint()
        rows = bench.payload()
        bench.resume()
        assert bench.payload() == rows
        assert caplog.text.count("is from another time") == 1

    def test_a_file_whose_slots_were_written_again_is_not_used_for_an_earlier_checkpoint(self, make):
        """The checkpoints since are lost, and an earlier one comes from elsewhere."""
        bench = make(capacity=300)
        bench.add(300)
        bench.checkpoint()
        rows, first = bench.payload(), bench.checkpoints.path / "1"
        shutil.copytree(first, bench.path / "elsewhere")
        for _ in range(8):
            bench.add(300)
            bench.checkpoint()
        bench.close()
        shutil.rmtree(bench.checkpoints.path)
        bench.checkpoints.path.mkdir()
        shutil.copytree(bench.path / "elsewhere", first)
        assert bench.resume() == 1
        assert bench.payload() == rows

    def test_a_file_goes_on_from_an_earlier_checkpoint_that_it_still_has(self, make, monkeypatch):
        """And from then on it does not have the later ones, whose slots are free."""
        bench = make(capacity=300)
        bench.add(300)
        for _ in range(3):
            bench.add(50)
            bench.checkpoint()
        third = bench.checkpoints.path / "3"
        shutil.copytree(third, bench.path / "elsewhere")
        later = bench.payload()
        shutil.rmtree(third)
        with monkeypatch.context() as patched:
            patched.setattr(Checkpoints, "rows", lambda *_: pytest.fail("rows are read"))
            assert bench.resume() == 2
        bench.add(200)
        bench.close()
        (bench.path / "elsewhere").rename(third)
        assert bench.resume() == 3
        assert bench.payload() == later


def test_a_row_that_the_tier_cannot_read_at_a_merge_is_taken_from_the_earlier_file(make, caplog):
    bench = make()
    bench.add(100)
    bench.checkpoint()
    assert bench.store is not None
    rows, tier = bench.payload(), bench.store.tiers.slow[-1]
    tier.erase(bench.store.event_table.slots[40:43].astype(np.int64))
    bench.add(100)
    bench.checkpoint()
    assert [name for name in bench.files(2) if name.startswith("rows-")] == ["rows-2.safetensors"]
    on_a_fresh_host(bench)
    assert {offset: row for offset, row in bench.payload().items() if offset < 100} == rows
    assert "a host without this tier will lack" not in caplog.text
    bench.store.tiers.slow[-1].erase(bench.store.event_table.slots[190:].astype(np.int64))
    bench.checkpoints.delete(2)
    bench.store.reservoir.changes.clear()
    bench.checkpoint()
    assert "a host without this tier will lack" in caplog.text


def test_rows_files_of_equal_bytes_have_their_own_events_erased(tmp_path):
    checkpoints, rows = Checkpoints(tmp_path / "checkpoints", "", 1), CountedRows(7, 16)
    checkpoints.write(1, Checkpoint(0, {}, {}, rows={"rows-1": rows, "rows-2": rows}), 0.0)
    erased = {
        part: ErasedRows(checkpoints.rows(1, part), np.arange(7) == at) for part, at in (("rows-1", 0), ("rows-2", 4))
    }
    CheckpointRewriter(checkpoints).replace(checkpoints.manifest(1), {}, erased)
    every = np.arange(7)
    left = [np.flatnonzero(checkpoints.rows(1, part).read(every)[1]).tolist() for part in ("rows-1", "rows-2")]
    assert left == [[1, 2, 4, 5, 6], [0, 1, 2, 5, 6]]


def test_rows_between_two_distant_ones_are_not_read(tmp_path, monkeypatch):
    rows = CountedRows(3000, 4096)
    write_rows(Folder(tmp_path), "rows.safetensors", rows)
    file, parts = RowsFile(tmp_path / "rows.safetensors"), list[int]()
    part = TensorFile.part

    def counted(self, name, begin, end):
        parts.append(end - begin)
        return part(self, name, begin, end)

    monkeypatch.setattr(TensorFile, "part", counted)
    positions = np.concatenate([np.arange(0, 600, 2), [1500], np.arange(2900, 3000)])
    found, valid = file.read(positions)
    assert torch.equal(found[:, 7], torch.from_numpy((positions % 251).astype(np.uint8) * valid))
    assert sum(parts) < 750
    assert max(parts) * 4096 <= 2**20 + 2 * 4096


def test_rows_of_a_redis_that_has_lost_them_are_restored(make, mortal_redis):
    """It started again empty: the store is that of the checkpoint, and the next one has only the changes."""
    bench = make(disk=None, redis={"url": mortal_redis.url, "bytes": "20MB"})
    replaced(bench)
    rows = bench.payload()
    bench.resume()
    assert bench.payload() == rows
    bench.close()
    mortal_redis.stop()
    mortal_redis.start()
    for _ in range(2):
        bench.resume()
        assert bench.payload() == rows
    bench.add(5)
    bench.checkpoint()
    rows = bench.payload()
    assert [name for name in bench.files(bench.number) if name == f"rows-{bench.number - 1}.safetensors"]
    bench.resume()
    assert bench.payload() == rows


def test_an_empty_folder_is_a_disk_that_is_not_mounted(make):
    """Else the rows would be written below its mount point, and the next checkpoint would name them there."""
    bench = make()
    bench.add(100)
    bench.checkpoint()
    rows, folder, mounted = bench.payload(), bench.path / "replay", bench.path / "mounted"
    bench.close()
    folder.rename(mounted)
    folder.mkdir()
    with pytest.raises(
        DependencyError, match=r"replay is empty: mount its disk; or if that is lost, remove the folder"
    ):
        bench.resume()
    folder.rmdir()
    mounted.rename(folder)
    bench.resume()
    assert bench.payload() == rows
    on_a_fresh_host(bench)
    assert bench.payload() == rows


def test_an_earlier_file_is_removed_where_there_is_no_space_for_both(make, monkeypatch):
    """A host that comes back after another one has gone on: its own file is of no use any more."""
    bench = make()
    bench.add(100)
    bench.checkpoint()
    bench.close()
    (file,) = (bench.path / "replay").iterdir()
    shutil.copy(file, bench.path / "theirs")
    bench.resume()
    bench.add(100)
    bench.checkpoint()
    rows = bench.payload()
    bench.close()
    (bench.path / "theirs").replace(file)
    allocate = disk._allocate

    def full(descriptor, size):
        if file.exists():
            raise OSError(28, "No space left on device")
        allocate(descriptor, size)

    monkeypatch.setattr(disk, "_allocate", full)
    bench.resume()
    assert bench.payload() == rows
