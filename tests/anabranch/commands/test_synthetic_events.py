"""The synthetic events of `anabranch plan`: values from which a model learns its features, in each format."""

from typing import Any

import numpy as np
import pytest

from anabranch.commands.planning.calibrating.synthetic_events import synthetic_messages
from ingest.config import SchemaSettings, StreamSettings
from ingest.events.schema import Schema
from ingest.formats.registry import FORMATS

ENCODE = {"learn": 1000}
NUMBERS: dict[str, dict[str, Any]] = {
    "plain": {"dtype": "int64"},
    "id": {"dtype": "int64", "encode": ENCODE},
    "tiny": {"dtype": "int8", "shape": [2], "encode": ENCODE},
    "bounded": {"dtype": "int32", "encode": ENCODE, "min": -3, "max": 3},
    "below": {"dtype": "int32", "encode": ENCODE, "max": -5},
    "amount": {"dtype": "uint16", "scale": "robust"},
    "when": {"dtype": "int64", "cycles": ["day", "year"]},
    "seconds": {"dtype": "float64", "cycles": ["hour"]},
    "price": {"dtype": "float32", "scale": "standard", "missing": "indicator"},
    "sizes": {"dtype": "float64", "shape": [3], "missing": 0.0},
}
STRINGS: dict[str, dict[str, Any]] = {
    "word": {"dtype": "string", "encode": ENCODE},
    "country": {"dtype": "string", "encode": {"hash": 4096}},
}
CROSS = {"word_country": {"of": ["word", "country"], "encode": ENCODE}}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["json", "rows", "arrow"])
def test_synthetic_events_have_values_to_learn_features_from(name: str) -> None:
    features = NUMBERS if name == "rows" else NUMBERS | STRINGS
    cross = {} if name == "rows" else CROSS
    label = {"name": "y", "classes": 3}
    schema = Schema(SchemaSettings.model_validate({"features": features, "cross": cross, "label": label}))
    stream = StreamSettings.model_validate({"bootstrap_servers": "broker:1", "topics": ["events"], "format": name})
    messages = synthetic_messages(schema, stream, None, 1)

    decoded = FORMATS[name](schema).decode(messages.values)

    assert decoded.rejects == []
    columns = {key.removeprefix("feature."): value for key, value in decoded.columns.items()}
    assert len(columns["id"]) == len(messages.values) > 1000
    assert not columns["plain"].any()
    for key in ("id", "word", "country") if cross else ("id",):
        _, counts = np.unique(columns[key], return_counts=True)
        assert len(counts) > 200, key
        assert key == "country" or counts.max() > 100, "ids are Zipf-like"
    assert len(np.unique(columns["tiny"])) > 50
    assert {*columns["bounded"].tolist()} == {*range(-3, 4)}
    assert columns["below"].tolist() == [-5] * len(columns["id"])
    assert len(np.unique(columns["amount"])) > 50
    for key in ("when", "seconds"):
        assert len(np.unique(columns[key] // 86_400)) > 300, key
    for key in ("price", "sizes"):
        assert 0.05 < np.isnan(columns[key]).mean() < 0.2, key
