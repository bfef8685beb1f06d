"""Erasure while no learner runs: the same on the files, by whoever holds the state directory."""

from pathlib import Path

from anabranch.core.errors import DependencyError
from learner.checkpointing.erase_checkpoints import Eraser
from learner.checkpointing.without_erased import remembered
from learner.errors import MisfitError
from learner.state_dir.checkpoint import RANK, Checkpoints
from replay.erasure.erased_events import ErasedEvents
from replay.erasure.erasure_log import ErasureLog, now
from replay.erasure.log_file import Applied

ERASED = "disk"
"""The kind of tier whose files are erased; rows in others are left to the next start of a learner."""


def erase(state_dir: Path, schema: str, written: ErasureLog, *, whole: bool) -> Applied:
    """Take all records that are not applied yet out of checkpoints and disk tier, and say so in the log.

    Args:
        state_dir: whose lock the caller holds.
        schema: the digest of the schema, under which the checkpoints were made.
        written: the log.
        whole: whether there are no rows elsewhere; else the log says what was removed, and not that it is all.

    Raises:
        SettingsError: no checkpoint can be used.
        DependencyError: something cannot be read or written; it is done again by the next start of a learner.
    """
    checkpoints = Checkpoints(state_dir / "checkpoints", schema, 0)
    through = written.count
    erased = ErasedEvents(written.since(written.through))
    try:
        store, holdout = _counted(checkpoints, erased)
        Eraser(checkpoints, state_dir / "replay" / RANK, erased).run()
        done = Applied(time=now(), through=through if whole else written.through, store=store, holdout=holdout)
        written.append(done)
    except OSError as exc:
        raise DependencyError(
            f"what was erased is written down, and cannot be erased yet: {exc.filename or state_dir}: "
            f"{exc.strerror or exc}; the next start of the learner does it"
        ) from exc
    return done


def _counted(checkpoints: Checkpoints, erased: ErasedEvents) -> tuple[int, int]:
    """Return how many events of store and holdout set the newest checkpoint loses."""
    try:
        found = checkpoints.newest()
    except MisfitError:
        return 0, 0  # of another schema or release: it is looked through all the same
    return remembered(found[1], erased)[1] if found is not None else (0, 0)
