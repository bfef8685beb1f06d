"""Times in another unit than seconds are refused where events and requests come in, whatever the format."""

import json

import pyarrow as pa
import pytest

from anabranch.ingest.backfill.row_decoder import RowDecoder
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.json import JsonFormat
from anabranch.ingest.formats.rows import RowsFormat, pack_rows
from anabranch.ingest.settings.stream import SchemaSettings

NOW = 1_790_000_000


def schema_of(dtype, **when):
    described = {
        "features": {"when": {"dtype": dtype, "cycles": ["day"], **when}},
        "label": {"name": "y", "classes": 2},
        "time": {"name": "at"},
    }
    return Schema(SchemaSettings.model_validate(described))


def in_json(schema, events):
    return JsonFormat(schema).decode([json.dumps(event).encode() for event in events])


def in_rows(schema, events):
    return RowsFormat(schema).decode([pack_rows(schema, [event]) for event in events])


def in_a_file(schema, events):
    return RowDecoder(schema, None, 1_000_000).decode(pa.Table.from_pylist(events))


@pytest.mark.parametrize("decode", [in_json, in_rows, in_a_file])
@pytest.mark.parametrize("dtype", ["int64", "float64"])
@pytest.mark.parametrize("factor", [1_000, 1_000_000])
def test_milliseconds_and_microseconds_are_rejected_with_the_field_and_the_unit(decode, dtype, factor):
    fine = {"when": NOW, "at": float(NOW), "y": 0}
    events = [fine, {**fine, "when": NOW * factor}, {**fine, "at": float(NOW * factor)}, {**fine, "when": -NOW}]
    decoded = decode(schema_of(dtype), events)
    assert decoded.message.tolist() == [0, 3]
    unit = "is not a time in seconds since 1970; it seems to be in milliseconds, or smaller units"
    assert [reject.reason for reject in decoded.rejects] == [f"when {unit}", f"at {unit}"]


def test_bounds_of_the_settings_come_before_those_of_times():
    wide = schema_of("int64", max=NOW * 1000)
    assert in_json(wide, [{"when": NOW * 1000, "at": NOW, "y": 0}]).message.tolist() == [0]
    reason = in_json(wide, [{"when": NOW * 1001, "at": NOW, "y": 0}]).rejects[0].reason
    assert reason == f"when is not {NOW * 1000} or less"
