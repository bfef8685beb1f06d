"""`pipeline.toml` as a whole: read, overridden from the environment, resolved, validated.

The environment is read here and nowhere else.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, cast, get_args, get_origin

from pydantic import BaseModel, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from anabranch.core.errors import SettingsError
from anabranch.core.net import is_loopback
from anabranch.core.settings import Section, written
from ingest.config import SchemaSettings, StreamSettings
from learner.compatibility import conflicts, facts
from learner.config import (
    CheckpointSettings,
    DeviceSharingSettings,
    GateSettings,
    LearnerSettings,
    ModelSettings,
    VersionsSettings,
)
from replay.config import ReplaySettings
from serving.config import ServingSettings

ENVIRONMENT_PREFIX = "ANABRANCH__"
_TESTS_PREFIX = "ANABRANCH_TEST_"
_TOLD = ("model", "args")
_NOTHING_HIDDEN = (
    "arguments of the factory stand in every version and in errors, so they hold no secrets; "
    "have the factory read {} itself"
)


class Pipeline(Section):
    """Everything that `pipeline.toml` says."""

    name: Annotated[
        str, written("[A-Za-z0-9][A-Za-z0-9._-]{0,99}", 'letters, digits, ".", "_" and "-", such as "fraud-eu"')
    ]
    """Model name in URLs."""
    state_dir: Path = Path("var")
    """Versions, checkpoints, the disk tier and reports lie below it; relative to the config's folder."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of initial weights, and of which events are held out, kept and sampled."""
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
    checkpoints: CheckpointSettings = CheckpointSettings()
    """What a restart resumes from."""
    gate: GateSettings = GateSettings()
    """The held-out events."""
    serving: ServingSettings = ServingSettings()
    """Predictions over HTTP."""
    device_sharing: DeviceSharingSettings = DeviceSharingSettings()
    """How serving borrows the device from the learner."""


class Config:
    """A validated pipeline and the folder that it lies in."""

    def __init__(self, pipeline: Pipeline, path: Path) -> None:
        self.path = path
        self.folder = path.parent
        self.state_dir = self.folder / pipeline.state_dir
        self.pipeline = pipeline.model_copy(update={"stream": pipeline.stream.resolved(pipeline.name)})


class Fault(NamedTuple):
    """One thing that is wrong with a config: the keys that lead to it, and the sentence that says it."""

    place: tuple[str, ...]
    sentence: str


class Examined(NamedTuple):
    """A config with all that is wrong with it."""

    config: Config | None
    """What is left when the keys at fault have their defaults; None when that is no pipeline."""
    faults: list[Fault]
    secrets: set[str]
    """Values that came from the environment or from files."""


def load_config(path: Path, environment: Mapping[str, str] = os.environ) -> Config:
    """Read `path`, apply overrides from the environment, and validate.

    Raises:
        SettingsError: one sentence that names file, key, value and the way out.
    """
    config, faults, _ = examine_config(path, environment)
    if faults:
        raise SettingsError(faults[0].sentence) from None
    assert config is not None
    return config


def examine_config(path: Path, environment: Mapping[str, str] = os.environ) -> Examined:
    """Do the same, but return everything that is wrong, the worst first.

    Raises:
        SettingsError: the file cannot be read at all.
    """
    path = path.absolute()
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise SettingsError(f'{path} does not exist; "anabranch init DIR" writes an example') from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as exc:
        raise SettingsError(f"{path} cannot be read: {exc}") from exc
    overrides, faults = _override(document, environment)
    secrets: dict[tuple[str, ...], str] = {}
    resolved = _resolve(document, (), path.parent, environment, secrets, faults)
    pipeline: Pipeline | None = None
    for _ in range(2):
        try:
            pipeline = Pipeline.model_validate(resolved)
            break
        except ValidationError as exc:
            errors = sorted(exc.errors(), key=_rank)
            known = {fault.place for fault in faults}
            for error in errors:
                place = _place(resolved, error)
                if place not in known:
                    known.add(place)
                    here = [each for each in errors if _place(resolved, each) == place]
                    faults.append(
                        Fault(place, _sentence(_origin(path, place, overrides), resolved, here, set(secrets)))
                    )
            places = [_place(resolved, error) for error in errors]
            for place in places:
                _remove(resolved, place)
    if pipeline is None:
        return Examined(None, faults, set(secrets.values()))
    host = pipeline.learner.status.rpartition(":")[0]
    if not is_loopback(host) and not pipeline.serving.tokens.read.get_secret_value():
        place = ("learner", "status")
        sentence = f'learner.status = "{host}:..." is not loopback, so serving.tokens.read is required'
        faults.append(Fault(place, f"{_origin(path, place, overrides)}: {sentence}"))
    for key, sentence in conflicts(facts(pipeline.learner, pipeline.replay, pipeline.stream, pipeline.device_sharing)):
        place = tuple(key.split("."))
        faults.append(Fault(place, f"{_origin(path, place, overrides)}: {sentence}"))
    return Examined(Config(pipeline, path), faults, set(secrets.values()))


def _remove(document: Any, place: tuple[str, ...]) -> None:
    """Remove the innermost key of a table on the way to a place."""
    tables: list[tuple[dict[str, Any], str]] = []
    for part in place:
        if not isinstance(document, dict) or part not in document:
            break
        tables.append((document, part))
        document = document[part]
    if tables:
        table, part = tables[-1]
        del table[part]


def _override(
    document: dict[str, Any], environment: Mapping[str, str]
) -> tuple[dict[tuple[str, ...], str], list[Fault]]:
    """Override what variables say; return the variable of each key, and what is wrong with names of variables."""
    overrides, faults = dict[tuple[str, ...], str](), []
    for name, text in environment.items():
        try:
            overrides[_override_one(document, name, text)] = name
        except SettingsError as exc:
            faults.append(Fault((name,), str(exc)))
    overrides.pop((), None)
    return overrides, faults


def _origin(path: Path, place: tuple[str, ...], overrides: Mapping[tuple[str, ...], str]) -> Path | str:
    """Return where a key's value stands: the variable that has set it, or a part of it; else the file."""
    return next((name for key, name in overrides.items() if place[: len(key)] == key), path)


def _override_one(document: dict[str, Any], name: str, text: str) -> tuple[str, ...]:
    """Return the keys that lead to what was overridden; none where the variable is not meant for us."""
    if name.startswith("ANABRANCH_") and not name.startswith((ENVIRONMENT_PREFIX, _TESTS_PREFIX)):
        raise SettingsError(f"{name}: overrides are written {ENVIRONMENT_PREFIX}SECTION__KEY, two underscores each")
    if not name.startswith(ENVIRONMENT_PREFIX):
        return ()
    place, kind, keys = document, cast("Any", Pipeline), list[str]()
    *sections, last = name.removeprefix(ENVIRONMENT_PREFIX).split("__")
    for section in sections:
        key, kind = _step(kind, section, place, name)
        keys.append(key)
        if isinstance(place.get(key), str) and _is_named(kind):
            place[key] = {"name": place[key]}
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            raise SettingsError(f"{name}: {key} is a value, not a section")
    key, kind = _step(kind, last, place, name)
    value = _value(text, kind)
    if isinstance(value, str) and isinstance(place.get(key), dict) and _is_named(kind):
        # What other variables have said of its arguments stays, whichever comes first.
        place[key]["name"] = value
        return (*keys, key, "name")
    place[key] = value
    return (*keys, key)


def _is_named(kind: Any) -> bool:
    """Whether a table has a name, which may stand for all of it."""
    return any(
        isinstance(each, type) and issubclass(each, BaseModel) and "name" in each.model_fields
        for each in alternatives(kind)
    )


def _step(kind: Any, part: str, place: Mapping[str, Any], name: str) -> tuple[str, Any]:
    """Return the key that a part of a variable's name stands for, and the type of its value."""
    types = alternatives(kind)
    models = [model for model in types if isinstance(model, type) and issubclass(model, BaseModel)]
    if len(models) == 1:
        known = {field.alias or key: field.annotation for key, field in models[0].model_fields.items()}
        if part.lower() in known:
            return part.lower(), known[part.lower()]
        if models[0].model_config.get("extra") == "forbid":
            raise SettingsError(f"{name}: there is no key {part.lower()}{_nearest(part.lower(), known)}")
    # Names that the user gives (features, arguments) may have capitals, which many environments do not.
    key = next((key for key in place if key.lower() == part.lower()), part.lower())
    inner = next((get_args(type_)[1] for type_ in types if get_origin(type_) is dict), Any)
    return key, inner


def alternatives(kind: Any) -> list[Any]:
    """Return the members of a union, or the one type, without annotations."""
    if get_origin(kind) is Annotated:
        return alternatives(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [inner for member in get_args(kind) for inner in alternatives(member)]
    return [kind]


def _value(text: str, kind: Any) -> Any:
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = document.pop("value")
    is_text = {str, SecretStr, Path} & set(alternatives(kind))
    # A password such as 1e5 is no number, and what goes on after the value is no value.
    return text if document or (is_text and not isinstance(value, str | dict)) else value


def _resolve(
    value: Any,
    place: tuple[str, ...],
    folder: Path,
    environment: Mapping[str, str],
    secrets: dict[tuple[str, ...], str],
    faults: list[Fault],
) -> Any:
    """Replace `{env = "NAME"}` and `{file = "path"}` by what they name, and note where that happened.

    Below `model.args` they are a fault: who writes them means a secret, and versions tell the arguments.
    """
    if isinstance(value, list):
        items = enumerate(value)
        return [_resolve(item, (*place, str(i)), folder, environment, secrets, faults) for i, item in items]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"env"} or value.keys() == {"file"}:
        ((kind, name),) = value.items()
        if isinstance(name, str) and place[:2] == _TOLD:
            faults.append(Fault(place, f"{'.'.join(place)}: {_NOTHING_HIDDEN.format(name)}"))
            return ""
        if isinstance(name, str):
            try:
                secrets[place] = environment[name] if kind == "env" else (folder / name).read_text("utf-8").strip()
            except KeyError:
                sentence = f"the environment variable {name} is not set"
            except OSError as exc:
                sentence = f"cannot read {folder / name}: {exc.strerror}"
            except UnicodeDecodeError:
                sentence = f"{folder / name} is not UTF-8 text"
            else:
                return secrets[place]
            faults.append(Fault(place, f"{'.'.join(place)}: {sentence}"))
            return ""
    return {key: _resolve(item, (*place, key), folder, environment, secrets, faults) for key, item in value.items()}


def _sentence(
    origin: Path | str, document: Mapping[str, Any], errors: Sequence[ErrorDetails], secrets: set[tuple[str, ...]]
) -> str:
    """Say the worst of the errors of one place; `origin`: where its value stands."""
    error = errors[0]
    place = _place(document, error)
    key = ".".join(place)
    if error["type"] == "extra_forbidden":
        return f"{origin}: unknown key {key}{_nearest(place[-1], (name for name, _ in _fields(place[:-1])))}"
    if error["type"] == "missing":
        return f"{origin}: {key} is missing; {_to_add(place)}"
    message = error["msg"].removeprefix("Value error, ").replace("tuple", "list").replace("Tuple", "List")
    if error["type"] == "model_type":
        message = "must be a section"
    if error["type"] == "literal_error":
        message += _others(errors[1:]) + _nearest_value(error)
    if isinstance(error["input"], Mapping):
        return f"{origin}: {key}: {message}"
    shared = any(secret[: len(place)] == place[: len(secret)] for secret in secrets)
    hidden = shared or isinstance(error["input"], SecretStr) or bool({"tokens", "properties", "url"} & set(place))
    return f"{origin}: {key} = {'(hidden)' if hidden else repr(error['input'])}: {message}"


def _rank(error: ErrorDetails) -> int:
    """An unknown key explains a missing one; that a value is of no member of a union says less than why not."""
    if error["type"] == "extra_forbidden":
        return 0
    return 2 if error["type"].endswith(("_type", "_parsing")) else 1


def _place(document: Mapping[str, Any], error: ErrorDetails) -> tuple[str, ...]:
    """Return the keys that lead to an error in the file; pydantic's own path also names the members of unions."""
    node: Any = document
    place: list[str] = []
    for part in error["loc"]:
        inside = part in node if isinstance(node, Mapping) else isinstance(node, list) and isinstance(part, int)
        if inside:
            node = node[part]
            place.append(str(part))
    if error["type"] == "missing":
        place.append(str(error["loc"][-1]))
    return tuple(place)


def _fields(place: tuple[str, ...]) -> list[tuple[str, FieldInfo]]:
    """Return the keys of the section at a place, of every kind of section that may stand there."""
    models: list[type[BaseModel]] = [Pipeline]
    for key in place:
        fields = [f for model in models for name, f in model.model_fields.items() if key == (f.alias or name)]
        models = [model for field in fields for model in _models(field.annotation)] or models
    return [(field.alias or name, field) for model in models for name, field in model.model_fields.items()]


def _to_add(place: tuple[str, ...]) -> str:
    """Say where to write a missing key, or a missing section, and what it is."""
    section, key = ".".join(place[:-1]), place[-1]
    field = dict(_fields(place[:-1])).get(key)
    what = f"write {key} = ... {f'below [{section}]' if section else 'at the top'}"
    if field is not None and _models(field.annotation):
        name = ".NAME" if get_origin(field.annotation) is dict else ""
        what = f"write a section [{'.'.join(place)}{name}]"
    described = field.description if field is not None else None
    if not described:
        return what
    return f"{what}: {' '.join(described.split()).partition('. ')[0].rstrip('.')}"


def _models(kind: Any) -> list[type[BaseModel]]:
    """Return the sections that a value, or each value of a table, may be."""
    types = [
        inner
        for type_ in alternatives(kind)
        for inner in (get_args(type_)[1:] if get_origin(type_) is dict else [type_])
    ]
    return [type_ for type_ in types if isinstance(type_, type) and issubclass(type_, BaseModel)]


def _others(errors: Iterable[ErrorDetails]) -> str:
    """Name the kinds of values that a union takes beside its words."""
    kinds = {"float": "a number", "int": "a whole number", "bool": "true or false"}
    return "".join(f" or {kinds[kind]}" for each in errors if (kind := each["type"].partition("_")[0]) in kinds)


def _nearest_value(error: ErrorDetails) -> str:
    words = re.findall("'([^']*)'", error["ctx"]["expected"])
    close = difflib.get_close_matches(str(error["input"]), words, n=1, cutoff=0.5)
    return f'; the nearest known value is "{close[0]}"' if close else ""


def _nearest(key: str, names: Iterable[str]) -> str:
    names = sorted(names)
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f'; the nearest known key is "{close[0]}"' if close else f"; known keys are {', '.join(names)}"
