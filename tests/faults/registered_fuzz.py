"""Messages of confluent-kafka's serializers, damaged: those with a schema id, in each format that has a registry.

What a damaged record becomes is decided by another decoder: Protobuf with the class that protoc makes, fastavro, or
Python's json. A record that it refuses, or whose values do not fit `[schema]`, must be rejected. One that it reads must
not become an event with other values.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from confluent_kafka.schema_registry import (
    SchemaRegistryClient,
    header_schema_id_serializer,
    prefix_schema_id_serializer,
)
from confluent_kafka.serialization import MessageField, SerializationContext

from anabranch.ingest.events.encoders import hash_texts
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.base import Decoded, Format
from anabranch.ingest.formats.registry import make_format
from anabranch.ingest.schema_registry.cache import WriterSchemas
from anabranch.ingest.schema_registry.client import RegistryClient
from anabranch.ingest.settings.formats import REGISTRY_FORMATS
from anabranch.ingest.settings.registry import RegistrySettings
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings
from tests.faults.fuzz import SETTINGS, TEXT, Fuzzed, event, through_kafka
from tests.faults.registered_codecs import CODECS, flat
from tests.support.registry_server import Registry, registry_server

SCHEMA = Schema(SchemaSettings.model_validate({**SETTINGS, "key": {"name": "k"}}))
TOPIC = "fuzz"
_BATCH = 64
_GOOD_EVERY = 8
_UNKNOWN_IDS = 16
"""Ids that the registry lacks: few, since each is asked for."""
Headers = list[tuple[str, bytes]]


class Message(NamedTuple):
    """A message, and the event that it must become; None if it must be rejected."""

    value: bytes
    headers: Headers
    event: dict[str, Any] | None


class Source:
    """Good and damaged messages of a format, whose writer schema is in `registry`; `positions` are those of the id."""

    def __init__(self, form: str, registry: Registry, positions: Sequence[str] = ("value", "number", "guid")) -> None:
        self._codec = CODECS[form]
        self._form = form
        mock = SchemaRegistryClient.new_client({"url": f"mock://{form}"})
        serializers = {
            "value": prefix_schema_id_serializer,
            "number": _number_in_header,
            "guid": header_schema_id_serializer,
        }
        self._serialize = {
            name: self._codec.serializer(mock, {"schema.id.serializer": serializers[name]}) for name in positions
        }
        dice = random.Random(0)
        for name in positions:
            self._packed(dice, name)  # registers the schema
        found: Any = mock.get_latest_version(f"{TOPIC}-value")
        number = registry.register(f"{TOPIC}-value", found.schema.schema_str, found.schema.schema_type)
        registry.schemas[number]["guid"] = found.guid
        assert number == found.schema_id

    def good(self, dice: random.Random) -> Message:
        """Return a good message."""
        value, headers, some = self._packed(dice, dice.choice(list(self._serialize)))
        return Message(value, headers, flat(some))

    def damaged(self, dice: random.Random) -> Message:
        """Return a message with a damaged id, or a damaged record."""
        value, headers, _ = self._packed(dice, dice.choice(list(self._serialize)))
        if dice.randrange(5) == 0:
            return self._with_damaged_id(dice, value, headers)
        begin = 0 if headers else (7 if self._form == "protobuf" else 5)
        record = _mutated(dice, value[begin:])
        return Message(value[:begin] + record, headers, self._expected(record))

    def is_wrong(self, message: Message, used: dict[str, Any] | None) -> bool:
        """Return whether a message must not have become what it became: an event, or None where it was rejected."""
        if used is None:
            return message.event is not None and self._codec.is_exact
        return message.event is None or not _same(used, message.event)

    def _packed(self, dice: random.Random, position: str) -> tuple[bytes, Headers, dict[str, Any]]:
        some = {**event(dice), "k": dice.choice(["", "key", "schl\u00fcssel", "\U0001f511" * 9, "k" * 200])}
        some["w"] = abs(some["w"])
        headers: Headers = []
        context = SerializationContext(TOPIC, MessageField.VALUE, headers)
        return self._serialize[position](some, context), headers, some

    def _expected(self, record: bytes) -> dict[str, Any] | None:
        try:
            some = self._codec.read(record)
        except Exception:  # noqa: BLE001 each decoder has its own for damaged records
            return None
        return some if _fits(some) else None

    def _with_damaged_id(self, dice: random.Random, value: bytes, headers: Headers) -> Message:
        name, own = headers[0] if headers else ("", value)
        unknown = dice.randrange(_UNKNOWN_IDS)
        choices = [
            b"\0" + (1_000_000 + unknown).to_bytes(4) + own[5:],
            b"\x01" + bytes([unknown]) * 16 + own[17:],
            own[: dice.randrange(1, 5)],
            bytes([dice.randrange(2, 256)]) + own[1:],
            b"\x01" + own[1 : dice.randrange(1, 16)],
        ]
        if self._form == "protobuf" and own[:1] == b"\0":
            choices += [own[:5] + indexes for indexes in (b"", b"\x02\x05", b"\x02\x80", b"\x04\x02\x00", b"\xff" * 9)]
        spoiled = dice.choice(choices)
        return Message(value, [(name, spoiled)], None) if headers else Message(spoiled, [], None)


def _number_in_header(payload: bytes, context: Any, schema_id: Any) -> bytes:
    context.headers.append(("__value_schema_id", schema_id.id_to_bytes()))
    return payload


def _mutated(dice: random.Random, record: bytes) -> bytes:
    """Return a record with some bytes flipped, set as lengths often are, removed, inserted, or truncated."""
    data = bytearray(record)
    for _ in range(dice.choice([1, 1, 1, 2, 4])):
        at, how = dice.randrange(len(data) + 1), dice.randrange(6)
        if how == 0 and at < len(data):
            data[at] ^= 1 << dice.randrange(8)
        elif how == 1:
            del data[at:]
        elif how == 2:
            data[at:at] = dice.randbytes(dice.randrange(1, 6))
        elif how == 3:
            del data[at : at + dice.randrange(1, 5)]
        elif how == 4:
            data[at : at + 1] = dice.choice(
                [b"\xff", b"\x7f", b"\x00", b"\xff" * 9 + b"\x01", b"\x80\x80\x04", b"\x01"]
            )
        else:
            data += record[dice.randrange(len(record)) :]
    return bytes(data)


def _fits(some: Mapping[str, Any]) -> bool:
    """Return whether an event fits `[schema]`."""
    with np.errstate(over="ignore"):
        floats = [*np.array(some["x"], np.float32), *some["d"], some["t"], np.float32(some["w"])]
    return (
        (len(some["x"]), len(some["d"])) == (3, 4)
        and all(map(math.isfinite, floats))
        and np.float32(some["w"]) >= 0
        and abs(some["t"]) <= 1e11
        and -128 <= some["n"] <= 127
        and (some.get("y") is None or 0 <= some["y"] <= 2)
    )


def _same(used: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return bool(
        np.array_equal(used["feature.x"], np.array(expected["x"], np.float32))
        and np.array_equal(used["feature.d"].ravel(), np.array(expected["d"], np.float64))
        and used["feature.n"] == expected["n"]
        and used["key_hash"] == hash_texts([expected["k"].encode()])[0]
        and (used["label"] == expected["y"] if expected.get("y") is not None else not used["labelled"])
        and used["weight"] == min(np.float32(expected["w"]), np.float32(SCHEMA.most_weight or np.inf))
        and used["time"] == expected["t"]
    )


@contextmanager
def format_of(form: str, registry: Registry) -> Iterator[Format]:
    """Yield the format of a stream with this registry."""
    described = {"url": registry.url, "subject": f"{TOPIC}-value"}
    stream = {"bootstrap_servers": "localhost:1", "topics": [TOPIC], "format": form, "registry": described}
    settings = RegistrySettings.model_validate(described)
    schemas = WriterSchemas(settings, RegistryClient(settings))
    try:
        yield make_format(StreamSettings.model_validate(stream), SCHEMA, schemas)
    finally:
        schemas.close()


def mixed(source: Source, dice: random.Random) -> tuple[list[Message], set[int]]:
    """Return the messages of one fetch, and the indexes of the good ones."""
    good = {index for index in range(_BATCH) if dice.randrange(_GOOD_EVERY) == 0}
    return [source.good(dice) if index in good else source.damaged(dice) for index in range(_BATCH)], good


def decoded(form: str, cases: int, seed: int) -> Fuzzed:
    """Decode `cases` damaged messages among good ones, in batches."""
    dice, fuzzed = random.Random(seed), Fuzzed()
    no_wait = mock.patch.multiple("anabranch.ingest.schema_registry.cache", _AGAIN_SECONDS=0.0, _LAGGING_SECONDS=0.0)
    with no_wait, registry_server() as registry, format_of(form, registry) as decoder:
        source = Source(form, registry)
        while fuzzed.cases < cases:
            messages, good = mixed(source, dice)
            fuzzed.cases += len(messages) - len(good)
            values, headers = [each.value for each in messages], [each.headers for each in messages]
            try:
                events = decoder.decode(values, headers)
                while events.deferred:  # the registry has not answered yet
                    events = decoder.decode(values, headers)
            except Exception as exc:  # noqa: BLE001 any exception would end the stream
                fuzzed.crashes.append(f"{form}: {type(exc).__name__}: {exc}")
                continue
            fuzzed.passed += [messages[index].value for index in _wrong(source, messages, good, events)]
    return fuzzed


def dead_lettered(folder: Path, bootstrap: str, form: str, cases: int, seed: int) -> Fuzzed:
    """Send messages that must be rejected, and good ones, to a learner, and compare its dead letters with them."""
    dice, chosen, bad = random.Random(seed), list[Message](), set[int]()
    with registry_server() as registry:
        source = Source(form, registry)
        while len(bad) < cases:
            messages, good = mixed(source, dice)
            for index, message in enumerate(messages):
                if index not in good and message.event is None:
                    bad.add(len(chosen))
                elif index not in good:
                    continue
                chosen.append(message)
        section = f'[stream.registry]\nurl = "{registry.url}"\nsubject = "{TOPIC}-value"\n'
        text = TEXT.format(form=form).replace("[schema.features]\n", f"{section}[schema.features]\n")
        text = text.replace("[schema]\n", '[schema]\nkey = {name = "k"}\n')
        sent = [(each.value, each.headers) for each in chosen]
        return through_kafka(folder, bootstrap, form, sent, bad, text)


def _wrong(source: Source, messages: Sequence[Message], good: set[int], events: Decoded) -> Iterator[int]:
    """Yield the indexes of messages that became what they must not."""
    rows = {index: row for row, index in enumerate(events.message.tolist())}
    rejected = {reject.message for reject in events.rejects}
    for index, message in enumerate(messages):
        row = rows.get(index)
        used = None if row is None else {name: column[row] for name, column in events.columns.items()}
        lost = (row is None) == (index not in rejected) or (index in good and used is None)
        if lost or source.is_wrong(message, used):
            yield index


FORMATS = REGISTRY_FORMATS
