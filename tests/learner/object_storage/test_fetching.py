"""What a learner fetches from an object store before it resumes."""

import dataclasses
import errno
import logging
import shutil
import stat
import threading
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.object_store.bucket import Bucket
from anabranch.core.shutdown import Deadline
from anabranch.core.temporary_files import temporary_folder
from anabranch.learner.checkpoints.checkpointer import CapturedState, Checkpointer
from anabranch.learner.checkpoints.erase_checkpoints import Eraser
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints, age_of, newest_age
from anabranch.learner.checkpoints.parts import CapturedPart, CheckpointPart, PackedPart
from anabranch.learner.errors import CheckpointError, MisfitError, SecondLearnerError
from anabranch.learner.loop.resume import resume_point
from anabranch.learner.object_storage.bucket_storage import storage_to_read
from anabranch.learner.object_storage.fetching import fetch_checkpoint, fetch_versions
from anabranch.learner.object_storage.opening import (
    fetching_checkpoints,
    lease_storage,
    stored_checkpoints,
    stored_versions,
)
from anabranch.learner.settings.learner import CheckpointSettings
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.state_dir.folders import COPIES, PARTIAL, REBUILD, discard_partial
from anabranch.learner.state_dir.lock import GENERATION, lock_state_directory
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.learner.versions.format import Verdict, Versions
from anabranch.replay.erasure.erased_events import ErasedEvents
from anabranch.replay.erasure.erasure_log import NAME, ErasureLog
from anabranch.replay.row_source import RowSource
from tests.support.manifests import manifest_of


@pytest.fixture
def settings(tmp_path):
    return StorageSettings(url=f"file://{tmp_path}/bucket", lease=timedelta(seconds=4))


def checkpoint(step, *segments):
    tensors = {"model": {"w": torch.full((9,), float(step))}}
    tensors |= {f"segment-{number}": {"index": torch.arange(number, number + 9)} for number in segments}
    return Checkpoint(step, tensors, {"steps": step})


def local_checkpoints(folder, generation=0):
    return Checkpoints(folder / "checkpoints", "digest", generation)


def upload(settings, folder, *steps):
    """Write checkpoints of these steps into the object store, as the learner of another host, and return the
    generation."""
    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation) as held:
        upload_as(held, folder, *steps)
        return held.lease.generation


def upload_as(held, folder, *steps):
    stored = Checkpoints(folder / "checkpoints", "digest", held.lease.generation, held.checkpoints)
    for step in steps:
        stored.write(stored.highest() + 1, checkpoint(step, 1, step), 1.0)


def version(number):
    return manifest_of(number, time=1.0, schema="digest", task="regression")


def upload_version(settings, folder, number):
    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation) as held:
        Versions(folder, held.versions).write({"w": torch.ones(9)}, version(number), Verdict("pass"))


def resumed_step(held, folder):
    checkpoints = stored_checkpoints(folder, "digest", held.lease.generation, held)
    held.checkpoints.clean()
    found = checkpoints.newest()
    if fetch_checkpoint(held.checkpoints, checkpoints, (-1, -1) if found is None else age_of(checkpoints, found[0])):
        found = checkpoints.newest()
    assert found is not None
    return found[1].step


def test_an_empty_host_fetches_the_newest_checkpoint(settings, tmp_path):
    upload(settings, tmp_path / "a", 10, 20)
    folder = tmp_path / "b"
    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation) as held:
        assert held.lease.generation == 2
        assert (folder / GENERATION).read_text() == "2"
        assert resumed_step(held, folder) == 20
        checkpoints = stored_checkpoints(folder, "digest", 2, held)
        assert checkpoints.numbers() == [2]
        assert not fetch_checkpoint(held.checkpoints, checkpoints, newest_age(checkpoints)), "it is there"
    assert local_checkpoints(folder).newest() is not None


def test_on_a_full_disk_no_older_checkpoint_is_taken_and_nothing_half_fetched_stays(settings, tmp_path, monkeypatch):
    upload(settings, tmp_path / "a", 10, 20)
    folder = tmp_path / "b"

    def fill(_bucket, _path, to):
        to.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation) as held:
        with monkeypatch.context() as full:
            full.setattr(Bucket, "download", fill)
            with pytest.raises(OSError, match="No space left"):
                resumed_step(held, folder)
        assert list((folder / "checkpoints").iterdir()) == []
        assert resumed_step(held, folder) == 20


def test_the_newest_by_generation_wins_and_numbers_go_on_from_the_highest_of_both(settings, tmp_path):
    upload(settings, tmp_path / "a", 10, 20)
    folder = tmp_path / "b"
    stale = local_checkpoints(folder, generation=1)
    stale.write(7, checkpoint(5), 1.0)
    stale.write(2, checkpoint(6), 1.0)
    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation) as held:
        assert resumed_step(held, folder) == 5, "number 7 of generation 1 is newer than number 2"
    upload(settings, tmp_path / "a", 30)
    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation) as held:
        assert resumed_step(held, folder) == 30, "generation 3, number 3"
        checkpoints = stored_checkpoints(folder, "digest", held.lease.generation, held)
        assert checkpoints.highest() == 7
        assert held.checkpoints.highest() == 3
    (folder / "checkpoints" / "7" / "manifest.json").unlink()
    local_checkpoints(folder).storage.clean()
    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation) as held:
        assert stored_checkpoints(folder, "digest", 9, held).highest() == 3
    upload(settings, tmp_path / "a", *range(40, 49))
    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation) as held:
        assert stored_checkpoints(folder, "digest", 9, held).highest() == 12


def test_a_damaged_checkpoint_is_passed_over_on_both_sides(settings, tmp_path, caplog):
    upload(settings, tmp_path / "a", 10, 20)
    folder = tmp_path / "b"
    bucket = settings.bucket
    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation) as held:
        path = held.checkpoints.table.files_of(2)["rank-0/model.safetensors"].path
        whole = bucket.read(path)
        bucket.write(path, b"torn")
        assert resumed_step(held, folder) == 10
        assert "checkpoint 2 in file://" in caplog.text
        assert "does not have its digest" in caplog.text
        bucket.write(path, whole)
        assert resumed_step(held, folder) == 20
        (folder / "checkpoints" / "2" / "rank-0" / "model.safetensors").write_bytes(b"torn")
        assert resumed_step(held, folder) == 20, "the damaged one is replaced"
        for number in (1, 2):
            (folder / "checkpoints" / str(number) / "rank-0" / "state.json").write_bytes(b"torn")
        checkpoints = stored_checkpoints(folder, "digest", held.lease.generation, held)
        with pytest.raises(CheckpointError, match="none can be used"):
            checkpoints.newest()
        log = ErasureLog(folder / NAME)
        assert resume_point_step(checkpoints, log, held) == 20, "all of the state directory are damaged"


def resume_point_step(checkpoints, written, held):
    """Return the step of `resume_point`; the checkpoints of this module have no positions of the stream."""
    with fetching_checkpoints(held, checkpoints) as fetch_newer:
        try:
            found = resume_point(checkpoints, written, fetch_newer).found
        except KeyError:
            found = checkpoints.newest()
    assert found is not None
    return found[1].step


def test_the_newest_of_both_is_found_before_one_is_judged(settings, tmp_path):
    """The old host comes back: its own checkpoint is of another schema, and that of the object store is newer."""
    folder = tmp_path / "b"
    Checkpoints(folder / "checkpoints", "old schema", 1).write(1, checkpoint(5), 1.0)
    upload(settings, tmp_path / "a", 10)
    upload(settings, tmp_path / "a", 20)
    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation) as held:
        checkpoints = stored_checkpoints(folder, "digest", held.lease.generation, held)
        assert resume_point_step(checkpoints, ErasureLog(folder / NAME), held) == 20
        other = stored_checkpoints(tmp_path / "c", "new schema", held.lease.generation, held)
        with (
            pytest.raises(MisfitError, match=f"checkpoint 2 in {settings.url}/checkpoints was made under another"),
            fetching_checkpoints(held, other) as fetch_newer,
        ):
            resume_point(other, ErasureLog(folder / NAME), fetch_newer)
        assert not other.path.exists(), "nothing is fetched that cannot be used"


def test_a_start_that_was_killed_while_it_fetched_a_version_is_cleaned_up(settings, tmp_path):
    (tmp_path / "versions" / ".tmp-1-1").mkdir(parents=True)
    upload_version(settings, tmp_path / "a", 1)
    with lock_state_directory(tmp_path) as generation, lease_storage(settings, tmp_path, generation) as held:
        assert stored_versions(tmp_path, held).numbers() == [1]


def test_files_that_are_there_are_linked(settings, tmp_path, monkeypatch):
    upload(settings, tmp_path / "a", 10)
    folder = tmp_path / "b"
    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation) as held:
        assert resumed_step(held, folder) == 10
    upload(settings, tmp_path / "a", 20)
    fetched: list[str] = []
    download = Bucket.download

    def record(self, path, to):
        fetched.append(to.name)
        download(self, path, to)

    monkeypatch.setattr(Bucket, "download", record)
    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation) as held:
        assert resumed_step(held, folder) == 20
    assert "rank-0-segment-1.safetensors" not in fetched
    assert "rank-0-segment-20.safetensors" in fetched


def test_a_fetch_that_was_interrupted_goes_on_with_the_files_that_are_missing(settings, tmp_path, monkeypatch):
    """A file that was damaged since is fetched again."""
    upload(settings, tmp_path / "a", 10)
    folder, fetched, download = tmp_path / "b", list[str](), Bucket.download
    monkeypatch.setattr("anabranch.learner.object_storage.fetching._THREADS", 1)

    def fetch(self, path, to):
        fetched.append(to.name)
        download(self, path, to)

    def fetch_two(self, path, to):
        if len(fetched) == 2:
            to.write_bytes(b"half")
            raise OSError(errno.EIO, "killed")
        fetch(self, path, to)

    monkeypatch.setattr(Bucket, "download", fetch_two)
    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation) as held:
        with pytest.raises(OSError, match="killed"):
            resumed_step(held, folder)
    first, second = fetched
    whole = sorted((folder / PARTIAL).glob("?" * 64), key=lambda path: path.stat().st_mtime_ns)
    assert len(whole) == 2
    whole[1].write_bytes(b"torn")
    monkeypatch.setattr(Bucket, "download", fetch)
    fetched.clear()
    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation) as held:
        assert resumed_step(held, folder) == 10
        assert first not in fetched
        assert second in fetched
        assert len(fetched) == len(held.checkpoints.table.files_of(1)) - 1
        checkpoints = stored_checkpoints(folder, "digest", held.lease.generation, held)
        assert resume_point_step(checkpoints, ErasureLog(folder / NAME), held) == 10
    discard_partial(folder)
    assert not (folder / PARTIAL).exists()


@pytest.mark.parametrize("links", [True, False], ids=["links", "no-links"])
def test_an_interrupted_start_in_mode_only_goes_on_with_the_files_that_are_missing(
    settings, tmp_path, monkeypatch, *, links
):
    """A file that was damaged since is fetched again."""
    upload(settings, tmp_path / "a", 10)
    only, folder, download = settings.model_copy(update={"mode": "only"}), tmp_path / "b", Bucket.download
    fetched, most = list[str](), 2
    monkeypatch.setattr("anabranch.learner.object_storage.fetching._THREADS", 1)

    def fetch(self, path, to):
        if len(fetched) == most:
            to.write_bytes(b"half")
            raise OSError(errno.EIO, "killed")
        fetched.append(path)
        download(self, path, to)

    def start():
        fetched.clear()
        with lock_state_directory(folder) as generation, lease_storage(only, folder, generation) as held:
            checkpoints = stored_checkpoints(folder, "digest", held.lease.generation, held)
            return resume_point_step(checkpoints, ErasureLog(folder / NAME), held)

    monkeypatch.setattr(Bucket, "download", fetch)
    if not links:
        monkeypatch.setattr(Path, "hardlink_to", lambda *_: fail_away())
    with pytest.raises(OSError, match="killed"):
        start()
    kept = list((folder / PARTIAL).glob("?" * 64))
    assert len(kept) == 2
    kept[0].write_bytes(b"torn")
    (folder / PARTIAL / ("0" * 64)).write_bytes(b"of a checkpoint that is not the newest any more")
    with pytest.raises(OSError, match="killed"):
        start()
    assert len(list((folder / PARTIAL).glob("?" * 64))) == 3
    most = 99
    assert start() == 10
    assert len(fetched) == len(checkpoint(10, 1, 10).tensors) + 1 - 3, "what was whole is not fetched again"


def with_rows(checkpoint, size):
    rows = torch.arange(3 * size, dtype=torch.uint8).view(3, size)

    class Rows(RowSource):
        row_bytes = size

        def __len__(self):
            return 3

        def read(self, positions):
            return rows[torch.from_numpy(positions)].clone(), np.ones(len(positions), np.bool_)

    return dataclasses.replace(checkpoint, rows={"rows-1": Rows()})


@pytest.mark.parametrize("name", ["rows-1", "segment-1", "model"])
@pytest.mark.parametrize("missing", [True, False])
def test_a_local_file_that_is_damaged_or_missing_is_fetched_again(settings, tmp_path, monkeypatch, name, *, missing):
    """Alone, and the newest checkpoint is used; a damaged one in the object store as well is used as before."""
    folder, fetched, download = tmp_path / "b", list[str](), Bucket.download
    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation) as held:
        for checkpoints in (
            Checkpoints(folder / "checkpoints", "digest", held.lease.generation, held.checkpoints),
            local_checkpoints(folder, held.lease.generation),
        ):
            checkpoints.write(1, checkpoint(10, 1), 1.0)
            checkpoints.write(2, with_rows(checkpoint(20, 1), 5), 1.0)
    path = folder / "checkpoints" / "2" / "rank-0" / f"{name}.safetensors"
    path.unlink()
    if not missing:
        path.write_bytes(b"torn")

    def record(self, path, to):
        fetched.append(path)
        download(self, path, to)

    monkeypatch.setattr(Bucket, "download", record)
    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation) as held:
        checkpoints = stored_checkpoints(folder, "digest", held.lease.generation, held)
        assert resume_point_step(checkpoints, ErasureLog(folder / NAME), held) == 20
        found = checkpoints.newest()
        assert found is not None
        rows, valid = found[1].rows["rows-1"].read(np.arange(3))
        assert rows.tolist() == torch.arange(15).view(3, 5).tolist()
        assert valid.all()
        assert found[1].tensors["segment-1"]["index"].tolist() == list(range(1, 10))
        assert fetched == [held.checkpoints.table.files_of(2)[f"rank-0/{name}.safetensors"].path]


def test_rows_that_are_damaged_on_both_sides_are_lost_and_no_start_goes_on_while_the_store_is_away(
    settings, tmp_path, monkeypatch
):
    folder = tmp_path / "b"
    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation) as held:
        upload_as(held, folder, 5)
        local = local_checkpoints(folder, held.lease.generation)
        local.write(2, with_rows(checkpoint(20, 1), 5), 1.0)
        for path in (folder / "checkpoints").glob("2/rank-0/rows-1*"):
            path.unlink()
        checkpoints = stored_checkpoints(folder, "digest", held.lease.generation, held)
        assert resume_point_step(checkpoints, ErasureLog(folder / NAME), held) == 20
        found = checkpoints.newest()
        assert found is not None
        assert not found[1].rows["rows-1"].read(np.arange(3))[1].any()
        found = checkpoints.newest()
        assert found is not None
        monkeypatch.setattr(held.checkpoints, "numbers", lambda: fail_away())
        with pytest.raises(DependencyError, match=r"rows-1\.safetensors of checkpoint 2 is damaged, and cannot be fe"):
            found[1].rows["rows-1"].read(np.arange(3))


def fail_away():
    raise OSError(errno.EHOSTUNREACH, "no route")


def test_the_served_version_is_fetched_with_its_verdict(settings, tmp_path):
    folder = tmp_path / "a"
    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation) as held:
        there = Versions(folder / "versions", held.versions)
        for number, verdict in enumerate(("pass", "pass", "fail", "fail"), 1):
            there.write({"w": torch.full((9,), float(number))}, version(number), Verdict(verdict))  # type: ignore[arg-type]
    folder = tmp_path / "b"
    with lock_state_directory(folder) as generation, lease_storage(settings, folder, generation) as held:
        versions = stored_versions(folder, held)
        assert versions.numbers() == [2, 4], "the newest, and the newest that has not failed"
        assert versions.verdict(2) == Verdict("pass")
        assert versions.weights(versions.manifest(2))["w"].tolist() == [2.0] * 9
        held.versions.delete(4)
        assert versions.highest() == 4
        fetch_versions(held.versions, versions)
        assert versions.numbers() == [2, 3, 4]


def test_commands_read_the_object_store_in_mode_only(settings, tmp_path):
    upload(settings, tmp_path / "a", 10, 20)
    assert storage_to_read(None, "checkpoints") is None
    assert storage_to_read(settings, "checkpoints") is None
    only = settings.model_copy(update={"mode": "only"})
    checkpoints = Checkpoints(tmp_path / "nowhere", "digest", 9, storage_to_read(only, "checkpoints"))
    assert checkpoints.numbers() == [1, 2]
    tensors, state = checkpoints.open(checkpoints.manifest(2))
    assert (tensors["model"]["w"].tolist(), state) == ([20.0] * 9, {"steps": 20})
    upload(settings, tmp_path / "a", 30)
    assert checkpoints.numbers() == [1, 2, 3]


def test_the_copies_that_a_command_makes_are_for_its_user_alone_and_an_erasure_removes_what_a_kill_has_left(
    settings, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    upload(settings, tmp_path / "a", 10)
    only, in_use = settings.model_copy(update={"mode": "only"}), list[object]()
    with monkeypatch.context() as killed:
        killed.setattr("atexit.register", in_use.append)
        checkpoints = Checkpoints(tmp_path / "nowhere", "digest", 9, storage_to_read(only, "checkpoints"))
    checkpoints.open(checkpoints.manifest(1))
    (folder,) = tmp_path.glob(f"{COPIES}*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert any(path.stat().st_size for path in (folder / "checkpoints").iterdir())
    eraser = Eraser(local_checkpoints(tmp_path), ErasedEvents([]))
    eraser.run()
    assert folder.exists(), "it is in use"
    shutil.copytree(folder, copy := tmp_path / "copy")
    shutil.rmtree(folder)
    copy.rename(folder)
    with temporary_folder(REBUILD) as rebuild:
        shutil.copytree(rebuild, copy)
    copy.rename(rebuild)
    eraser.run()
    assert not folder.exists()
    assert not rebuild.exists()


def test_copies_of_what_a_checkpoint_merges_are_dropped_once_it_is_written(settings, tmp_path):
    only, merged = settings.model_copy(update={"mode": "only"}), []

    class Part(CheckpointPart, CapturedPart):
        """A part that reads the checkpoint before."""

        def capture(self, number):
            return self

        def pack(self, earlier, oldest):
            merged.append(earlier.part(number - 1, "model")["w"].tolist())
            assert copies(), "what is to be dropped"
            return PackedPart("part", {}, {})

    def copies():
        return [path for path in (tmp_path / "fetched" / "checkpoints").rglob("*") if path.is_file()]

    with lock_state_directory(tmp_path) as generation, lease_storage(only, tmp_path, generation) as held:
        stored = stored_checkpoints(tmp_path, "digest", held.lease.generation, held)
        stored.write(1, checkpoint(1), 1.0)
        metrics, settings = LearnerMetrics(CollectorRegistry()), CheckpointSettings()
        checkpointer = Checkpointer(stored, settings, metrics.checkpoint, metrics.checkpoint_stall, [Part()])
        for number in (2, 3):
            captured = CapturedState(number, checkpoint(number).tensors, {})
            checkpointer.request()
            checkpointer.checkpoint(lambda captured=captured: captured)  # type: ignore[misc]
            checkpointer.wait(Deadline(timedelta(seconds=30)))
            assert not copies()
    assert merged == [[1.0] * 9, [2.0] * 9]


def test_mode_only_does_not_pass_over_newer_checkpoints_of_the_state_directory(settings, tmp_path):
    folder, only = tmp_path / "a", settings.model_copy(update={"mode": "only"})
    local_checkpoints(folder, generation=1).write(1, checkpoint(10), 1.0)
    with lock_state_directory(folder) as generation, lease_storage(only, folder, generation) as held:
        with pytest.raises(SettingsError, match=r'storage\.mode = "only" does not go with the checkpoints in .*mirror'):
            stored_checkpoints(folder, "digest", held.lease.generation, held)
        upload_as(held, folder, 20)
        assert stored_checkpoints(folder, "digest", held.lease.generation, held).numbers() == [1]


def test_the_lease_is_released_although_the_store_is_away_and_no_time_is_lost(settings, tmp_path, monkeypatch):
    here = tmp_path / "a"
    with lock_state_directory(here) as generation, lease_storage(settings, here, generation) as held:
        held.lease.away_since = 1.0
        monkeypatch.setattr(Bucket, "replace", lambda *_: pytest.fail("a request"))
    monkeypatch.undo()
    stop = threading.Event()
    stop.set()
    with (
        lock_state_directory(tmp_path / "b") as generation,
        pytest.raises(SecondLearnerError, match="stopped while"),
        lease_storage(settings, tmp_path / "b", generation, stop),
    ):
        pytest.fail("the lease was not released, and is not over")


def test_progress_is_logged(settings, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("anabranch.learner.object_storage.fetching._PROGRESS_SECONDS", 0.0)
    upload(settings, tmp_path / "a", 10)
    folder = tmp_path / "b"
    with (
        caplog.at_level(logging.INFO),
        lock_state_directory(folder) as generation,
        lease_storage(settings, folder, generation) as held,
    ):
        resumed_step(held, folder)
    assert "fetching checkpoint 1 from file://" in caplog.text
    assert msgspec.json.decode((folder / "checkpoints" / "1" / "manifest.json").read_bytes())["step"] == 10
