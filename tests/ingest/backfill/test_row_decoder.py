"""Columns of Arrow tables of rows."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ingest.backfill.row_decoder import RowDecoder
from ingest.config import SchemaSettings
from ingest.events.schema import Schema
from tests.support.tokenizer import write_tokenizer


def decoder(time: str | None = None, **features: dict[str, Any]) -> RowDecoder:
    described = {"features": features, "label": {"name": "y", "classes": 3}}
    return RowDecoder(Schema(SchemaSettings.model_validate(described)), time, 1_000_000)


def test_rows_of_a_slice_are_those_of_a_copy_of_it() -> None:
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


def test_finite_numbers_are_accepted_whose_sum_is_not_finite() -> None:
    largest = float(np.finfo(np.float32).max)
    table = pa.table({"x": pa.array([largest, largest, -largest], pa.float32()), "y": [0, 1, 2]})
    decoded = decoder(x={"dtype": "float32"}).decode(table)
    assert (len(decoded.message), list(decoded.rejects)) == (3, [])


def test_infinities_that_cancel_out_are_rejected() -> None:
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
def test_times_that_are_no_times_are_none(seconds: list[float | None], expected: list[int]) -> None:
    table = pa.table({"at": pa.array(seconds, pa.float64())})
    assert decoder("at", x={"dtype": "float32"}).times_ms(table).tolist() == expected


def test_rows_with_a_text_that_is_too_long_are_rejected_and_their_letter_is_short() -> None:
    reader = decoder(word={"dtype": "string", "encode": {"hash": 9}})
    table = pa.table({"word": ["a", "b" * 1_000_001, None, "c" * 1_000_000], "y": [0, 1, 2, 1]})
    decoded = reader.decode(table)
    assert decoded.message.tolist() == [0, 3]
    assert decoded.rejects[0] == (1, 0, "oversized: a text of more than 1000000 bytes")
    assert len(reader.text(table, 1)) < 1_000_100


def test_a_text_that_the_tokenizer_cannot_encode_is_rejected_alone(tmp_path: Path) -> None:
    backtracks = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    path = write_tokenizer(tmp_path / "tokenizer.json", pre_tokenizer=backtracks)
    reader = decoder(word={"dtype": "string", "encode": {"tokenizer": str(path), "length": 4}})
    decoded = reader.decode_all(pa.table({"word": ["good", "a" * 40 + "!", "bad"], "y": [0, 1, 2]}))
    assert decoded.message.tolist() == [0, 2]
    assert decoded.columns["feature.word"].tolist() == [[2, 4, 3, 0], [2, 5, 3, 0]]
    assert decoded.rejects[0].reason.startswith("the tokenizer cannot encode a text: ")


def test_a_row_that_makes_the_decoder_raise_is_rejected_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = decoder(word={"dtype": "string", "encode": {"hash": 9}})
    sound = RowDecoder.decode

    def decode(self: RowDecoder, table: Any) -> Any:
        if "poison" in table.column("word").to_pylist():
            raise KeyError("poison")
        return sound(self, table)

    monkeypatch.setattr(RowDecoder, "decode", decode)
    decoded = reader.decode_all(pa.table({"word": ["a", "poison", "b"], "y": [0, 1, 2]}))
    assert decoded.message.tolist() == [0, 2]
    assert decoded.rejects == [(1, 0, "internal: KeyError: 'poison'")]
