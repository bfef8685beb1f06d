"""`anabranch replay stats` and `sample`: what the newest checkpoint holds for replay. Reads only, also while
a learner runs.

Legend: H events held, n events that are asked for.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from anabranch.config.loader import Config
from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.failures import away_is_dependency
from anabranch.ingest.events.identity import identity_hash, partition_name
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import IGNORED, Schema
from anabranch.ingest.settings.features import Vocabulary
from anabranch.learner.checkpoints.erase_checkpoints import without_erased
from anabranch.learner.checkpoints.format import RANK, Checkpoint, Checkpoints, check_age
from anabranch.learner.checkpoints.parts import unpack
from anabranch.learner.errors import CheckpointError, MisfitError
from anabranch.learner.model.examples import output_fields
from anabranch.learner.object_storage.bucket_storage import storage_to_read
from anabranch.learner.status.report import read_report
from anabranch.replay.erasure.erased_events import hash_of_key
from anabranch.replay.erasure.erasure_log import NAME, ErasureLog
from anabranch.replay.row_layout import RowLayout
from anabranch.replay.snapshot import StoreSnapshot
from anabranch.replay.tiers.registry import kind_with, kinds_of
from anabranch.replay.tiers.tier import Tier, TierContext

_ATTEMPTS = 3
"""A running learner may delete every checkpoint that existed when this began to read."""
_AT_ONCE = 64
_WHAT = ("label", "topic", "partition", "key")


@dataclass(frozen=True)
class Stored:
    """What a checkpoint has of the store."""

    number: int
    checkpoint: Checkpoint
    contents: StoreSnapshot
    log: ErasureLog

    @property
    def names(self) -> list[TopicPartition]:
        """The partitions, by their index."""
        return [
            TopicPartition(each["topic"], each["partition"], each["incarnation"], each["history"])
            for each in self.checkpoint.state["ledger"]
        ]


@dataclass(frozen=True)
class Stats:
    """Numbers on the store: what it holds is of the newest checkpoint, tiers and bounds of the learner's last
    report."""

    checkpoint: int
    step: int
    events: int
    capacity: int | None
    added: int
    admission: str
    sampling: str
    tiers: dict[str, dict[str, int]]
    """By tier: rows, bytes and bound_bytes."""
    by_label: dict[str, int]
    record_times: dict[str, str]
    """Of the oldest, the median and the newest event, in ISO 8601."""
    holdout_rows: int
    erased: int
    """Records in the log."""
    erased_through: int
    """The last of them that is applied everywhere."""

    def document(self) -> dict[str, Any]:
        """Return them as JSON values."""
        return asdict(self)


def read_stats(config: Config) -> Stats:
    """Read the newest checkpoint and the learner's report; raises SettingsError when there is no checkpoint with a
    store."""
    stored, report = _stored(config), read_report(config.state_dir)
    index = stored.contents.index
    rows = report.replay_rows if report is not None else {}
    return Stats(
        checkpoint=stored.number,
        step=stored.checkpoint.step,
        events=len(index),
        capacity=report.replay_capacity if report is not None else None,
        added=int(stored.contents.state.added.sum()),
        admission=config.pipeline.replay.admission,
        sampling=config.pipeline.replay.sampling,
        tiers={
            tier: {"rows": held, "bytes": report.replay_bytes[tier], "bound_bytes": report.replay_bounds[tier]}
            for tier, held in rows.items()
            if report is not None
        },
        by_label=_by_label(Schema(config.pipeline.events), index),
        record_times=_record_times(index),
        holdout_rows=len(stored.checkpoint.tensors["holdout"].get("label", ())),
        erased=stored.log.count,
        erased_through=stored.log.through,
    )


def render_stats(stats: Stats) -> Table:
    """Return the screen."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    of = "" if stats.capacity is None else f" of {stats.capacity:,}"
    table.add_row("events", f"{stats.events:,}{of}, of {stats.added:,} that were added")
    table.add_row("checkpoint", f"{stats.checkpoint}, at step {stats.step:,}")
    for tier, numbers in stats.tiers.items():
        used, bound = numbers["bytes"] / 1e6, numbers["bound_bytes"] / 1e6
        table.add_row(tier, f"{numbers['rows']:,} events, {used:.1f} of {bound:.1f} MB")
    table.add_row("kept", f"{stats.admission}, sampled {stats.sampling}")
    if stats.by_label:
        table.add_row("by label", ", ".join(f"{label}: {rows:,}" for label, rows in stats.by_label.items()))
    for what, moment in stats.record_times.items():
        table.add_row(what, moment)
    table.add_row("holdout set", f"{stats.holdout_rows:,} events")
    left = stats.erased - stats.erased_through
    table.add_row("erased", f"{stats.erased:,} records" + (f", {left:,} not erased everywhere yet" if left else ""))
    return table


def read_sample(config: Config, n: int, where: Sequence[str], seed: int | None) -> Iterator[dict[str, Any]]:
    """Yield up to n stored events, sampled uniformly among those that fit, as JSON values.

    Events that are overwritten at this moment are left out, and others are sampled instead.

    Raises:
        SettingsError: there is no checkpoint with a store, a condition is not valid, or the payload cannot be read.
    """
    stored, schema = _stored(config), Schema(config.pipeline.events)
    index = stored.contents.index
    fits = np.ones(len(index), np.bool_)
    for condition in where:
        fits &= _fits(condition, schema, stored.names, index)
    indices = np.random.default_rng(seed).permutation(np.flatnonzero(fits))
    layout = RowLayout({**schema.payload(), **output_fields(stored.checkpoint.state)})
    for begin in range(0, len(indices), _AT_ONCE):
        for i, row in _rows(config, stored, layout, indices[begin : begin + _AT_ONCE]):
            if n == 0:
                return
            n -= 1
            yield _event(schema, stored.names, index[i], row)


def _stored(config: Config) -> Stored:
    schema = Schema(config.pipeline.events)
    log = ErasureLog(config.state_dir / NAME)
    log.refresh()
    storage = storage_to_read(config.pipeline.storage, "checkpoints")
    checkpoints = Checkpoints(config.state_dir / "checkpoints", schema.digest, 0, storage)
    for attempt in range(_ATTEMPTS):
        try:
            with away_is_dependency(f"the checkpoints in {checkpoints.location} cannot be read"):
                found = checkpoints.newest()
        except MisfitError:
            raise
        except CheckpointError:  # the learner may have replaced them meanwhile
            if attempt == _ATTEMPTS - 1:
                raise
            continue
        if found is not None:
            check_age(*found, log)
            number, checkpoint = found[0], without_erased(found[1], log.erased)[0]
            unpacked = unpack(checkpoint)
            if checkpoint.begins:
                break
            if unpacked is None:
                raise SettingsError(f"checkpoint {number} has no store: learner.strategy is one without replay")
            return Stored(number, checkpoint, unpacked[0], log)
        if not checkpoints.numbers():
            break
    raise SettingsError(
        f"there is no checkpoint with stored events in {checkpoints.location} yet; the first one is made after "
        "checkpoints.every, or when the learner stops"
    )


def _rows(
    config: Config, stored: Stored, layout: RowLayout, indices: NDArray[np.intp]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield index and columns of the events whose payload can be read."""

    contents = stored.contents
    if contents.payload is not None:
        rows_nR, whole = contents.payload[indices.tolist()], np.ones(len(indices), np.bool_)
    else:
        events = contents.index[indices]
        bases = np.array(contents.state.bases, np.uint64)[events["partition"]]
        identity = identity_hash(bases, events["offset"], events["row"])
        with _open_tier(config, contents, layout.row_bytes) as tier:
            try:
                rows_nR, whole = tier.read(events["slot"].astype(np.int64), identity)
            except OSError as exc:
                raise DependencyError(str(exc)) from exc
    if rows_nR.shape[1] != layout.row_bytes:
        raise SettingsError(f"events have {rows_nR.shape[1]} bytes in the store and {layout.row_bytes} by [schema]")
    columns = {name: values.numpy() for name, values in layout.unpack(rows_nR).items()}
    for at in np.flatnonzero(whole).tolist():
        yield int(indices[at]), {name: values[at] for name, values in columns.items()}


@contextlib.contextmanager
def _open_tier(config: Config, contents: StoreSnapshot, row_bytes: int) -> Iterator[Tier]:
    """Open the tier that has the payload of a checkpoint."""
    folder = config.state_dir / "replay" / RANK
    site = TierContext(folder, f"{config.pipeline.name}:{RANK}", row_bytes, writable=False)
    kind = kind_with(contents, kinds_of(config.pipeline.replay, site).values())
    assert kind is not None
    with contextlib.ExitStack() as opened:
        kind.connect(opened, needed=True)
        tier = kind.open_existing(replace(contents, rows=None))  # rows that it lacks are left out
        opened.callback(tier.close)
        yield tier


def _event(schema: Schema, names: Sequence[TopicPartition], known: np.void, row: Mapping[str, Any]) -> dict[str, Any]:
    position = f"@{known['offset']}" + (f"/{known['row']}" if known["row"] else "")
    event: dict[str, Any] = {
        "event": partition_name(names[known["partition"]]) + position,
        "time": _moment(int(known["time_s"])),
        "label": _label(schema, row["label"]) if row["labelled"] else None,
    }
    if schema.weight:
        event["weight"] = row["weight"].item()
    if schema.key:
        event["key_hash"] = f"{int(known['key_hash']):016x}"
    features = {feature.name: _value(schema, feature.name, row) for feature in schema.features}
    return event | {"features": features}


def _value(schema: Schema, name: str, row: Mapping[str, Any]) -> Any:
    """Return the value of a feature; of hashed strings the bucket, of strings outside the vocabulary None."""
    values, encode = row[f"feature.{name}"], schema.settings.features[name].encode
    if isinstance(encode, Vocabulary):
        words = np.array([None, *encode.vocab], object)
        return words[values].tolist() if values.ndim else words[int(values)]
    return values.tolist()


def _label(schema: Schema, label: Any) -> Any:
    """Return a label in the form that messages have."""
    names = schema.label.names
    if schema.label.multi:
        return [each if names is None else names[each] for each in np.flatnonzero(label).tolist()]
    if schema.label.length is not None:
        return [None if each == IGNORED else each if names is None else names[each] for each in label.tolist()]
    return label.item() if names is None else names[label]


def _fits(
    condition: str, schema: Schema, names: Sequence[TopicPartition], index: NDArray[np.void]
) -> NDArray[np.bool_]:
    what, _, value = condition.partition("=")
    if what == "label" and schema.label.one_of is not None:
        known = [str(name) for name in schema.label.names or range(schema.label.one_of)]
        if value not in known:
            raise SettingsError(f'--where label={value}: "{value}" is no class; there are {", ".join(known[:20])}')
        return np.asarray(index["label"] == known.index(value))
    if what == "topic":
        partitions = [i for i, name in enumerate(names) if name.topic == value]
        return np.isin(index["partition"], partitions)
    if what == "partition" and value.isdigit():
        partitions = [i for i, name in enumerate(names) if name.partition == int(value)]
        return np.isin(index["partition"], partitions)
    if what == "key" and schema.key is not None:
        return np.asarray(index["key_hash"] == np.uint64(int(hash_of_key(value.encode()), 16)))
    raise SettingsError(
        f'--where "{condition}" does not apply to stored events; write one of {", ".join(_WHAT)} with a value, such as '
        "label=3 (label needs classes, one an event, key needs [schema.key])"
    )


def _by_label(schema: Schema, index: NDArray[np.void]) -> dict[str, int]:
    if schema.label.one_of is None:
        return {}
    counts = np.bincount(index["label"] + 1, minlength=schema.label.one_of + 1).tolist()
    found = dict(zip(map(str, schema.label.names or range(schema.label.one_of)), counts[1:], strict=True))
    return found | ({"none": counts[0]} if counts[0] else {})


def _record_times(index: NDArray[np.void]) -> dict[str, str]:
    if not len(index):
        return {}
    times = np.sort(index["time_s"])
    at = {"oldest": times[0], "median": times[len(times) // 2], "newest": times[-1]}
    return {what: _moment(int(time_s)) for what, time_s in at.items()}


def _moment(time_s: int) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat()
