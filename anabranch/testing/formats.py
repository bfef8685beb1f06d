"""What every message format promises. The subject of a check is a function that makes one for a schema.

Messages of events are those that the format packs; a format that writes none promises less.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from anabranch.ingest.events.block import BlockLayout
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.base import Decoded, Format
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.testing.checks import Check, NotPromisedError, expect

Make = Callable[[Schema], Format]


def schema_of(features: Mapping[str, Any], label: Mapping[str, Any], **others: Any) -> Schema:
    """Return a schema; arguments are as in the config file."""
    return Schema(SchemaSettings.model_validate({"features": features, "label": label, **others}))


THREE = schema_of({"x": {"dtype": "float32", "shape": [3]}}, {"name": "y", "classes": 3})
GOOD = {"x": [1, 2, 3], "y": 1}


def _packed(make: Make, schema: Schema, *events: Mapping[str, Any]) -> list[bytes]:
    format_ = make(schema)
    if not format_.kind.writes:
        raise NotPromisedError("it writes no messages (kind.writes)")
    return [format_.pack([{name: value for name, value in each.items() if value is not None}]) for each in events]


def _decoded(make: Make, schema: Schema, *events: Mapping[str, Any]) -> Decoded:
    return make(schema).decode(_packed(make, schema, *events))


def _equal(decoded: Decoded, **columns: Sequence[Any]) -> None:
    for name, expected in columns.items():
        found = decoded.columns[name.replace("feature_", "feature.")].tolist()
        expect(found == expected, f"the column {name} is {found}, and the events had {expected}")


def has_the_columns_of_the_schema(make: Make) -> None:
    """No message is no event, with all columns of the schema in their dtypes."""
    for schema in (THREE, schema_of({"b": {"dtype": "bool"}}, {"name": "y", "dtype": "float32"}, time={"name": "t"})):
        decoded, empty = make(schema).decode([]), BlockLayout(schema).empty(0)
        expect(len(decoded.message) == 0, f"no message is {len(decoded.message)} events")
        for name in schema.payload():
            expect(name in decoded.columns, f"the column {name} is missing")
            found, needed = decoded.columns[name], empty[name]
            fits = (found.dtype, found.shape) == (needed.dtype, needed.shape)
            expect(fits, f"the column {name} is {found.dtype} {found.shape}, not {needed.dtype} {needed.shape}")


def makes_columns_of_events_in_order(make: Make) -> None:
    """Features of any shape, a label, a weight and a time."""
    schema = schema_of(
        {"x": {"dtype": "float32", "shape": [2, 2]}, "n": {"dtype": "int16"}, "b": {"dtype": "bool"}},
        {"name": "y", "classes": 3},
        weight={"name": "w"},
        time={"name": "t"},
    )
    events = [
        {"x": [[i, 1.5], [-2, 0]], "n": -i, "b": i % 2 == 0, "y": i % 3, "w": 0.5 * i, "t": 1e9 + i} for i in range(5)
    ]
    decoded = _decoded(make, schema, *events)
    expect(not decoded.rejects, f"good events are rejected: {decoded.rejects[:1]}")
    expect(decoded.message.tolist() == list(range(5)), f"5 events are of the messages {decoded.message.tolist()}")
    expect(decoded.row.tolist() == [0] * 5, f"the one event of each message has the rows {decoded.row.tolist()}")
    for column, dtype in (("feature.x", "float32"), ("feature.n", "int16"), ("feature.b", "bool"), ("label", "int64")):
        found = decoded.columns[column].dtype
        expect(found == dtype, f"the column {column} is {found}, not {dtype}")
    for column, name in {"feature.x": "x", "feature.n": "n", "feature.b": "b", "label": "y", "weight": "w"}.items():
        _equal(decoded, **{column: [event[name] for event in events]})
    _equal(decoded, time=[event["t"] for event in events])
    expect(decoded.columns["labelled"].all(), "an event with a label is not labelled")


def an_event_without_a_label_is_not_labelled(make: Make) -> None:
    """It is no reject: `stream.unlabelled` says what becomes of it."""
    decoded = _decoded(make, THREE, {"x": [1, 2, 3], "y": None}, {"x": [1, 2, 3], "y": 2})
    expect(not decoded.rejects, f"an event without a label is rejected: {decoded.rejects[:1]}")
    _equal(decoded, labelled=[False, True], label=[-1, 2])


def a_regression_target_may_be_missing(make: Make) -> None:
    """The label is NaN then."""
    schema = schema_of({"x": {"dtype": "float64"}}, {"name": "y", "dtype": "float32"})
    decoded = _decoded(make, schema, {"x": 1, "y": None}, {"x": 1, "y": -2.5})
    _equal(decoded, labelled=[False, True])
    missing, there = decoded.columns["label"].tolist()
    expect(math.isnan(missing) and there == -2.5, f"labels are {missing} and {there}, not NaN and -2.5")


def a_key_and_a_group_hash_alike_in_every_event(make: Make) -> None:
    """`key_hash` and `group_hash`, by which events are held out, found and erased."""
    schema = schema_of({"x": {"dtype": "int8"}}, {"name": "y", "classes": 2}, key={"name": "k"}, group={"name": "g"})
    decoded = _decoded(make, schema, {"x": 1, "y": 0, "k": 7, "g": 9}, {"x": 2, "y": 1, "k": 7, "g": 8})
    key, group = decoded.columns["key_hash"], decoded.columns["group_hash"]
    expect(key[0] == key[1] != 0, f"events of one key have the hashes {key.tolist()}")
    expect(group[0] != group[1], "events of two groups have the same hash")


def good_events_survive_bad_neighbours(make: Make) -> None:
    """An empty message and random bytes are rejects, each with a reason."""
    (good,) = _packed(make, THREE, GOOD)
    decoded = make(THREE).decode([good, b"", good, b"\xff" * 5])
    expect(decoded.message.tolist() == [0, 2], f"good messages 0 and 2 are the events of {decoded.message.tolist()}")
    rejects = [reject.message for reject in decoded.rejects]
    expect(rejects == [1, 3], f"bad messages 1 and 3 are the rejects {rejects}")
    expect(all(reject.reason for reject in decoded.rejects), "a reject has no reason")


def any_bytes_are_events_or_rejects_and_no_error(make: Make) -> None:
    """Random bytes, and good messages with bytes changed; each is an event or a reject, and numbers are finite."""
    schema = schema_of({"x": {"dtype": "float16", "shape": [2]}}, {"name": "y", "classes": 2})
    dice = random.Random(0)  # noqa: S311 no secret
    values = [dice.randbytes(dice.randrange(60)) for _ in range(500)]
    if make(schema).kind.writes:
        (good,) = _packed(make, schema, {"x": [1, 2], "y": 1})
        for _ in range(500):
            damaged = bytearray(good)
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
            values.append(bytes(damaged[: dice.randrange(len(damaged) + 1)] if dice.random() < 0.5 else damaged))
    decoded = make(schema).decode(values)
    lost = set(range(len(values))) - {*decoded.message.tolist(), *(reject.message for reject in decoded.rejects)}
    expect(not lost, f"{len(lost)} messages are neither events nor rejects, such as {values[min(lost, default=0)]!r}")
    expect(np.isfinite(decoded.columns["feature.x"]).all(), "a feature of a usable event is not finite")
    labels = decoded.columns["label"][decoded.columns["labelled"].astype(np.bool_)]
    expect(np.isin(labels, (0, 1)).all(), "a label of a usable event is no class")


def numbers_out_of_bounds_are_rejects_of_their_events(make: Make) -> None:
    """Call `reject_unusable_numbers` last."""
    schema = schema_of({"day": {"dtype": "int64", "min": 0, "max": 6}}, {"name": "y", "classes": 3})
    events: list[dict[str, Any]] = [{"day": 6, "y": 1}, {"day": 7, "y": 1}, {"day": -1, "y": 1}, {"day": 0, "y": None}]
    decoded = _decoded(make, schema, *events)
    expect(decoded.message.tolist() == [0, 3], f"days 6 and 0 of 0..6 are the events of {decoded.message.tolist()}")
    reasons = {reject.reason for reject in decoded.rejects}
    expect(reasons == {"day is not in 0..6"}, f"reasons are {sorted(reasons)}, not 'day is not in 0..6'")


def a_message_may_have_several_events(make: Make) -> None:
    """`kind.several` says so; rows number the events of each message."""
    format_ = make(THREE)
    if not format_.kind.several or not format_.kind.writes:
        raise NotPromisedError("its messages have one event (kind.several)")
    decoded = format_.decode([format_.pack([GOOD] * 3), format_.pack([GOOD])])
    found = decoded.message.tolist(), decoded.row.tolist()
    expect(found == ([0, 0, 0, 1], [0, 1, 2, 0]), f"3 events and 1 are the messages and rows {found}")


CHECKS: Sequence[Check] = (
    has_the_columns_of_the_schema,
    makes_columns_of_events_in_order,
    an_event_without_a_label_is_not_labelled,
    a_regression_target_may_be_missing,
    a_key_and_a_group_hash_alike_in_every_event,
    good_events_survive_bad_neighbours,
    any_bytes_are_events_or_rejects_and_no_error,
    numbers_out_of_bounds_are_rejects_of_their_events,
    a_message_may_have_several_events,
)
