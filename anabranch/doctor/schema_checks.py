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
from anabranch.doctor.findings import CheckContext, Finding, found, ok
from ingest.config import SchemaSettings, StreamSettings
from ingest.errors import (
    MissingSchemaError,
    OversizedSchemaError,
    RegistryCertificateError,
    RegistryCredentialsError,
    RegistryError,
)
from ingest.events.schema import Schema
from ingest.events.tokenizer import TokenizerEncoder
from ingest.formats.avro_records.aliases import aliases_in
from ingest.formats.registry import FORMATS, make_decoder
from ingest.schema_registry.writer_schema import UnfitSchemaError, WriterSchema

if TYPE_CHECKING:
    from ingest.schema_registry.client import RegistryClient


class _ModelConfig(msgspec.Struct):
    """What is read of a model's `config.json`."""

    pad_token_id: int | None = None


def check_schema(context: CheckContext) -> Iterator[Finding]:
    """Whether defaults fit their features, and the format takes the fields."""
    pipeline = context.config.pipeline
    try:
        schema = Schema(pipeline.events)
        if pipeline.stream.format in FORMATS:
            FORMATS[pipeline.stream.format](schema)
    except SettingsError as exc:
        yield found("schema.invalid", f"{exc}.", path=context.path)
    else:
        yield ok(
            f"Features {', '.join(f.name for f in schema.features)} and label {schema.label.name} go as "
            f'"{pipeline.stream.format}".'
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
        yield found("schema.padding", message, path=encoder.path)


def check_registry(context: CheckContext) -> Iterator[Finding]:
    """Fetch the newest schema of the subject, and compare it with `[schema]` field by field."""
    stream = context.config.pipeline.stream
    if stream.registry is None:
        return
    try:
        from ingest.schema_registry.client import RegistryClient
    except ImportError:  # a finding of the installation's check
        return
    try:
        registry = RegistryClient(stream.registry, are_serialized=stream.format == "protobuf")
    except SettingsError as exc:
        what = "registry.ca" if str(exc).startswith("stream.registry.ca") else "registry.proxy"
        yield found(what, f"{_sentence(exc) if what == 'registry.proxy' else exc}.")
        return
    try:
        with closing(registry) as client:
            newest = _newest(client, stream)
            if isinstance(newest, Finding):
                yield newest
            else:
                yield from _compare(newest, stream, context.config.pipeline.events)
    except RegistryCredentialsError as exc:
        yield found("registry.credentials", f"{_sentence(exc)}.")
    except RegistryCertificateError as exc:
        yield found("registry.certificate", f"{_sentence(exc)}.")
    except RegistryError as exc:
        yield found("registry.connect", f"{_sentence(exc)}.")
    except SettingsError:  # a finding of the schema's check
        return


def _newest(client: "RegistryClient", stream: StreamSettings) -> WriterSchema | Finding:
    """Return the newest schema of the subject, or what is wrong with the subject."""
    assert stream.registry is not None
    subject = str(stream.registry.subject)
    try:
        return client.newest(subject)
    except OversizedSchemaError as exc:
        return found("registry.schema", f"{_sentence(exc)}.")
    except MissingSchemaError:
        subjects = client.subjects()
        close = difflib.get_close_matches(subject, subjects, n=1)
        others = f"the nearest one is {close[0]}" if close else f"it has {len(subjects)} others"
        return found("registry.subject", f"The registry has no subject {subject}; {others}.")


def _compare(newest: WriterSchema, stream: StreamSettings, events: SchemaSettings) -> Iterator[Finding]:
    if newest.kind != stream.format:
        message = f'The newest schema, {newest.id}, is of "{newest.kind}", but stream.format = "{stream.format}".'
        yield found("registry.format", message, written=newest.kind)
        return
    unfit = [*dict.fromkeys(_unfit(newest, schema) for schema in _alone(stream, events))]
    for sentence in filter(None, unfit):
        yield found("registry.schema", f"{newest.id} does not fit [schema]: {sentence}.")
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
