"""What the search reports, and `search.json`, by which a person controls it. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from anabranch.core.atomic_files import replace_file
from anabranch.core.errors import SettingsError
from anabranch.core.failures import DamagedError, away_is_dependency, decoded
from anabranch.core.files import MOST_BYTES, read_file

CONTROL = "search.json"
Judged = Literal["promoted", "better", "no_better", "undecided", "not_finite", "raised", "no_memory", "stopped"]
"""How a challenger ended: `better` is reported, not promoted; `undecided` after its longest lease; `stopped` since the
model's settings have changed, or are pinned."""


class ChallengerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A challenger that trains, or waits for its next lease, or has ended."""

    number: int
    """From 1, over the life of the pipeline."""
    values: dict[str, float]
    """Its settings, by key."""
    steps: int
    """Steps that it was compared on."""
    difference: float
    """Mean difference of its measure from the model's, over these steps; positive where it is better."""
    log_wealth: float
    """Evidence that it is better, and what that has to reach."""
    log_threshold: float
    outcome: Judged | None = None
    """None: it has not ended."""
    step: int = 0
    """The step at which it ended."""


class SearchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of `[search]`."""

    values: dict[str, float]
    """The model's settings, by key."""
    given: dict[str, float]
    """Those of the config."""
    pinned: bool
    """Whether a person has fixed the model's settings."""
    challengers: list[ChallengerReport]
    """Those that have not ended."""
    history: list[ChallengerReport]
    """The newest that have ended, oldest first."""
    outcomes: dict[str, int]
    """Challengers by how they ended, over the life of the pipeline."""
    steps: int
    """Steps of challengers over the life of the pipeline."""


class SearchControl(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `search.json`."""

    number: int = 0
    """Grows with each command that changes `values`."""
    values: dict[str, float] = {}
    """Settings that the model takes once, by key."""
    pinned: bool = False
    """Whether the model's settings stay as they are."""


def stamp_of_control(state_dir: Path) -> object:
    """Return a value that changes when the file is replaced; None where there is none that can be read."""
    try:
        status = (state_dir / CONTROL).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


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


def write_control(state_dir: Path, *, values: Mapping[str, float] | None = None, pinned: bool) -> SearchControl:
    """Let the model take `values`, if they are given, and pin its settings from then on, or not.

    Raises:
        SettingsError: the file is damaged, or cannot be written.
        DependencyError: it cannot be read for now.
    """
    before = read_control(state_dir)
    control = SearchControl(
        number=before.number + (values is not None),
        values=before.values if values is None else dict(values),
        pinned=pinned,
    )
    try:
        replace_file(state_dir / CONTROL, msgspec.json.encode(control))
    except OSError as exc:
        raise SettingsError(f"{state_dir / CONTROL} cannot be written: {exc.strerror or exc}") from exc
    return control
