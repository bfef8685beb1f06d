"""Times in another unit than seconds are refused where events and requests come in, whatever the format."""

import json
from typing import Any

import pyarrow as pa
import pytest

from ingest.backfill.row_decoder import RowDecoder
from ingest.config import SchemaSettings
from ingest.events.schema import Schema
from ingest.formats.base import Decoded
from ingest.formats.json import JsonFormat
from ingest.formats.rows import RowsFormat, pack_rows

NOW = 1_790_000_000


def schema_of(dtype: str, **when: Any) -> Schema:
    described = {
        "features": {"when": {"dtype": dtype, "cycles": ["day"], **when}},
        "label": {"name": "y", "classes": 2},
        "time": {"name": "at"},
    }
    return Schema(SchemaSettings.model_validate(described))


def in_json(schema: Schema, events: list[dict[str, Any]]) -> Decoded:
    return JsonFormat(schema).decode([json.dumps(event).encode() for event in events])


def in_rows(schema: Schema, events: list[dict[str, Any]]) -> Decoded:
    return RowsFormat(schema).decode([pack_rows(schema, [event]) for event in events])


def in_a_file(schema: Schema, events: list[dict[str, Any]]) -> Decoded:
    return RowDecoder(schema, None, 1_000_000).decode(pa.Table.from_pylist(events))


@pytest.mark.parametrize("decode", [in_json, in_rows, in_a_file])
@pytest.mark.parametrize("dtype", ["int64", "float64"])
@pytest.mark.parametrize("factor", [1_000, 1_000_000])
def test_milliseconds_and_microseconds_are_rejected_with_the_field_and_the_unit(
    decode: Any, dtype: str, factor: int
) -> None:
    fine = {"when": NOW, "at": float(NOW), "y": 0}
    events = [fine, {**fine, "when": NOW * factor}, {**fine, "at": float(NOW * factor)}, {**fine, "when": -NOW}]
    decoded = decode(schema_of(dtype), events)
    assert decoded.message.tolist() == [0, 3]
    unit = "is not a time in seconds since 1970; it seems to be in milliseconds, or smaller units"
    assert [reject.reason for reject in decoded.rejects] == [f"when {unit}", f"at {unit}"]


def test_bounds_of_the_settings_come_before_those_of_times() -> None:
    wide = schema_of("int64", max=NOW * 1000)
    assert in_json(wide, [{"when": NOW * 1000, "at": NOW, "y": 0}]).message.tolist() == [0]
    reason = in_json(wide, [{"when": NOW * 1001, "at": NOW, "y": 0}]).rejects[0].reason
    assert reason == f"when is not {NOW * 1000} or less"
