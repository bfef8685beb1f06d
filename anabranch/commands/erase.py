"""`anabranch erase`: records what to erase, and waits until nothing of it is left."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Annotated, Any

import typer

from anabranch.command import AsJson, DryRun, Yes, command, confirm, output, say, time_option
from anabranch.config.loader import Config
from anabranch.core.errors import SettingsError
from anabranch.ingest.events.identity import partition_name
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.learner.errors import SecondLearnerError, StateBusyError
from anabranch.learner.state_dir.lock import is_locked, lock_state_directory
from anabranch.learner.status.report import PartitionReport, read_report
from anabranch.replay.erasure.erased_events import ByKey, ByRange, Record, hash_of_key
from anabranch.replay.erasure.erasure_log import COMMAND, NAME, ErasureLog, now
from anabranch.runtime.private_state import private_state

_RANGE = re.compile(r"([A-Za-z0-9._-]{1,249})(?:#(\d+))?\[(\d+)\]@(\d+)(?:\.\.(\d+))?")
_PAUSE_SECONDS = 0.05
_COMMAND = "anabranch erase"


@command("anabranch erase --key customer-17")
def erase(
    config: Config,
    key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Erase the events of this \\[schema.key] so far; repeatable."),
    ] = None,
    offsets: Annotated[
        list[str] | None,
        typer.Option(metavar="RANGE", help="Erase these offsets, such as events[3]@100..200; repeatable."),
    ] = None,
    timeout: Annotated[
        timedelta, time_option("How long to wait until the learner has erased them.", default="15s")
    ] = timedelta(seconds=15),
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Erase events: they leave store, holdout set and checkpoints, and do not come back. Weights are not unlearned."""
    if not key and not offsets:
        raise typer.BadParameter("name what to erase by --key or --offsets")
    planned = planned_sentences(plan_erasure(config, key or [], offsets or []))
    if dry_run:
        output({"preview": planned} if as_json else None, lambda: "\n".join(planned))
        return
    confirm("erase", "\n".join(planned), yes=yes)
    with private_state(config):
        answer = erase_events(config, key or [], offsets or [], timeout)
    if as_json:
        output(answer.document(), lambda: None)
    else:
        say(*answer.sentences())


@dataclass(frozen=True)
class ErasureResult:
    """The result of a command.

    Attributes:
        log: the path of the log.
        records: the numbers of the records that were written.
        up_to: for each partition, the first offset that the erasure by key does not cover.
        missing: what is not done yet; None when nothing of it is left anywhere.
        store: events that were in the store.
        holdout: held-out events that were in the holdout set.
    """

    log: str
    records: list[int]
    up_to: dict[str, int]
    missing: str | None
    store: int
    holdout: int

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**asdict(self), "applied": self.applied}

    @property
    def applied(self) -> bool:
        """Whether nothing of it is left."""
        return self.missing is None

    def sentences(self) -> list[str]:
        """Return it as sentences for a person."""
        which = f"record {self.records[-1]}" if len(self.records) == 1 else f"records up to {self.records[-1]}"
        sentences = [] if self.missing is None else [self.missing]
        if self.applied or self.store or self.holdout:
            sentences.insert(0, f"erased events: {self.store:,} of the store, {self.holdout:,} of the holdout set")
        if self.applied and not (self.store or self.holdout):
            how = "; a key is compared byte for byte with the value of schema.key" if self.up_to else ""
            sentences.append(f"none of the events that are kept was meant{how}")
        if self.up_to:
            ends = ", ".join(f"{name}@{end}" for name, end in self.up_to.items())
            sentences.append(f"later events of the key are new: those from {ends} on")
        return [*sentences, f"recorded as {which} in {self.log}; weights that have learned from it are not changed"]


def erase_events(config: Config, keys: Sequence[str], ranges: Sequence[str], patience: timedelta) -> ErasureResult:
    """Erase the events of some keys and of some ranges of offsets.

    1. Append to the log: from here on it is erased, also after a crash.
    2. A running learner applies it, and this waits for it. Without one, this rewrites checkpoints and the disk tier.

    Raises:
        SettingsError: a range or a key is not valid, or something cannot be written.
    """
    records = plan_erasure(config, keys, ranges)
    log = ErasureLog(config.state_dir / NAME)
    try:
        numbers = [record.number for record in log.append(records)]
    except OSError as exc:
        raise SettingsError(f"{log.path} cannot be written: {exc.strerror}; nothing is erased") from exc
    store, holdout = log.store, log.holdout
    missing = _missing(config, log, numbers[-1], patience)
    return ErasureResult(
        log=str(log.path),
        records=numbers,
        up_to=next((dict(record.up_to) for record in records if isinstance(record, ByKey)), {}),
        missing=missing,
        store=log.store - store,
        holdout=log.holdout - holdout,
    )


def plan_erasure(config: Config, keys: Sequence[str], ranges: Sequence[str]) -> list[Record]:
    """Return the records that `erase_events` would append; raises as it does, and changes nothing."""
    known = known_partitions(config)
    records = [*_by_key(config, keys, known), *(range_of(text, known) for text in ranges)]
    if not config.state_dir.is_dir():
        raise SettingsError(f"there is no {config.state_dir} yet: nothing was learned that could be erased")
    return records


def planned_sentences(records: Sequence[Record]) -> list[str]:
    """Return for each record a sentence on the events that it would erase."""
    sentences = []
    for record in records:
        if isinstance(record, ByKey):
            ends = ", ".join(f"{name}@{end}" for name, end in record.up_to.items())
            sentences.append(f"would erase the events of one key, before {ends}")
        elif isinstance(record, ByRange):
            sentences.append(f"would erase {record.partition}@{record.first}..{record.last}")
    return sentences


def _missing(config: Config, log: ErasureLog, through: int, patience: timedelta) -> str | None:
    """Wait until a learner has applied a record, or do it where there is none; return what is not done in time."""
    deadline = time.monotonic() + patience.total_seconds()
    while log.through < through:
        if not is_locked(config.state_dir):
            try:
                return _erase(config, log, through)
            except (SecondLearnerError, StateBusyError):  # it was there before this
                pass
        if time.monotonic() > deadline:
            return (
                "the learner has not reported in time that nothing is left; it admits none of these events from now on"
            )
        time.sleep(_PAUSE_SECONDS)
        log.refresh()
    return None


def _erase(config: Config, log: ErasureLog, through: int) -> str | None:
    """Erase what is left of all up to a record, under the lock; return what is not done."""
    # Loads torch, which takes seconds: before the lock, for which a learner that starts meanwhile waits.
    from anabranch.learner.checkpoints.erase_checkpoints import IN_FILES, erase
    from anabranch.learner.object_storage.lease import PrefixOwner
    from anabranch.learner.object_storage.opening import checkpoints_to_write

    replay, storage = config.pipeline.replay, config.pipeline.storage
    left = [f"rows in replay.{name}" for name in replay.slower if name != IN_FILES]
    left += [f"checkpoints in {storage.url}"] if storage is not None and storage.mode == "mirror" else []
    digest, owner = (
        Schema(config.pipeline.events).digest,
        PrefixOwner(config.pipeline.name, config.pipeline.stream.topics),
    )
    with (
        lock_state_directory(config.state_dir, command=_COMMAND) as generation,
        checkpoints_to_write(storage, config.state_dir, digest, generation, owner) as checkpoints,
    ):
        log.refresh()  # a learner that has ended may have done it
        if log.through >= through:
            return None
        erase(checkpoints, log, config.pipeline.checkpoints.keep, whole=not left)
    if not left:
        return None
    return f"{' and '.join(left)} are removed by the next start of the learner, before anything is sampled"


def known_partitions(config: Config) -> Mapping[TopicPartition, PartitionReport]:
    """Return the partitions of the learner's last report; empty without one."""
    report = read_report(config.state_dir)
    partitions: dict[TopicPartition, PartitionReport] = {}
    for name, progress in report.partitions.items() if report is not None else ():
        if progress.history:  # no file has more rows than all together
            files = (TopicPartition(name, file, 0, progress.history) for file in range(progress.files))
            partitions |= dict.fromkeys(files, progress)
            continue
        topic, _, number = name.rpartition(":")
        partitions[TopicPartition(topic, int(number), progress.incarnation)] = progress
    return partitions


def _by_key(config: Config, keys: Sequence[str], known: Mapping[TopicPartition, PartitionReport]) -> list[Record]:
    if not keys:
        return []
    if config.pipeline.events.key is None:
        raise SettingsError(
            "--key needs [schema.key], without which events have none; name them by --offsets, such as events[0]@7..9"
        )
    if not known:
        raise SettingsError(f"no learner has read anything yet in {config.state_dir}: there is nothing to erase")
    up_to = {partition_name(name): each.end for name, each in known.items()}
    return [ByKey(time=now(), by=COMMAND, key_hash=hash_of_key(os.fsencode(key)), up_to=up_to) for key in keys]


def range_of(text: str, known: Mapping[TopicPartition, PartitionReport]) -> ByRange:
    """Return the range that `events[3]@100..200` names; raises SettingsError where it is none of a known partition."""
    match = _RANGE.fullmatch(text)
    if match is None:
        raise SettingsError(f'--offsets "{text}" is not of the form events[3]@100..200')
    topic, incarnation, number, first, last = match.groups()
    same = [name.incarnation for name in known if (name.topic, name.partition) == (topic, int(number))]
    if known and not same:
        there = ", ".join(f"{name.topic}[{name.partition}]" for name in known)
        raise SettingsError(f'--offsets "{text}" is of no partition that was read; there are {there}')
    if last is not None and int(last) < int(first):
        raise SettingsError(f'--offsets "{text}" ends before it begins; write the smaller offset first')
    name = TopicPartition(topic, int(number), int(incarnation) if incarnation is not None else max(same, default=0))
    return ByRange(time=now(), by=COMMAND, partition=partition_name(name), first=int(first), last=int(last or first))
