"""Overrides of settings by variables of the environment, such as `ANABRANCH__LEARNER__BATCH_SIZE`."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, get_args, get_origin

from pydantic import BaseModel, SecretStr

from anabranch.config.explain import Fault, nearest_key
from anabranch.config.model import Pipeline, alternatives
from anabranch.core.errors import SettingsError
from learner.state_dir.origin import is_published

ENVIRONMENT_PREFIX = "ANABRANCH__"
_TESTS_PREFIX = "ANABRANCH_TEST_"


def apply_overrides(
    document: dict[str, Any], environment: Mapping[str, str]
) -> tuple[dict[tuple[str, ...], str], list[Fault]]:
    """Override settings by variables; return the variable of each key, and what is wrong with names of variables."""
    overrides, faults = dict[tuple[str, ...], str](), []
    for name, text in environment.items():
        try:
            overrides[_override_one(document, name, text)] = name
        except SettingsError as exc:
            faults.append(Fault((name,), str(exc)))
    overrides.pop((), None)
    return overrides, faults


def origin_of(path: Path, location: tuple[str, ...], overrides: Mapping[tuple[str, ...], str]) -> Path | str:
    """Return what sets a key: the variable that overrides it, or a part of it; else the file."""
    return next((name for key, name in overrides.items() if location[: len(key)] == key), path)


def _override_one(document: dict[str, Any], name: str, text: str) -> tuple[str, ...]:
    """Override one key, and return the keys that lead to it; none when the variable is not ours."""
    if name.startswith("ANABRANCH_") and not name.startswith((ENVIRONMENT_PREFIX, _TESTS_PREFIX)):
        raise SettingsError(f"{name}: overrides are written {ENVIRONMENT_PREFIX}SECTION__KEY, two underscores each")
    if not name.startswith(ENVIRONMENT_PREFIX):
        return ()
    table, kind, keys = document, cast("Any", Pipeline), list[str]()
    *sections, last = name.removeprefix(ENVIRONMENT_PREFIX).split("__")
    for section in sections:
        key, kind = _step(kind, section, table, name)
        keys.append(key)
        if isinstance(table.get(key), str) and _is_named(kind):
            table[key] = {"name": table[key]}
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise SettingsError(f"{name}: {key} is a value, not a section")
    key, kind = _step(kind, last, table, name)
    value = _value(text, kind)
    if _has_free_text(value, kind) and is_published((*keys, key)):
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


def _step(kind: Any, part: str, table: Mapping[str, Any], name: str) -> tuple[str, Any]:
    """Return the key that a part of a variable's name means, and the type of its value."""
    types = alternatives(kind)
    models = [model for model in types if isinstance(model, type) and issubclass(model, BaseModel)]
    if len(models) == 1:
        known = {field.alias or key: field.annotation for key, field in models[0].model_fields.items()}
        if part.lower() in known:
            return part.lower(), known[part.lower()]
        if models[0].model_config.get("extra") == "forbid":
            raise SettingsError(f"{name}: there is no key {part.lower()}{nearest_key(part.lower(), known)}")
    # Names that the user gives (features, arguments) may have capitals, which many environments do not.
    key = next((key for key in table if key.lower() == part.lower()), part.lower())
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
        return text
    value = document.pop("value")
    is_text = {str, SecretStr, Path} & set(alternatives(kind))
    # A password such as 1e5 is no number, and text after a value makes it no value.
    return text if document or (is_text and not isinstance(value, str | dict)) else value
