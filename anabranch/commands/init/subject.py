"""`anabranch init --subject`: a pipeline for the records of a subject."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from anabranch.commands.init.files import (
    Classes,
    PipelineField,
    SectionField,
    pipeline_files,
    refuse_existing,
    write_files,
)
from anabranch.commands.init.subject_fields import fields_of_subject
from anabranch.config.toml_text import toml_value
from anabranch.core.errors import SettingsError
from anabranch.core.extras import needs
from anabranch.ingest.schema_registry.writer_schema import WriterSchema
from anabranch.ingest.settings.registry import RegistrySettings

if TYPE_CHECKING:
    from anabranch.ingest.schema_registry.client import RegistryClient

_PREFIX = "ANABRANCH__STREAM__REGISTRY__"


@dataclass(frozen=True)
class SubjectOptions:
    """What to make a pipeline of.

    Attributes:
        subject: name of the subject.
        url: address of the registry.
        label: field to predict; None if it is not known yet, which is an error that names the fields.
        classes: their number, or their names with commas between; None where the label's type has them.
        key: field that names whom an event is about, if there is one.
    """

    subject: str
    url: str
    label: str | None = None
    classes: str | None = None
    key: str | None = None


def write_subject(folder: Path, options: SubjectOptions, environment: Mapping[str, str], *, force: bool) -> list[Path]:
    """Write `pipeline.toml` and `my_model.py` for the newest schema of a subject, and return their paths.

    `environment` has the credentials, as overrides of `[stream.registry]`.

    Raises:
        SettingsError: a file exists already, the label is not named, or the subject is not there.
        RegistryError: the registry does not answer.
    """
    refuse_existing([folder / name for name in ("pipeline.toml", "my_model.py")], force=force)
    writer = _newest(options, environment)
    return write_files(folder, _files(writer, fields_of_subject(writer), options), force=force)


def _files(writer: WriterSchema, fields: Sequence[PipelineField], options: SubjectOptions) -> dict[str, str]:
    """Return the files; raises SettingsError where an option names no field, or the label has no classes."""
    names = [field.name for field in fields]
    if options.label is None:
        raise SettingsError(f"name the field to predict with --label: one of {', '.join(names)}")
    for option, name in (("label", options.label), ("key", options.key)):
        if name is not None and name not in names:
            raise SettingsError(f"--{option} {name} is no field of {writer.id}, which has {', '.join(names)}")
    label = fields[names.index(options.label)]
    time = next((field.name for field in fields if field.dtype == "time" and not field.shape), None)
    features = [field for field in fields if field.name not in (options.label, options.key, time)]
    if not any(field.is_read for field in features):
        raise SettingsError(f"{writer.id} has no field that can be a feature: numbers, booleans or strings")
    topic = options.subject.removesuffix("-value")
    stream = (
        'bootstrap_servers = "localhost:9092"',
        f"topics = [{toml_value(topic)}]",
        f'format = "{writer.kind}"',
        "",
        "[stream.registry]",
        f"url = {toml_value(options.url)}",
        f"subject = {toml_value(options.subject)}",
    )
    classes = _classes(label, options.classes)
    key, when = (None if name is None else SectionField(name) for name in (options.key, time))
    return pipeline_files(features, str(writer.id), topic, stream, (SectionField(label.name), classes), key, when)


def _newest(options: SubjectOptions, environment: Mapping[str, str]) -> WriterSchema:
    with closing(registry_client(options.url, environment)) as client:
        return client.newest(options.subject)


def registry_client(url: str, environment: Mapping[str, str]) -> "RegistryClient":
    """Return the client of a registry, whose credentials are overrides of `[stream.registry]` in `environment`.

    Raises:
        SettingsError: the address or a credential is none, or requests is not installed.
    """
    with needs("a Schema Registry", "requests", "registry"):
        from anabranch.ingest.schema_registry.client import RegistryClient
    given = {
        name: environment[f"{_PREFIX}{name.upper()}"]
        for name in ("user", "password", "token", "ca")
        if f"{_PREFIX}{name.upper()}" in environment
    }
    try:
        settings = RegistrySettings.model_validate({"url": url, **given})
    except ValidationError as exc:
        error = exc.errors()[0]
        key = ".".join(map(str, error["loc"]))
        raise SettingsError(f"--registry and {_PREFIX}*: {key} {error['msg'].removeprefix('Value error, ')}") from exc
    return RegistryClient(settings)


def _classes(label: PipelineField, given: str | None) -> Classes:
    """Return the number of classes or their names; None for regression."""
    if not label.is_read:
        raise SettingsError(f"--label {label.name} is of type {label.written}, which init cannot make a label of")
    if given is not None:
        return int(given) if given.isdecimal() else given.split(",")
    if label.vocabulary:
        return list(label.vocabulary)
    if label.dtype == "bool":
        return 2
    if label.dtype == "float32":
        return None
    what = "their number" if label.dtype == "int64" else "their names, with commas between"
    raise SettingsError(f"--label {label.name} is of type {label.written}: give its classes with --classes, {what}")
