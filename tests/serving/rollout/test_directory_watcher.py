"""Which changes of the versions directory end a wait, and how soon, with inotify and by polling."""

import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

from anabranch.core.atomic_files import replace_file
from anabranch.serving.rollout import directory_watcher as notice
from anabranch.serving.rollout.directory_watcher import DirectoryWatcher, file_system

linux = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")
PATIENCE = 30


@pytest.fixture(autouse=True)
def no_polling(monkeypatch):
    """Only inotify or another thread ends a wait."""
    monkeypatch.setattr(notice, "POLL_ANYWAY", timedelta(hours=1))


@pytest.fixture
def versions(tmp_path):
    (tmp_path / "versions" / "1").mkdir(parents=True)
    return tmp_path / "versions"


@pytest.fixture
def notices(versions):
    with DirectoryWatcher(versions) as notices:
        notices.follow()
        yield notices


@pytest.fixture
def waits():
    """Wait in a thread."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda notices: pool.submit(notices.wait)


def a_version(versions):
    (versions / ".tmp-1-2").mkdir()
    (versions / ".tmp-1-2").rename(versions / "2")


def a_verdict(versions):
    replace_file(versions / "1" / "verdict.json", b"{}")


def a_state(versions):
    replace_file(versions / "state.json", b"{}")


@linux
@pytest.mark.parametrize("change", [a_version, a_verdict, a_state])
def test_inotify_reports_a_change_at_once(versions, notices, waits, change):
    assert notices.uses_inotify
    waiting = waits(notices)
    change(versions)
    waiting.result(PATIENCE)


@linux
def test_a_change_between_following_and_waiting_is_not_missed(versions, notices):
    a_version(versions)
    notices.wait()
    notices.follow()
    replace_file(versions / "2" / "verdict.json", b"{}")
    notices.wait()


@linux
def test_a_directory_that_is_created_later_or_again_is_followed(tmp_path):
    path = tmp_path / "versions"
    with DirectoryWatcher(path) as notices:
        notices.follow()
        assert not notices.uses_inotify
        for _ in range(2):
            path.mkdir()
            notices.follow()
            assert notices.uses_inotify
            shutil.rmtree(path)
            notices.wait()
            notices.follow()
            assert not notices.uses_inotify


@linux
def test_deleted_versions_are_no_longer_followed(versions, notices):
    watches = Path(f"/proc/self/fdinfo/{notices._inotify.descriptor}")  # type: ignore[union-attr]
    for number in range(2, 40):
        (versions / str(number)).mkdir()
        notices.follow()
        shutil.rmtree(versions / str(number - 1))
        notices.follow()
    assert watches.read_text().count("inotify wd:") == 2


def test_another_thread_ends_a_wait(notices, waits):
    waiting = waits(notices)
    threading.Thread(target=notices.wake).start()
    waiting.result(PATIENCE)
    for _ in range(100_000):
        notices.wake()


@pytest.mark.parametrize("why", ["nfs", "no inotify", "no watches left"])
def test_without_inotify_the_directory_is_polled(versions, monkeypatch, why):
    if why == "nfs":
        monkeypatch.setattr(notice, "file_system", lambda path: "nfs4")
    elif why == "no inotify":
        monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: object())
    else:
        monkeypatch.setattr(notice._Inotify, "_add", _no_space)
    open_files = len(list(Path("/dev/fd").iterdir()))
    with DirectoryWatcher(versions) as notices:
        for _ in range(3):
            notices.follow()
            assert not notices.uses_inotify
            notices.wait()
    assert len(list(Path("/dev/fd").iterdir())) == open_files


def _no_space(*_):
    raise OSError(28, "No space left on device")


def test_a_path_belongs_to_the_innermost_mount(tmp_path, monkeypatch):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        "2 1 0:4 / /data rw,relatime shared:1 - nfs4 host:/x rw\n"
        "3 1 0:5 / /data/my\\040models rw - tmpfs none rw\n"
        "4 1 0:6 / /twice rw - ext4 /dev/b rw\n"
        "5 1 0:7 / /twice rw - fuse.sshfs host: rw\n"
    )
    monkeypatch.setattr(notice, "_MOUNTS", mounts)
    for path, kind in {
        "/database/var": "ext4",
        "/data": "nfs4",
        "/data/var/versions": "nfs4",
        "/data/my models/var": "tmpfs",
        "/twice/var": "fuse.sshfs",
    }.items():
        assert file_system(Path(path)) == kind
    mounts.unlink()
    assert file_system(Path("/data")) == ""
