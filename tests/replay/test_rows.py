"""Packed rows."""

import numpy as np
import torch

from ingest.config import SchemaSettings
from ingest.schema import Schema
from replay.rows import RowLayout


def schema(*features: str) -> Schema:
    settings = {"features": {name: {"dtype": "float32"} for name in features}, "label": {"name": "y", "classes": 2}}
    return Schema(SchemaSettings.model_validate(settings))


def test_rows_can_be_read_after_the_features_have_changed_places_in_the_file():
    before, after = schema("a", "b"), schema("b", "a")
    assert before.digest == after.digest  # so that a cut is taken up
    columns = {name: np.zeros(1, dtype) for name, (dtype, _) in before.payload().items()}
    columns["feature.a"], columns["feature.b"] = np.float32([1]), np.float32([2])
    rows = torch.from_numpy(RowLayout(before.payload()).pack(columns, np.arange(1)))
    read = RowLayout(after.payload()).unpack(rows)
    assert (read["feature.a"].tolist(), read["feature.b"].tolist()) == ([1.0], [2.0])
