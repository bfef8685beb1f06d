"""The schema: whether the stream's format can hold it, and whether it can read what the registry's subject has."""

import difflib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from anabranch.core.errors import SettingsError
from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES, read_file
from anabranch.core.preflight import Finding, can_import, check_import, ok, problem, warning
from anabranch.ingest.errors import (
    MissingSchemaError,
    OversizedSchemaError,
    RegistryCertificateError,
    RegistryCredentialsError,
    RegistryError,
)
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.events.tokenizer import TokenizerEncoder
from anabranch.ingest.formats.avro_records.aliases import aliases_in
from anabranch.ingest.formats.registry import make_decoder, make_format
from anabranch.ingest.schema_registry.writer_schema import UnfitSchemaError, WriterSchema
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings

if TYPE_CHECKING:
    from anabranch.ingest.schema_registry.client import RegistryClient


class _ModelConfig(msgspec.Struct):
    """What is read of a model's `config.json`."""

    pad_token_id: int | None = None


def check_install(stream: StreamSettings) -> Iterator[Finding]:
    """Whether what the stream needs can be imported."""
    if not can_import("crc32c"):
        message = "crc32c cannot be imported: without it Kafka is read 9 times slower."
        yield warning("install.crc32c", message, "Install it: pip install crc32c.")
    if stream.client == "confluent":
        yield from check_import('stream.client = "confluent"', "confluent_kafka", "fast")
    for module, extra in stream.format_kind.needs.items():
        yield from check_import(f'stream.format = "{stream.format}"', module, extra)
    if stream.backfill is not None:
        yield from check_import("[stream.backfill]", "pyarrow", "arrow")
        if any("://" in pattern and not pattern.startswith("file://") for pattern in stream.backfill.files):
            yield from check_import("[stream.backfill]", "obstore", "storage")


def check_schema(stream: StreamSettings, events: SchemaSettings) -> Iterator[Finding]:
    """Whether defaults fit their features, and the format takes the fields."""
    try:
        schema = Schema(events)
        if stream.registry is None:
            make_format(stream, schema)
    except SettingsError as exc:
        yield problem("schema.invalid", f"{exc}.", "Fix [schema], or choose another stream.format.")
    else:
        yield ok(
            f"Features {', '.join(f.name for f in schema.features)} and label {schema.label.name} go as "
            f'"{stream.format}".'
        )
        for feature in schema.features:
            if isinstance(feature.encoder, TokenizerEncoder):
                yield from _check_padding(feature.name, feature.encoder)


def _check_padding(name: str, encoder: TokenizerEncoder) -> Iterator[Finding]:
    """Compare the padding id with that which the model masks, where the tokenizer is in the model's folder."""
    config = encoder.path.with_name("config.json")
    try:
        masked = decoded(read_file(config, MOST_BYTES), _ModelConfig).pad_token_id
    except (OSError, DamagedError):  # no folder of a model, or a finding of the model's check
        return
    if masked is not None and masked != encoder.padding:
        message = f"schema.features.{name} is filled up with id {encoder.padding}, but {config} masks id {masked}."
        yield warning(
            "schema.padding", message, f"Name in schema.features the tokenizer.json of the same model: {encoder.path}."
        )


def check_registry(stream: StreamSettings, events: SchemaSettings) -> Iterator[Finding]:
    """Fetch the newest schema of the subject, and compare it with `[schema]` field by field."""
    if stream.registry is None:
        return
    try:
        from anabranch.ingest.schema_registry.client import RegistryClient
    except ImportError:  # a finding of the installation's check
        return
    try:
        registry = RegistryClient(stream.registry, are_serialized=stream.format == "protobuf")
    except SettingsError as exc:
        if str(exc).startswith("stream.registry.ca"):
            yield problem("registry.ca", f"{exc}.", "Set stream.registry.ca to a PEM file of certificates.")
        else:
            yield problem("registry.proxy", f"{_sentence(exc)}.", "Fix the variable, or unset it.")
        return
    try:
        with closing(registry) as client:
            newest = _newest(client, stream)
            if isinstance(newest, Finding):
                yield newest
            else:
                yield from _compare(newest, stream, events)
    except RegistryCredentialsError as exc:
        fix = "Fix stream.registry.user and password, or token."
        yield problem("registry.credentials", f"{_sentence(exc)}.", fix, unreachable=True)
    except RegistryCertificateError as exc:
        fix = "Set stream.registry.ca to the authority that signed it, or renew it."
        yield problem("registry.certificate", f"{_sentence(exc)}.", fix)
    except RegistryError as exc:
        fix = "Start the registry, or fix stream.registry.url."
        yield problem("registry.connect", f"{_sentence(exc)}.", fix, unreachable=True)
    except SettingsError:  # a finding of the schema's check
        return


def _newest(client: "RegistryClient", stream: StreamSettings) -> WriterSchema | Finding:
    """Return the newest schema of the subject, or what is wrong with the subject."""
    assert stream.registry is not None
    subject = str(stream.registry.subject)
    try:
        return client.newest(subject)
    except OversizedSchemaError as exc:
        fix = "Fix the field in [schema]; one that may be missing needs a default."
        return problem("registry.schema", f"{_sentence(exc)}.", fix)
    except MissingSchemaError:
        subjects = client.subjects()
        close = difflib.get_close_matches(subject, subjects, n=1)
        others = f"the nearest one is {close[0]}" if close else f"it has {len(subjects)} others"
        fix = "Set stream.registry.subject, or let the producer write first."
        return problem("registry.subject", f"The registry has no subject {subject}; {others}.", fix)


def _compare(newest: WriterSchema, stream: StreamSettings, events: SchemaSettings) -> Iterator[Finding]:
    if newest.kind != stream.format:
        message = f'The newest schema, {newest.id}, is of "{newest.kind}", but stream.format = "{stream.format}".'
        yield problem("registry.format", message, f'Set stream.format = "{newest.kind}", or stream.registry.subject.')
        return
    unfit = [*dict.fromkeys(_unfit(newest, schema) for schema in _alone(stream, events))]
    for sentence in filter(None, unfit):
        fix = "Fix the field in [schema]; one that may be missing needs a default."
        yield problem("registry.schema", f"{newest.id} does not fit [schema]: {sentence}.", fix)
    if not any(unfit):
        yield ok(f"[schema] can read the newest schema, {newest.id}.")


def _unfit(newest: WriterSchema, schema: Schema) -> str | None:
    try:
        make_decoder(replace(newest, aliases=aliases_in(newest)), schema)
    except UnfitSchemaError as exc:
        return str(exc)
    return None


def _alone(stream: StreamSettings, events: SchemaSettings) -> Iterator[Schema]:
    """Yield schemas of one field besides the label, and of one feature that is optional where it is no feature."""
    none = events.model_copy(update={"key": None, "time": None, "weight": None, "group": None})
    for name, feature in events.features.items():
        yield Schema(none.model_copy(update={"features": {name: feature}}))
    first = next(iter(events.features))
    optional = {first: events.features[first].model_copy(update={"default": blank(events, first)})}
    none = none.model_copy(update={"features": optional})
    for name in ("key", "time", "weight", "group"):
        yield Schema(none.model_copy(update={name: getattr(events, name)}))
    yield Schema(none, stream.labels)


def _sentence(exc: Exception) -> str:
    return f"{str(exc)[:1].upper()}{str(exc)[1:]}"


def blank(events: SchemaSettings, name: str) -> object:
    """Return a value that a feature may have, to try the others without it."""
    feature = next(each for each in Schema(events).features if each.name == name)
    return "" if feature.is_string else feature.filler
