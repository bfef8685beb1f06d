"""Erases events while no learner runs: applies the log to checkpoints and disk tier. The caller holds the lock."""

from anabranch.core.errors import DependencyError
from learner.checkpointing.erase_checkpoints import Eraser
from learner.checkpointing.without_erased import without_erased
from learner.errors import MisfitError
from learner.state_dir.checkpoint import RANK, Checkpoints
from replay.erasure.erased_events import ErasedEvents
from replay.erasure.erasure_log import ErasureLog, now
from replay.erasure.log_file import Applied

ERASED = "disk"
"""The kind of tier whose files are erased; the next start of a learner erases rows in others."""


def erase(checkpoints: Checkpoints, written: ErasureLog, keep: int, *, whole: bool) -> Applied:
    """Erase the events of all pending records from checkpoints and disk tier, and append the result to the log.

    Args:
        checkpoints: those of the state directory, whose lock the caller holds.
        written: the log.
        keep: as in `Eraser`.
        whole: whether no rows are stored elsewhere; if not, the records stay pending.

    Raises:
        SettingsError: no checkpoint can be used.
        DependencyError: a file cannot be read or written; the next start of a learner tries again.
    """
    state_dir = checkpoints.path.parent
    through = written.count
    erased = ErasedEvents(written.since(written.through))
    try:
        store, holdout = _counted(checkpoints, erased)
        Eraser(checkpoints, state_dir / "replay" / RANK, erased, keep).run()
        done = Applied(time=now(), through=through if whole else written.through, store=store, holdout=holdout)
        written.append(done)
    except OSError as exc:
        raise DependencyError(
            f"the erasure is in the log, but its events cannot be removed yet: {exc.filename or state_dir}: "
            f"{exc.strerror or exc}; the next start of the learner removes them"
        ) from exc
    return done


def _counted(checkpoints: Checkpoints, erased: ErasedEvents) -> tuple[int, int]:
    """Return how many events of the store and the holdout set are erased from the newest checkpoint."""
    try:
        newest = checkpoints.newest()
    except MisfitError:
        return 0, 0  # of another schema or release, and erased all the same
    return without_erased(newest[1], erased)[1] if newest is not None else (0, 0)
