"""`anabranch init --from TOPIC`: what the newest messages of a topic have, in whatever format they are."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import msgspec
from pydantic import ValidationError

from anabranch.commands.init.sample import ROWS, EventSample, unwrapped
from anabranch.commands.init.subject import registry_client
from anabranch.config.overrides import ENVIRONMENT_PREFIX, apply_overrides
from anabranch.config.toml_text import toml_value
from anabranch.core.errors import SettingsError
from anabranch.core.extras import needs
from anabranch.ingest.errors import BrokerError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.json_text import decoded
from anabranch.ingest.formats.other_formats import other_format
from anabranch.ingest.formats.registry import make_format
from anabranch.ingest.kafka.topic_inspector import Inspector
from anabranch.ingest.schema_registry.cache import writer_schemas
from anabranch.ingest.schema_registry.message_ids import HEADER, SchemaIdError, locate
from anabranch.ingest.schema_registry.writer_schema import UnfitSchemaError, WriterSchema
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings

_PATIENCE_SECONDS = 15.0
_OF_STREAM = f"{ENVIRONMENT_PREFIX}STREAM__"


class SampledMessage(NamedTuple):
    """The value and the headers of a message."""

    value: bytes
    headers: Sequence[tuple[str, bytes]]


class TopicSource(NamedTuple):
    """Where a topic is: `registry` is the address of the Schema Registry of its messages, if they need one."""

    topic: str
    broker: str
    registry: str


def sample_of_topic(source: TopicSource, environment: Mapping[str, str]) -> tuple[EventSample, list[SampledMessage]]:
    """Return the newest messages of a topic as events, in the order of their times, and as they are.

    `environment` has what the broker and the registry need besides their addresses, as overrides of `[stream]`.

    Raises:
        SettingsError: there is no such topic, or no message of it can be read.
        BrokerError, RegistryError: the broker or the registry does not answer.
    """
    messages = _newest(_stream(source, environment), source)
    first = next((each for each in messages if each.value), None)
    if first is None:
        raise SettingsError(f"the topic {source.topic} at {source.broker} has no message with a value")
    lines = [f"bootstrap_servers = {toml_value(source.broker)}", f"topics = [{toml_value(source.topic)}]"]
    if not _has_id(first):
        rows, envelope = unwrapped(_documents(messages, source, lambda each: _json(each.value)))
        if envelope:
            lines.append(f'envelope = "{envelope}"')
    else:
        with closing(registry_client(source.registry, environment)) as client:
            schemas: dict[int | str, WriterSchema] = {}
            readers: dict[tuple[int | str, tuple[int, ...]], Callable[[bytes], dict[str, Any]]] = {}

            def document(each: SampledMessage) -> dict[str, Any]:
                found = locate(each.value, each.headers, has_indexes=False).id
                if found is None:
                    raise SchemaIdError("it has no schema id")
                schemas[found] = writer = schemas.get(found) or client.schema(found)
                _, indexes, begin = locate(each.value, each.headers, has_indexes=writer.kind == "protobuf")
                if (found, indexes) not in readers:
                    readers[found, indexes] = _reader(writer, indexes)
                return readers[found, indexes](each.value[begin:])

            rows = _documents(messages, source, document)
        kind = next(iter(schemas.values())).kind
        lines += [f'format = "{kind}"', "", "[stream.registry]", f"url = {toml_value(source.registry)}"]
    said = f"{len(rows):,} messages of the topic {source.topic}"
    return EventSample(rows, f"the topic {source.topic}", said, lines), messages


def usable(stream: StreamSettings, events: SchemaSettings, messages: Sequence[SampledMessage]) -> str:
    """Return how many messages the pipeline can use, by decoding them as it does."""
    schemas = writer_schemas(stream)
    try:
        values, headers = [each.value for each in messages], [each.headers for each in messages]
        found = make_format(stream, Schema(events), schemas).decode(values, headers)
    finally:
        if schemas is not None:
            schemas.close()
    faults = [reject for reject in found.rejects if reject.message not in found.deletes]
    total = len(messages) - len(found.deletes)
    first = f"; the first that it cannot: {faults[0].reason}" if faults else ""
    return f"the pipeline can use {total - len(faults):,} of {total:,} messages{first}"


def _stream(source: TopicSource, environment: Mapping[str, str]) -> StreamSettings:
    document: dict[str, Any] = {}
    _, faults = apply_overrides(document, {k: v for k, v in environment.items() if k.startswith(_OF_STREAM)})
    if faults:
        raise SettingsError(faults[0].sentence)
    given = {
        key: value for key, value in document.get("stream", {}).items() if key in ("properties", "client", "token")
    }
    try:
        return StreamSettings.model_validate({**given, "bootstrap_servers": source.broker, "topics": [source.topic]})
    except ValidationError as exc:
        error = exc.errors()[0]
        key = ".".join(map(str, error["loc"]))
        raise SettingsError(f"--from {source.topic}, --broker and {_OF_STREAM}*: {key} {error['msg']}") from exc


def _newest(stream: StreamSettings, source: TopicSource) -> list[SampledMessage]:
    try:
        with Inspector(stream, _PATIENCE_SECONDS) as inspector:
            topic = inspector.topic(source.topic)
            if topic is None or not topic.partitions:
                raise SettingsError(f"{source.topic} is no file, and no topic of the broker at {source.broker}")
            parts = inspector.tail(source.topic, topic.partitions, ROWS)
    except BrokerError as exc:
        raise BrokerError(f"{source.topic} is no file; as a topic: {exc}") from exc
    found = [
        (time, SampledMessage(value, headers))
        for part in parts
        for time, value, headers in zip(part.times_ms, part.values, part.headers, strict=True)
        if value is not None  # a tombstone is no event
    ]
    return [message for _, message in sorted(found, key=lambda each: each[0])][-ROWS:]


def _documents(
    messages: Sequence[SampledMessage], source: TopicSource, read: Callable[[SampledMessage], dict[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the documents of messages; those that are none are left out, unless all are none."""
    rows: list[Mapping[str, Any]] = []
    why = ""
    for message in messages:
        try:
            rows.append(read(message))
        except UnfitSchemaError as exc:
            raise SettingsError(f"the topic {source.topic}: {exc}") from exc
        except (SettingsError, MemoryError):
            raise
        except Exception as exc:  # noqa: BLE001 decoders raise many kinds for a damaged record
            why = why or other_format(message.value) or f"{type(exc).__name__}: {exc}"
    if not rows:
        raise SettingsError(f"no message of the topic {source.topic} can be read; the first: {why}")
    return rows


def _json(value: bytes) -> dict[str, Any]:
    return decoded(partial(msgspec.json.decode, type=dict[str, Any]), value)


def _has_id(message: SampledMessage) -> bool:
    return message.value[:1] in (b"\0", b"\1") or any(name == HEADER for name, _ in message.headers)


def _reader(writer: WriterSchema, indexes: tuple[int, ...]) -> Callable[[bytes], dict[str, Any]]:
    with needs(f"messages of {writer.kind}", "a package", "registry"):
        if writer.kind == "avro":
            from anabranch.ingest.formats.avro_records.rows import reader_of as reader_of_avro

            return reader_of_avro(writer)
        if writer.kind == "protobuf":
            from anabranch.ingest.formats.protobuf_schema.records import reader_of

            return reader_of(writer, indexes)
    return _json
