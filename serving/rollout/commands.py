"""Rollout commands, as changes of `state.json`. Pure functions; loads neither torch nor the web framework."""

from collections.abc import Callable, Sequence

import msgspec

from anabranch.learner.versions.format import RegistryState
from anabranch.serving.errors import ConflictError, NotFoundError

RolloutCommand = Callable[[RegistryState, int, Sequence[int]], RegistryState]
"""Takes the state, the version's number and the numbers of all versions, ascending; returns the new state.

Raises NotFoundError when there is no such version, and ConflictError when another command contradicts it.
"""


def promote(state: RegistryState, number: int, numbers: Sequence[int]) -> RegistryState:
    """Serve this version whatever its verdict, until a newer one passes; skip those that are newer now."""
    _check(state, number, numbers)
    passed_over = {newer for newer in numbers if newer > number} | (set(state.rolled_back) - {number})
    replaced = _replaced(state) if number == state.serving else state.serving
    return msgspec.structs.replace(_with(state, numbers, passed_over, promoted=number), replaced=replaced)


def roll_back(state: RegistryState, number: int, numbers: Sequence[int]) -> RegistryState:
    """Serve this version whatever its verdict, until a newer one passes; those that are newer now are not taken.

    Raises ConflictError also when the version is neither older than the served one nor what this one replaced.
    """
    _check(state, number, numbers)
    if state.serving is not None and number >= state.serving and number != _replaced(state):
        why = "is served" if number == state.serving else f"is newer than version {state.serving}, which is served"
        raise ConflictError(f"version {number} {why}; roll back to an older version, or serve this one")
    return msgspec.structs.replace(promote(state, number, numbers), replaced=None)


def reject(state: RegistryState, number: int, numbers: Sequence[int]) -> RegistryState:
    """Never serve this version again; when it is served now, serve the newest other one that may be served."""
    _check(state, number, numbers)
    after = _with(state, numbers, {*state.rolled_back, number})
    return msgspec.structs.replace(after, replaced=None if number == state.replaced else state.replaced)


def version_before(state: RegistryState, numbers: Sequence[int], usable: Sequence[int]) -> int | None:
    """Return the version that a rollback without a target returns to; None when there is none.

    Args:
        state: what serving serves.
        numbers: all versions.
        usable: those that may be served, ascending.

    It is the version that a person replaced by the served one, else the one that was served before, else the newest one
    below the served version.
    """
    if state.serving is None:
        return None
    if (replaced := _replaced(state)) in numbers:
        return replaced
    older = [number for number in usable if number < state.serving and number not in state.rolled_back]
    return state.previous if state.previous in older else max(older, default=None)


def pin(state: RegistryState, number: int, numbers: Sequence[int]) -> RegistryState:
    """Serve exactly this version until it is unpinned."""
    _check_there(number, numbers)
    return msgspec.structs.replace(state, pinned=number, promoted=_still(state, numbers))


def unpin(state: RegistryState, number: int, numbers: Sequence[int]) -> RegistryState:
    """Serve the newest version that may be served again."""
    if state.pinned != number:
        pinned = "none is" if state.pinned is None else f"version {state.pinned} is"
        raise ConflictError(f"version {number} is not pinned; {pinned}")
    return msgspec.structs.replace(state, pinned=None, promoted=_still(state, numbers))


COMMANDS: dict[str, RolloutCommand] = {
    "promote": promote,
    "reject": reject,
    "rollback": roll_back,
    "pin": pin,
    "unpin": unpin,
}


def _replaced(state: RegistryState) -> int | None:
    """Return the version that a person replaced, while no other than the promoted one was served since."""
    return state.replaced if state.serving in (state.promoted, state.replaced) else None


def _check(state: RegistryState, number: int, numbers: Sequence[int]) -> None:
    _check_there(number, numbers)
    if state.pinned is not None:
        raise ConflictError(f"version {state.pinned} is pinned, and nothing else is served; unpin it first")


def _check_there(number: int, numbers: Sequence[int]) -> None:
    if number not in numbers:
        there = f"there are {numbers[0]} to {numbers[-1]}" if numbers else "there is none yet"
        raise NotFoundError(f"there is no version {number}; {there}")


def _with(
    state: RegistryState, numbers: Sequence[int], rolled_back: set[int], promoted: int | None = None
) -> RegistryState:
    """Return the state with these versions rolled back; deleted ones are left out."""
    kept = sorted(rolled_back & set(numbers))
    promotion = _still(state, numbers) if state.promoted not in kept else None
    return msgspec.structs.replace(state, rolled_back=kept, promoted=promotion if promoted is None else promoted)


def _still(state: RegistryState, numbers: Sequence[int]) -> int | None:
    """Return the promoted version, unless it was deleted."""
    return state.promoted if state.promoted in numbers else None
