"""Texts to the ids of a pretrained model's tokenizer, the same in ingest and in serving.

Legend: N texts, B of them together, L ids of each, and as many words at most.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anabranch.core.errors import SettingsError
from anabranch.core.extras import needs
from anabranch.core.failures import DamagedError, panics_are_errors
from anabranch.core.files import read_file
from anabranch.ingest.settings.features import TokenizerFile

MOST_FILE_BYTES = 64 * 2**20
"""A larger file is refused: that of a vocabulary of 256,000 tokens has half of it."""
CHARACTERS_PER_ID = 100
"""Of a text, `length` times as many characters are read: BERT reads no longer word, and 10 MB would take seconds."""
_BATCH = 256
"""Texts that are encoded together: more take memory, and are not faster."""
_LONGEST = 200
"""Characters of an error of the package in a sentence."""
_PADDING = ("[PAD]", "<pad>", "<|pad|>")
"""The usual names of the padding token, for files without a section `padding`."""


class UnencodableError(ValueError):
    """A text that the package cannot encode: a pattern of the file takes too many steps on it, for example."""


class TokenizerEncoder:
    """The first L ids of a text, filled up on the right with the padding id, by the rules of a `tokenizer.json`."""

    dtype: np.dtype[Any] = np.dtype(np.int32)

    def __init__(self, settings: TokenizerFile, key: str) -> None:
        """Read the file; `key` is the setting that names it.

        Raises:
            SettingsError: the package is missing, or the file cannot be used.
        """
        self.path = settings.tokenizer
        self.shape: tuple[int, ...] = (2, settings.length) if settings.words else (settings.length,)
        self._length, self._words = settings.length, settings.words
        self._characters = settings.length * CHARACTERS_PER_ID
        self._name = f'{key} = "{settings.tokenizer}"'
        content = self._content()
        self.identity: dict[str, Any] = {
            "tokenizer": hashlib.sha256(content).hexdigest(),
            "length": settings.length,
            **({"words": True} if settings.words else {}),
        }
        self._tokenizer: Any = self._parsed(content)
        self.size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        padding = self._tokenizer.padding
        self.padding = self._usual_padding() if padding is None else int(padding["pad_id"])
        if not 0 <= self.padding < self.size <= np.iinfo(self.dtype).max:
            raise SettingsError(
                f"{self._name}: its padding id is {self.padding}, and its largest id {self.size - 1}; "
                "save it again with the ids of the model"
            )
        self._use(settings.length)

    def encode(self, values: Sequence[str]) -> NDArray[np.int32]:
        """Return the ids of each text, int32 `[N, L]`; with `words`, and where each word begins, int32 `[N, 2, L]`.

        Raises:
            UnencodableError: the package cannot encode one of the texts.
        """
        ids_NL = np.full((len(values), self._length), self.padding, np.int32)
        first_NL = np.zeros_like(ids_NL) if self._words else None
        positions_L = np.arange(self._length)
        for begin in range(0, len(values), _BATCH):
            texts = [value[: self._characters] for value in values[begin : begin + _BATCH]]
            encoded = self._encoded(texts)
            ids = [each.ids for each in encoded]
            lengths_B = np.fromiter(map(len, ids), np.int64, len(ids))
            filled_BL = positions_L < lengths_B[:, None]
            ids_NL[begin : begin + _BATCH][filled_BL] = np.fromiter(chain.from_iterable(ids), np.int32)
            if first_NL is not None:
                for first_L, each in zip(first_NL[begin : begin + _BATCH], encoded, strict=True):
                    _set_first(first_L, each.word_ids)
        return ids_NL if first_NL is None else np.stack([ids_NL, first_NL], axis=1)

    def _encoded(self, texts: Sequence[str]) -> list[Any]:
        try:
            with panics_are_errors():
                if not self._words:
                    return list(self._tokenizer.encode_batch_fast(texts))
                return list(self._tokenizer.encode_batch([text.split() for text in texts], is_pretokenized=True))
        except Exception as exc:
            reason = " ".join(str(exc).split())[:_LONGEST]
            raise UnencodableError(f"the tokenizer cannot encode a text: {reason}") from exc

    def _content(self) -> bytes:
        try:
            return read_file(Path(os.path.realpath(self.path)), MOST_FILE_BYTES)  # the cache of a hub has links
        except (OSError, DamagedError) as exc:
            reason = exc.strerror or exc if isinstance(exc, OSError) else exc
            raise SettingsError(f"{self._name} cannot be read: {reason}; name the tokenizer.json of a model") from exc

    def _parsed(self, content: bytes) -> Any:
        with needs(self._name, "tokenizers", "hf"):
            from tokenizers import Tokenizer
        # Its threads would take cores from the learner, and a forked process does not have them.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        with self._refusing("it is not a tokenizer.json"):
            return Tokenizer.from_buffer(content)

    def _use(self, length: int) -> None:
        """Set truncation and padding, and try texts that tokenizers refuse: of no word, of many, of unknown ones."""
        with self._refusing(f"it cannot be used with length = {length}"):
            self._tokenizer.no_padding()
            self._tokenizer.enable_truncation(length)
            empty, full, _ = self._encoded(["", "a text " * length, "\ue000 \U000f0000"])
            if not len(empty.ids) < len(full.ids) <= length:
                raise ValueError(f"the {len(empty.ids)} ids that it adds to each text leave no room for another")
            if self._words and full.ids != self._tokenizer.encode_batch_fast(["a text " * length])[0].ids:
                raise ValueError("a word has other ids by itself than in a text; save it with add_prefix_space = true")

    @contextlib.contextmanager
    def _refusing(self, what: str) -> Iterator[None]:
        try:
            with panics_are_errors():
                yield
        except Exception as exc:
            raise SettingsError(f"{self._name}: {what}: {' '.join(str(exc).split())[:_LONGEST]}") from exc

    def _usual_padding(self) -> int:
        ids = [self._tokenizer.token_to_id(name) for name in _PADDING]
        found = [each for each in ids if each is not None]
        if not found:
            raise SettingsError(
                f"{self._name} has no padding token; load it with tokenizers.Tokenizer.from_file, call "
                "enable_padding(pad_id=..., pad_token=...) with a token that the model ignores, and save it"
            )
        return int(found[0])


def _set_first(first_L: NDArray[np.int32], word_ids: Sequence[int | None]) -> None:
    """Set 1 + the index of the first id of each word, whose number each id has."""
    for index, word in reversed(list(enumerate(word_ids, start=1))):
        if word is not None and word < len(first_L):
            first_L[word] = index
