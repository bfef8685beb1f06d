"""`undo.json`: which events the learner has to unlearn, and how far that has come.

`anabranch undo` appends a record. A learner that holds the state directory returns to a checkpoint that has seen none
of its events, and records that; from then on it skips these events whenever it reads them. Records stay: an older
checkpoint may be restored at any time.

The file is replaced atomically and durably, under a lock on `undo.lock`. A missing file has no records. Imports no
torch.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from anabranch.core.atomic_files import replace_file
from anabranch.core.errors import SettingsError
from anabranch.core.failures import DamagedError, away_is_dependency, decoded
from anabranch.core.files import MOST_BYTES, locked_file, read_file
from anabranch.core.files import stamp_of as stamp_of_file

NAME = "undo.json"
LOCK = "undo.lock"
FORMAT = 1
UNDONE = "undone"
"""Key of a checkpoint's state: the number of the last record whose events it has never seen."""

_Offset = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class OffsetRanges(msgspec.Struct, frozen=True):
    """Ranges of offsets of one partition, ascending and disjoint."""

    firsts: list[_Offset]
    lasts: list[_Offset]
    """Inclusive, one for each of `firsts`."""

    @property
    def count(self) -> int:
        """How many offsets they have."""
        return sum(last - first + 1 for first, last in zip(self.firsts, self.lasts, strict=True))


class WentBack(msgspec.Struct, frozen=True, kw_only=True):
    """How a learner has applied a record."""

    checkpoint: int
    """The checkpoint that it returned to."""
    time: float
    """When, in seconds since 1970."""
    positions: dict[str, int]
    """Where that checkpoint reads on, by partition as `topic#incarnation[partition]`."""


class UndoRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Events that are to be unlearned."""

    number: int
    """From 1."""
    time: float
    """When it was given, in seconds since 1970."""
    ranges: dict[str, OffsetRanges]
    """By partition, as `topic#incarnation[partition]`."""
    until: dict[str, int]
    """How far the stream was read when it was given, by partition: up to there it is learned again."""
    went_back: WentBack | None = None
    """None until a learner has returned to a checkpoint."""


class UndoFile(msgspec.Struct, frozen=True):
    """The contents of the file."""

    format: int = FORMAT
    records: list[UndoRecord] = []


def read_undo(state_dir: Path) -> Sequence[UndoRecord]:
    """Return all records, by number.

    Raises:
        SettingsError: the file is damaged, or of another release.
        DependencyError: it cannot be read for now.
    """
    path = state_dir / NAME
    try:
        with away_is_dependency(f"{path} cannot be read; its records are needed"):
            try:
                content = read_file(path, MOST_BYTES)
            except FileNotFoundError:
                return ()
        file = decoded(content, UndoFile)
        if file.format != FORMAT:
            raise DamagedError(f"it is of format {file.format}, and this release reads {FORMAT}")
        _check(file.records)
    except DamagedError as exc:
        raise SettingsError(
            f"{path} cannot be used: {exc}; put it back from a backup, or what was undone may be learned again"
        ) from exc
    return file.records


def append_record(state_dir: Path, make: Callable[[int], UndoRecord]) -> UndoRecord:
    """Append the record that `make` returns for its number; it is durable when this returns.

    No learner deletes a checkpoint between the call of `make` and then: see `changing`.

    Raises:
        SettingsError: the file is damaged, or of another release.
        OSError: it cannot be written; nothing has changed.
    """
    with changing(state_dir):
        records = read_undo(state_dir)
        record = make(len(records) + 1)
        _write(state_dir, [*records, record])
    return record


def record_return(state_dir: Path, went_back: WentBack) -> None:
    """Record for all records without a return that a learner went back; raises as `append_record`."""
    with changing(state_dir):
        records = [
            msgspec.structs.replace(record, went_back=record.went_back or went_back) for record in read_undo(state_dir)
        ]
        _write(state_dir, records)


def copy_records(state_dir: Path, target: Path, through: int) -> Sequence[UndoRecord]:
    """Copy the records up to this number into another state directory; return them. Raises as `append_record`."""
    records = read_undo(state_dir)[:through]
    if records:
        _write(target, records)
    return records


def changing(state_dir: Path) -> contextlib.AbstractContextManager[None]:
    """Lock the file of records while one is appended, or a learner deletes checkpoints; raises OSError."""
    return locked_file(state_dir / LOCK)


def stamp_of(state_dir: Path) -> object:
    """Return a value that changes when the file is replaced; None where it is missing or cannot be read."""
    return stamp_of_file(state_dir / NAME)


def ranges_of(offsets: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, OffsetRanges]:
    """Return ranges from first and last offsets in any order, by partition; those that touch are one."""
    merged: dict[str, OffsetRanges] = {}
    for name, pairs in offsets.items():
        firsts, lasts = list[int](), list[int]()
        for first, last in sorted(pairs):
            if lasts and first <= lasts[-1] + 1:
                lasts[-1] = max(lasts[-1], last)
            else:
                firsts.append(first)
                lasts.append(last)
        if firsts:
            merged[name] = OffsetRanges(firsts, lasts)
    return merged


def _check(records: Sequence[UndoRecord]) -> None:
    """Raise DamagedError unless the records have the numbers from 1 on, and their ranges are ranges."""
    for number, record in enumerate(records, 1):
        if record.number != number:
            raise DamagedError(f"it has record {record.number} where {number} should be")
        for name, ranges in record.ranges.items():
            ends = [each for pair in zip(ranges.firsts, ranges.lasts, strict=False) for each in pair]
            rises = all(first < last for first, last in zip(ends[1::2], ends[2::2], strict=False))
            fits = len(ranges.firsts) == len(ranges.lasts) and all(map(int.__le__, ranges.firsts, ranges.lasts))
            if not (rises and fits):
                raise DamagedError(f"the ranges of {name[:200]!r} in record {number} do not ascend")


def _write(state_dir: Path, records: Sequence[UndoRecord]) -> None:
    replace_file(state_dir / NAME, msgspec.json.encode(UndoFile(records=list(records))))
