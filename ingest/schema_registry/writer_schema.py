"""The schema that a message was written with, as the registry has it."""

from dataclasses import dataclass
from typing import Literal

SchemaKind = Literal["avro", "protobuf", "json-schema"]


class UnfitSchemaError(Exception):
    """A writer schema whose messages can never fit `[schema]`; its sentence, without `schema: `, says why."""


@dataclass(frozen=True)
class Reference:
    """A schema that another one refers to by `name`: a type of Avro, an import of Protobuf, a URI of JSON Schema."""

    name: str
    text: str


@dataclass(frozen=True)
class WriterSchema:
    """A schema of the registry.

    Attributes:
        id: its number, or its GUID in lower case; `subject:version` for the newest one of a subject.
        kind: the language that it is written in.
        text: the schema.
        references: what it refers to, in an order in which each only needs those before it.
        aliases: other names of fields in the subject's newest schema, each with the field's name there; in Avro only.
    """

    id: int | str
    kind: SchemaKind
    text: str
    references: tuple[Reference, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def size(self) -> int:
        """Characters of it and of what it refers to."""
        return len(self.text) + sum(len(each.text) for each in self.references)
