"""What the learner and the process of MLflow's client send each other: lines of JSON."""

from typing import Any, Literal

import msgspec

from learner.registration.lineage import Registration


class Opening(msgspec.Struct, tag=True):
    """The first line: what the registry is made with."""

    settings: dict[str, Any]
    name: str
    source: str


class Call(msgspec.Struct, tag=True):
    """A call of a method of the registry."""

    method: Literal["register", "move_alias", "tag"]
    texts: list[str] = []
    version: Registration | None = None

    def arguments(self) -> list[Any]:
        """Return the arguments of the call."""
        return [*self.texts] if self.version is None else [self.version]


class Answer(msgspec.Struct):
    """What a method returned, or the sentence of its error."""

    result: str | None = None
    error: str = ""
    kind: Literal["", "settings", "refused", "failed"] = ""
