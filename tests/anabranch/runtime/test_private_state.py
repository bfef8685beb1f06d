"""The state directory is its owner's alone, whatever the umask."""

import os
import stat
from pathlib import Path

import pytest

from anabranch.config.loader import load_config
from anabranch.runtime.daemon import enter
from anabranch.runtime.private_state import private_state


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def _usual_umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def config(write_pipeline):
    return load_config(write_pipeline("127.0.0.1:1", "events", ""))


def test_what_a_daemon_writes_is_for_its_user_alone(config):
    def work(found, _stop):
        (found.state_dir / "checkpoints").mkdir(parents=True)
        (found.state_dir / "checkpoints" / "holdout.safetensors").write_bytes(b"events")

    assert enter("learner", "Learn.", work, ["-c", str(config.path)]) == 0
    assert mode(config.state_dir) == 0o700
    assert mode(config.state_dir / "checkpoints") == 0o700
    assert mode(config.state_dir / "checkpoints" / "holdout.safetensors") == 0o600
    (config.folder / "after").touch()
    assert mode(config.folder / "after") == 0o644, "the umask is not restored"


def test_a_directory_that_others_may_read_is_closed_at_the_start(config):
    config.state_dir.mkdir()
    (config.state_dir / "learner.json").touch()
    assert mode(config.state_dir) == 0o755
    with private_state(config):
        assert mode(config.state_dir) == 0o700


def test_a_folder_that_holds_more_than_the_state_stays_as_it_is(write_pipeline, tmp_path):
    path = write_pipeline("127.0.0.1:1", "events", "")
    config = load_config(path, {"ANABRANCH__STATE_DIR": str(path.parent)})
    path.parent.chmod(0o755)
    with private_state(config):
        assert mode(path.parent) == 0o755


def test_a_directory_of_somebody_else_stays_as_it_is(config, monkeypatch):
    config.state_dir.mkdir()
    monkeypatch.setattr("anabranch.runtime.private_state.os.geteuid", lambda: config.state_dir.stat().st_uid + 1)
    with private_state(config):
        assert mode(config.state_dir) == 0o755


def test_one_that_cannot_be_closed_is_logged_and_ends_nothing(config, monkeypatch, caplog):
    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    config.state_dir.mkdir()
    monkeypatch.setattr(Path, "chmod", refuse)
    with private_state(config):
        pass
    assert "stays open to others: Operation not permitted" in caplog.text
