"""Which fields of a writer schema of Avro the pipeline reads, and whether their types fit: the reader's rules.

Integers are read as floats where a float is declared. Fields that `[schema]` lacks are skipped, and missing ones must
have a default.
"""

from collections.abc import Iterator
from dataclasses import dataclass
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
        fields: the names of the fields that are read.
    """

    schema: Schema
    record: AvroType
    fields: tuple[str, ...]

    @property
    def has_unknown(self) -> bool:
        """Whether records have fields that `[schema]` lacks."""
        names = {field.name for field in _declared(self.schema)}
        return any(name not in names for name in self.record.fields)

    def type_of(self, name: str) -> AvroType:
        """Return the type of a field of the record."""
        return self.record.parts[self.record.fields.index(name)]

    @cached_property
    def time_logical(self) -> str:
        """The logical type of the field `[schema.time]`, or an empty string for a number of seconds."""
        kinds = () if self.schema.time is None else self.type_of(self.schema.time).branches()
        return next((kind.logical for kind in kinds if kind.logical in TIMESTAMPS), "")

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
        kind = record.parts[record.fields.index(field.name)] if field.name in record.fields else None
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
            raise UnfitSchemaError(f"the writer's record {what} {field.name}, which has no default{envelope}")
    return AvroReading(schema, record, tuple(read))


def names_of(schema: Schema) -> list[str]:
    """Return the names of the fields that the pipeline reads."""
    return [field.name for field in _declared(schema)]


def _units(time: AvroType) -> set[str | float]:
    """Return how many of its units a second has, for each kind of number in a type of times; dates have no such."""
    numbers = [kind.logical for kind in time.branches() if kind.kind in _NUMBERS or kind.logical == "decimal"]
    return {logical if logical in NO_TIMES else TIMESTAMPS.get(logical, 1.0) for logical in numbers}


def _declared(schema: Schema) -> Iterator[_Declared]:
    for feature in schema.features:
        kinds = {"b": frozenset({"boolean"}), "f": _NUMBERS}.get(feature.dtype.kind, frozenset({"long"}))
        kind = "string" if feature.is_string else str(feature.dtype)
        expected = f"{kind} of shape {list(feature.shape)}" if feature.shape else kind
        kinds = _WORDS if feature.is_string else kinds
        yield _Declared(feature.name, expected, kinds, feature.shape, feature.default is None)
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
