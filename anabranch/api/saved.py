"""What is saved in a folder: checkpoints as the daemon writes them, with a store, and the tensors of a model."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.host_clock import HOST_CLOCK
from anabranch.learner.checkpoints.checkpointer import CheckpointPruning, complete
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints
from anabranch.learner.checkpoints.parts import pack, unpack
from anabranch.learner.errors import CheckpointError, SecondLearnerError
from anabranch.learner.state_dir.lock import lock_state_directory
from anabranch.replay.segments import Segment
from anabranch.replay.snapshot import StoreSnapshot
from anabranch.replay.store import Store

_KEPT = 2
"""Checkpoints that are kept: where the newest is damaged, the one before is restored."""
_FACTS = "python_api"
"""The key of a state that says what has saved it."""


class SavedState:
    """A folder with checkpoints, which one object of one process has open. Used by one thread."""

    def __init__(self, path: Path, kind: str) -> None:
        """Lock the folder, which is made if need be.

        Args:
            path: the folder.
            kind: what saves itself there, for errors: `ReplayBuffer` or `Learner`.

        Raises:
            SettingsError: another one has it open, or it cannot be written.
        """
        self._path, self._kind = path, kind
        self._segments: Sequence[Segment] = ()
        with contextlib.ExitStack() as stack:
            try:
                generation = stack.enter_context(lock_state_directory(path))
            except SecondLearnerError as exc:
                raise SettingsError(
                    f"{path} is open elsewhere, in this process or in another one; close that first"
                ) from exc
            self._checkpoints = Checkpoints(path / "checkpoints", "", generation)
            self._checkpoints.storage.clean()
            self.number = self._checkpoints.highest()
            """Of the last checkpoint."""
            self.close = stack.pop_all().close

    @staticmethod
    def facts_of(checkpoint: Checkpoint) -> dict[str, Any]:
        """Return what `write` was given as facts."""
        return dict(checkpoint.state[_FACTS])

    def newest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint; None where nothing is saved.

        Raises:
            SettingsError: something else has saved itself there, or nothing that is intact.
        """
        try:
            found = self._checkpoints.newest()
        except OSError as exc:
            raise DependencyError(f"{self._path} cannot be read: {exc.strerror or exc}") from exc
        if found is None:
            return None
        facts = found[1].state.get(_FACTS)
        if facts is None or facts["kind"] != self._kind:
            what = "a learner of a pipeline" if facts is None else f"a {facts['kind']}"
            raise SettingsError(f"{self._path} has what {what} has saved, and no {self._kind}; name another folder")
        return found[1]

    def contents(self, checkpoint: Checkpoint) -> StoreSnapshot | None:
        """Return the store in the checkpoint that goes on, if it has one."""
        contents, self._segments = unpack(checkpoint) or (None, ())
        return contents

    def write(
        self,
        step: int,
        facts: Mapping[str, Any],
        store: Store | None = None,
        tensors: Mapping[str, Mapping[str, Tensor]] | None = None,
        state: Mapping[str, Any] | None = None,
        *,
        last: bool = False,
    ) -> None:
        """Write a checkpoint, completely or not at all, and remove old ones.

        Args:
            step: the number of steps.
            facts: plain values that `facts` returns.
            store: whose events are in it.
            tensors: by part.
            state: further plain values.
            last: whether the next one may be written elsewhere, and so has all events.

        Raises:
            DependencyError: it cannot be written; the last one stays.
        """
        self.number += 1
        captured = None if store is None else store.begin_snapshot(self.number)
        numbers, written, segments = self._checkpoints.numbers(), False, self._segments
        oldest = min(numbers, default=None)
        try:
            parts = []
            if captured is not None:
                packed, segments = pack(
                    *captured.contents([*numbers, self.number][-_KEPT:][0]), segments, self._checkpoints
                )
                parts.append(packed)
            values = {**(state or {}), _FACTS: {**facts, "kind": self._kind}}
            self._checkpoints.write(self.number, complete(step, tensors or {}, values, parts), HOST_CLOCK.now())
            written, self._segments = True, segments
            if captured is not None:
                captured.mark_named()
            oldest = CheckpointPruning(self._checkpoints, _KEPT).prune()
        except (OSError, CheckpointError) as exc:
            why = getattr(exc, "strerror", None) or exc
            raise DependencyError(f"{self._path} cannot be written: {why}") from exc
        finally:
            if store is not None:
                store.end_snapshot(oldest, written=written and not last)
