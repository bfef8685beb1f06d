"""Strings to integers, the same in ingest and in serving."""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ingest.config import HashBuckets, Vocabulary


class Encoder(Protocol):
    """Turns strings into ids. Has no state beyond its settings, so learner and serving cannot disagree."""

    size: int
    """Ids are in `[0, size)`."""

    def encode(self, values: Sequence[str]) -> NDArray[np.int64]:
        """Return one id for each string, int64 `[len(values)]`."""
        ...


class VocabularyEncoder:
    """A string's index in the list, from 1; 0 for strings that are not in it."""

    def __init__(self, settings: Vocabulary) -> None:
        self.size = len(settings.vocab) + 1
        self._ids = {word: index for index, word in enumerate(settings.vocab, start=1)}

    def encode(self, values: Sequence[str]) -> NDArray[np.int64]:
        """Return one id for each string, int64 `[len(values)]`."""
        ids = self._ids
        return np.fromiter((ids.get(value, 0) for value in values), np.int64, len(values))


class HashEncoder:
    """The bucket of the string's 64-bit BLAKE2b hash: stable across runs, machines and versions."""

    def __init__(self, settings: HashBuckets) -> None:
        self.size = settings.hash

    def encode(self, values: Sequence[str]) -> NDArray[np.int64]:
        """Return one id for each string, int64 `[len(values)]`."""
        return (hash_texts([value.encode() for value in values]) % np.uint64(self.size)).astype(np.int64)


def encoder_of(settings: Vocabulary | HashBuckets | None) -> Encoder | None:
    """Return the encoder that a feature's settings ask for."""
    if settings is None:
        return None
    return VocabularyEncoder(settings) if isinstance(settings, Vocabulary) else HashEncoder(settings)


def hash_texts(values: Sequence[bytes]) -> NDArray[np.uint64]:
    """Return the 64-bit BLAKE2b hash of each byte string, uint64 `[len(values)]`."""
    digests = b"".join(hashlib.blake2b(value, digest_size=8).digest() for value in values)
    return np.frombuffer(digests, "<u8").astype(np.uint64)
