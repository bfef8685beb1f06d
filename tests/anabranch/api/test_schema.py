"""Data as notebooks have it becomes the events that messages of the same values are."""

import datetime
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import anabranch
from anabranch.api.data import EventReader, arrays_of, rows_of
from anabranch.commands.init.sample import described_rows
from anabranch.ingest.events.schema import Schema

ORDERS = {
    "amount": [9.5, None, 3.25, 120.0] * 10,
    "shop": ["b", "a", "b", "c"] * 10,
    "order_id": [f"o-{number}" for number in range(40)],
    "at": [datetime.datetime(2026, 5, 1 + number % 9, tzinfo=datetime.UTC) for number in range(40)],
    "fraud": [False, True, False, False] * 10,
}


class Frame:
    """A data frame as pandas and polars have it, of columns with `to_numpy`."""

    def __init__(self, columns):
        self._columns = columns
        self.columns = list(columns)

    def __getitem__(self, name):
        return pa.chunked_array([self._columns[name]])


class Stream:
    """Something that others read as Arrow."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


TABLE = pa.table(ORDERS)


@pytest.mark.parametrize(
    "data", [ORDERS, TABLE, Frame(ORDERS), Stream(TABLE)], ids=["dict", "arrow", "frame", "stream"]
)
def test_a_schema_is_that_which_init_writes_for_the_same_rows(data):
    schema = anabranch.Schema.infer(data, label="fraud")
    assert isinstance(schema, Schema)
    assert (schema.label.name, schema.label.classes, schema.key) == ("fraud", 2, "order_id")
    features = schema.settings.features
    assert {name: each.dtype for name, each in features.items()} == {
        "amount": "float32",
        "shop": "string",
        "at": "float64",
    }
    assert features["amount"].missing == "indicator"
    assert features["shop"].encode.vocab == ("a", "b", "c")
    assert features["at"].cycles == ("day", "week")
    columns = EventReader(schema).read(data)
    assert columns["feature.shop"].tolist()[:4] == [2, 1, 2, 3]
    assert columns["label"].tolist()[:4] == [0, 1, 0, 0]
    assert math.isnan(columns["feature.amount"][1])
    assert columns["feature.at"][0] == datetime.datetime(2026, 5, 1, tzinfo=datetime.UTC).timestamp()


def test_arrays_of_several_dimensions_are_features_of_their_shape():
    data = {"image": np.zeros((30, 8, 8), np.float32), "digit": np.arange(30) % 10}
    schema = anabranch.Schema.infer(data, label="digit")
    assert [(each.name, each.shape) for each in schema.features] == [("image", (8, 8))]
    assert EventReader(schema).read(data)["feature.image"].shape == (30, 8, 8)


def test_what_is_left_out_says_why():
    schema = anabranch.Schema.infer({"x": [0.5, 1.5, 2.5], "one": ["a"] * 3, "y": [0, 1, 0]}, label="y")
    assert schema.left_out == ("\"one\" is left out: it is 'a' in each row",)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"x": [1.0]}, "label y is no field of the data, which has x"),
        ({"x": [1.0, 2.0], "y": [1]}, "the columns of the data have different lengths: x has 2, y has 1"),
        ({"x": 1.0, "y": 2}, "the column x is of type float, and has to be an array with a value for each event"),
        (3, "data is of type int, and has to be a dict of arrays by name, or a data frame of pandas, polars or Arrow"),
        ({}, "the data has no event: nothing can be said of its fields"),
    ],
)
def test_data_without_a_schema_is_refused_in_one_sentence(data, sentence):
    with pytest.raises(anabranch.AnabranchError) as error:
        anabranch.Schema.infer(data, label="y")
    assert str(error.value) == sentence


def test_a_wrong_key_of_a_schema_is_named_as_in_a_file():
    with pytest.raises(anabranch.AnabranchError, match=r"Schema: unknown key schema\.lable; the nearest known key"):
        anabranch.Schema({"features": {"x": {"dtype": "float32"}}, "lable": {"name": "y", "classes": 2}})


NUMBERS = anabranch.Schema(
    {
        "features": {
            "x": {"dtype": "float32", "shape": [2], "max": 50},
            "n": {"dtype": "int16"},
            "b": {"dtype": "bool"},
        },
        "label": {"name": "y", "classes": 3},
    }
)
COLUMNS = st.fixed_dictionaries(
    {
        "x": st.sampled_from([np.float32, np.float64, np.int64, np.float16]),
        "n": st.sampled_from([np.int8, np.int16, np.int64, np.uint8, np.float64]),
        "b": st.sampled_from([np.bool_, np.int8]),
        "y": st.sampled_from([np.int64, np.uint8, np.int32]),
    }
)


@given(kinds=COLUMNS, rows=st.integers(1, 4), fill=st.randoms(use_true_random=False))
def test_numbers_are_read_at_once_as_the_decoder_of_messages_reads_each(kinds, rows, fill):
    values = [0, 1, 2, 3, 51, 1e30, math.nan, math.inf] if fill.random() < 0.5 else [0, 1, 2]
    data = {}
    for name, kind in kinds.items():
        whole = not np.issubdtype(kind, np.floating)
        allowed = [value for value in values if not whole or (math.isfinite(value) and value < 100)]
        shape = (rows, 2) if name == "x" else (rows,)
        chosen = [fill.choice(allowed) for _ in range(math.prod(shape))]
        with np.errstate(over="ignore"):
            data[name] = np.array(chosen).reshape(shape).astype(kind)
    reader = EventReader(NUMBERS)
    at_once = reader._at_once(arrays_of(data))
    if at_once is not None:
        decoded = reader._decoded(arrays_of(data))
        assert {name: column.dtype for name, column in at_once.items()} == {
            name: decoded[name].dtype for name in at_once
        }
        for name, column in at_once.items():
            np.testing.assert_array_equal(column, decoded[name])


def test_an_event_that_cannot_be_used_is_named_and_none_is_read():
    data = {"x": np.zeros((3, 2)), "n": [1, 2, 3], "b": [True, False, True], "y": [0, 1, 2]}
    data["x"][1, 0] = math.nan
    reader = EventReader(NUMBERS)
    with pytest.raises(anabranch.AnabranchError, match=r"event 1 of the data cannot be used: .*x"):
        reader.read(data)
    data["x"][1, 0], data["y"] = 0, [0, 1, None]
    assert reader.read(data)["labelled"].tolist() == [True, True, False]
    with pytest.raises(anabranch.AnabranchError, match="event 2 of the data has no y, its label"):
        reader.read(data, labelled=True)


def test_whole_numbers_that_a_frame_has_as_floats_are_read():
    data = {"x": np.zeros((3, 2)), "n": np.array([1.0, 2.0, 3.0]), "b": [True, False, True], "y": [2.0, np.nan, 1.0]}
    columns = EventReader(NUMBERS).read(data)
    assert columns["feature.n"].tolist() == [1, 2, 3]
    assert columns["label"].tolist() == [2, -1, 1]
    several = {"features": {"n": {"dtype": "int64", "shape": [2]}}, "label": {"name": "y", "classes": 3}}
    with pytest.raises(anabranch.AnabranchError, match=r"event 0 of the data cannot be used.*\$\.n\[0\]"):
        EventReader(anabranch.Schema(several)).read({"n": np.full((3, 2), 0.5), "y": [0, 1, 2]})


def test_a_field_of_an_object_is_not_the_column_of_its_name():
    fields = {"x": {"dtype": "float32"}, "u_x": {"dtype": "float32", "field": "u.x"}}
    schema = anabranch.Schema({"features": fields, "label": {"name": "y", "field": "u.y", "classes": 3}})
    data = {"x": np.array([7.0, 8.0]), "u": [{"x": 1.0, "y": 2}, {"x": 2.0, "y": 1}], "y": [0, 0]}
    columns = EventReader(schema).read(data, labelled=True)
    assert (columns["feature.u_x"].tolist(), columns["label"].tolist()) == ([1, 2], [2, 1])


def test_read_columns_are_copies_unless_it_is_said():
    data = {
        "x": np.zeros((1, 2), np.float32),
        "n": np.ones(1, np.int16),
        "b": np.ones(1, np.bool_),
        "y": np.ones(1, int),
    }
    reader = EventReader(NUMBERS)
    assert reader.read(data, copy=False)["feature.x"] is data["x"]
    assert not any(np.may_share_memory(each, data["x"]) for each in reader.read(data).values())


def test_values_of_objects_are_those_of_json():
    class NAType:
        pass

    arrays = arrays_of({"a": np.array([NAType(), np.float32(0.5), np.array([1, 2])], object)})
    assert [row["a"] for row in rows_of(arrays)] == [None, 0.5, [1, 2]]


def test_a_command_names_its_options_in_errors():
    with pytest.raises(anabranch.AnabranchError, match=r"^--label z is no field of f\.csv"):
        described_rows([{"x": 1.0}], "f.csv", "z", None, "", "", ())
