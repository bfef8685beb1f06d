"""Which events an undo is for: ranges of offsets, a time, a key, or a header of their producer."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.commands.erase import range_of
from anabranch.config.loader import Config
from anabranch.core.errors import SettingsError
from anabranch.ingest.backfill.files import DISORDER
from anabranch.ingest.events.identity import partition_name
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.search.stream_search import Matches, Progress, StreamSearch, with_header, with_key
from anabranch.learner.state_dir.undo_file import OffsetRanges, ranges_of
from anabranch.learner.status.report import PartitionReport

Known = Mapping[TopicPartition, PartitionReport]
"""The partitions of topics in the learner's last report."""


@dataclass(frozen=True)
class Selection:
    """The options of a command.

    Attributes:
        offsets: ranges such as `events[3]@100..200`; all other options are empty then.
        keys: values of `[schema.key]`.
        producers: headers as `NAME=VALUE`.
        since: the first moment, in ISO format; empty: the beginning.
        until: the last moment likewise; empty: the end.
    """

    offsets: Sequence[str] = ()
    keys: Sequence[str] = ()
    producers: Sequence[str] = ()
    since: str = ""
    until: str = ""

    def check(self, config: Config) -> None:
        """Raise SettingsError unless the options go together and are what they should be."""
        others = bool(self.keys or self.producers or self.since or self.until)
        if bool(self.offsets) == others:
            raise SettingsError(
                "name what to undo by --offsets, or else by --key, --producer, --since and --until, which go together"
            )
        if self.until and not (self.since or self.keys or self.producers):
            raise SettingsError("--until needs --since, --key or --producer")
        if self.keys and config.pipeline.events.key is None:
            raise SettingsError("--key needs [schema.key], without which events have none; use --producer or --since")
        for header in self.producers:
            if not header.partition("=")[1]:
                raise SettingsError(f'--producer "{header}" is not of the form NAME=VALUE')
        if self.since and self.until and moment_of("--since", self.since) > moment_of("--until", self.until):
            raise SettingsError(f"--since {self.since} is after --until {self.until}")


class SelectedOffsets(NamedTuple):
    """What an undo is for.

    Attributes:
        ranges: by partition, as `topic#incarnation[partition]`, without offsets before the pipeline's first.
        unsearched: what the pipeline has read and the search has not, which may have more of the selection.
    """

    ranges: dict[str, OffsetRanges]
    unsearched: list[str]


def select(
    config: Config, selection: Selection, known: Known, connected: Callable[[], StreamSearch], progress: Progress
) -> SelectedOffsets:
    """Find the events of a selection.

    With keys and producers, each message that matches one of them is a range. `connected` returns the connection to the
    broker, once it is there; offsets need none.

    Raises:
        SettingsError: a range is not valid.
        BrokerError: the broker does not answer.
    """
    if selection.offsets:
        ranges = [range_of(text, known) for text in selection.offsets]
        pairs: dict[str, list[tuple[int, int]]] = {}
        for each in ranges:
            pairs.setdefault(each.partition, []).append((each.first, each.last))
        return SelectedOffsets(ranges_of(_within(pairs, known)), [])
    search = connected()
    window = _window(selection, known, search)
    matches = _within_times(selection)
    matchers = [matches, *([_any_of(config, selection)] if selection.keys or selection.producers else [])]
    edges = window.edges if len(matchers) == 1 else [(window.begins, window.ends)]
    chosen = {name: [(begin, end - 1)] for name, (begin, end) in window.certain.items()} if len(matchers) == 1 else {}
    for begins, ends in edges:
        found = search.matching(
            begins, ends, lambda each: np.logical_and.reduce([one(each) for one in matchers]), progress
        )
        for name, offsets in found.items():
            chosen.setdefault(name, []).extend((each, each) for each in offsets)
    unsearched = [f"{_named(name, known)}@{first}..{end - 1}" for name, (first, end) in window.gone.items()]
    if config.pipeline.stream.backfill is not None:
        unsearched.append("the files of [stream.backfill]")
    return SelectedOffsets(ranges_of({_named(name, known): own for name, own in chosen.items()}), unsearched)


def moment_of(option: str, text: str) -> datetime:
    """Return a time in ISO format; one without a zone is UTC. Raises SettingsError."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as exc:
        raise SettingsError(f'{option} "{text}" is not a time such as 2026-07-03T14:00') from exc
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


@dataclass(frozen=True)
class _Window:
    """Where messages within the times are, by partition: a record may be some minutes later than others before it.

    Attributes:
        begins: the first offset that may have one.
        ends: the offset after the last that may.
        certain: the first offset, and the one after the last, between which all have such times; none are left out.
        gone: the pipeline's first offset, and the broker's, which has none of those between any longer.
    """

    begins: Mapping[TopicPartition, int]
    ends: Mapping[TopicPartition, int]
    certain: Mapping[TopicPartition, tuple[int, int]]
    gone: Mapping[TopicPartition, tuple[int, int]]

    @property
    def edges(self) -> Iterator[tuple[dict[TopicPartition, int], dict[TopicPartition, int]]]:
        """Yield the begins and ends of what is not certain."""
        inner = {name: self.certain.get(name, (self.ends[name], self.ends[name])) for name in self.begins}
        yield dict(self.begins), {name: begin for name, (begin, _) in inner.items()}
        yield {name: end for name, (_, end) in inner.items()}, dict(self.ends)


def _window(selection: Selection, known: Known, search: StreamSearch) -> _Window:
    firsts = {_named(name, known): each.start for name, each in known.items()}
    begins = {name: max(begin, firsts.get(_named(name, known), 0)) for name, begin in search.log_starts.items()}
    ends, sure, stop = dict(search.log_ends), dict(begins), dict(search.log_ends)
    if selection.since:
        since = moment_of("--since", selection.since)
        at, later = search.offsets_at(since), search.offsets_at(since + DISORDER)
        begins, sure = ({name: max(begin, each[name]) for name, begin in begins.items()} for each in (at, later))
    if selection.until:
        until = moment_of("--until", selection.until)
        at, later = search.offsets_at(until), search.offsets_at(until + DISORDER)
        stop, ends = ({name: min(end, each[name]) for name, end in ends.items()} for each in (at, later))
    certain = {name: (sure[name], stop[name]) for name in begins if sure[name] < stop[name]}
    first_of = {name: firsts.get(_named(name, known), begin) for name, begin in begins.items()}
    gone = {
        name: (first_of[name], start)
        for name, start in search.log_starts.items()
        if first_of[name] < start == begins[name]
    }
    return _Window(begins, ends, certain, gone)


def _within_times(selection: Selection) -> Matches:
    """Match messages by their record time; one without a time is within any."""
    since = moment_of("--since", selection.since).timestamp() * 1000 if selection.since else 0.0
    until = moment_of("--until", selection.until).timestamp() * 1000 if selection.until else math.inf

    def matches(messages: Messages) -> NDArray[np.bool_]:
        times = np.array(messages.times_ms, np.int64)
        return np.less_equal(times, 0) | (np.greater_equal(times, since) & np.less(times, until))

    return matches


def _any_of(config: Config, selection: Selection) -> Matches:
    stream = config.pipeline.stream
    each = [with_header(*header.split("=", 1)) for header in selection.producers]
    if selection.keys:
        each.append(with_key([os.fsencode(key) for key in selection.keys], config.pipeline.events, stream))
    return lambda messages: sum((matches(messages) for matches in each[1:]), each[0](messages))


def _named(name: TopicPartition, known: Known) -> str:
    """Return the name of a partition that exists now, whose incarnation is that of the learner."""
    same = [each.incarnation for each in known if (each.topic, each.partition) == (name.topic, name.partition)]
    return partition_name(TopicPartition(name.topic, name.partition, max(same, default=0)))


def _within(pairs: Mapping[str, Sequence[tuple[int, int]]], known: Known) -> dict[str, list[tuple[int, int]]]:
    """Return the ranges without offsets before the pipeline's first of each partition: nothing was learned of them."""
    firsts = {partition_name(name): each.start for name, each in known.items()}
    return {
        name: [(max(first, firsts.get(name, 0)), last) for first, last in own if last >= firsts.get(name, 0)]
        for name, own in pairs.items()
    }
