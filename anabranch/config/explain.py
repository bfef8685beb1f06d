"""One sentence for each thing that is wrong with the settings: origin, key, value, rule and the nearest known name."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from anabranch.config.pipeline import Pipeline, alternatives
from anabranch.core.settings import documented_fields

_CLOSE = 0.5
"""How much of two keys has to be the same for the one to be taken for the other."""


class Fault(NamedTuple):
    """One thing that is wrong with a config: the keys that lead to it, and a sentence that explains it."""

    location: tuple[str, ...]
    sentence: str


def sentence_of(
    origin: Path | str, document: Mapping[str, Any], errors: Sequence[ErrorDetails], secrets: set[tuple[str, ...]]
) -> str:
    """Return the worst of the errors of one key as a sentence; `origin`: the file or variable that sets it."""
    error = errors[0]
    location = key_of(document, error)
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        return f"{origin}: unknown key {key}{nearest_key(location[-1], (name for name, _ in _fields(location[:-1])))}"
    if error["type"] == "missing":
        return f"{origin}: {key} is missing; {_to_add(location)}"
    message = error["msg"].removeprefix("Value error, ").replace("tuple", "list").replace("Tuple", "List")
    if error["type"] == "model_type":
        message = "must be a section"
    if error["type"] == "literal_error":
        message += _others(errors[1:]) + _nearest_value(error)
    if isinstance(error["input"], Mapping):
        return f"{origin}: {key}: {message}"
    shared = any(secret[: len(location)] == location[: len(secret)] for secret in secrets)
    # An address that is refused may be refused because it has a password.
    hidden = shared or isinstance(error["input"], SecretStr) or location[-1] == "url" or _may_be_secret(location)
    return f"{origin}: {key} = {'(hidden)' if hidden else repr(error['input'])}: {message}"


def without(sentence: str, secrets: Iterable[str]) -> str:
    """Return a sentence with (hidden) in place of each secret value."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        sentence = sentence.replace(secret, "(hidden)")
    return sentence


def _may_be_secret(location: tuple[str, ...]) -> bool:
    """Return whether the value at these keys is a secret by its type, or something below it is."""
    types: list[Any] = [Pipeline]
    for key in location:
        types = [inner for type_ in types for inner in _below(type_, key)]
        if SecretStr in types:
            return True
    return any(map(_has_secret, types))


def _below(kind: Any, key: str) -> list[Any]:
    """Return the types that the value of a key may have in a value of type `kind`."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        fields = kind.model_fields.items()
        return [
            each for name, field in fields if key == (field.alias or name) for each in alternatives(field.annotation)
        ]
    return alternatives(get_args(kind)[-1]) if get_origin(kind) in (dict, list, tuple) else []


def _has_secret(kind: Any) -> bool:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return any(_has_secret(each) for field in kind.model_fields.values() for each in alternatives(field.annotation))
    return kind is SecretStr or (get_origin(kind) is dict and any(map(_has_secret, alternatives(get_args(kind)[1]))))


def explained(document: Mapping[str, Any], errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Return the errors without those that follow from another one.

    A key is missing since it is misspelt, or a list is too short since its only value is none of those that it takes.
    """
    misspelt = set()
    for location in (key_of(document, error) for error in errors if error["type"] == "extra_forbidden"):
        names = [name for name, _ in _fields(location[:-1])]
        misspelt |= {(*location[:-1], name) for name in difflib.get_close_matches(location[-1], names, 1, _CLOSE)}
    lists = {key_of(document, error)[:-1] for error in errors}
    follow = {"missing": misspelt, "too_short": lists}
    return [error for error in errors if key_of(document, error) not in follow.get(error["type"], ())]


def rank(error: ErrorDetails) -> int:
    """Return 0 for the most specific errors (an unknown key explains a missing one), 2 for the least specific."""
    if error["type"] == "extra_forbidden":
        return 0
    return 2 if error["type"].endswith(("_type", "_parsing")) else 1


def key_of(document: Mapping[str, Any], error: ErrorDetails) -> tuple[str, ...]:
    """Return the keys that lead to an error in the file; pydantic's own path also names the members of unions."""
    node: Any = document
    location: list[str] = []
    for part in error["loc"]:
        inside = part in node if isinstance(node, Mapping) else isinstance(node, list) and isinstance(part, int)
        if inside:
            node = node[part]
            location.append(str(part))
    if error["type"] == "missing":
        location.append(str(error["loc"][-1]))
    return tuple(location)


def _fields(location: tuple[str, ...]) -> list[tuple[str, FieldInfo]]:
    """Return the keys of the section at `location`, for every type of section that is allowed there."""
    models: list[type[BaseModel]] = [Pipeline]
    for key in location:
        fields = [f for model in models for name, f in documented_fields(model).items() if key == (f.alias or name)]
        models = [model for field in fields for model in _models(field.annotation)] or models
    return [(field.alias or name, field) for model in models for name, field in documented_fields(model).items()]


def _to_add(location: tuple[str, ...]) -> str:
    """Return where to write a missing key, or a missing section, and what it is."""
    section, key = ".".join(location[:-1]), location[-1]
    field = dict(_fields(location[:-1])).get(key)
    what = f"write {key} = ... {f'below [{section}]' if section else 'at the top'}"
    if field is not None and _models(field.annotation):
        name = ".NAME" if get_origin(field.annotation) is dict else ""
        what = f"write a section [{'.'.join(location)}{name}]"
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
    """Return the kinds of values that a union takes in addition to its words."""
    kinds = {"float": "a number", "int": "a whole number", "bool": "true or false"}
    return "".join(f" or {kinds[kind]}" for each in errors if (kind := each["type"].partition("_")[0]) in kinds)


def _nearest_value(error: ErrorDetails) -> str:
    words = re.findall("'([^']*)'", error["ctx"]["expected"])
    close = difflib.get_close_matches(str(error["input"]), words, n=1, cutoff=0.5)
    return f'; the nearest known value is "{close[0]}"' if close else ""


def nearest_key(key: str, names: Iterable[str]) -> str:
    """Return the end of a sentence that names the known key nearest to an unknown one, or all known keys."""
    names = sorted(names)
    close = difflib.get_close_matches(key, names, 1, _CLOSE)
    return f'; the nearest known key is "{close[0]}"' if close else f"; known keys are {', '.join(names)}"
