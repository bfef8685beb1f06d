"""A real text stream and a real pretrained encoder: rated texts of four sources, and all-MiniLM-L6-v2.

The label of a text is its source: film review, product review, editorial or tweet. The texts are in the order of a
fixed seed.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from anabranch.ingest.events.tokenizer import TokenizerEncoder
from anabranch.ingest.settings.features import TokenizerFile
from benchmarks.harness import data
from benchmarks.harness.pipeline import Stream, send

CLASSES = list(data.TEXT_SOURCES)
LENGTH = 64
"""Ids of a text; the longest texts have more."""
_ORDER_SEED = 0
_BATCH = 50


@dataclass(frozen=True)
class Texts:
    """Texts, and the index of the class of each, int64 `[N]`."""

    text: list[str]
    label: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.text)

    def rows(self, begin: int, end: int) -> "Texts":
        """Return a part of them."""
        return Texts(self.text[begin:end], self.label[begin:end])


def load_texts(folder: Path | None) -> Texts:
    """Return all texts in the order of a fixed seed; `folder` as of `data.load`."""
    arrays = data.load("texts", folder)
    order = np.random.default_rng(_ORDER_SEED).permutation(len(arrays["text"]))
    return Texts(arrays["text"][order].tolist(), arrays["source"][order])


def write_minilm(target: Path, folder: Path | None) -> Path:
    """Write the files of MiniLM below `target` and return their folder; `folder` as of `data.load`."""
    model = target / "minilm"
    model.mkdir(parents=True, exist_ok=True)
    for name, content in data.load("minilm", folder).items():
        (model / name).write_bytes(content.tobytes())
    return model


def text_schema(model: Path) -> dict[str, Any]:
    """Return the section `[schema]` of texts for the tokenizer of a model's folder."""
    encode = {"tokenizer": str(model / "tokenizer.json"), "length": LENGTH}
    return {"features": {"text": {"dtype": "string", "encode": encode}}, "label": {"name": "y", "classes": CLASSES}}


def produce_texts(bootstrap: str, name: str, texts: Texts, model: Path) -> Stream:
    """Send texts as JSON, one a message, in order."""
    events = zip(texts.text, (CLASSES[each] for each in texts.label), strict=True)
    values = (json.dumps({"text": text, "y": label}).encode() for text, label in events)
    return send(bootstrap, name, text_schema(model), values, len(texts))


def ids_of(texts: list[str], model: Path) -> torch.Tensor:
    """Return the ids of texts, int32 `[N, LENGTH]`."""
    encoder = TokenizerEncoder(TokenizerFile(tokenizer=model / "tokenizer.json", length=LENGTH), "tokenizer")
    return torch.from_numpy(encoder.encode(texts))


def accuracy(module: nn.Module, texts: Texts, model: Path) -> float:
    """Return the accuracy on texts in per cent."""
    ids, label = ids_of(texts.text, model), torch.from_numpy(texts.label)
    right = 0
    with torch.inference_mode():
        for begin in range(0, len(texts), _BATCH):
            answers = module(ids[begin : begin + _BATCH]).argmax(dim=1)
            right += int((answers == label[begin : begin + _BATCH]).sum())
    return 100 * right / len(texts)
