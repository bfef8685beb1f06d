"""An event's identity, `topic#incarnation[partition]@offset/row`, as 64-bit hashes, whole blocks at a time."""

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

from ingest.events.partition import TopicPartition

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROW = np.uint64(0xD6E8FEB86659FD93)
_ROUNDS = (
    (np.array(30, np.uint64), np.array(0xBF58476D1CE4E5B9, np.uint64)),
    (np.array(27, np.uint64), np.array(0x94D049BB133111EB, np.uint64)),
)
_LAST = np.array(31, np.uint64)


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


def identity_hash(
    base: NDArray[np.uint64], offset: NDArray[np.int64], row: NDArray[np.int32], seed: int
) -> NDArray[np.uint64]:
    """Hash N events' identities under a seed; different seeds give independent hashes.

    Args:
        base: uint64 `[N]`, `partition_base` of each event's partition.
        offset: int64 `[N]`.
        row: int32 `[N]`.
        seed: any whole number of 64 bits.
    """
    mixed = offset.astype(np.uint64)
    mixed *= _GOLDEN
    if row.any():
        mixed += row.astype(np.uint64) * _ROW
    mixed ^= base
    return mix(mix(mixed) ^ _salt(seed))


def seeded_hash(value: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Hash values that are hashes already (keys, groups) under a seed, uint64 `[N]`."""
    return mix(value ^ _salt(seed))


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
def _salt(seed: int) -> NDArray[np.uint64]:
    salt = mix(np.array([seed & (2**64 - 1)], np.uint64))
    salt.flags.writeable = False
    return salt
