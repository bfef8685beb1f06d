"""Where events have the fields of the schema: under their names, in objects within objects, or one value for several.

A schema whose fields are all found under their own names costs nothing here: its messages are parsed into events at
once. Others are parsed into structs that are nested as the messages are, and those become events.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from anabranch.ingest.events.schema import IGNORED, UNITS, Feature, Label, Schema
from anabranch.ingest.formats.base import seconds_of

T = TypeVar("T")

_LARGEST_BOUND = 2**63 - 1
"""msgspec compares integers with bounds of at most 64 bits."""
_ABSENT = (None, UNSET)


class _EventField(NamedTuple):
    """A field of an event: its attribute, its name in the schema, and the type that msgspec checks."""

    attribute: str
    name: str
    kind: Any
    optional: bool = False


def event_reader(
    schema: Schema,
    make: Callable[[Any], Callable[[T], Any]],
    *,
    forbid_unknown: bool,
    has_paths: bool = True,
    text_times: bool = True,
) -> Callable[[T], Any]:
    """Return what makes an event of a value: a struct with `f0` and so on for the features, `label`, `key`, ...

    Args:
        schema: the fields of an event.
        make: returns what makes an instance of a type of a value, or raises as msgspec does.
        forbid_unknown: whether a field that the schema does not have is an error. Objects within objects may have
            others, and so may the objects around them.
        has_paths: whether fields are where `Schema.path` says; otherwise, they are under their names.
        text_times: whether a time may be a text.
    """
    fields = list(_fields(schema, text_times=text_times))
    if schema.is_flat or not (has_paths or schema.shared):
        read = make(_struct("Event", fields, forbid_unknown=forbid_unknown))
    else:
        paths = {each.name: schema.path(each.name) if has_paths else (each.name,) for each in fields}
        forbid_unknown = forbid_unknown and all(len(path) == 1 for path in paths.values())
        read = _nested_reader(fields, paths, make, forbid_unknown=forbid_unknown)
    return _with_times(read, schema) if text_times else read


def event_of(schema: Schema, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the schema that a message has, by name; what it has in addition is left out."""
    if schema.is_flat:
        return dict(document)
    found = ((name, value_at(document, schema.path(name))) for name in schema.names)
    return {name: value for name, value in found if value is not None}


def document_of(schema: Schema, event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message of an event, given by names of the schema: each value at its path."""
    document: dict[str, Any] = {}
    for name, value in event.items():
        *parents, last = schema.path(name)
        inner = document
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner.setdefault(last, value)
    return document


def value_at(document: Any, path: tuple[str, ...]) -> Any:
    """Return the value in objects within objects; None where one of them lacks it or is none."""
    for part in path:
        if not isinstance(document, Mapping):
            return None
        document = document.get(part)
    return document


def in_units(schema: Schema, name: str, value: Any) -> Any:
    """Return the value of a field, of a time that is a text the number that a message may have instead.

    Raises ValueError where the text is no ISO time.
    """
    found = next((each for each in _times(schema) if each[1] == name), None)
    return value if found is None else _number(value, found[2], whole=found[3])


def _fields(schema: Schema, *, text_times: bool) -> list[_EventField]:
    fields = []
    for index, feature in enumerate(schema.features):
        kind, optional = _feature_type(feature, text_times=text_times), feature.default is not None
        fields.append(_EventField(f"f{index}", feature.name, kind | None if optional else kind, optional))
    fields.append(_EventField("label", schema.label.name, _label_type(schema.label) | None, optional=True))
    for attribute, name, kind in (
        ("key", schema.key, str | int),
        ("time", schema.time, float | str if text_times else float),
        ("weight", schema.weight, Annotated[float, Meta(ge=0)]),
        ("group", schema.group, str | int),
        ("join", schema.join, str | int),
    ):
        if name is not None:
            fields.append(_EventField(attribute, name, kind))
    return fields


def _struct(name: str, fields: list[_EventField], *, forbid_unknown: bool) -> type[msgspec.Struct]:
    declared: list[Any] = [
        (each.attribute, each.kind | UnsetType, UNSET) if each.optional else (each.attribute, each.kind)
        for each in fields
    ]
    declared.sort(key=len)  # fields without a default have to come first
    names = {each.attribute: each.name for each in fields}
    return msgspec.defstruct(name, declared, rename=names, forbid_unknown_fields=forbid_unknown, gc=False)


def _nested_reader(
    fields: list[_EventField],
    paths: Mapping[str, tuple[str, ...]],
    make: Callable[[Any], Callable[[T], Any]],
    *,
    forbid_unknown: bool,
) -> Callable[[T], Any]:
    """Return what makes an event of a value by way of structs that are nested as messages are."""
    by_path: dict[tuple[str, ...], list[_EventField]] = {}
    for each in fields:
        by_path.setdefault(paths[each.name], []).append(each)
    steps: dict[str, tuple[str, ...]] = {}
    read = make(_level(by_path, (), steps, forbid_unknown=forbid_unknown))
    event = _struct(
        "Event", [each._replace(name=each.attribute, optional=True) for each in fields], forbid_unknown=False
    )
    plan = [
        (each.attribute, steps[each.attribute], each.kind if len(same) > 1 else None, ".".join(path))
        for path, same in by_path.items()
        for each in same
    ]

    def parsed(value: T) -> Any:
        message, found = read(value), {}
        for attribute, attributes, kind, dotted in plan:
            inner = message
            for step in attributes:
                inner = getattr(inner, step)
                if inner is None or inner is UNSET:
                    break
            if kind is not None and inner is not UNSET:
                try:
                    inner = msgspec.convert(inner, kind)
                except msgspec.ValidationError as exc:
                    raise msgspec.ValidationError(f"{str(exc).partition(' - at ')[0]} - at `$.{dotted}`") from None
            found[attribute] = inner
        return event(**found)

    return parsed


def _level(
    by_path: Mapping[tuple[str, ...], list[_EventField]],
    above: tuple[str, ...],
    steps: dict[str, tuple[str, ...]],
    *,
    forbid_unknown: bool,
) -> type[msgspec.Struct]:
    """Return the type of the objects to which the attributes `above` lead; `steps` gets those that lead to a field."""
    depth = len(above)
    members: list[_EventField] = []
    groups: dict[str, dict[tuple[str, ...], list[_EventField]]] = {}
    for path, same in by_path.items():
        groups.setdefault(path[depth], {})[path] = same
    for index, (name, group) in enumerate(groups.items()):
        attribute = f"m{index}"
        here = (*above, attribute)
        optional = all(each.optional for same in group.values() for each in same)
        (path, same), *_ = group.items()
        if len(path) == depth + 1:
            steps.update({each.attribute: here for each in same})
            kind: Any = same[0].kind if len(same) == 1 else Any
        else:
            kind = _level(group, here, steps, forbid_unknown=forbid_unknown)
            kind = kind | None if optional else kind
        members.append(_EventField(attribute, name, kind, optional))
    return _struct("Level", members, forbid_unknown=forbid_unknown)


def _with_times(read: Callable[[T], Any], schema: Schema) -> Callable[[T], Any]:
    """Return `read` for events whose times, if they have any, are numbers then, though some may be written as texts."""
    times = _times(schema)
    if not times:
        return read
    texts = str, list

    def parsed(value: T) -> Any:
        event = read(value)
        for attribute, name, count, whole in times:
            time = getattr(event, attribute)
            if isinstance(time, texts):
                try:
                    setattr(event, attribute, _number(time, count, whole=whole))
                except ValueError as exc:
                    dotted = ".".join(schema.path(name))
                    unit = next(words for each, words in UNITS.values() if each == count)
                    raise msgspec.ValidationError(
                        f"Expected {unit} since 1970 or an ISO time, got {exc.args[-1][:40]!r} - at `$.{dotted}`"
                    ) from None
        return event

    return parsed


def _times(schema: Schema) -> list[tuple[str, str, int, bool]]:
    """Return attribute, name, units of a second and whether it is whole, of each field that is a time."""
    times = [
        (f"f{index}", feature.name, UNITS[feature.unit][0], feature.dtype.kind != "f")
        for index, feature in enumerate(schema.features)
        if feature.is_time
    ]
    return times if schema.time is None else [*times, ("time", schema.time, UNITS[schema.time_unit][0], False)]


def _number(time: Any, count: int, *, whole: bool) -> Any:
    """Return a time, or those of a list, as a number of units, of which a second has `count`.

    The last argument of the ValueError is the text.
    """
    if isinstance(time, list):
        return [_number(each, count, whole=whole) for each in time]
    if not isinstance(time, str):
        return time
    try:
        seconds = seconds_of(time)
    except ValueError as exc:
        raise ValueError(str(exc), time) from None
    return round(seconds * count) if whole else seconds * count


def _feature_type(feature: Feature, *, text_times: bool) -> Any:
    kind: Any = str if feature.is_string else _number_type(feature.wire)
    if feature.is_time and text_times:
        kind = kind | str
    if feature.may_be_nan:
        kind = kind | None
    for size in reversed(feature.shape):
        kind = Annotated[list[kind], Meta(min_length=size, max_length=size)]
    return kind | None if feature.may_be_nan else kind


def _number_type(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        return bool
    if dtype.kind == "f":
        return float
    limits = np.iinfo(dtype)
    if limits.max > _LARGEST_BOUND:
        return Annotated[int, Meta(ge=0)]
    return Annotated[int, Meta(ge=int(limits.min), le=int(limits.max))]


def _label_type(label: Label) -> Any:
    if label.is_list:
        one: Any = _label_type(replace(label, multi=False, length=None))
        if label.length is not None:
            one = (
                one | Literal[""] if label.names else Annotated[int, Meta(ge=IGNORED, le=(label.classes or 0) - 1)]
            ) | None
        return list[one]
    if label.names is not None:
        return Literal[label.names]
    if label.classes is None:
        return float
    number = Annotated[int, Meta(ge=0, le=label.classes - 1)]
    return number | bool if label.one_of == 2 else number
