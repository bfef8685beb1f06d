"""The secret by which events are held out, kept and sampled."""

import pytest

from anabranch.core.errors import SettingsError
from anabranch.core.stream_secret import SECRET_FILE, StreamSecret


def test_a_secret_is_made_once_and_its_owner_alone_may_read_it(tmp_path):
    assert StreamSecret.read(tmp_path) is None
    made = StreamSecret.open(tmp_path)
    assert (tmp_path / SECRET_FILE).stat().st_mode & 0o777 == 0o600
    assert StreamSecret.open(tmp_path).value == made.value == StreamSecret.open(tmp_path, seed=0).value
    assert [path.name for path in tmp_path.iterdir()] == [SECRET_FILE]


def test_two_state_directories_have_different_secrets_unless_they_are_of_a_seed(tmp_path):
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        folder.mkdir()
    one, other = (StreamSecret.open(folder) for folder in folders[:2])
    assert one.value != other.value
    assert one.digest != other.digest
    one, other = (StreamSecret.open(folder, seed=7) for folder in folders[2:])
    assert one.value == other.value == StreamSecret.fixed(7).value != StreamSecret.fixed(8).value


def test_each_purpose_has_a_number_of_its_own():
    secret = StreamSecret.fixed(1)
    numbers = {secret.number(purpose) for purpose in ("holdout", "replay", "lag policy", "held-out events")}
    assert len(numbers) == 4
    assert all(2**64 < number < 2**128 for number in numbers)
    assert secret.digest not in secret.value.hex()


def test_a_torn_secret_is_refused(tmp_path):
    StreamSecret.open(tmp_path)
    (tmp_path / SECRET_FILE).write_bytes(b"short")
    with pytest.raises(SettingsError, match=r"secret.key has 5 bytes, and not the 32 of a secret; put it back"):
        StreamSecret.open(tmp_path)
