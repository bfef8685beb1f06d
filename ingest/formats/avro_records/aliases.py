"""Fields that were renamed: the newest schema of a subject says by which names older records have them.

They are resolved in both directions, since `[schema]` may have either name.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from anabranch.ingest.formats.avro_records.schema import AvroType
from anabranch.ingest.schema_registry.writer_schema import WriterSchema


def fields_in(writer: WriterSchema) -> list[dict[str, Any]]:
    """Return the fields of a schema's record, as they are written; none where it is no such schema."""
    try:
        record = json.loads(writer.text)
    except (ValueError, RecursionError):
        return []
    fields = record.get("fields") if isinstance(record, dict) else None
    return [each for each in fields or () if isinstance(each, dict) and isinstance(each.get("name"), str)]


def aliases_in(newest: WriterSchema) -> tuple[tuple[str, str], ...]:
    """Return the aliases of a schema's fields, each with the field's name."""
    if newest.kind != "avro":
        return ()
    found = []
    for each in fields_in(newest):
        names = each.get("aliases")
        found += [(name, each["name"]) for name in (names if isinstance(names, list) else ()) if isinstance(name, str)]
    return tuple(found)


def renamed(record: AvroType, aliases: Iterable[tuple[str, str]], declared: Iterable[str]) -> AvroType:
    """Return a record type whose fields have the names that `[schema]` declares, where aliases lead to them."""
    names, others = set(declared), dict[str, set[str]]()
    for alias, name in aliases:
        others.setdefault(name, {name}).add(alias)
    fields = list(record.fields)
    for declared_name in names - set(fields):
        same = {each for known in others.values() if declared_name in known for each in known} - names
        found = [index for index, field in enumerate(fields) if field in same]
        if len(found) == 1:
            fields[found[0]] = declared_name
    return replace(record, fields=tuple(fields))
