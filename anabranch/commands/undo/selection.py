"""Which events an undo is for: ranges of offsets, a time, a key, or a header of their producer."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from anabranch.commands.erase import range_of
from anabranch.config.loader import Config
from anabranch.core.errors import SettingsError
from ingest.events.identity import partition_name
from ingest.events.partition import TopicPartition
from ingest.search.stream_search import Matches, Progress, StreamSearch, with_header, with_key
from learner.state_dir.report import PartitionReport
from learner.state_dir.undo_file import OffsetRanges, ranges_of

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


def select(
    config: Config, selection: Selection, known: Known, connected: Callable[[], StreamSearch], progress: Progress
) -> dict[str, OffsetRanges]:
    """Return the ranges by partition, as `topic#incarnation[partition]`, without offsets before the pipeline's first.

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
        return ranges_of(_within(pairs, known))
    search = connected()
    begins, ends = _window(selection, known, search)
    if not (selection.keys or selection.producers):
        return ranges_of({name: [(begin, ends[name] - 1)] for name, begin in begins.items() if begin < ends[name]})
    by_name = {_named(name, known): name for name in search.partitions}
    found = search.matching(
        {by_name[name]: begin for name, begin in begins.items()},
        {by_name[name]: end for name, end in ends.items()},
        _any_of(config, selection),
        progress,
    )
    return ranges_of({_named(name, known): [(each, each) for each in offsets] for name, offsets in found.items()})


def moment_of(option: str, text: str) -> datetime:
    """Return a time in ISO format; one without a zone is UTC. Raises SettingsError."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as exc:
        raise SettingsError(f'{option} "{text}" is not a time such as 2026-07-03T14:00') from exc
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _window(selection: Selection, known: Known, search: StreamSearch) -> tuple[dict[str, int], dict[str, int]]:
    """Return the first offset, and the one after the last, of each partition within the times."""
    begins, ends = dict(search.log_starts), dict(search.log_ends)
    if selection.since:
        since = search.offsets_at(moment_of("--since", selection.since))
        begins = {name: max(begin, since[name]) for name, begin in begins.items()}
    if selection.until:
        until = search.offsets_at(moment_of("--until", selection.until))
        ends = {name: min(end, until[name]) for name, end in ends.items()}
    firsts = {_named(name, known): each.start for name, each in known.items()}
    return (
        {(text := _named(name, known)): max(begin, firsts.get(text, 0)) for name, begin in begins.items()},
        {_named(name, known): end for name, end in ends.items()},
    )


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
