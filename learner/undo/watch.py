"""Notices records of `undo.json` while a learner runs, and ends it: the next start returns to a checkpoint."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from learner.errors import UndoRequestedError
from learner.state_dir.undo_file import changing, read_undo, stamp_of

_EVERY_SECONDS = 0.1


class UndoWatch:
    """Compares the file with what a learner has applied. Any thread may call `check`."""

    def __init__(self, state_dir: Path, number: int) -> None:
        """Take the last record that is applied."""
        self._state_dir = state_dir
        self._number = number
        self._stamp: object = None
        self._due = 0.0

    def check_if_due(self) -> None:
        """Check several times a second; called between steps."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _EVERY_SECONDS
            self.check()

    def check(self) -> None:
        """Check now; called before anything is published.

        Raises:
            UndoRequestedError: there is a record that is not applied.
            SettingsError: the file is damaged.
            DependencyError: it cannot be read for now.
        """
        stamp = stamp_of(self._state_dir)
        if stamp == self._stamp:
            return
        records = read_undo(self._state_dir)
        if records and records[-1].number > self._number:
            raise UndoRequestedError(
                f"undo {records[-1].number} was requested: this learner ends without a checkpoint, and its next start "
                "returns to one from before the events"
            )
        self._stamp = stamp

    @contextlib.contextmanager
    def excluded(self) -> Iterator[None]:
        """Let no undo be ordered while a checkpoint is deleted, to which it may return, or a version appears.

        Raises as `check`, and OSError.
        """
        with changing(self._state_dir):
            self.check()
            yield
