"""`pipeline.toml` as a whole: read, overridden from the environment, resolved, validated.

The environment is read here and nowhere else.
"""

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, Field, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from ingest.config import SchemaSettings, Section, StreamSettings
from ingest.errors import SettingsError
from learner.config import GateSettings, LearnerSettings, ModelSettings, VersionsSettings
from replay.config import ReplaySettings
from serving.config import ServingSettings, is_loopback

ENVIRONMENT_PREFIX = "ANABRANCH__"


class Pipeline(Section):
    """Everything that `pipeline.toml` says."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """Model name in URLs."""
    state_dir: Path = Path("var")
    """Versions and status live below it; relative to the config's folder."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of everything random."""
    stream: StreamSettings
    """Where events come from."""
    events: Annotated[SchemaSettings, Field(alias="schema")]
    """The fields of an event."""
    model: ModelSettings
    """The model to train and to serve."""
    learner: LearnerSettings = LearnerSettings()
    """The training loop."""
    replay: ReplaySettings = ReplaySettings()
    """What is kept for rehearsal."""
    versions: VersionsSettings = VersionsSettings()
    """What is published."""
    gate: GateSettings = GateSettings()
    """The held-out events."""
    serving: ServingSettings = ServingSettings()
    """Predictions over HTTP."""


class Config:
    """A validated pipeline and the folder that it lies in."""

    def __init__(self, pipeline: Pipeline, path: Path) -> None:
        self.path = path
        self.folder = path.parent
        self.state_dir = self.folder / pipeline.state_dir
        self.pipeline = pipeline.model_copy(update={"stream": pipeline.stream.resolved(pipeline.name)})


def load_config(path: Path, environment: Mapping[str, str] = os.environ) -> Config:
    """Read `path`, apply overrides from the environment, and validate.

    Raises:
        SettingsError: one sentence that names file, key, value and the way out.
    """
    path = path.absolute()
    try:
        document = tomllib.loads(path.read_text())
    except FileNotFoundError as exc:
        raise SettingsError(f'{path} does not exist; "anabranch init DIR" writes an example') from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as exc:
        raise SettingsError(f"{path} cannot be read: {exc}") from exc
    _override(document, environment)
    secrets: set[tuple[str, ...]] = set()
    resolved = _resolve(document, (), path.parent, environment, secrets)
    try:
        pipeline = Pipeline.model_validate(resolved)
    except ValidationError as exc:
        raise SettingsError(_sentence(path, exc.errors()[0], secrets)) from exc
    host = pipeline.learner.status.rpartition(":")[0]
    if not is_loopback(host) and not pipeline.serving.tokens.read.get_secret_value():
        raise SettingsError(f'{path}: learner.status = "{host}:..." is not loopback, so serving.tokens.read is required')
    return Config(pipeline, path)


def _override(document: dict[str, Any], environment: Mapping[str, str]) -> None:
    for name, text in environment.items():
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        *sections, key = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        place = document
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise SettingsError(f"{name}: {section} is a value, not a section")
        place[_known(Pipeline, (*sections, key), name)] = _toml_value(text)


def _known(model: type[BaseModel], keys: tuple[str, ...], name: str) -> str:
    """Return the last key as the settings spell it; an override of an unknown key is an error."""
    for place, key in enumerate(keys):
        names = dict(_keys(model))
        if key not in names:
            raise SettingsError(f"{name}: there is no key {'.'.join(keys[: place + 1])}{_nearest(key, names)}")
        inner = names[key]
        if inner is None:
            return keys[-1] if place < len(keys) - 1 else key
        model = inner
    return keys[-1]


def _keys(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel] | None]]:
    for name, field in model.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        closed = [kind for kind in sections if kind.model_config.get("extra") == "forbid"]
        yield field.alias or name, closed[0] if len(closed) == 1 else None


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _resolve(
    value: Any, place: tuple[str, ...], folder: Path, environment: Mapping[str, str], secrets: set[tuple[str, ...]]
) -> Any:
    """Replace `{env = "NAME"}` and `{file = "path"}` by what they name, and note where that happened."""
    if isinstance(value, list):
        return [_resolve(item, (*place, str(i)), folder, environment, secrets) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    match value:
        case {"env": str(name)} if len(value) == 1:
            secrets.add(place)
            if name not in environment:
                raise SettingsError(f"{'.'.join(place)}: the environment variable {name} is not set")
            return environment[name]
        case {"file": str(name)} if len(value) == 1:
            secrets.add(place)
            try:
                return (folder / name).read_text().strip()
            except OSError as exc:
                raise SettingsError(f"{'.'.join(place)}: cannot read {folder / name}: {exc.strerror}") from exc
    return {key: _resolve(item, (*place, key), folder, environment, secrets) for key, item in value.items()}


def _sentence(path: Path, error: ErrorDetails, secrets: set[tuple[str, ...]]) -> str:
    place = tuple(str(part) for part in error["loc"])
    key = ".".join(place)
    if error["type"] == "extra_forbidden":
        return f"{path}: unknown key {key}{_nearest(place[-1], dict(_keys(_model_at(place[:-1]))))}"
    if error["type"] == "missing":
        return f"{path}: {key} is missing"
    message = error["msg"].removeprefix("Value error, ")
    if isinstance(error["input"], Mapping):
        return f"{path}: {key}: {message}"
    hidden = place in secrets or isinstance(error["input"], SecretStr) or "tokens" in place or "properties" in place
    return f"{path}: {key} = {'(hidden)' if hidden else repr(error['input'])}: {message}"


def _model_at(place: tuple[str, ...]) -> type[BaseModel]:
    """Return the section at a place, as far as it can be told from the path."""
    model: type[BaseModel] = Pipeline
    for key in place:
        field = next((f for name, f in model.model_fields.items() if key in (f.alias, name)), None)
        if field is None:
            continue
        kinds = [field.annotation, *get_args(field.annotation)]
        kinds += [inner for kind in kinds for inner in get_args(kind)]
        model = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), model)
    return model


def _nearest(key: str, names: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f'; the nearest known key is "{close[0]}"' if close else f"; known keys are {', '.join(sorted(names))}"
