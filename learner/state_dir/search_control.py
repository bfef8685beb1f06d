"""`search.json`, by which a person controls the search. Imports no torch."""

import logging
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from anabranch.core.atomic_files import replace_file
from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.failures import DamagedError, away_is_dependency, decoded
from anabranch.core.files import MOST_BYTES, read_file, stamp_of

CONTROL = "search.json"
_EVERY_SECONDS = 0.5
"""Time after which the file is read again, if it has changed."""
log = logging.getLogger(__name__)


class SearchControl(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `search.json`."""

    command: str = ""
    """Another one for each command that changes `values`, also after the file was deleted."""
    values: dict[str, float] = {}
    """Settings that the model takes once, by key."""
    pinned: bool = False
    """Whether the model's settings stay as they are."""


def read_control(state_dir: Path) -> SearchControl:
    """Return the contents of the file; the defaults where there is none.

    Raises:
        SettingsError: the file is damaged.
        DependencyError: it cannot be read for now.
    """
    path = state_dir / CONTROL
    try:
        with away_is_dependency(f"{path} cannot be read; it controls the search"):
            try:
                content = read_file(path, MOST_BYTES)
            except FileNotFoundError:
                return SearchControl()
        return decoded(content, SearchControl)
    except DamagedError as exc:
        raise SettingsError(f"{path} cannot be used: {exc}; delete it, and repeat the command") from exc


def write_control(
    state_dir: Path, *, values: Mapping[str, float] | None = None, pinned: bool | None = None
) -> SearchControl:
    """Let the model take `values`, if they are given, and pin its settings from then on, or not; None: as before.

    Raises:
        SettingsError: the file is damaged, or cannot be written.
        DependencyError: it cannot be read for now.
    """
    before = read_control(state_dir)
    control = SearchControl(
        command=before.command if values is None else secrets.token_hex(8),
        values=before.values if values is None else dict(values),
        pinned=before.pinned if pinned is None else pinned,
    )
    try:
        replace_file(state_dir / CONTROL, msgspec.json.encode(control))
    except OSError as exc:
        raise SettingsError(f"{state_dir / CONTROL} cannot be written: {exc.strerror or exc}") from exc
    return control


class ControlReader:
    """Reads the file where it has changed, about twice a second. Used by one thread."""

    def __init__(self, state_dir: Path) -> None:
        """Start before the first read."""
        self._state_dir = state_dir
        self._stamp: object = None
        self._due = 0.0
        self.problem: str | None = None
        """Why the file cannot be used, as a sentence; what was read before holds."""

    def changed(self) -> SearchControl | None:
        """Return the new contents; None where they are as before, or cannot be used."""
        if time.monotonic() < self._due:
            return None
        self._due = time.monotonic() + _EVERY_SECONDS
        stamp = stamp_of(self._state_dir / CONTROL)
        if stamp == self._stamp and self.problem is None:
            return None
        try:
            control = read_control(self._state_dir)
        except (SettingsError, DependencyError) as exc:
            if str(exc) != self.problem:
                log.error("%s", exc)  # noqa: TRY400 the sentence says all
            self.problem = str(exc)
            return None
        self._stamp, self.problem = stamp, None
        return control
