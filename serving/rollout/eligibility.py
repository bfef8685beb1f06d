"""Which versions may be taken, by their verdicts and by what was ordered."""

from learner.state_dir.folders import LocalFolder
from learner.state_dir.trained_through import Trained
from learner.state_dir.version import STATE, Manifest, RegistryState, Versions


class Choice:
    """Reads `state.json` and verdicts again only when they have changed. Used by one thread at a time."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._state: tuple[object, RegistryState] = (None, RegistryState())
        self._served: tuple[int, object, bool] | None = None

    def state(self) -> RegistryState:
        """Return what `state.json` says; raises VersionError when it cannot be read."""
        stamp = LocalFolder(self._versions.path).stamp(STATE)
        if stamp != self._state[0]:
            self._state = stamp, self._versions.state()
        return self._state[1]

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
        stamp = self._versions.verdict_stamp(number)
        if self._served is None or self._served[:2] != (number, stamp):
            verdict = None if stamp is None else self._versions.verdict(number)
            self._served = number, stamp, verdict is not None and verdict.verdict == "fail"
        return not self._served[2] or number == state.promoted


def lowered(served: Manifest, candidate: Manifest) -> tuple[str, int, int] | None:
    """Return a partition of which a candidate has learned less, with both offsets; None when there is none.

    Topics that the candidate does not name do not count where a later learner wrote it: it was told to read others.
    """
    topics = {_topic(name) for name in candidate.trained_through}
    others = candidate.generation > served.generation and bool(topics)
    for name, before in served.trained_through.items():
        if others and _topic(name) not in topics:
            continue
        after = candidate.trained_through.get(name, Trained(offset=-1, incarnation=before.incarnation))
        if after.incarnation == before.incarnation and after.offset < before.offset:
            return name, before.offset, after.offset
    return None


def _topic(name: str) -> str:
    return name.rpartition(":")[0]
