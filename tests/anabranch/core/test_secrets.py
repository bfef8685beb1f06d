"""The secret by which events are held out, kept and sampled, and the bearer tokens of all servers."""

import pytest

from anabranch.core.errors import SettingsError
from anabranch.core.stream_secret import SECRET_FILE, StreamSecret
from anabranch.core.tokens import bearer_token, is_token


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


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer secret", b"secret"),
        ("bearer secret", b"secret"),
        ("BEARER   secret ", b"secret"),
        ("", b""),
        ("Bearer", b""),
        ("Bearer ", b""),
        ("secret", b""),
        ("Basic secret", b""),
        ("Bearer \xc3\xa0", b"\xc3\xa0"),
        ("Bearer \u20ac", b"?"),
    ],
)
def test_the_token_is_what_follows_the_scheme_in_any_case(header, token):
    assert bearer_token(header) == token


def test_a_token_is_accepted_if_it_is_one_of_those_given():
    assert is_token(b"admin", "read", "admin")
    assert is_token("\xe0".encode(), "\xe0")
    assert not is_token(b"other", "read", "admin")
    assert not is_token(b"read")


def test_an_empty_token_is_never_accepted():
    assert not is_token(b"", "")
    assert not is_token(b"", "read", "")
