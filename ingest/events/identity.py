"""An event's identity, `topic#incarnation[partition]@offset/row`, as 64-bit hashes, whole blocks at a time."""

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.partition import TopicPartition

_Words = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROW = np.uint64(0xD6E8FEB86659FD93)
_ROUNDS = (
    (np.array(30, np.uint64), np.array(0xBF58476D1CE4E5B9, np.uint64)),
    (np.array(27, np.uint64), np.array(0x94D049BB133111EB, np.uint64)),
)
_LAST = np.array(31, np.uint64)
_SIP = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
_SHIFTS = {bits: (np.array(bits, np.uint64), np.array(64 - bits, np.uint64)) for bits in (13, 16, 17, 21, 32)}
_LENGTH, _FINAL = np.array(8 << 56, np.uint64), np.array(0xFF, np.uint64)


def partition_base(partition: TopicPartition) -> int:
    """Return the 64-bit hash of a topic partition and incarnation, which differs from that of all others."""
    return base_of(partition_name(partition))


def partition_name(partition: TopicPartition) -> str:
    """Return `topic#incarnation[partition]`, with which identities begin."""
    return f"{partition.identity_topic}#{partition.incarnation}[{partition.partition}]"


@functools.lru_cache(maxsize=4096)
def base_of(name: str) -> int:
    """Return `partition_base` of the partition of that name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def identity_hash(base: NDArray[np.uint64], offset: NDArray[np.int64], row: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Hash N events' identities. Anybody can compute it: what others must not foresee goes by `keyed_hash` of it.

    Args:
        base: uint64 `[N]`, `partition_base` of each event's partition.
        offset: int64 `[N]`.
        row: int32 `[N]`.
    """
    mixed = offset.astype(np.uint64)
    mixed *= _GOLDEN
    if row.any():
        mixed += row.astype(np.uint64) * _ROW
    mixed ^= base
    return mix(mixed)


def keyed_hash(value: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Hash N values, uint64 `[N]`, under a seed of 128 bits, without which nobody can compute a bit of the result.

    SipHash-1-3 (Aumasson and Bernstein 2012, "SipHash: a fast short-input PRF") of the eight bytes of each value.
    """
    state = np.empty((4, len(value)), np.uint64)
    state[:] = _initial(seed)
    a, b, c, d = state
    spare = np.empty(len(value), np.uint64)
    for word in (value, _LENGTH):
        d ^= word
        _sip_round(a, b, c, d, spare)
        a ^= word
    c ^= _FINAL
    for _ in range(3):
        _sip_round(a, b, c, d, spare)
    return a ^ b ^ c ^ d


def _sip_round(a: _Words, b: _Words, c: _Words, d: _Words, spare: _Words) -> None:
    a += b
    _rotate(b, 13, spare)
    b ^= a
    _rotate(a, 32, spare)
    c += d
    _rotate(d, 16, spare)
    d ^= c
    a += d
    _rotate(d, 21, spare)
    d ^= a
    c += b
    _rotate(b, 17, spare)
    b ^= c
    _rotate(c, 32, spare)


def _rotate(words: _Words, bits: int, spare: _Words) -> None:
    left, right = _SHIFTS[bits]
    np.right_shift(words, right, out=spare)
    np.left_shift(words, left, out=words)
    words |= spare


def mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64 bits that spreads every bit."""
    value = value + _GOLDEN
    # In place: for a hundred events the calls and the memory around the arithmetic are what it costs.
    shifted = np.empty_like(value)
    for shift, factor in _ROUNDS:
        value ^= np.right_shift(value, shift, out=shifted)
        value *= factor
    value ^= np.right_shift(value, _LAST, out=shifted)
    return value


@functools.lru_cache(maxsize=64)
def _initial(seed: int) -> NDArray[np.uint64]:
    """Return the state of SipHash under a seed, uint64 `[4, 1]`."""
    low, high = seed & (2**64 - 1), seed >> 64 & (2**64 - 1)
    keyed = [key ^ constant for key, constant in zip((low, high, low, high), _SIP, strict=True)]
    state = np.array(keyed, np.uint64).reshape(4, 1)
    state.flags.writeable = False
    return state
