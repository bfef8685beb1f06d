import hashlib

import numpy as np
import pytest

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings

LABEL = {"name": "y", "classes": 10}


def schema_of(features, **more):
    return Schema(SchemaSettings.model_validate({"features": features, "label": LABEL} | more))


def test_a_column_has_the_features_dtype_and_shape():
    schema = schema_of(
        {
            "pixels": {"dtype": "uint8", "shape": [8, 8]},
            "price": {"dtype": "float64"},
            "colour": {"dtype": "string", "encode": {"vocab": ["red"]}, "shape": [3]},
        }
    )
    assert schema.payload() == {
        "feature.pixels": (np.uint8, (8, 8)),
        "feature.price": (np.float64, ()),
        "feature.colour": (np.int64, (3,)),
        "label": (np.int64, ()),
        "labelled": (np.bool_, ()),
        "weight": (np.float32, ()),
    }
    assert [feature.is_string for feature in schema.features] == [False, False, True]


def test_a_declared_time_is_a_column_and_other_fields_are_none():
    fields = {name: {"name": name[0]} for name in ("key", "time", "weight", "group")}
    schema = schema_of({"x": {"dtype": "int8"}}, **fields)
    assert (schema.key, schema.time, schema.weight, schema.group) == ("k", "t", "w", "g")
    assert list(schema.payload()) == ["feature.x", "label", "labelled", "weight", "time"]
    assert schema.payload()["time"] == (np.float64, ())


@pytest.mark.parametrize(
    ("label", "dtype", "classes", "names", "wire"),
    [
        ({"name": "y", "classes": 3}, np.int64, 3, None, np.int64),
        ({"name": "y", "dtype": "uint8", "classes": 3}, np.int64, 3, None, np.uint8),
        ({"name": "y", "classes": ["no", "yes"]}, np.int64, 2, ("no", "yes"), np.int64),
        ({"name": "y", "dtype": "float32"}, np.float32, None, None, np.float32),
    ],
)
def test_classes_are_indices_and_regression_keeps_its_dtype(label, dtype, classes, names, wire):
    found = schema_of({"x": {"dtype": "int8"}}, label=label).label
    assert (found.dtype, found.classes, found.names, found.wire) == (dtype, classes, names, wire)
    assert found.missing == -1 if classes else np.isnan(found.missing)
    assert (found.one_of, found.shape) == (classes, ())


def test_a_label_of_several_classes_is_a_bool_for_each():
    schema = schema_of({"x": {"dtype": "int8"}}, label={"name": "y", "dtype": "int8", "classes": 3, "multi": True})
    assert schema.payload()["label"] == (np.bool_, (3,))
    assert (schema.label.classes, schema.label.one_of, schema.label.missing) == (3, None, False)


INTEGERS = {"uint8": (0, 255), "int8": (-128, 127), "uint64": (0, 2**64 - 1), "int64": (-(2**63), 2**63 - 1)}


@pytest.mark.parametrize("dtype", INTEGERS)
def test_an_integer_may_be_bounded_by_any_value_of_its_dtype(dtype):
    lowest, highest = INTEGERS[dtype]
    (feature,) = schema_of({"n": {"dtype": dtype, "min": lowest, "max": highest, "shape": [2]}}).features
    column = np.array([[lowest, highest], [0, 1]], dtype)
    assert feature.outside(column) is None
    for bound, beyond in (("min", lowest - 1), ("max", highest + 1)):
        with pytest.raises(ValueError, match=f"{bound} = {beyond} is no {dtype}, which is {lowest}..{highest}"):
            schema_of({"n": {"dtype": dtype, bound: beyond}})
    (feature,) = schema_of({"n": {"dtype": dtype, "min": lowest + 1, "max": highest - 1, "shape": [2]}}).features
    assert feature.outside(column).tolist() == [True, lowest == 0]


@pytest.mark.parametrize(
    ("bounds", "allowed", "filler", "outside"),
    [
        ({"min": 0, "max": 6}, "in 0..6", 0, [-1, 7]),
        ({"min": 1}, "1 or more", 1, [-1, 0]),
        ({"max": -1}, "-1 or less", -1, [0, 1, 6, 7]),
        ({}, None, 0, []),
    ],
)
def test_bounds_are_inclusive_and_either_may_be_absent(bounds, allowed, filler, outside):
    (feature,) = schema_of({"n": {"dtype": "int32", **bounds}}).features
    column = np.array([-1, 0, 1, 6, 7], np.int32)
    found = feature.outside(column)
    assert ([] if found is None else column[found].tolist()) == outside
    assert feature.filler == filler
    assert allowed is None or feature.allowed == allowed


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_float_may_be_bounded_and_a_missing_value_is_within_any_bounds(dtype):
    features = {"x": {"dtype": dtype, "shape": [2], "min": -1.5, "max": 1000, "missing": "mean"}}
    (feature,) = schema_of(features).features
    column = np.array([[-1.5, 1000], [np.nan, 0], [-1.6, 0], [0, np.inf]], dtype)
    assert feature.outside(column).tolist() == [False, False, True, True]
    assert (feature.allowed, feature.filler) == ("in -1.5..1000", 0)
    assert schema_of(features).digest == schema_of({"x": {"dtype": dtype, "shape": [2], "missing": "mean"}}).digest


def test_bounds_of_labels_are_for_numbers_and_change_no_digest():
    label = {"name": "y", "dtype": "float32"}
    features = {"x": {"dtype": "int8"}}
    bounded = schema_of(features, label={**label, "min": 0, "max": 1e6})
    assert bounded.digest == schema_of(features, label=label).digest
    with pytest.raises(ValueError, match="min and max are bounds of a number, but labels are classes"):
        schema_of(features, label={"name": "y", "classes": 2, "max": 1})
    with pytest.raises(ValueError, match="min = 2 is larger than max = 1"):
        schema_of(features, label={**label, "min": 2, "max": 1})


@pytest.mark.parametrize(
    ("feature", "sentence"),
    [
        ({"dtype": "float16", "max": 1e6}, "max = 1000000.0 is no float16, which is -65504..65504"),
        ({"dtype": "float32", "min": float("nan")}, "min = nan is no float32"),
        ({"dtype": "int8", "min": 0.5}, "min = 0.5 is no int8"),
        ({"dtype": "bool", "max": 1}, "but dtype is bool"),
        ({"dtype": "string", "encode": {"hash": 4}, "max": 1}, "but dtype is string"),
        ({"dtype": "int8", "min": 2, "max": 1}, "min = 2 is larger than max = 1"),
        ({"dtype": "int8", "min": 1, "default": 0}, "schema.features.n.default = 0 is not 1 or more"),
    ],
)
def test_bounds_that_cannot_be_meant_are_refused(feature, sentence):
    with pytest.raises((ValueError, SettingsError), match=sentence):
        schema_of({"n": feature})


class TestDigest:
    FEATURES = {"a": {"dtype": "float32", "shape": [2]}, "b": {"dtype": "int8"}}

    def test_is_the_same_for_the_same_columns(self):
        swapped = dict(reversed(self.FEATURES.items()))
        written_out = {name: {"shape": [], "default": None} | feature for name, feature in self.FEATURES.items()}
        digests = {schema_of(features).digest for features in (self.FEATURES, swapped, written_out)}
        assert len(digests) == 1

    def test_does_not_change_with_a_bound_so_that_checkpoints_stay_of_use(self):
        bounded = {**self.FEATURES, "b": {"dtype": "int8", "min": 0, "max": 6}}
        assert schema_of(bounded).digest == schema_of(self.FEATURES).digest

    def test_stays_what_it_was_when_it_was_first_written(self):
        text = (
            '{"features":{"a":{"dtype":"float32","shape":[2]},"b":{"dtype":"int8"}},"label":{"classes":10,"name":"y"}}'
        )
        assert schema_of(self.FEATURES).digest == hashlib.sha256(text.encode()).hexdigest()

    @pytest.mark.parametrize(
        "change",
        [
            {"features": FEATURES | {"b": {"dtype": "int16"}}},
            {"features": FEATURES | {"b": {"dtype": "int8", "default": 0}}},
            {"features": FEATURES | {"c": {"dtype": "int8"}}},
            {"label": {"name": "y", "classes": 11}},
            {"label": {"name": "z", "classes": 10}},
            {"key": {"name": "k"}},
        ],
    )
    def test_differs_for_other_columns(self, change):
        assert schema_of(**({"features": self.FEATURES} | change)).digest != schema_of(self.FEATURES).digest


class TestDefaults:
    @pytest.mark.parametrize(
        ("feature", "column"),
        [
            ({"dtype": "float32", "default": 1}, np.float32(1)),
            ({"dtype": "float32", "shape": [3], "default": 0.5}, np.full(3, 0.5, np.float32)),
            ({"dtype": "int8", "shape": [2], "default": [1, -1]}, np.array([1, -1], np.int8)),
            ({"dtype": "uint64", "default": 2**63}, np.uint64(2**63)),
            ({"dtype": "bool", "default": True}, np.True_),
            (
                {"dtype": "float16", "shape": [2, 2], "default": [[1, 2], [3, 4]]},
                np.array([[1, 2], [3, 4]], np.float16),
            ),
            ({"dtype": "string", "encode": {"vocab": ["a", "b"]}, "default": "b"}, np.int64(2)),
            ({"dtype": "string", "encode": {"vocab": ["a"]}, "shape": [2], "default": ["a", "?"]}, np.array([1, 0])),
        ],
    )
    def test_become_a_column_of_one_event(self, feature, column):
        (found,) = schema_of({"x": feature}).features
        assert found.default.dtype == found.dtype
        np.testing.assert_array_equal(found.default, column, strict=True)

    @pytest.mark.parametrize(
        ("feature", "reason"),
        [
            ({"dtype": "float32", "default": "one"}, "it is not a number"),
            ({"dtype": "float32", "default": float("nan")}, "it is not a finite float32"),
            ({"dtype": "float16", "default": 70_000}, "it is not a finite float16"),
            ({"dtype": "float32", "default": [1, [2]]}, "inhomogeneous"),
            ({"dtype": "float32", "shape": [3], "default": [1, 2]}, "could not be broadcast"),
            ({"dtype": "float32", "default": [1, 2]}, "cannot broadcast"),
            ({"dtype": "uint8", "default": 256}, "it is not a uint8"),
            ({"dtype": "uint8", "default": -1}, "it is not a uint8"),
            ({"dtype": "int8", "default": 1.5}, "it is not a int8"),
            ({"dtype": "bool", "default": 2}, "it is not a bool"),
            ({"dtype": "int64", "default": 2**70}, "it is not a number"),
            ({"dtype": "string", "encode": {"hash": 9}, "default": 3}, "it is not a string"),
        ],
    )
    def test_that_do_not_fit_are_refused(self, feature, reason):
        with pytest.raises(SettingsError, match=f"schema.features.x.default = .* does not fit dtype .*: .*{reason}"):
            schema_of({"x": feature})
