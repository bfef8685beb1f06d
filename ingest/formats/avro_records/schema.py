"""Writer schemas of Avro, parsed and bounded: what they may cost in memory is limited before a record is read.

The types that a decoder is given are the parsed ones, written again: each named type under a name that occurs once,
`int` as `long`, since decoders truncate numbers that do not fit, and without logical types.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from anabranch.ingest.schema_registry.writer_schema import UnfitSchemaError, WriterSchema

_MOST_NODES = 20_000
_MOST_DEPTH = 32
_SMALL_BYTES = 2_048
_MOST_EXPANSION = 32
"""A record may expand to `_SMALL_BYTES` and this many times its size once it is in columns."""

_LONGEST_NAME = 200
"""Characters of a type in an error sentence."""
_MOST_PRECISION = 1_000
_PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
TIMESTAMPS = {
    f"{where}timestamp-{unit}": 10.0**power
    for where in ("", "local-")
    for unit, power in (("millis", 3), ("micros", 6), ("nanos", 9))
}
"""Logical types of times, and how many of their units a second has."""
NO_TIMES = ("date", "time-millis", "time-micros")
"""Logical types of integers that are no time of an event."""

_BYTES = {"null": 0, "boolean": 1, "long": 1, "float": 4, "double": 8, "bytes": 1, "string": 1, "enum": 1}
"""Bytes of the shortest value of each kind."""
_COLUMN_BYTES = {"null": 0, "boolean": 1, "long": 8, "float": 4, "double": 8, "bytes": 4, "string": 4}


@dataclass(frozen=True)
class AvroType:
    """A type of a writer schema.

    Attributes:
        kind: `null`, `boolean`, `long` (also for `int`), `float`, `double`, `bytes`, `string`, `fixed`, `enum`,
            `array`, `map`, `record` or `union`.
        name: as an error sentence writes it.
        parts: the branches of a union, the fields of a record, the values of an array or a map.
        fields: the names of a record's fields.
        symbols: those of an enum.
        logical: the logical type, or an empty string.
        size: bytes of a `fixed`.
        scale: that of a decimal.
        precision: that of a decimal.
    """

    kind: str
    name: str
    parts: tuple["AvroType", ...] = ()
    fields: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()
    logical: str = ""
    size: int = 0
    scale: int = 0
    precision: int = 0

    @cached_property
    def nodes(self) -> int:
        """Number of types in it, one that is named in several fields counted in each."""
        return 1 + sum(part.nodes for part in self.parts)

    @cached_property
    def depth(self) -> int:
        """Levels of nesting."""
        return 1 + max((part.depth for part in self.parts), default=0)

    @cached_property
    def least_bytes(self) -> int:
        """Bytes of the shortest value."""
        if self.kind == "union":
            return 1 + min(part.least_bytes for part in self.parts)
        if self.kind == "record":
            return sum(part.least_bytes for part in self.parts)
        return self.size if self.kind == "fixed" else _BYTES.get(self.kind, 1)

    @cached_property
    def column_bytes(self) -> int:
        """Bytes that the shortest value takes in Arrow columns; those of a null record are as many as of any other."""
        if self.kind in ("union", "record"):
            return 1 + sum(part.column_bytes for part in self.parts)
        if self.kind == "enum":
            return 4 + max(map(len, self.symbols), default=0)
        return self.size if self.kind == "fixed" else _COLUMN_BYTES.get(self.kind, 4)

    @cached_property
    def expands(self) -> bool:
        """Whether records may take much more memory in columns than in messages."""
        if self.kind in ("array", "map"):
            (part,) = self.parts
            return part.expands or part.column_bytes > _MOST_EXPANSION * (part.least_bytes + (self.kind == "map"))
        return any(part.expands for part in self.parts)

    @property
    def suits_columns(self) -> bool:
        """Whether pyruhvro can decode records of this type, without filling the memory."""
        return self.column_bytes <= _SMALL_BYTES + _MOST_EXPANSION * self.least_bytes and self._suits_columns

    @property
    def _suits_columns(self) -> bool:
        if self.kind in ("union", "array", "map"):
            values = self.without_null() if self.kind == "union" else self.parts
            if len(values) != 1 or not values[0].least_bytes:
                return False
        return (
            self.kind != "fixed"
            and not self.expands
            and all(part._suits_columns for part in self.parts if part.least_bytes)
        )

    def walk(self) -> Iterator["AvroType"]:
        """Yield this type and all that are in it."""
        yield self
        for part in self.parts:
            yield from part.walk()

    def as_record(self) -> "AvroType | None":
        """Return the record that a value is where it is not null; None for other types, and for several records."""
        values = self.without_null()
        return values[0] if len(values) == 1 and values[0].kind == "record" else None

    def branches(self) -> Iterator["AvroType"]:
        """Yield the types of its values, those of unions in unions too."""
        if self.kind != "union":
            yield self
        for part in self.parts if self.kind == "union" else ():
            yield from part.branches()

    def without_null(self) -> tuple["AvroType", ...]:
        """Return the types of its values that are not null."""
        branches = self.parts if self.kind == "union" else (self,)
        return tuple(branch for branch in branches if branch.kind != "null")


def parse_avro(writer: WriterSchema) -> AvroType:
    """Return the record type of a writer schema.

    Raises:
        UnfitSchemaError: it is not an Avro schema of a record, refers to itself, or is too large.
    """
    names: dict[str, AvroType | None] = {}
    try:
        for reference in writer.references:
            _parse(json.loads(reference.text), "", names)
        record = _parse(json.loads(writer.text), "", names)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise UnfitSchemaError(f"schema {writer.id} is not an Avro schema ({type(exc).__name__}: {exc})") from exc
    except RecursionError as exc:
        raise UnfitSchemaError(f"schema {writer.id} is nested too deeply") from exc
    if record.kind != "record":
        raise UnfitSchemaError(f"schema {writer.id} is of Avro type {record.name}, not a record")
    return record


def written(record: AvroType, fields: Iterable[str], end: str, *, for_columns: bool) -> str:
    """Return the JSON of a record of some fields, in the order of the type, and of a double `end` after them.

    Field number n is named `fn`. With `for_columns` it is in types that pyruhvro has: it lacks `bytes`, which are
    written as `string`s are, and `null` outside of unions, which takes no bytes. Without, decimals remain.
    """
    chosen = set(fields)
    kinds = [part if name in chosen else None for name, part in zip(record.fields, record.parts, strict=True)]
    members = _members(kinds, "t", for_columns=for_columns)
    return json.dumps({"type": "record", "name": "event", "fields": [*members, {"name": end, "type": "double"}]})


def _members(kinds: Iterable[AvroType | None], prefix: str, *, for_columns: bool) -> list[dict[str, Any]]:
    return [
        {"name": f"f{index}", "type": _written(kind, f"{prefix}_{index}", for_columns=for_columns)}
        for index, kind in enumerate(kinds)
        if kind is not None and (kind.least_bytes or not for_columns)
    ]


def _written(kind: AvroType, name: str, *, for_columns: bool) -> Any:
    """Return a type as JSON; the names of types in it begin with `name`, so that each occurs once."""
    named = {"type": kind.kind, "name": name}
    if kind.kind == "record":
        return named | {"fields": _members(kind.parts, name, for_columns=for_columns)}
    parts = [_written(part, f"{name}_{index}", for_columns=for_columns) for index, part in enumerate(kind.parts)]
    if kind.kind == "union":
        return parts
    if kind.kind in ("array", "map"):
        return {"type": kind.kind, "items" if kind.kind == "array" else "values": parts[0]}
    if kind.kind == "enum":
        return named | {"symbols": list(kind.symbols)}
    plain: dict[str, Any] = {"type": "string" if for_columns and kind.kind == "bytes" else kind.kind}
    if kind.kind == "fixed":
        plain = named | {"size": kind.size}
    if kind.logical == "decimal" and not for_columns:
        plain |= {"logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
    return plain


def _parse(text: Any, namespace: str, names: dict[str, AvroType | None]) -> AvroType:
    parsed = _parse_any(text, namespace, names)
    if parsed.nodes > _MOST_NODES:
        raise UnfitSchemaError(f"its Avro schema is too large: it has more than {_MOST_NODES} types")
    if parsed.depth > _MOST_DEPTH:
        raise UnfitSchemaError(f"its Avro schema is nested more than {_MOST_DEPTH} types deep")
    if parsed.kind == "array" and not parsed.parts[0].least_bytes:
        # A few bytes could claim any number of them.
        raise UnfitSchemaError(f"its Avro schema has an array of {parsed.parts[0].name}, whose values have no bytes")
    return parsed


def _parse_any(text: Any, namespace: str, names: dict[str, AvroType | None]) -> AvroType:
    if isinstance(text, list):
        branches = tuple(_parse(each, namespace, names) for each in text)
        if not branches:
            raise ValueError("a union has no branches")
        return AvroType("union", f"union of {', '.join(branch.name for branch in branches)}"[:_LONGEST_NAME], branches)
    if isinstance(text, str):
        return (
            AvroType("long" if text == "int" else text, text) if text in _PRIMITIVES else _named(text, namespace, names)
        )
    kind = text["type"]
    if kind in ("record", "error", "enum", "fixed"):
        return _definition(text, namespace, names)
    if kind in ("array", "map"):
        part = _parse(text["items" if kind == "array" else "values"], namespace, names)
        return AvroType(kind, f"{kind} of {part.name}"[:_LONGEST_NAME], (part,))
    parsed = _parse(kind, namespace, names)
    return _with_logical(parsed, text) if isinstance(kind, str) else parsed


def _named(name: str, namespace: str, names: Mapping[str, AvroType | None]) -> AvroType:
    full = name if "." in name or not namespace or f"{namespace}.{name}" not in names else f"{namespace}.{name}"
    if full not in names:
        raise ValueError(f"the type {full} is not defined")
    known = names[full]
    if known is None:
        raise UnfitSchemaError(f"its Avro schema refers to itself in {full}; recursive types are not supported")
    return known


def _definition(text: Mapping[str, Any], namespace: str, names: dict[str, AvroType | None]) -> AvroType:
    name = text["name"]
    space, _, short = name.rpartition(".")
    space = space or text.get("namespace", namespace) or ""
    full = f"{space}.{short}" if space else short
    names[full] = None
    kind = "record" if text["type"] == "error" else text["type"]
    if kind == "record":
        fields = tuple(str(field["name"]) for field in text["fields"])
        if len(set(fields)) < len(fields):
            raise ValueError(f"two fields of {full} have the same name")
        parsed = AvroType(
            "record", f"record {short}", tuple(_parse(f["type"], space, names) for f in text["fields"]), fields
        )
    elif kind == "enum":
        parsed = AvroType("enum", f"enum {short}", symbols=tuple(map(str, text["symbols"])))
    else:
        parsed = _with_logical(AvroType("fixed", f"fixed {short}", size=max(0, _whole(text["size"]))), text)
    names[full] = parsed
    return parsed


def _with_logical(parsed: AvroType, text: Mapping[str, Any]) -> AvroType:
    logical = text.get("logicalType")
    if logical in (*TIMESTAMPS, *NO_TIMES) and parsed.kind == "long":
        return replace(parsed, logical=logical, name=logical)
    if logical == "decimal" and parsed.kind in ("bytes", "fixed"):
        precision, scale = _whole(text["precision"]), _whole(text.get("scale", 0))
        if 0 <= scale <= precision <= _MOST_PRECISION:
            return replace(parsed, logical="decimal", name="decimal", precision=precision, scale=scale)
    return parsed


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{str(value)[:_LONGEST_NAME]} is no whole number")
    return value
