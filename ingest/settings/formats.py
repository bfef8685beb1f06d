"""The catalog of message formats: what each is to all that is around it. Imports no format."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from anabranch.core.users_code import NamedClass


@dataclass(frozen=True)
class FormatKind:
    """What a message format is to all that is around it.

    Attributes:
        several: whether a message may have several events.
        writes: whether it makes messages of events too, for `anabranch produce`.
        registered: whether its messages name a schema of the registry.
        needs: the modules that it imports, and the extra that brings each.
    """

    several: bool = False
    writes: bool = False
    registered: bool = False
    needs: Mapping[str, str] = field(default_factory=dict)


def _registered(module: str) -> FormatKind:
    """Return the kind of a format whose schemas a module reads."""
    return FormatKind(registered=True, needs=dict.fromkeys(("requests", module), "registry"))


FORMATS: Mapping[str, FormatKind] = {
    "json": FormatKind(writes=True),
    "rows": FormatKind(several=True, writes=True),
    "arrow": FormatKind(several=True, writes=True, needs={"pyarrow": "arrow"}),
    "avro": _registered("fastavro"),
    "protobuf": _registered("google.protobuf"),
    "json-schema": _registered("jsonschema_rs"),
}
"""Our formats, by the names that `stream.format` takes."""
REGISTRY_FORMATS = tuple(name for name, kind in FORMATS.items() if kind.registered)
"""Those whose messages name a schema of the registry."""
FORMAT = NamedClass("stream.format", tuple(FORMATS), "anabranch.formats", "anabranch.ingest.formats.base:Format")
