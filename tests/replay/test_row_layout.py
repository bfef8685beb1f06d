"""Packed rows."""

import numpy as np
import pytest
import torch

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.replay.row_layout import RowLayout


def schema(*features):
    settings = {"features": {name: {"dtype": "float32"} for name in features}, "label": {"name": "y", "classes": 2}}
    return Schema(SchemaSettings.model_validate(settings))


def test_rows_can_be_read_after_the_order_of_features_has_changed():
    before, after = schema("a", "b"), schema("b", "a")
    assert before.digest == after.digest  # so that a checkpoint can be restored
    columns = {name: np.zeros(1, dtype) for name, (dtype, _) in before.payload().items()}
    columns["feature.a"], columns["feature.b"] = np.float32([1]), np.float32([2])
    rows = torch.from_numpy(RowLayout(before.payload()).pack(columns, np.arange(1)))
    read = RowLayout(after.payload()).unpack(rows)
    assert (read["feature.a"].tolist(), read["feature.b"].tolist()) == ([1.0], [2.0])


@pytest.mark.parametrize("which", [[0, 1, 2, 3], [3, 2, 1, 0], [2], [1, 1, 0, 3], [0, 1, 2]])
def test_rows_are_of_the_requested_events_in_their_order(which):
    fields = schema("a", "b").payload()
    rng = np.random.default_rng(0)
    columns = {name: rng.integers(0, 100, (4, *shape)).astype(dtype) for name, (dtype, shape) in fields.items()}
    layout = RowLayout(fields)
    rows = layout.pack(columns, np.array(which, np.intp))
    assert rows.shape == (len(which), layout.row_bytes)
    read = layout.unpack(torch.from_numpy(rows))
    assert all(np.array_equal(read[name].numpy(), columns[name][which]) for name in fields)


@pytest.mark.parametrize(("features", "row_bytes"), [(3, 48), (124, 1016), (125, 1024), (126, 1088), (389, 3136)])
def test_long_rows_are_whole_lines_of_the_cache_filled_up_with_zeros(features, row_bytes):
    fields = schema(*(f"f{n}" for n in range(features))).payload()
    layout = RowLayout(fields)
    assert layout.row_bytes == row_bytes
    columns = {name: np.ones((2, *shape), dtype) for name, (dtype, shape) in fields.items()}
    out = np.full((2, row_bytes), 255, np.uint8)
    rows = layout.pack(columns, np.arange(2), out)
    read = layout.unpack(rows)
    assert all(np.array_equal(read[name].numpy(), columns[name]) for name in fields)
    assert rows.sum() == sum(column.view(np.uint8).sum() for column in columns.values()), "what is no field is zero"
