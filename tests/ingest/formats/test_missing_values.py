"""Values that are missing, in each format that can say so."""

import json

import numpy as np
import pytest

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.json import JsonFormat
from anabranch.ingest.formats.rows import RowsFormat, pack_rows
from anabranch.ingest.settings.stream import SchemaSettings

FEATURES = {
    "x": {"dtype": "float32", "missing": "mean"},
    "w": {"dtype": "float64", "shape": [2], "missing": 0},
    "z": {"dtype": "float32"},
}
SCHEMA = Schema(SchemaSettings.model_validate({"features": FEATURES, "label": {"name": "y", "classes": 2}}))
FULL = {"x": 1.5, "w": [2.0, 3.0], "z": 4.0, "y": 1}
NAN = np.nan


def decoded(*changes):
    events = [{name: value for name, value in {**FULL, **change}.items() if value != "absent"} for change in changes]
    return JsonFormat(SCHEMA).decode([json.dumps(event).encode() for event in events])


def test_the_bare_word_nan_is_a_missing_value():
    """Python's json writes it, and pandas with it."""
    found = decoded({"x": NAN}, {"w": NAN}, {"w": [NAN, 7]}, {"y": NAN, "x": NAN})
    assert not found.rejects
    np.testing.assert_array_equal(found.columns["feature.x"], np.array([NAN, 1.5, 1.5, NAN], np.float32))
    np.testing.assert_array_equal(found.columns["feature.w"], [[2, 3], [NAN, NAN], [NAN, 7], [2, 3]])
    assert found.columns["labelled"].tolist() == [True, True, True, False]


def test_the_bare_word_nan_is_named_where_no_value_may_be_missing():
    found = decoded({}, {"z": NAN})
    assert found.rejects == [(1, -1, "Expected `float`, got `null` - at `$.z`; NaN is read as null")]


def test_absent_and_null_values_are_nan_where_they_may_be_missing():
    found = decoded({}, {"x": None}, {"x": "absent", "w": None}, {"w": [None, 7]})
    assert not found.rejects
    np.testing.assert_array_equal(found.columns["feature.x"], np.array([1.5, NAN, NAN, 1.5], np.float32))
    np.testing.assert_array_equal(found.columns["feature.w"], [[2, 3], [2, 3], [NAN, NAN], [NAN, 7]])


@pytest.mark.parametrize("change", [{"z": None}, {"z": "absent"}, {"x": 1e300}, {"w": [1]}, {"w": [1, "1"]}])
def test_other_values_are_refused_as_before(change):
    found = decoded({}, change)
    assert [reject.message for reject in found.rejects] == [1]
    assert len(found.message) == 1


def test_packed_rows_have_nan():
    packed = pack_rows(SCHEMA, [FULL, {**FULL, "x": NAN}, {**FULL, "z": NAN}])
    found = RowsFormat(SCHEMA).decode([packed])
    np.testing.assert_array_equal(found.columns["feature.x"], np.array([1.5, NAN], np.float32))
    assert [reject.row for reject in found.rejects] == [2]


def test_missing_values_of_events_are_packed_as_nan():
    absent = {name: value for name, value in FULL.items() if name != "x"}
    found = RowsFormat(SCHEMA).decode([pack_rows(SCHEMA, [{**FULL, "x": None}, absent, {**FULL, "w": [None, 7]}])])
    np.testing.assert_array_equal(found.columns["feature.x"], np.array([NAN, NAN, 1.5], np.float32))
    np.testing.assert_array_equal(found.columns["feature.w"], [[2, 3], [2, 3], [NAN, 7]])
