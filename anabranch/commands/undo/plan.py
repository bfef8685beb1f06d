"""What an undo would do: which versions are tainted, what is served instead, and where learning goes on."""

import contextlib
import functools
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from anabranch.commands.erase import known_partitions
from anabranch.commands.undo.selection import Known, Selection, select
from anabranch.commands.versions.ls import list_versions
from anabranch.commands.versions.show import Listed, format_time, stored_versions
from anabranch.config.loader import Config
from anabranch.core.errors import DependencyError, SettingsError
from anabranch.ingest.events.identity import partition_name
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.search.stream_search import Progress, StreamSearch
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.state_dir.undo_file import OffsetRanges, UndoRecord, read_undo
from anabranch.learner.versions.format import RegistryState
from anabranch.learner.versions.tainted import (
    CheckpointsByTaint,
    check_beginning,
    checkpoints_by_taint,
    names_in,
    reads_files,
    seen_by_checkpoint,
    seen_by_version,
)
from anabranch.serving.reporting.report import read_report

_MOST_NAMED = 5
"""Ranges that a sentence names."""


@dataclass(frozen=True)
class TaintedVersion:
    """A version that has seen events of the undo."""

    version: int
    served: bool
    requests: int | None
    """Requests that it has answered since serving was started; None where that is not known."""


@dataclass(frozen=True)
class UndoPlan:
    """What an undo does, or would do.

    Attributes:
        ranges: the offsets, by partition.
        unsearched: what was read and was not searched for the selection.
        offsets: their number.
        tainted: the versions that have seen some of them, ascending.
        clean: the newest version that has seen none and may be served; None where there is none.
        checkpoint: the checkpoint to return to; 0: the beginning of the stream; None: nothing was seen yet.
        checkpoint_time: when it was made, in seconds since 1970.
        until: how far the stream is read, by partition.
        again: the offsets that are read again.
        state: what serving serves.
    """

    ranges: dict[str, OffsetRanges]
    unsearched: list[str]
    offsets: int
    tainted: list[TaintedVersion]
    clean: int | None
    checkpoint: int | None
    checkpoint_time: float | None
    until: dict[str, int]
    again: int
    state: RegistryState

    def record(self, number: int, now: float) -> UndoRecord:
        """Return the record with this number."""
        return UndoRecord(number=number, time=now, ranges=self.ranges, until=self.until)

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        pairs = {name: list(zip(each.firsts, each.lasts, strict=True)) for name, each in self.ranges.items()}
        names = ("unsearched", "offsets", "clean", "checkpoint", "checkpoint_time", "again")
        fields = {name: getattr(self, name) for name in names}
        return {"ranges": pairs, **fields, "tainted": [asdict(each) for each in self.tainted]}

    def sentences(self) -> list[str]:
        """Return it as sentences for a person."""
        named = [
            f"{name}@{first}..{last}"
            for name, each in self.ranges.items()
            for first, last in zip(each.firsts, each.lasts, strict=True)
        ]
        more = f" and {len(named) - _MOST_NAMED:,} more ranges" if len(named) > _MOST_NAMED else ""
        sentences = [f"{self.offsets:,} offsets are undone: {', '.join(named[:_MOST_NAMED])}{more}"]
        if self.unsearched:
            sentences.append(_unsearched(self.unsearched))
        for each in self.tainted:
            answered = "an unknown number of" if each.requests is None else f"{each.requests:,}"
            served = ", is served now," if each.served else ""
            sentences.append(f"version {each.version}{served} has seen some, and has answered {answered} requests")
        if not self.tainted:
            sentences.append("no version has seen any of them")
        elif self.clean is not None:
            sentences.append(f"version {self.clean} is the newest that has seen none: it is served at once")
        else:
            sentences.append(
                "no version is left that has seen none: the served one stays until the learner publishes one"
            )
        if self.checkpoint is None:
            sentences.append("the learner has seen none either: it skips them when they come")
        else:
            made = "" if self.checkpoint_time is None else f", made at {format_time(self.checkpoint_time)}"
            where = f"checkpoint {self.checkpoint}{made}" if self.checkpoint else "the beginning of the stream"
            sentences.append(f"the learner returns to {where}, and reads {self.again:,} offsets again, without these")
        return sentences


def plan_undo(config: Config, selection: Selection, progress: Progress) -> UndoPlan:
    """Return what an undo would do; changes nothing.

    Raises:
        SettingsError: the selection is not valid or has no event, the pinned version is tainted, or the stream that
            would have to be read again is gone.
        DependencyError: the broker or a disk cannot be read.
    """
    selection.check(config)
    _check_settings(config, selection)
    known = {name: each for name, each in known_partitions(config).items() if not name.history}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        # In this thread, which Ctrl-C ends while the broker does not answer.
        connected = functools.cache(lambda: stack.enter_context(StreamSearch(config.pipeline.stream)))
        ranges, unsearched = select(config, selection, known, connected, progress)
        if not ranges:
            more = f"; {_unsearched(unsearched)}" if unsearched else ""
            raise SettingsError(f"no event in the topics is of that selection: nothing is to be undone{more}")
        # After a search, which may take minutes in which versions appear. Tainted versions are served until this is
        # done: where offsets are given, the broker answers while they are listed.
        listed = pool.submit(lambda: (list_versions(config, None), stored_versions(config).state()))
        starts = {partition_name(name): offset for name, offset in connected().log_starts.items()}
        versions, state = listed.result()
    before = read_undo(config.state_dir)
    record = UndoRecord(number=len(before) + 1, time=0.0, ranges=ranges, until={})
    torn = config.pipeline.stream.format_kind.several
    tainted = [one for one in versions[::-1] if _is_tainted(one, [record], torn=torn)]
    _check_pinned(state, tainted)
    # The learner may not have returned for earlier records yet.
    numbers = {one.number for one in versions if _is_tainted(one, [*before, record], torn=torn)}
    number, made, positions = _target(config, [*before, record], starts, known)
    until = {partition_name(name): each.seen_through + 1 for name, each in known.items()}
    answered = _answered(config)
    return UndoPlan(
        ranges=ranges,
        unsearched=unsearched,
        offsets=sum(each.count for each in ranges.values()),
        tainted=[
            TaintedVersion(
                one.number, one.number == state.serving, None if answered is None else answered.get(one.number, 0)
            )
            for one in tainted
        ],
        clean=max((one.number for one in versions if one.refused is None and one.number not in numbers), default=None),
        checkpoint=number,
        checkpoint_time=made,
        until=until,
        again=sum(max(0, end - positions.get(name, end)) for name, end in until.items()),
        state=state,
    )


def check_checkpoint(config: Config, plan: UndoPlan, record: UndoRecord) -> None:
    """Raise SettingsError where the learner has deleted the checkpoint of a plan since; raises DependencyError."""
    found = _sorted(_checkpoints(config), [*read_undo(config.state_dir), record])
    if plan.checkpoint is None:
        lost = bool(found.tainted and not found.clean)
    else:
        lost = plan.checkpoint > 0 and plan.checkpoint not in found.clean
    if lost:
        raise SettingsError(
            "the learner has deleted the checkpoint to which it would return, since newer ones replace it; nothing was "
            "changed: run the command again"
        )


def _checkpoints(config: Config) -> Checkpoints:
    schema = Schema(config.pipeline.events, config.pipeline.stream.labels)
    return Checkpoints(config.state_dir / "checkpoints", schema.digest, sys.maxsize)


def _sorted(checkpoints: Checkpoints, records: Sequence[UndoRecord]) -> CheckpointsByTaint:
    try:
        return checkpoints_by_taint(checkpoints, records)
    except OSError as exc:
        raise DependencyError(f"{checkpoints.location} cannot be read: {exc.strerror or exc}") from exc


def _check_settings(config: Config, selection: Selection) -> None:
    if config.pipeline.storage is not None:
        raise SettingsError(
            "undo does not go with [storage]: another host that takes over would not have the record; take the section "
            "out until the learner has returned to its checkpoint"
        )
    if _has_files_of_topics(config) and not selection.offsets:
        raise SettingsError(
            "with stream.backfill.identity, name what to undo by --offsets: --key, --producer, --since and --until "
            "find what is in the topics, and files may have events that these have no longer"
        )
    if not config.state_dir.is_dir():
        raise SettingsError(f"there is no {config.state_dir} yet: nothing was learned that could be undone")


def _check_pinned(state: RegistryState, tainted: list[Listed]) -> None:
    if state.pinned in {one.number for one in tainted}:
        raise SettingsError(
            f"version {state.pinned} is pinned, and has seen events that are to be undone; unpin it first with "
            "`anabranch versions unpin`"
        )


def _is_tainted(one: Listed, records: Sequence[UndoRecord], *, torn: bool) -> bool:
    seen = None if one.manifest is None else seen_by_version(one.manifest, names_in(records), torn=torn)
    return seen is not None and bool(seen.tainted_by(records))


def _has_files_of_topics(config: Config) -> bool:
    """Return whether events of the topics may come from files."""
    backfill = config.pipeline.stream.backfill
    return backfill is not None and backfill.identity is not None


def _target(
    config: Config, records: Sequence[UndoRecord], starts: Mapping[str, int], known: Known
) -> tuple[int | None, float | None, Mapping[str, int]]:
    """Return the checkpoint to return to, when it was made, and where it reads on.

    Raises SettingsError where neither files nor the broker have the stream from there on.
    """
    checkpoints = _checkpoints(config)
    found = _sorted(checkpoints, records)
    if not found.tainted:
        return None, None, {}
    if found.clean:
        number, state = next(iter(found.clean.items()))
        made, positions = checkpoints.manifest(number).time, seen_by_checkpoint(state).offsets
        if _has_files_of_topics(config) and reads_files(state):
            return number, made, positions
    else:
        check_beginning(checkpoints, next(iter(found.tainted.values())))
        number, made = 0, None
        positions = {partition_name(name): each.start for name, each in known.items()}
    if gone := _gone(positions, starts):
        whence = f"checkpoint {number}" if number else "the beginning of the stream"
        still = _since_when(checkpoints, found, starts)
        raise SettingsError(
            f"the broker has {gone} no longer, which undo would read again from {whence} on; {still}; nothing was "
            "changed: raise the topic's retention and checkpoints.keep_hourly for the next time, and take "
            "the events out of the store with `anabranch erase`"
        )
    return number, made, positions


def _gone(positions: Mapping[str, int], starts: Mapping[str, int]) -> str | None:
    """Return a range that would be read again and is gone; None where there is none."""
    for name, position in positions.items():
        if (start := starts.get(name, position)) > position:
            return f"{name}@{position}..{start - 1}"
    return None


def _since_when(checkpoints: Checkpoints, found: CheckpointsByTaint, starts: Mapping[str, int]) -> str:
    """Return from which checkpoint on events can be undone, as a part of a sentence."""
    for number, state in sorted((found.clean | found.tainted).items()):
        if _gone(seen_by_checkpoint(state).offsets, starts) is None:
            made = format_time(checkpoints.manifest(number).time)
            return f"events that came after checkpoint {number}, made at {made}, can be undone"
    return "no event that was learned can be undone now"


def _unsearched(parts: Sequence[str]) -> str:
    named = ", ".join(parts[:_MOST_NAMED])
    more = f" and {len(parts) - _MOST_NAMED:,} more" if len(parts) > _MOST_NAMED else ""
    return (
        f"not searched, since the broker has them no longer or never had them: {named}{more}; what they have of that "
        "selection is not undone, and `anabranch erase` takes it out of the store"
    )


def _answered(config: Config) -> Mapping[int, int] | None:
    report = read_report(config.state_dir)
    return None if report is None else report.answered
