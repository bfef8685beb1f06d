"""Sections of `pipeline.toml`, as arguments in Python: the same keys, and errors in the same words."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from anabranch.config.explain import explained, key_of, rank, sentence_of
from anabranch.core.errors import SettingsError

_Section = TypeVar("_Section", bound=BaseModel)


def check_type(value: object, kind: type, what: str, way: str) -> None:
    """Raise SettingsError, which names the way to make one, unless an argument is of a class of the API."""
    if not isinstance(value, kind):
        raise SettingsError(f"{what} is of type {type(value).__name__}, and has to be a {kind.__name__}: write {way}")


def checked(kind: type[_Section], section: str, values: Mapping[str, Any] | BaseModel, origin: str) -> _Section:
    """Return the settings of a section, such as `schema`, or of all where it is empty; `origin`: what takes them.

    Raises:
        SettingsError: a key or a value is wrong; the sentence is that of a file's.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as exc:
        document: Any = {section: values} if section else values
        above = (section,) if section else ()
        found = [{**error, "loc": (*above, *error["loc"])} for error in sorted(exc.errors(), key=rank)]
        errors = explained(document, found)  # type: ignore[arg-type] # of the same keys
        first = key_of(document, errors[0])
        same_key = [error for error in errors if key_of(document, error) == first]
        raise SettingsError(sentence_of(origin, document, same_key, set())) from exc
