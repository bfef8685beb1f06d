"""Hashes of events, the forms of their keys, and which are held out."""

import struct

import numpy as np
import pytest

from anabranch.core.stream_secret import StreamSecret
from anabranch.ingest.events.hold_out import held_out, shuffle_seed
from anabranch.ingest.events.identity import keyed_hash
from anabranch.ingest.events.key_forms import PLAIN, form_of
from anabranch.ingest.settings.stream import HoldOut
from anabranch.learner.settings.learner import GateSettings

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


@pytest.mark.parametrize(
    ("key", "form"),
    [
        (b"10", PLAIN),
        ("k\u00e9y-1 of {x}".encode(), PLAIN),
        (b"", PLAIN),
        (b"{bad", PLAIN),
        (b'{"id": 11}', "a JSON object"),
        (b"[11]", "a JSON array"),
        (b'{"schema": {"type": "struct"}, "payload": {"id": 12}}', "Kafka Connect's schema and payload"),
        (b'"13"', "a text in quotes"),
        (struct.pack(">q", 14), "a binary number"),
        (struct.pack(">i", 14), "a binary number"),
        (b"\x00\x00\x00\x00\x01\x1e", "a record of a Schema Registry"),
        (b"\xff\xfe\x00", "bytes that are no text"),
    ],
)
def test_the_form_of_a_key_is_named(key, form):
    assert form_of(key) == form


HALF = HoldOut(fraction=0.5, seed=3)
N = 64


def columns(key, group):
    return {"offset": np.arange(N), "row": np.zeros(N, np.int32), "key_hash": key, "group_hash": group}


def test_each_event_is_decided_by_its_group_else_its_key_else_itself():
    base, none = np.full(N, 7, np.uint64), np.zeros(N, np.uint64)
    key, group = np.full(N, 11, np.uint64), np.full(N, 12, np.uint64)
    kind = np.arange(N) % 3
    mixed = held_out(HALF, columns(np.where(kind > 0, key, none), np.where(kind > 1, group, none)), base)
    by_itself, by_key, by_group = (
        held_out(HALF, columns(*hashes), base) for hashes in ((none, none), (key, none), (none, group))
    )
    assert mixed.tolist() == np.choose(kind, [by_itself, by_key, by_group]).tolist()
    assert 0 < by_itself.sum() < N
    assert (len(set(by_key.tolist())), len(set(by_group.tolist()))) == (1, 1)


def test_with_another_secret_other_keys_are_held_out():
    keys = np.arange(1, 100_001, dtype=np.uint64)
    none, row = np.zeros(len(keys), np.uint64), np.zeros(len(keys), np.int32)
    events = {"offset": np.arange(len(keys)), "row": row, "key_hash": keys, "group_hash": none}
    gate = GateSettings(holdout_fraction=0.01)
    first, second = (held_out(gate.hold_out(StreamSecret.fixed(seed)), events, none) for seed in (0, 1))
    assert first.tolist() == held_out(gate.hold_out(StreamSecret.fixed(0)), events, none).tolist()
    for held in (first, second):
        assert abs(held.mean() - 0.01) < 0.0015
    assert (first & second).sum() < 40, "of 1,000, ten are held out under both by chance"


def test_the_order_of_rows_in_files_reveals_nothing_of_the_secret():
    seeds = {shuffle_seed(HoldOut(fraction=0, seed=seed)) for seed in (0, 1, 2**127)}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**63 for seed in seeds)
