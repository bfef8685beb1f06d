"""Events in messages of CloudEvents: those of the SDK are read in both modes, and what is none is rejected alone."""

import json
from base64 import b64encode
from typing import Any

import numpy as np
import pytest
from cloudevents.core.bindings.kafka import to_binary_event, to_structured_event
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given
from hypothesis import strategies as st

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.base import WHOLE_MESSAGE, Headers
from anabranch.ingest.formats.envelopes.cloud_events import binary_headers
from anabranch.ingest.formats.registry import make_format
from anabranch.ingest.formats.rows import pack_rows
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings

SCHEMA = Schema(
    SchemaSettings.model_validate(
        {"features": {"x": {"dtype": "float32", "shape": [2]}}, "label": {"name": "y", "classes": 3}}
    )
)
ATTRIBUTES = {"id": "1", "source": "/orders", "type": "order.paid", "specversion": "1.0"}
EVENT = {"x": [0.5, -1.0], "y": 2}


def decode(messages, form="json"):
    stream = StreamSettings.model_validate({"topics": ["t"], "format": form, "envelope": "cloudevents"})
    return make_format(stream, SCHEMA).decode([value for value, _ in messages], [own for _, own in messages])


def message(made):
    assert isinstance(made.value, bytes)
    return made.value, list(made.headers.items())


def structured(**changes):
    fields = {**ATTRIBUTES, "data": EVENT, **changes}
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


def event_of(data, content_type="application/json"):
    return CloudEvent({**ATTRIBUTES, "datacontenttype": content_type}, data)


def test_both_modes_of_the_sdk_are_read():
    made = [message(write(event_of(EVENT))) for write in (to_structured_event, to_binary_event)]
    decoded = decode([*made, (structured(), ())])
    assert decoded.rejects == []
    np.testing.assert_array_equal(decoded.columns["feature.x"], np.array([EVENT["x"]] * 3, np.float32))
    assert decoded.columns["label"].tolist() == [2, 2, 2]


def test_packed_rows_are_read_in_both_modes():
    rows = pack_rows(SCHEMA, [EVENT, {"x": [1, 2], "y": 0}])
    event = event_of(rows, "application/octet-stream")
    decoded = decode([message(to_structured_event(event)), message(to_binary_event(event))], "rows")
    assert decoded.rejects == []
    assert decoded.message.tolist() == [0, 0, 1, 1]
    assert decoded.columns["label"].tolist() == [2, 0, 2, 0]


@pytest.mark.parametrize(
    ("value", "headers", "reason"),
    [
        (json.dumps(EVENT).encode(), (), "neither a header ce_specversion nor an event in JSON"),
        (b"\xff\xfe", (), "neither a header ce_specversion nor an event in JSON"),
        (b"[" * 100_000, (), "neither a header ce_specversion nor an event in JSON"),
        (structured(specversion="0.3"), (), "specversion 0.3 is not 1.0"),
        (b"{}", [("ce_specversion", b"2" * 1000)], "specversion 2222"),
        (structured(data=None), (), "neither data nor data_base64"),
        (structured(data_base64="AAAA"), (), "both data and data_base64"),
        (structured(data=None, data_base64="?"), (), "data_base64 is not base64"),
        (structured(id=None), (), "missing required field `id`"),
        (structured(), [("content-type", b"application/cloudevents+avro")], "is not application/cloudevents+json"),
        (
            structured(),
            [("content-type", b"application/cloudevents-batch+json")],
            "is not application/cloudevents+json",
        ),
    ],
)
def test_a_message_that_is_no_event_is_rejected_alone(value, headers, reason):
    good = json.dumps(EVENT).encode(), binary_headers()
    decoded = decode([good, (value, headers), good])
    assert decoded.message.tolist() == [0, 2]
    ((index, row, said),) = decoded.rejects
    assert (index, row) == (1, WHOLE_MESSAGE)
    assert said.startswith("cloudevents: ")
    assert reason in said
    assert len(said) < 400


def test_headers_without_a_value_count_for_nothing():
    nulls: Any = [("content-type", None), ("ce_specversion", None), ("ce_id", None)]
    assert decode([(structured(), nulls), (json.dumps(EVENT).encode(), [*nulls, *binary_headers()])]).rejects == []


def test_data_that_does_not_fit_the_schema_is_rejected_by_the_format():
    decoded = decode(
        [(structured(data={"x": [1, 2, 3], "y": 0}), ()), (structured(data="text"), ()), (structured(), ())]
    )
    assert decoded.message.tolist() == [2]
    assert [reject.message for reject in decoded.rejects] == [0, 1]
    assert not any("cloudevents" in reject.reason for reject in decoded.rejects)


@given(st.lists(st.sampled_from(["structured", "binary", "base64", "none", "bad"])))
def test_events_keep_their_messages_in_any_mixture(kinds):
    body = json.dumps(EVENT).encode()
    ways: dict[str, tuple[bytes, Headers]] = {
        "structured": (structured(), [("Content-Type", b"Application/CloudEvents+JSON; charset=utf-8")]),
        "binary": (body, [("CE_specversion", b"1.0"), ("content-type", b"application/json")]),
        "base64": (structured(data=None, data_base64=b64encode(body).decode()), ()),
        "none": (body, ()),
        "bad": (structured(data={"x": []}), ()),
    }
    decoded = decode([ways[kind] for kind in kinds])
    good = [index for index, kind in enumerate(kinds) if kind in ("structured", "binary", "base64")]
    assert decoded.message.tolist() == good
    assert [reject.message for reject in decoded.rejects] == [i for i in range(len(kinds)) if i not in good]
