"""A registry of the learner's named parts with state, used both to save and to restore a checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Stateful(Protocol):
    """A part with a state of plain JSON values."""

    @property
    def state(self) -> Callable[[], Any]:
        """Return the state between two steps."""
        ...

    @property
    def restore(self) -> Callable[[Any], None]:
        """Restore the state of a checkpoint, before the first step."""
        ...


@dataclass(frozen=True)
class StatefulPart:
    """A part without an object, or whose object restores more than this state."""

    state: Callable[[], Any]
    restore: Callable[[Any], None]


def states_of(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return the state of each part, by name."""
    return {name: part.state() for name, part in parts.items()}


def restore_states(parts: Mapping[str, Stateful], states: Mapping[str, Any]) -> None:
    """Restore all parts, in the order of the registry."""
    for name, part in parts.items():
        part.restore(states[name])
