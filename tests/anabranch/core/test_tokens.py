"""One check of bearer tokens for all servers."""

import pytest

from anabranch.core.tokens import bearer_token, is_token


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
