"""Which fields of a writer schema of Avro the pipeline reads, and whether their types fit: the reader's rules.

Integers are read as floats where a float is declared. Fields that `[schema]` lacks are skipped, and missing ones must
have a default.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.avro_records.schema import NO_TIMES, TIMESTAMPS, AvroType
from anabranch.ingest.formats.other_formats import DEBEZIUM, UNWRAP
from anabranch.ingest.schema_registry.writer_schema import UnfitSchemaError

_NUMBERS = frozenset({"long", "float", "double", "decimal"})
_WORDS = frozenset({"string", "enum"})


@dataclass(frozen=True)
class _Declared:
    """A field of the pipeline's schema, and the kinds of Avro types that it accepts."""

    name: str
    expected: str
    kinds: frozenset[str]
    shape: tuple[int, ...] = ()
    required: bool = True
    many: bool = False
    """Whether a value is an array of any length."""
    is_time: bool = False
    path: tuple[str, ...] = ()
    """The fields of records that lead to it."""

    def accepts(self, kind: AvroType, arrays: int = 0) -> list[bool]:
        """Return for each type that a value may have, except null, whether the field accepts it, inside `arrays`."""
        if kind.kind == "array":
            return self.accepts(kind.parts[0], arrays + 1)
        if kind.kind == "union":
            return [accepted for branch in kind.without_null() for accepted in self.accepts(branch, arrays)]
        if kind.kind == "null":
            return []
        if self.is_time and kind.logical in NO_TIMES:
            return [False]
        depths = {1} if self.many or self.shape else {0}
        depths |= {len(self.shape)} if self.shape else set()
        return [arrays in depths and ("decimal" if kind.logical == "decimal" else kind.kind) in self.kinds]


@dataclass(frozen=True)
class AvroReading:
    """How records of one writer schema are read.

    Attributes:
        schema: the pipeline's.
        record: the writer's record type.
        fields: the names, in the pipeline's schema, of the fields that are read.
    """

    schema: Schema
    record: AvroType
    fields: tuple[str, ...]

    @property
    def outermost(self) -> tuple[str, ...]:
        """The fields of the record that have those that are read, or are them."""
        return tuple(dict.fromkeys(self.schema.path(name)[0] for name in self.fields))

    def steps(self, name: str) -> list[str]:
        """Return the names under which `written` has the fields of records that lead to a field that is read."""
        steps, record = [], self.record
        for part in self.schema.path(name):
            at = record.fields.index(part)
            steps.append(f"f{at}")
            record = record.parts[at].as_record() or record
        return steps

    @property
    def has_unknown(self) -> bool:
        """Whether records have fields that `[schema]` lacks."""
        names = names_of(self.schema)
        return any(name not in names for name in self.record.fields)

    def type_of(self, name: str) -> AvroType:
        """Return the type of a field that is read."""
        found = _type_at(self.record, self.schema.path(name))
        assert found is not None
        return found

    @cached_property
    def times(self) -> dict[str, str]:
        """The logical type of each field that is a time and is read, where it has one; others are numbers."""
        names = [feature.name for feature in self.schema.features if feature.is_time]
        names += [self.schema.time] if self.schema.time is not None else []
        kinds = {name: self.type_of(name).walk() for name in names if name in self.fields}
        logical = {
            name: next((each.logical for each in of if each.logical in TIMESTAMPS), "") for name, of in kinds.items()
        }
        return {name: found for name, found in logical.items() if found}

    @property
    def is_label_boolean(self) -> bool:
        """Whether the label of two classes is written as true or false."""
        name = self.schema.label.name
        return name in self.fields and "boolean" in {kind.kind for kind in self.type_of(name).walk()}


def read_fields(schema: Schema, record: AvroType) -> AvroReading:
    """Return how to read a writer's records.

    Raises:
        UnfitSchemaError: a field that has no default is missing, or no value of a field can fit.
    """
    read = []
    for field in _declared(schema):
        kind = _type_at(record, field.path)
        accepted = field.accepts(kind) if kind is not None else []
        if accepted and any(accepted):
            if kind is not None and field.is_time and len(_units(kind)) > 1:
                raise UnfitSchemaError(f"{field.name} is of Avro type {kind.name}, whose numbers have several units")
            read.append(field.name)
        elif accepted and kind is not None:
            raise UnfitSchemaError(f"{field.name} is of Avro type {kind.name}, not {field.expected}")
        elif field.required:
            what = "has no field" if kind is None else "has only null in"
            envelope = f"; it is an envelope of Debezium: {UNWRAP}" if set(record.fields) >= DEBEZIUM else ""
            raise UnfitSchemaError(f"the writer's record {what} {'.'.join(field.path)}, which has no default{envelope}")
    return AvroReading(schema, record, tuple(read))


def names_of(schema: Schema) -> list[str]:
    """Return the names of the record's fields that the pipeline reads, or in which it reads."""
    return list(dict.fromkeys(schema.path(name)[0] for name in schema.names))


def _type_at(record: AvroType, path: tuple[str, ...]) -> AvroType | None:
    """Return the type of a field in records within a record; None where it is missing."""
    kind: AvroType | None = record
    for part in path:
        inner = kind.as_record() if kind is not None else None
        kind = inner.parts[inner.fields.index(part)] if inner is not None and part in inner.fields else None
    return kind


def _units(time: AvroType) -> set[str | float]:
    """Return how many of its units a second has, for each kind of number in a type of times; dates have no such."""
    numbers = [kind.logical for kind in time.branches() if kind.kind in _NUMBERS or kind.logical == "decimal"]
    return {logical if logical in NO_TIMES else TIMESTAMPS.get(logical, 1.0) for logical in numbers}


def _declared(schema: Schema) -> Iterator[_Declared]:
    """Yield the fields that records may have, the features first and in their order."""
    for each in _described(schema):
        yield replace(each, path=schema.path(each.name))


def _described(schema: Schema) -> Iterator[_Declared]:
    for feature in schema.features:
        kinds = {"b": frozenset({"boolean"}), "f": _NUMBERS}.get(feature.dtype.kind, frozenset({"long"}))
        kind = "string" if feature.is_string else str(feature.dtype)
        expected = f"{kind} of shape {list(feature.shape)}" if feature.shape else kind
        kinds = _WORDS if feature.is_string else kinds
        yield _Declared(feature.name, expected, kinds, feature.shape, feature.default is None, is_time=feature.is_time)
    yield _label(schema)
    for name, expected, kinds in (
        (schema.key, "a string or a whole number", _WORDS | {"long"}),
        (schema.time, "a timestamp or a number of seconds", _NUMBERS),
        (schema.weight, "a number", _NUMBERS),
        (schema.group, "a string or a whole number", _WORDS | {"long"}),
        (schema.join, "a string or a whole number", _WORDS | {"long"}),
    ):
        if name is not None:
            yield _Declared(name, expected, kinds, is_time=name == schema.time)


def _label(schema: Schema) -> _Declared:
    label = schema.label
    if label.names is not None:
        kinds, expected = _WORDS, "a string"
    elif label.classes is not None:
        kinds, expected = frozenset({"long"}), "a whole number"
        if label.one_of == 2:
            kinds, expected = kinds | {"boolean"}, "a whole number or a boolean"
    else:
        kinds, expected = _NUMBERS, "a number"
    expected = f"an array, each {expected}" if label.is_list else expected
    return _Declared(label.name, expected, kinds, required=False, many=label.is_list)
