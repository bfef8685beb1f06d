"""Strings to integers, the same in ingest and in serving."""

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.tokenizer import TokenizerEncoder
from anabranch.ingest.settings.features import Encoding, HashBuckets, LearnedVocabulary, TokenizerFile, Vocabulary


class Encoder(Protocol):
    """Turns strings into ids. Has no state beyond its settings, so learner and serving cannot disagree."""

    size: int
    """Ids are in `[0, size)`."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """Shape of the ids of one string."""
    identity: dict[str, Any]
    """What decides the ids, as JSON values: encoders of one identity give the same ids."""

    @property
    def padding(self) -> int | None:
        """The id that fills up a text; None: there is none."""
        ...

    def encode(self, values: Sequence[str]) -> NDArray[np.signedinteger[Any]]:
        """Return the ids of each string, `[len(values), *shape]`."""
        ...


class VocabularyEncoder:
    """A string's index in the list, from 1; 0 for strings that are not in it."""

    padding = None
    dtype: np.dtype[Any] = np.dtype(np.int64)
    shape: tuple[int, ...] = ()

    def __init__(self, settings: Vocabulary) -> None:
        self.size = len(settings.vocab) + 1
        self.identity = settings.model_dump(mode="json")
        self._ids = {word: index for index, word in enumerate(settings.vocab, start=1)}

    def encode(self, values: Sequence[str]) -> NDArray[np.int64]:
        """Return one id for each string, int64 `[len(values)]`."""
        ids = self._ids
        return np.fromiter((ids.get(value, 0) for value in values), np.int64, len(values))


class HashEncoder:
    """The bucket of the string's 64-bit BLAKE2b hash: stable across runs, machines and versions."""

    padding = None
    dtype: np.dtype[Any] = np.dtype(np.int64)
    shape: tuple[int, ...] = ()

    def __init__(self, settings: HashBuckets) -> None:
        self.size = settings.hash
        self.identity = settings.model_dump(mode="json")

    def encode(self, values: Sequence[str]) -> NDArray[np.int64]:
        """Return one id for each string, int64 `[len(values)]`."""
        return (hash_texts([value.encode() for value in values]) % np.uint64(self.size)).astype(np.int64)


class KeyEncoder:
    """The string's 64-bit BLAKE2b hash, of which the model's learned vocabulary makes a row."""

    padding = None
    dtype: np.dtype[Any] = np.dtype(np.int64)
    shape: tuple[int, ...] = ()
    size = 2**63 - 1
    """Hashes are any int64; those from 0 are examples."""

    def __init__(self, settings: LearnedVocabulary) -> None:
        self.identity = {"learn": settings.learn}

    def encode(self, values: Sequence[str]) -> NDArray[np.int64]:
        """Return one hash for each string, int64 `[len(values)]`."""
        return hash_texts([value.encode() for value in values]).view(np.int64)


def encoder_of(settings: Encoding | None, key: str = "encode") -> Encoder | None:
    """Return the encoder that a feature's settings ask for; `key` names them.

    Raises:
        SettingsError: the file of a tokenizer cannot be used.
    """
    if settings is None:
        return None
    if isinstance(settings, TokenizerFile):
        return TokenizerEncoder(settings, f"{key}.tokenizer")
    if isinstance(settings, LearnedVocabulary):
        return KeyEncoder(settings)
    return VocabularyEncoder(settings) if isinstance(settings, Vocabulary) else HashEncoder(settings)


def hash_texts(values: Sequence[bytes]) -> NDArray[np.uint64]:
    """Return the 64-bit BLAKE2b hash of each byte string, uint64 `[len(values)]`."""
    digests = b"".join(hashlib.blake2b(value, digest_size=8).digest() for value in values)
    return np.frombuffer(digests, "<u8").astype(np.uint64)
