"""What validation by a JSON Schema may cost, known before a record is read.

A few lines of a schema may need more steps than any machine has: subschemas that refer to the next one twice double
with each level, and a list of alternatives is compared with each element of a message.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

from anabranch.ingest.schema_registry.writer_schema import UnfitSchemaError

_MOST_NODES = 20_000
"""Subschemas, each counted where it is referred to; as many as an Avro schema may have types."""
_MOST_DEPTH = 64
_LONGEST_REFERENCE = 100
_APPLIED_HERE = ("not", "if", "then", "else")
_APPLIED_HERE_LISTS = ("allOf", "anyOf", "oneOf")
_APPLIED_HERE_MAPS = ("dependentSchemas", "dependencies")
_EACH = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "items",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_ONE_OF_MANY = ("properties", "prefixItems", "items")
"""Maps and lists of which one subschema applies to a value. `items` may be a list in older drafts."""
_DYNAMIC = ("$dynamicRef", "$recursiveRef")
_DEFINITIONS = ("$defs", "definitions")


class Bounds(NamedTuple):
    """What a schema costs at most.

    Attributes:
        nodes: its subschemas, those that are referred to counted at each reference.
        steps: at each depth of a message, the steps that one value needs there.
    """

    nodes: int
    steps: tuple[int, ...]


def most_steps(document: Any, others: Mapping[str, Any]) -> int:
    """Return the steps that a schema needs for one value of a message at most.

    `others` are the documents that it may refer to, by name.

    Raises:
        UnfitSchemaError: it is recursive, or has too many subschemas.
        ValueError: it refers to what is in none of the documents.
    """
    return max(_Counter(document, others).bounds(document).steps)


class _Counter:
    """Counts the subschemas of documents, and the steps that each needs."""

    def __init__(self, document: Any, others: Mapping[str, Any]) -> None:
        self._resources: dict[str, Any] = {}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._bases: dict[int, str] = {}
        """The URI that references in a subschema are relative to, by the identity of its object."""
        self._known: dict[int, Bounds] = {}
        self._begun: set[int] = set()
        for name, each in {**others, "": document}.items():
            self._resources.setdefault(name, each)
            self._add(each, name)

    def bounds(self, schema: Any) -> Bounds:
        """Return the bounds of a subschema."""
        if not isinstance(schema, dict):
            return Bounds(1, (1,))
        key = id(schema)
        if key not in self._known:
            if key in self._begun:
                raise UnfitSchemaError("its JSON Schema is recursive")
            self._begun.add(key)
            self._known[key] = self._counted(schema)
            self._begun.remove(key)
        return self._known[key]

    def _counted(self, schema: dict[str, Any]) -> Bounds:
        for name in _DYNAMIC:
            if name in schema:
                raise UnfitSchemaError(f"its JSON Schema has {name}, by which it may be recursive")
        here = list(map(self.bounds, _applied_here(schema)))
        if "$ref" in schema:
            here.append(self.bounds(self._resolved(schema["$ref"], schema)))
        each = [self.bounds(schema[name]) for name in _EACH if isinstance(schema.get(name), dict | bool)]
        each += map(self.bounds, _values(schema.get("patternProperties")))
        one = [self.bounds(inner) for name in _ONE_OF_MANY for inner in _values(schema.get(name), name != "properties")]
        # What is not evaluated yet is found by evaluating all that applies to the same value once more.
        again = 2 if any(name.startswith("unevaluated") for name in schema) else 1
        depth = 1 + max((len(inner.steps) for inner in (*each, *one)), default=0)
        steps = [_own_steps(schema), *[0] * (max([depth, *(len(inner.steps) for inner in here)]) - 1)]
        if len(steps) > _MOST_DEPTH:
            raise UnfitSchemaError(f"its JSON Schema is nested more than {_MOST_DEPTH} levels deep")
        for level in range(len(steps)):
            steps[level] += sum(again * _at(inner, level) for inner in here)
            if level:
                steps[level] += sum(again * _at(inner, level - 1) for inner in each)
                steps[level] += again * max((_at(inner, level - 1) for inner in one), default=0)
        nodes = 1 + again * sum(inner.nodes for inner in (*here, *each, *one))
        if nodes > _MOST_NODES:
            raise UnfitSchemaError(
                f"its JSON Schema has more than {_MOST_NODES} subschemas, each counted where it is referred to"
            )
        return Bounds(nodes, tuple(steps))

    def _add(self, schema: Any, base: str) -> None:
        """Add a subschema and all within it: their base, and the names by which they are referred to."""
        if not isinstance(schema, dict) or id(schema) in self._bases:
            return
        own = schema.get("$id", schema.get("id"))
        if isinstance(own, str):
            uri, fragment = urldefrag(own)
            base = urljoin(base, uri) if uri else base
            if uri:
                self._resources[base] = schema
            if fragment:
                self._anchors[base, fragment] = schema
        self._bases[id(schema)] = base
        for name in ("$anchor", "$dynamicAnchor"):
            if isinstance(schema.get(name), str):
                self._anchors[base, schema[name]] = schema
        for inner in _subschemas(schema):
            self._add(inner, base)

    def _resolved(self, reference: Any, schema: dict[str, Any]) -> Any:
        """Return what a reference in a subschema refers to."""
        base = self._bases.get(id(schema), "")
        uri, fragment = urldefrag(str(reference))
        uri = urljoin(base, uri) if uri else base
        found: Any = self._resources.get(uri, self._resources.get(uri.lstrip("/")))
        if found is None:
            raise ValueError(f"it refers to {str(reference)[:_LONGEST_REFERENCE]}, which is in none of its documents")
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get((uri, unquote(fragment)))
        for part in unquote(fragment).split("/")[1:] if fragment.startswith("/") else ():
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(part)] if isinstance(found, list) else found[part]
            except (KeyError, IndexError, TypeError, ValueError):
                found = None
                break
        if found is None:
            raise ValueError(f"it refers to {str(reference)[:_LONGEST_REFERENCE]}, which is in none of its documents")
        self._add(found, uri)  # a pointer may lead to where no subschema is expected
        return found


def _applied_here(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield the subschemas that apply to the same value."""
    for name in _APPLIED_HERE:
        if name in schema:
            yield schema[name]
    for name in _APPLIED_HERE_LISTS:
        yield from _values(schema.get(name), True)
    for name in _APPLIED_HERE_MAPS:
        yield from (each for each in _values(schema.get(name)) if not isinstance(each, list))


def _subschemas(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield all subschemas that are written within one."""
    yield from _applied_here(schema)
    yield from (schema[name] for name in _EACH if name in schema)
    for name in ("patternProperties", "properties", *_DEFINITIONS):
        yield from _values(schema.get(name))
    for name in ("prefixItems", "items"):
        yield from _values(schema.get(name), True)


def _values(found: Any, is_list: bool = False) -> list[Any]:
    """Return the subschemas of a map or a list of them; none where it is something else."""
    if is_list:
        return found if isinstance(found, list) else []
    return list(found.values()) if isinstance(found, dict) else []


def _at(bounds: Bounds, level: int) -> int:
    return bounds.steps[level] if level < len(bounds.steps) else 0


def _own_steps(schema: dict[str, Any]) -> int:
    """Return the steps that the keywords of a schema need for one value, without those of its subschemas."""
    steps = 1 + sum(
        len(schema[name]) for name in ("properties", "required") if isinstance(schema.get(name), dict | list)
    )
    steps += sum(_size(schema[name]) for name in ("enum", "const") if name in schema)
    for name in ("dependentRequired", "dependencies"):
        steps += sum(len(each) for each in _values(schema.get(name)) if isinstance(each, list))
    return steps


def _size(value: Any) -> int:
    """Return how many values a value of JSON has."""
    if isinstance(value, dict):
        return 1 + sum(map(_size, value.values()))
    return 1 + sum(map(_size, value)) if isinstance(value, list) else 1
