"""Which versions may be taken, by their verdicts and by what was ordered."""

from pathlib import Path

from learner.version import STATE, VERDICT, RegistryState, Versions

_Stamp = tuple[int, int] | None
"""Modification time and inode of a file, by which a new one is noticed; None without one."""


class Choice:
    """Reads `state.json` and verdicts again only when they have changed. Used by one thread at a time."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._state: tuple[_Stamp, RegistryState] = (None, RegistryState())
        self._served: tuple[int, _Stamp, bool] | None = None

    def state(self) -> RegistryState:
        """Return what `state.json` says; raises VersionError when it cannot be read."""
        stamp = _stamp(self._versions.path / STATE)
        if stamp != self._state[0]:
            self._state = stamp, self._versions.state()
        return self._state[1]

    def verdict_stamp(self, number: int) -> _Stamp:
        """Return what tells a version's verdict from a later one."""
        return _stamp(self._versions.directory(number) / VERDICT)

    def may_take(self, number: int, state: RegistryState) -> bool:
        """Whether a version may be served: it passed, or nobody knows, or a person wants it; raises VersionError."""
        if number in state.rolled_back:
            return False
        verdict = self._versions.verdict(number)
        return verdict is not None and (verdict.verdict != "fail" or number == state.promoted)

    def may_stay(self, number: int, state: RegistryState) -> bool:
        """Whether the served version may go on to be; one that was deleted may."""
        if number in state.rolled_back:
            return False
        stamp = self.verdict_stamp(number)
        if self._served is None or self._served[:2] != (number, stamp):
            verdict = None if stamp is None else self._versions.verdict(number)
            self._served = number, stamp, verdict is not None and verdict.verdict == "fail"
        return not self._served[2] or number == state.promoted


def _stamp(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino
