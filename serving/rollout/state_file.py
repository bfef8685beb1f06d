"""`state.json` of the versions directory, which all serving workers read and write."""

import contextlib
from collections.abc import Iterator

import msgspec

from anabranch.learner.errors import VersionError
from anabranch.learner.versions.format import RegistryState, Versions
from anabranch.serving.rollout.eligibility import ServingPolicy

_MOST_ROLLED_BACK = 1000
_MOST_RECENT = 100


class StateFile:
    """The contents at the last read or write by this process. Used by one thread at a time."""

    def __init__(self, versions: Versions, policy: ServingPolicy) -> None:
        self.contents = RegistryState()
        self._versions = versions
        self._policy = policy
        self._is_locked = False

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Lock `state.json` against other workers while it is read and written; may be nested."""
        if self._is_locked:
            yield
            return
        with self._versions.changing_state():
            self._is_locked = True
            try:
                yield
            finally:
                self._is_locked = False

    def read(self) -> bool:
        """Read the file again, and return whether a rollout command has changed it. An unreadable file is ignored."""
        try:
            state = self._policy.state()
        except (OSError, VersionError):  # reported when it is written
            return False
        before, self.contents = self.contents, state
        return (state.pinned, state.promoted, state.rolled_back) != (
            *(before.pinned, before.promoted, before.rolled_back),
        )

    def swapped(self, previous: int | None, number: int) -> None:
        """Write that this process serves a version instead of `previous`; raises OSError or VersionError."""
        with self.changing():
            before = self._versions.state()
            state = _served(before, previous, number, was_pinned=self.contents.pinned is not None)
            if state != before:
                self._versions.write_state(state)
        self.contents = state


def _served(state: RegistryState, previous: int | None, number: int, was_pinned: bool) -> RegistryState:
    """Return the state after a process swapped from `previous` (None: it has just started) to a version.

    Another worker may have written the same state before, or be ahead. `was_pinned`: one was when this process chose;
    by now another may have unpinned it.
    """
    forward = previous is not None and number > previous
    if forward and state.serving is not None and state.serving > number and state.pinned is None:
        return state
    back = previous is not None and number < previous and state.pinned is None and not was_pinned
    rolled_back = sorted({*state.rolled_back, previous}) if back and previous is not None else state.rolled_back
    recent = [*state.recent, number]
    if state.serving == number:  # already written, or a restart
        previous, recent = state.previous, state.recent
    elif previous is None:
        previous = state.serving
    return msgspec.structs.replace(
        state,
        serving=number,
        previous=previous,
        rolled_back=rolled_back[-_MOST_ROLLED_BACK:],
        recent=recent[-_MOST_RECENT:],
    )
