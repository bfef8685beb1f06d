"""Hashes of events."""

import numpy as np

from anabranch.ingest.events.identity import keyed_hash

SECRET = int.from_bytes(bytes(range(16)), "little")


def siphash_1_3(message, secret):
    """The definition, one word at a time (Aumasson and Bernstein 2012)."""
    low, high = secret & 2**64 - 1, secret >> 64
    v = [low ^ 0x736F6D6570736575, high ^ 0x646F72616E646F6D, low ^ 0x6C7967656E657261, high ^ 0x7465646279746573]

    def rotated(word, bits):
        return (word << bits | word >> 64 - bits) & 2**64 - 1

    def scramble():
        v[0] = (v[0] + v[1]) % 2**64
        v[1] = rotated(v[1], 13) ^ v[0]
        v[0] = rotated(v[0], 32)
        v[2] = (v[2] + v[3]) % 2**64
        v[3] = rotated(v[3], 16) ^ v[2]
        v[0] = (v[0] + v[3]) % 2**64
        v[3] = rotated(v[3], 21) ^ v[0]
        v[2] = (v[2] + v[1]) % 2**64
        v[1] = rotated(v[1], 17) ^ v[2]
        v[2] = rotated(v[2], 32)

    for word in (message, 8 << 56):
        v[3] ^= word
        scramble()
        v[0] ^= word
    v[2] ^= 0xFF
    for _ in range(3):
        scramble()
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def test_a_keyed_hash_is_siphash_of_the_eight_bytes_of_a_value():
    values = np.array([0, 1, 2**63, 2**64 - 1, 0x0706050403020100], np.uint64)
    before = values.copy()
    for secret in (0, SECRET, 2**128 - 1):
        assert keyed_hash(values, secret).tolist() == [siphash_1_3(value, secret) for value in values.tolist()]
    assert values.tolist() == before.tolist()
    assert len(keyed_hash(values[:0], SECRET)) == 0
