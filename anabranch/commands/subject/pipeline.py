"""Writes a pipeline for a subject: `pipeline.toml` with its `[schema]`, and a model that takes its features."""

import importlib.resources
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from anabranch.commands.subject.fields import SubjectField, fields_of_subject
from anabranch.config.toml_text import toml_comment, toml_value
from anabranch.core.errors import SettingsError
from ingest.registry_settings import RegistrySettings
from ingest.schema_registry.writer_schema import WriterSchema

_BUCKETS = 1000
"""Hash buckets of a string whose values are not known."""
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
    paths = [folder / "pipeline.toml", folder / "my_model.py"]
    there = [path for path in paths if path.exists()]
    if there and not force:
        raise SettingsError(f"{there[0]} exists already; --force overwrites it")
    writer = _newest(options, environment)
    text = pipeline_text(writer, fields_of_subject(writer), options)
    model = (importlib.resources.files("anabranch.commands") / "template" / "subject_model.py").read_text("utf-8")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in zip(paths, (text, model), strict=True):
            path.write_text(content, encoding="utf-8")
    except OSError as exc:
        raise SettingsError(f"cannot write {exc.filename or folder}: {exc.strerror}") from exc
    return paths


def pipeline_text(writer: WriterSchema, fields: Sequence[SubjectField], options: SubjectOptions) -> str:
    """Return `pipeline.toml`; raises SettingsError where an option names no field, or the label has no classes."""
    names = [field.name for field in fields]
    if options.label is None:
        raise SettingsError(f"name the field to predict with --label: one of {', '.join(names)}")
    for option, name in (("label", options.label), ("key", options.key)):
        if name is not None and name not in names:
            raise SettingsError(f"--{option} {name} is no field of {writer.id}, which has {', '.join(names)}")
    label = fields[names.index(options.label)]
    times = [field.name for field in fields if field.kind == "time"]
    others = {options.label, options.key, *times[:1]}
    features = [field for field in fields if field.name not in others]
    readable = [field for field in features if field.kind not in ("other", "time") and not field.is_list]
    if not readable:
        raise SettingsError(f"{writer.id} has no field that can be a feature: numbers, booleans or strings")
    topic = options.subject.removesuffix("-value")
    classes = _classes(label, options.classes)
    lines = [
        f"# Made by anabranch init --subject, of {toml_comment(str(writer.id))}.",
        "# Every key that is left out has its default; docs/reference.md lists them all.",
        "",
        f"name = {toml_value(re.sub('[^A-Za-z0-9._-]', '-', topic).strip('.-_') or 'pipeline')}",
        'state_dir = "var"',
        "",
        "[stream]",
        'bootstrap_servers = "localhost:9092"',
        f"topics = [{toml_value(topic)}]",
        f'format = "{writer.kind}"',
        "",
        "[stream.registry]",
        f"url = {toml_value(options.url)}",
        f"subject = {toml_value(options.subject)}",
        *(line for field in features for line in _feature(field)),
        "",
        "[schema.label]",
        f"name = {toml_value(label.name)}",
        *([f"classes = {toml_value(classes)}"] if classes else ['dtype = "float32"']),
    ]
    if options.key is not None:
        lines += ["", "[schema.key]", f"name = {toml_value(options.key)}"]
    if times:
        lines += ["", "[schema.time]", f"name = {toml_value(times[0])}"]
    return "\n".join([*lines, *_model(readable, classes), ""])


def _newest(options: SubjectOptions, environment: Mapping[str, str]) -> WriterSchema:
    try:
        # Imported here since it is an extra.
        from ingest.schema_registry.client import RegistryClient
    except ImportError as exc:
        raise SettingsError("init --subject needs httpx: pip install 'anabranch[registry]'") from exc
    given = {
        name: environment[f"{_PREFIX}{name.upper()}"]
        for name in ("user", "password", "token", "ca")
        if f"{_PREFIX}{name.upper()}" in environment
    }
    try:
        settings = RegistrySettings.model_validate({"url": options.url, **given})
    except ValidationError as exc:
        error = exc.errors()[0]
        key = ".".join(map(str, error["loc"]))
        raise SettingsError(f"--registry and {_PREFIX}*: {key} {error['msg'].removeprefix('Value error, ')}") from exc
    with closing(RegistryClient(settings)) as client:
        return client.newest(options.subject)


def _classes(label: SubjectField, given: str | None) -> int | list[str] | None:
    """Return the number of classes or their names; None for regression."""
    if label.is_list or label.kind in ("other", "time"):
        raise SettingsError(f"--label {label.name} is of type {label.written}, which init cannot make a label of")
    if given is not None:
        return int(given) if given.isdecimal() else given.split(",")
    if label.kind == "words":
        return list(label.words)
    if label.kind == "boolean":
        return 2
    if label.kind == "number":
        return None
    what = "their number" if label.kind == "integer" else "their names, with commas between"
    raise SettingsError(f"--label {label.name} is of type {label.written}: give its classes with --classes, {what}")


def _feature(field: SubjectField) -> Iterator[str]:
    yield ""
    if field.kind in ("other", "time"):
        yield f'# "{toml_comment(field.name)}" is of type "{toml_comment(field.written)}", and is not read.'
        return
    mark = "# " if field.is_list else ""
    if field.is_list:
        yield f'# {field.name} is of type "{toml_comment(field.written)}": to read it, set the number of its values.'
    dtypes = {"number": "float32", "integer": "int64", "boolean": "bool"}
    yield f"{mark}[schema.features.{field.name}]"
    yield f'{mark}dtype = "{dtypes.get(field.kind, "string")}"'
    if field.kind == "words":
        yield f"{mark}encode = {{vocab = {toml_value(field.words)}}}"
    elif field.kind == "string":
        yield f"{mark}encode = {{hash = {_BUCKETS}}}"
    if field.is_list:
        yield f"{mark}shape = [1]"
    if field.is_optional:
        default = {"boolean": "false", "number": "0.0", "integer": "0"}.get(field.kind, '""')
        yield f"{mark}default = {default}{' ' * 20}# of events in which it is null or missing"


def _model(features: Sequence[SubjectField], classes: int | list[str] | None) -> Iterator[str]:
    words = {field.name: len(field.words) + 1 for field in features if field.kind == "words"}
    words |= {field.name: _BUCKETS for field in features if field.kind == "string"}
    numbers = [field.name for field in features if field.name not in words]
    outputs = 1 if classes is None else classes if isinstance(classes, int) else len(classes)
    yield from ("", "[model]", 'factory = "my_model:build"')
    tables = ", ".join(f"{name} = {size}" for name, size in words.items())
    yield f"args = {{numbers = {toml_value(numbers)}, words = {{{tables}}}, outputs = {outputs}}}"
    yield f'task = "{"regression" if classes is None else "classification"}"'
