"""The newest labels of `[stream.labels]` against the newest events."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

import numpy as np
from numpy.typing import NDArray

from anabranch.core.durations import format_duration
from anabranch.core.preflight import Finding, ok, warning
from anabranch.ingest.events.block import Array, Outcome
from anabranch.ingest.events.position import Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.kafka.topic_inspector import Inspector
from anabranch.ingest.schema_registry.cache import writer_schemas
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from anabranch.ingest.worker.block_builder import BlockBuilder, Incoming

_LABELS = 2_000
_EVENTS = 20_000
"""The newest labels of all topics, and the newest events, that are compared."""
_FEWEST = 20
"""Fewer labels show nothing."""


def check_labels(
    stream: StreamSettings, events: SchemaSettings, inspector: Inspector, partitions: Mapping[str, int]
) -> Iterator[Finding]:
    """Compare the newest labels with the newest events.

    Args:
        stream: has the topics, and how labels find their events.
        events: the fields of an event.
        inspector: reads the topics.
        partitions: how many partitions each topic of events and of labels has, where it can be read.
    """
    assert stream.labels is not None
    schema = Schema(events, stream.labels)
    builder = BlockBuilder(schema, stream, HoldOut(fraction=0, seed=0), writer_schemas(stream, is_patient=False))
    samples = []
    for topics, most in ((stream.labels.topics, _LABELS), (stream.topics, _EVENTS)):
        known = [topic for topic in topics if topic in partitions]
        messages = [each for topic in known for each in inspector.tail(topic, partitions[topic], most // len(known))]
        samples.append(_sampled_rows(builder, messages))
    labels, sampled = samples
    is_label = labels["outcome"] == Outcome.LABEL
    label_keys, label_ms = (labels[name][is_label].astype(np.int64) for name in (schema.join_column, "time_ms"))
    event_keys, event_ms = (sampled[name].astype(np.int64) for name in (schema.join_column, "time_ms"))
    if len(label_keys) < _FEWEST or not len(event_keys):
        return
    lags = _lags(label_keys, label_ms, event_keys, event_ms)
    field = stream.labels.key or schema.key
    if not len(lags):
        compared = (
            f"the {len(label_keys):,} newest labels has the key ({field}) of one of the {len(event_keys):,} newest"
        )
        fix = "Set stream.labels.key to the field that both messages have, or check what the producers write to it."
        yield warning("labels.key", f"None of {compared} events.", fix)
        return
    p99 = timedelta(milliseconds=int(np.quantile(lags, 0.99)))
    if p99 > stream.labels.wait:
        wait = format_duration(stream.labels.wait)
        message = f"Of the newest labels, 1 in 100 comes more than {_rounded(p99)} after its event"
        fix = "Raise stream.labels.wait: labels that come later are dropped."
        yield warning("labels.wait", f"{message}, and stream.labels.wait is {wait}.", fix)
        return
    yield ok(f"{len(lags):,} of the {len(label_keys):,} newest labels find one of the newest events.")


def _sampled_rows(builder: BlockBuilder, messages: Sequence[Messages]) -> Mapping[str, Array]:
    incoming = [Incoming(each, index, Position(0)) for index, each in enumerate(messages)]
    return builder.assemble(incoming).columns


def _lags(
    label_keys: NDArray[np.int64],
    label_ms: NDArray[np.int64],
    event_keys: NDArray[np.int64],
    event_ms: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the time from event to label of each label whose key an event has, milliseconds."""
    order = np.argsort(event_keys, kind="stable")
    at = np.searchsorted(event_keys[order], label_keys)
    nearest = order[np.minimum(at, len(order) - 1)]
    matches = event_keys[nearest] == label_keys
    return np.asarray(label_ms[matches] - event_ms[nearest[matches]])


def _rounded(value: timedelta) -> str:
    """Write a duration to the second."""
    return format_duration(timedelta(seconds=max(1, round(value.total_seconds()))))
