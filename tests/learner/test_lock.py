"""One learner a state directory."""

import subprocess
import sys
from pathlib import Path

import pytest

from ingest.errors import SecondLearnerError, SettingsError
from learner.lock import hold_state_directory


def test_a_second_learner_is_refused_while_the_first_is_alive(tmp_path: Path) -> None:
    with hold_state_directory(tmp_path), pytest.raises(SecondLearnerError, match=str(tmp_path)):
        with hold_state_directory(tmp_path):
            pass


def test_the_epoch_grows_with_every_holder(tmp_path: Path) -> None:
    epochs = []
    for _ in range(3):
        with hold_state_directory(tmp_path / "var") as epoch:
            epochs.append(epoch)
    assert epochs == [1, 2, 3]


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from learner.lock import hold_state_directory\n"
        "with hold_state_directory(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(SecondLearnerError), hold_state_directory(tmp_path):
            pass
        holder.kill()
        holder.wait()
        with hold_state_directory(tmp_path) as epoch:
            assert epoch == 2


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="state_dir"), hold_state_directory(tmp_path / "file" / "var"):
        pass
