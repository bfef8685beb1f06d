"""Messages with random events of a schema, at a given size."""

import math
import string
from typing import Any

import msgspec
import numpy as np

from anabranch.commands.produce import packer
from anabranch.core.errors import SettingsError
from ingest.config import StreamSettings
from ingest.events.schema import Feature, Label, Schema
from ingest.feature_settings import FeatureSettings, LearnedVocabulary, TokenizerFile, Vocabulary

PADDING = "anabranch_padding"
"""A field that the schema does not know, which brings a JSON message to its size."""
_EVENTS = 2_048
_MOST_BYTES = 16_000_000
_KEYS = 100_000
_SOME_WORDS = 3
_DIGITS = (15, 12, 9, 7, 6, 5, 4, 3, 2, 1)
_TIME = 1_700_000_000
_YEAR_SECONDS = 31_556_952
_ZIPF = 1.2
_MOST_IDS = 10_000_000
_AMOUNTS = 100
"""Whole numbers that are scaled are below it."""
_MISSING = 0.1
"""The part of values that is missing, where they may be."""


class Synthetic(msgspec.Struct, frozen=True):
    """Messages, and the mean bytes of an event in them."""

    values: list[bytes]
    event_bytes: float


def synthetic_messages(
    schema: Schema, stream: StreamSettings, event_bytes: int | None, per_message: int, seed: int = 0
) -> Synthetic:
    """Return some messages of `per_message` events each, in the stream's format; those of a registry are JSON here.

    Args:
        schema: of the events.
        stream: has the format.
        event_bytes: of an event. JSON gets fewer digits, or a further field, until it fits; None: six digits.
        per_message: events of a message; 1 for JSON.
        seed: of the random values.

    Raises:
        SettingsError: the format cannot hold the schema, or several events a message.
    """
    pack = packer(stream.format)
    if per_message > 1 and pack is None:
        raise SettingsError(f'a message of stream.format = "{stream.format}" has one event, not {per_message}')
    random = np.random.default_rng(seed)
    if pack is None:
        return _json(schema, random, event_bytes)
    first = pack(schema, [_event(schema, random, _DIGITS[0]) for _ in range(per_message)])
    count = max(2, min(_EVENTS // per_message, _MOST_BYTES // len(first)))
    values = [pack(schema, [_event(schema, random, _DIGITS[0]) for _ in range(per_message)]) for _ in range(count)]
    return Synthetic(values, sum(map(len, values)) / (count * per_message))


def _json(schema: Schema, random: np.random.Generator, event_bytes: int | None) -> Synthetic:
    digits = 6 if event_bytes is None else _digits_within(schema, event_bytes)
    largest = len(_encoded(_event(schema, random, digits), event_bytes))
    count = max(2, min(_EVENTS, _MOST_BYTES // largest))
    values = [_encoded(_event(schema, random, digits), event_bytes) for _ in range(count)]
    return Synthetic(values, sum(map(len, values)) / count)


def _digits_within(schema: Schema, event_bytes: int) -> int:
    """Return the most digits after the point with which an event has at most `event_bytes`; the fewest if none do."""
    fits = (
        digits
        for digits in _DIGITS
        if len(msgspec.json.encode(_event(schema, np.random.default_rng(0), digits))) <= event_bytes
    )
    return next(fits, _DIGITS[-1])


def _encoded(event: dict[str, Any], event_bytes: int | None) -> bytes:
    value = msgspec.json.encode(event)
    missing = 0 if event_bytes is None else event_bytes - len(value) - len(f',"{PADDING}":""')
    return value if missing < 0 or event_bytes is None else msgspec.json.encode({**event, PADDING: "x" * missing})


def _event(schema: Schema, random: np.random.Generator, digits: int) -> dict[str, Any]:
    event = {feature.name: _value(schema, feature, random, digits) for feature in schema.features}
    event[schema.label.name] = _label(schema.label, random)
    for name in (schema.key, schema.group):
        if name is not None and name not in event:
            event[name] = int(random.integers(_KEYS))
    if schema.time is not None:
        event.setdefault(schema.time, float(_TIME + int(random.integers(_KEYS))))
    if schema.weight is not None:
        event.setdefault(schema.weight, 1.0)
    return event


def _value(schema: Schema, feature: Feature, random: np.random.Generator, digits: int) -> Any:
    count, settings = math.prod(feature.shape), schema.settings.features[feature.name]
    flat: np.ndarray[Any, Any]
    if settings.cycles:
        flat = _TIME + random.integers(_YEAR_SECONDS, size=count)
        flat = flat if feature.dtype.kind != "f" else flat.astype(float)
    elif feature.is_string:
        flat = np.array([_text(settings, random) for _ in range(count)], object)
    elif feature.dtype.kind == "b":
        flat = random.integers(2, size=count).astype(bool)
    elif feature.dtype.kind == "f":
        flat = feature.within(random.standard_normal(count).round(digits))
        if feature.may_be_nan:
            flat[random.random(count) < _MISSING] = np.nan
    elif isinstance(settings.encode, LearnedVocabulary):
        lowest, most = _range(feature, _MOST_IDS)
        flat = lowest + random.zipf(_ZIPF, count) % most
    elif settings.scale is not None:
        lowest, most = _range(feature, _AMOUNTS)
        flat = lowest + random.integers(most, size=count)
    elif feature.min is not None and feature.max is not None:
        flat = random.integers(int(feature.min), int(feature.max), count, endpoint=True)
    else:  # an id may have no row in the model's embedding
        flat = np.full(count, feature.filler)
    return flat.reshape(feature.shape).tolist()


def _range(feature: Feature, most: int) -> tuple[int, int]:
    """Return the lowest of at most `most` whole numbers that the feature may have, and how many there are."""
    limit = int(np.iinfo(np.dtype(feature.dtype.name)).max if feature.max is None else feature.max)
    lowest = int(feature.filler if feature.min is None else feature.min)
    return lowest, min(most, limit - lowest + 1)


def _text(settings: FeatureSettings, random: np.random.Generator) -> str:
    encode = settings.encode
    if isinstance(encode, Vocabulary):
        return str(random.choice(encode.vocab))
    if isinstance(encode, LearnedVocabulary):
        return f"id-{random.zipf(_ZIPF) % _MOST_IDS}"
    words = encode.length if isinstance(encode, TokenizerFile) else 1
    letters = np.array([*string.ascii_lowercase])
    return " ".join("".join(random.choice(letters, _SOME_WORDS)) for _ in range(words))


def _label(label: Label, random: np.random.Generator) -> Any:
    if label.classes is None:
        return float(random.standard_normal())
    names = list(label.names or range(label.classes))
    if label.length is not None:
        return [names[index] for index in random.integers(label.classes, size=label.length).tolist()]
    chosen = [names[index] for index in np.flatnonzero(random.random(label.classes) < 1 / 2)] if label.multi else None
    return names[int(random.integers(label.classes))] if chosen is None else chosen
