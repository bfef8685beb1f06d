"""The catalog of message formats: what each is to all that is around it. Imports no format."""

from collections.abc import Mapping
from dataclasses import dataclass

from anabranch.core.users_code import NamedClass, UsersCodeError


@dataclass(frozen=True)
class FormatKind:
    """What a message format is to all that is around it.

    Attributes:
        several: whether a message may have several events.
        writes: whether it makes messages of events too, for `anabranch produce`.
    """

    several: bool = False
    writes: bool = False


FORMATS: Mapping[str, FormatKind] = {
    "json": FormatKind(writes=True),
    "rows": FormatKind(several=True, writes=True),
    "arrow": FormatKind(several=True, writes=True),
    "avro": FormatKind(),
    "protobuf": FormatKind(),
    "json-schema": FormatKind(),
}
"""Our formats, by the names that `stream.format` takes."""
FORMAT = NamedClass("stream.format", tuple(FORMATS), "anabranch.formats", "anabranch.ingest.formats.base:Format")


def kind_of(name: str) -> FormatKind:
    """Return what a format is: one of the catalog, or a class that is imported for it.

    Raises:
        UsersCodeError: there is no such class.
    """
    if name in FORMATS:
        return FORMATS[name]
    kind = FORMAT.find(name).kind
    if not isinstance(kind, FormatKind):
        raise UsersCodeError(f'stream.format = "{name}": its attribute kind is a {type(kind).__name__}, no FormatKind')
    return kind
