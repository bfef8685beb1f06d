"""What the search reports, and `search.json`: what a person has ordered of it. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from anabranch.core.atomic_files import replace_file
from anabranch.core.errors import SettingsError
from anabranch.core.failures import DamagedError, away_is_dependency, decoded
from anabranch.core.files import MOST_BYTES, read_file

ORDERS = "search.json"
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


class SearchOrders(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `search.json`."""

    number: int = 0
    """Grows with each order that changes `values`."""
    values: dict[str, float] = {}
    """Settings that the model takes once, by key."""
    pinned: bool = False
    """Whether the model's settings stay as they are."""


def stamp_of_orders(state_dir: Path) -> object:
    """Return a value that changes when the file is replaced; None where there is none that can be read."""
    try:
        status = (state_dir / ORDERS).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino, status.st_size


def read_orders(state_dir: Path) -> SearchOrders:
    """Return what was ordered.

    Raises:
        SettingsError: the file is damaged.
        DependencyError: it cannot be read for now.
    """
    path = state_dir / ORDERS
    try:
        with away_is_dependency(f"{path} cannot be read; what was ordered of the search is needed"):
            try:
                content = read_file(path, MOST_BYTES)
            except FileNotFoundError:
                return SearchOrders()
        return decoded(content, SearchOrders)
    except DamagedError as exc:
        raise SettingsError(f"{path} cannot be used: {exc}; delete it, and give the order again") from exc


def write_orders(state_dir: Path, *, values: Mapping[str, float] | None = None, pinned: bool) -> SearchOrders:
    """Order that the model takes `values`, if they are given, and whether its settings are pinned from then on.

    Raises:
        SettingsError: the file is damaged, or cannot be written.
        DependencyError: it cannot be read for now.
    """
    before = read_orders(state_dir)
    orders = SearchOrders(
        number=before.number + (values is not None),
        values=before.values if values is None else dict(values),
        pinned=pinned,
    )
    try:
        replace_file(state_dir / ORDERS, msgspec.json.encode(orders))
    except OSError as exc:
        raise SettingsError(f"{state_dir / ORDERS} cannot be written: {exc.strerror or exc}") from exc
    return orders
