"""Versions over time: the newest, those that count, and one a minute of the others.

The versions directory keeps the newest versions alone, which may be those of the last seconds.
"""

from collections.abc import Sequence

import msgspec

from anabranch.serving.rollout.version_list import VersionLine

NEWEST = 6
"""The newest versions, which are all listed."""
FAILED = 6
"""The newest of those that failed the gate or were refused."""
MINUTES = 20
"""Versions that are listed as the first of the minute in which they were published."""


class VersionRow(VersionLine, frozen=True, kw_only=True):
    """One version of the list."""

    removed: bool = False
    """Whether its files are gone, so that it cannot be served again."""


class VersionHistory:
    """Remembers versions beyond those on disk, in fixed memory. Used by one thread at a time."""

    def __init__(self) -> None:
        self._rows: dict[int, VersionRow] = {}
        self._served: list[int] = []
        """The version that is served, and the one before it."""

    @property
    def rows(self) -> list[VersionRow]:
        """The list of the last update."""
        return list(self._rows.values())

    def update(self, lines: Sequence[VersionLine]) -> list[VersionRow]:
        """Update from the versions on disk, and return the thinned list, the newest first."""
        there = {line.number: VersionRow(**msgspec.structs.asdict(line)) for line in lines}
        served = next((line.number for line in lines if line.fate in ("served", "pinned")), None)
        if served is not None and self._served[:1] != [served]:
            self._served = [served, *self._served[:1]]
        rows = {number: _gone(row, served) for number, row in self._rows.items() if number not in there} | there
        self._rows = {number: rows[number] for number in sorted(self._listed(rows), reverse=True)}
        return self.rows

    def _listed(self, rows: dict[int, VersionRow]) -> set[int]:
        numbers = sorted(rows, reverse=True)
        minutes: dict[int, int] = {}
        for number in numbers:
            time = rows[number].time
            if time is not None:
                minutes[int(time // 60)] = number  # the first of its minute: one that was chosen stays
        bad = [n for n in numbers if rows[n].verdict == "fail" or rows[n].fate in ("refused", "rolled back")]
        pinned = [n for n in numbers if rows[n].fate == "pinned"]
        newest_minutes = [minutes[minute] for minute in sorted(minutes, reverse=True)[:MINUTES]]
        return {*numbers[:NEWEST], *bad[:FAILED], *pinned, *newest_minutes, *(n for n in self._served if n in rows)}


def _gone(row: VersionRow, served: int | None) -> VersionRow:
    """Return the row of a version that is not among the newest on disk any more."""
    fate = row.fate
    if row.number != served:
        if fate in ("served", "pinned"):
            fate = "swapped"
        elif fate == "waiting":
            fate = "superseded"
    return msgspec.structs.replace(row, fate=fate, removed=row.number != served)
