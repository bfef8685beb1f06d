import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.ingest.events.encoders import encoder_of, hash_texts
from anabranch.ingest.settings.features import HashBuckets, Vocabulary

ENCODERS = [
    pytest.param(Vocabulary(vocab=("red", "", "grün")), id="vocabulary"),
    pytest.param(HashBuckets(hash=2), id="two buckets"),
    pytest.param(HashBuckets(hash=2**31), id="many buckets"),
]


@pytest.mark.parametrize("settings", ENCODERS)
@given(values=st.lists(st.text()))
def test_every_string_becomes_an_id_below_size_and_the_same_one_each_time(settings, values):
    encoder, another = encoder_of(settings), encoder_of(settings)
    ids = encoder.encode(values)
    assert (ids.dtype, ids.shape) == (np.int64, (len(values),))
    assert ((ids >= 0) & (ids < encoder.size)).all()
    assert ids.tolist() == [another.encode([value])[0] for value in values]


def test_a_vocabulary_counts_from_one_and_keeps_zero_for_the_rest():
    encoder = encoder_of(Vocabulary(vocab=("red", "green")))
    assert encoder.size == 3
    assert encoder.encode(["green", "blue", "red", "Red", ""]).tolist() == [2, 0, 1, 0, 0]


def test_hashes_are_the_same_on_every_machine():
    # As `b2sum -l 64` writes them, read as little-endian.
    assert hash_texts([b"", b"anabranch"]).tolist() == [13020603013274838756, 13574918910744585233]
    assert encoder_of(HashBuckets(hash=65536)).encode(["anabranch"]).tolist() == [13574918910744585233 % 65536]


def test_hashes_of_nothing_are_an_empty_array():
    assert hash_texts([]).shape == (0,)


def test_buckets_are_filled_evenly():
    ids = encoder_of(HashBuckets(hash=16)).encode([str(n) for n in range(16_000)])
    # 1000 each; six standard deviations are 184.
    assert (np.abs(np.bincount(ids, minlength=16) - 1000) < 184).all()


def test_numbers_have_no_encoder():
    assert encoder_of(None) is None
