"""An object that several processes replace: it is read when it has changed, and replaced as it was read."""

import msgspec
import pytest

from anabranch.core.errors import SettingsError
from anabranch.core.failures import damage_is, decoded
from anabranch.core.object_store.bucket import Bucket, ReplacedError
from anabranch.core.object_store.tagged_object import TaggedObject


class Number(msgspec.Struct, frozen=True):
    value: int = 0


@pytest.fixture
def bucket(tmp_path):
    return Bucket(f"file://{tmp_path}/bucket", {})


def number_in(bucket):
    def decode(content):
        with damage_is(SettingsError, "the number cannot be used"):
            return decoded(content, Number)

    return TaggedObject(bucket, "number.json", decode, Number(), SettingsError, 100)


def test_an_object_is_read_when_it_has_changed(bucket):
    one, other = number_in(bucket), number_in(bucket)
    assert not one.poll(), "there is none"
    other.replace(Number(1))
    assert (one.poll(), one.contents) == (True, Number(1))
    assert not one.poll()
    bucket.delete(["number.json"])
    assert (one.poll(), one.contents, one.tag) == (True, Number(), None)


def test_what_another_one_has_replaced_since_is_not_replaced(bucket):
    one, other = number_in(bucket), number_in(bucket)
    one.replace(Number(1))
    other.poll()
    one.replace(Number(2))
    with pytest.raises(ReplacedError):
        other.replace(Number(3))
    with pytest.raises(ReplacedError):
        number_in(bucket).replace(Number(4))
    other.poll()
    other.replace(Number(3))
    assert (one.poll(), one.contents) == (True, Number(3))


@pytest.mark.parametrize("content", [b"{", b'{"value": "x"}'])
def test_what_cannot_be_used_is_an_error_until_it_has_changed_and_leaves_what_was_read(bucket, content):
    one = number_in(bucket)
    one.replace(Number(1))
    bucket.write("number.json", content)
    for _ in range(2):
        with pytest.raises(SettingsError, match="the number cannot be used"):
            one.poll()
    assert one.contents == Number(1)
    bucket.write("number.json", b" " * 1000)
    with pytest.raises(SettingsError, match="has 1000 bytes, and at most 100 are read"):
        one.poll()
    bucket.write("number.json", b'{"value": 5}')
    assert (one.poll(), one.contents) == (True, Number(5))
