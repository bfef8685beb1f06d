"""Columns of Arrow tables of rows."""

import math
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from anabranch.ingest.backfill.row_decoder import RowDecoder
from anabranch.ingest.events.encoders import hash_texts
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from tests.support.tokenizer import write_tokenizer


def decoder(time=None, **features):
    described = {"features": features, "label": {"name": "y", "classes": 3}}
    return RowDecoder(Schema(SchemaSettings.model_validate(described)), time, 1_000_000)


def test_rows_of_a_slice_are_those_of_a_copy_of_it():
    table = pa.table(
        {
            "fixed": pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], pa.list_(pa.float32(), 2)),
            "nested": [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]],
            "flag": [True, False, True, False],
            "word": pa.array(["a", "b", "c", "a"]).dictionary_encode(),
            "y": [0, None, 2, 1],
        }
    )
    reader = decoder(
        fixed={"dtype": "float32", "shape": [2]},
        nested={"dtype": "float32", "shape": [2]},
        flag={"dtype": "bool"},
        word={"dtype": "string", "encode": {"vocab": ["a", "b", "c"]}},
    )
    sliced = reader.decode(table.slice(1, 2))
    copied = reader.decode(table.take(pa.array([1, 2])))
    assert sliced.columns["feature.fixed"].tolist() == [[3, 4], [5, 6]]
    assert sliced.columns["labelled"].tolist() == [False, True]
    for name, column in copied.columns.items():
        np.testing.assert_array_equal(sliced.columns[name], column, err_msg=name)


def test_finite_numbers_are_accepted_whose_sum_is_not_finite():
    largest = float(np.finfo(np.float32).max)
    table = pa.table({"x": pa.array([largest, largest, -largest], pa.float32()), "y": [0, 1, 2]})
    decoded = decoder(x={"dtype": "float32"}).decode(table)
    assert (len(decoded.message), list(decoded.rejects)) == (3, [])


def test_infinities_that_cancel_out_are_rejected():
    table = pa.table({"x": pa.array([math.inf, 1.0, -math.inf], pa.float32()), "y": [0, 1, 2]})
    decoded = decoder(x={"dtype": "float32"}).decode(table)
    assert (decoded.message.tolist(), [reject.message for reject in decoded.rejects]) == ([1], [0, 2])


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([1.5, None], [1500, 0]),
        ([1.5, math.nan], [1500, 0]),
        ([1.5, math.inf, -math.inf], [1500, 0, 0]),
        ([1.5, 1e300, -1e300], [1500, 2**62, 0]),
    ],
)
def test_times_that_are_no_times_are_none(seconds, expected):
    table = pa.table({"at": pa.array(seconds, pa.float64())})
    assert decoder("at", x={"dtype": "float32"}).times_ms(table).tolist() == expected


def test_rows_with_a_text_that_is_too_long_are_rejected_and_their_letter_is_short():
    reader = decoder(word={"dtype": "string", "encode": {"hash": 9}})
    table = pa.table({"word": ["a", "b" * 1_000_001, None, "c" * 1_000_000], "y": [0, 1, 2, 1]})
    decoded = reader.decode(table)
    assert decoded.message.tolist() == [0, 3]
    assert decoded.rejects[0] == (1, 0, "oversized: a text of more than 1000000 bytes")
    assert len(reader.text(table, 1)) < 1_000_100


def test_a_text_that_the_tokenizer_cannot_encode_is_rejected_alone(tmp_path):
    backtracks = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    path = write_tokenizer(tmp_path / "tokenizer.json", pre_tokenizer=backtracks)
    reader = decoder(word={"dtype": "string", "encode": {"tokenizer": str(path), "length": 4}})
    decoded = reader.decode_all(pa.table({"word": ["good", "a" * 40 + "!", "bad"], "y": [0, 1, 2]}))
    assert decoded.message.tolist() == [0, 2]
    assert decoded.columns["feature.word"].tolist() == [[2, 4, 3, 0], [2, 5, 3, 0]]
    assert decoded.rejects[0].reason.startswith("the tokenizer cannot encode a text: ")


def test_a_row_that_makes_the_decoder_raise_is_rejected_alone(monkeypatch):
    reader = decoder(word={"dtype": "string", "encode": {"hash": 9}})
    sound = RowDecoder.decode

    def decode(self, table):
        if "poison" in table.column("word").to_pylist():
            raise KeyError("poison")
        return sound(self, table)

    monkeypatch.setattr(RowDecoder, "decode", decode)
    decoded = reader.decode_all(pa.table({"word": ["a", "poison", "b"], "y": [0, 1, 2]}))
    assert decoded.message.tolist() == [0, 2]
    assert decoded.rejects == [(1, 0, "internal: KeyError: 'poison'")]


def test_decimals_are_the_numbers_that_they_are():
    amounts = [Decimal("1.25"), None, Decimal("-3.50"), Decimal("1e10")]
    whole = [Decimal(2**63 - 1), Decimal(5), Decimal(2**63), Decimal(-(2**63))]
    table = pa.table(
        {
            "a": pa.array(amounts, pa.decimal128(14, 2)),
            "b": pa.array(whole, pa.decimal256(50, 0)),
            "c": pa.array([[each] * 2 for each in amounts[:1] * 4], pa.list_(pa.decimal128(12, 2))),
            "y": pa.array([0, 1, 2, 1], pa.decimal128(38, 0)),
            "k": pa.array([7, 8, 9, 2**70], pa.decimal128(38, 0)),
            "t": pa.array([Decimal("1.5")] * 4, pa.decimal128(12, 3)),
        }
    )
    features = {
        "a": {"dtype": "float32", "default": 0.5},
        "b": {"dtype": "int64"},
        "c": {"dtype": "float64", "shape": [2]},
    }
    described = {
        "features": features,
        "label": {"name": "y", "classes": 3},
        "key": {"name": "k"},
        "time": {"name": "t"},
    }
    reader = RowDecoder(Schema(SchemaSettings.model_validate(described)), "t", 1000)
    assert reader.problem(table.schema) is None
    assert reader.times_ms(table).tolist() == [1500] * 4
    decoded = reader.decode(table)
    assert [(each.message, each.reason) for each in decoded.rejects] == [(2, "b does not fit int64")]
    assert decoded.columns["feature.a"].tolist() == [1.25, 0.5, 1e10]
    assert decoded.columns["feature.b"].tolist() == [2**63 - 1, 5, -(2**63)]
    assert decoded.columns["feature.c"].tolist() == [[1.25, 1.25]] * 3
    assert decoded.columns["label"].tolist() == [0, 1, 1]
    assert decoded.columns["time"].tolist() == [1.5] * 3
    assert decoded.columns["key_hash"].tolist() == hash_texts([b"7", b"8", str(2**70).encode()]).tolist()


def test_a_fraction_is_no_whole_number():
    kind = pa.table({"x": pa.array([Decimal("1.5")], pa.decimal128(12, 2)), "y": [0]}).schema
    assert decoder(x={"dtype": "int64"}).problem(kind) == "its column x is of Arrow type decimal128(12, 2), not int64"


@pytest.mark.parametrize(
    ("labels", "found", "rejected"),
    [
        ([0.0, 1.0, None, math.nan], [0, 1, None, None], []),
        ([2.0, 0.5, 3.0, 2.0**60], [2], [1, 2, 3]),
        ([True, False, None, True], [1, 0, None, 1], []),
    ],
)
def test_a_class_may_be_a_float_or_true_in_a_file(labels, found, rejected):
    table = pa.table({"x": [1.0] * 4, "y": labels})
    described = {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 2 if True in labels else 3}}
    reader = RowDecoder(Schema(SchemaSettings.model_validate(described)), None, 1000)
    assert reader.problem(table.schema) is None
    decoded = reader.decode(table)
    assert [each.message for each in decoded.rejects] == rejected
    labelled = decoded.columns["labelled"].tolist()
    assert [int(y) if has else None for y, has in zip(decoded.columns["label"], labelled, strict=True)] == found
