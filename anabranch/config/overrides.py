"""Overrides of settings: by variables, such as `ANABRANCH__LEARNER__BATCH_SIZE`, and by `--set`."""

import contextlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args, get_origin

from pydantic import BaseModel, SecretStr

from anabranch.config.explain import Fault, nearest_key
from anabranch.config.pipeline import Pipeline, alternatives
from anabranch.core.errors import SettingsError
from anabranch.learner.state_dir.origin import is_published

ENVIRONMENT_PREFIX = "ANABRANCH__"
_TESTS_PREFIX = "ANABRANCH_TEST_"


def apply_overrides(
    document: dict[str, Any], environment: Mapping[str, str], assignments: Sequence[str] = ()
) -> tuple[dict[tuple[str, ...], str], list[Fault]]:
    """Override settings by variables, then by assignments such as `learner.batch_size=64`.

    Returns:
        What sets each key, the last one last: a variable or an option. And what is wrong with their names.
    """
    overrides, faults = dict[tuple[str, ...], str](), []
    for name, text in environment.items():
        try:
            if parts := _parts_of_variable(name):
                overrides[_override_one(document, name, parts, text, from_environment=True)] = name
        except SettingsError as exc:
            faults.append(Fault((name,), str(exc)))
    for each in assignments:
        key, sign, text = (part.strip() for part in each.partition("="))
        name = f"--set {key}"
        try:
            if not sign:
                raise SettingsError(f"{name}: write SECTION.KEY=VALUE")
            overrides[_override_one(document, name, _parts_of_key(name, key), text, from_environment=False)] = name
        except SettingsError as exc:
            faults.append(Fault((name,), str(exc)))
    return overrides, faults


def origin_of(path: Path, location: tuple[str, ...], overrides: dict[tuple[str, ...], str]) -> Path | str:
    """Return what sets a key: the variable or option that overrides it, or a part of it; else the file."""
    return next((name for key, name in reversed(overrides.items()) if location[: len(key)] == key), path)


def _parts_of_variable(name: str) -> list[str]:
    """Return the keys that a variable names; none when it is not ours."""
    if name.startswith("ANABRANCH_") and not name.startswith((ENVIRONMENT_PREFIX, _TESTS_PREFIX)):
        raise SettingsError(f"{name}: overrides are written {ENVIRONMENT_PREFIX}SECTION__KEY, two underscores each")
    if not name.startswith(ENVIRONMENT_PREFIX):
        return []
    return name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")


def _parts_of_key(name: str, key: str) -> list[str]:
    """Return the keys of a dotted key of TOML."""
    try:
        table: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        raise SettingsError(f"{name} is no key: write SECTION.KEY=VALUE") from None
    parts = list[str]()
    while isinstance(table, dict):
        (part,) = table
        table = table[part]
        parts.append(part)
    return parts


def _override_one(
    document: dict[str, Any], name: str, parts: Sequence[str], text: str, *, from_environment: bool
) -> tuple[str, ...]:
    """Override one key, and return the keys that lead to it."""
    table, kind, keys = document, cast("Any", Pipeline), list[str]()
    *sections, last = parts
    for section in sections:
        key, kind = _step(kind, section, table, name, ignore_case=from_environment)
        keys.append(key)
        if isinstance(table.get(key), str) and _is_named(kind):
            table[key] = {"name": table[key]}
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise SettingsError(f"{name}: {key} is a value, not a section")
    key, kind = _step(kind, last, table, name, ignore_case=from_environment)
    value = _value(text, kind)
    if from_environment and _has_free_text(value, kind) and is_published((*keys, key)):
        raise SettingsError(
            f"{name}: a text of the environment may be a secret, and {'.'.join((*keys, key))} is stored in every "
            "version and shown in errors; write it into the file, or have the model's code read a separate variable"
        )
    if isinstance(value, str) and isinstance(table.get(key), dict) and _is_named(kind):
        # Other variables may have set its arguments before.
        table[key]["name"] = value
        return (*keys, key, "name")
    table[key] = value
    return (*keys, key)


def _is_named(kind: Any) -> bool:
    """Return whether a section has a key `name`, so that a string may replace the whole section."""
    return any(
        isinstance(each, type) and issubclass(each, BaseModel) and "name" in each.model_fields
        for each in alternatives(kind)
    )


def _step(kind: Any, part: str, table: Mapping[str, Any], name: str, *, ignore_case: bool) -> tuple[str, Any]:
    """Return the key that a part of a name means, and the type of its value."""
    types = alternatives(kind)
    models = [model for model in types if isinstance(model, type) and issubclass(model, BaseModel)]
    if len(models) == 1:
        known = {field.alias or key: field.annotation for key, field in models[0].model_fields.items()}
        if part in known:
            return part, known[part]
        if models[0].model_config.get("extra") == "forbid":
            raise SettingsError(f"{name}: there is no key {part}{nearest_key(part, known)}")
    # Names that the user gives (features, arguments) may have capitals, which many environments do not.
    key = next((key for key in table if ignore_case and key.lower() == part.lower()), part)
    inner = next((get_args(type_)[1] for type_ in types if get_origin(type_) is dict), Any)
    return key, inner


def _has_free_text(value: Any, kind: Any) -> bool:
    """Return whether a value has text where no section says what it is, such as in the arguments of a factory."""
    types = alternatives(kind)
    if isinstance(value, str):
        return Any in types
    if isinstance(value, list):
        return any(_has_free_text(item, kind) for item in value)
    if not isinstance(value, dict):
        return False
    known: dict[str, Any] = {}
    inner: Any = next((get_args(type_)[1] for type_ in types if get_origin(type_) is dict), Any)
    for type_ in types:
        if isinstance(type_, type) and issubclass(type_, BaseModel):
            known |= {field.alias or name: field.annotation for name, field in type_.model_fields.items()}
    return any(_has_free_text(item, known.get(name, inner)) for name, item in value.items())


def _value(text: str, kind: Any) -> Any:
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return _object_of_json(text, kind)
    value = document.pop("value")
    is_text = {str, SecretStr, Path} & set(alternatives(kind))
    # A password such as 1e5 is no number, and text after a value makes it no value.
    return text if document or (is_text and not isinstance(value, str | dict)) else value


def _object_of_json(text: str, kind: Any) -> Any:
    """Return a table that is written in JSON, as manifests of Kubernetes often have it; else the text."""
    if not any(get_origin(each) is dict or hasattr(each, "model_fields") for each in alternatives(kind)):
        return text
    with contextlib.suppress(ValueError):
        if isinstance(value := json.loads(text), dict):
            return value
    return text
