"""The history: whether its files are there, can be read and fit the schema, and whether the topics outlast it."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from anabranch.core.durations import format_duration
from anabranch.core.errors import SettingsError
from anabranch.core.preflight import Finding, info, ok, problem, warning
from anabranch.ingest.backfill.files import FileMark, listed
from anabranch.ingest.errors import BrokerError, HistoryAwayError, HistoryError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.envelopes.change_events import RowEnvelope
from anabranch.ingest.kafka.topic_inspector import Inspector
from anabranch.ingest.preflight.broker import reach
from anabranch.ingest.settings.backfill import BackfillSettings
from anabranch.ingest.settings.stream import SchemaSettings, StreamSettings

if TYPE_CHECKING:
    from anabranch.ingest.backfill.open_files import RowFiles

_AT_ONCE = 16
_NAMED = 3
"""Files that are named; of the others with a fault there is a count."""
_LINES = 20
"""Rows of a file of text that are decoded."""
_ROWS_A_SECOND = 10_000
"""Assumed rate of training where no learner has reported how fast it reads the history."""


class _Inspected(NamedTuple):
    """The rows of a file where its footer has their number, and what is wrong with it."""

    rows: int | None
    fault: Finding | None


def check_history(stream: StreamSettings, events: SchemaSettings, left: timedelta | None) -> Iterator[Finding]:
    """Check the files of `[stream.backfill]`, and whether the topics keep their messages until they are read.

    `left`: the time that a running learner expects for the rest; None: none has begun.
    """
    settings = stream.backfill
    if settings is None:
        return
    until = settings.until_time
    if until is not None and until > datetime.now(UTC):
        message = f'stream.backfill.until = "{settings.until}" is in the future, so that the topics are read from their'
        fix = 'Set stream.backfill.until to a time in the past, or to "stream".'
        yield problem("backfill.until", f"{message} end on: what they have by then is left out.", fix)
    try:
        schema = Schema(events)
        marks = listed(settings)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            inspected = list(pool.map(lambda mark: _inspect(mark, stream, schema), marks))
        fair = not any(each.fault for each in inspected)
        unlabelled = _files(stream, schema).no_labels(marks) if fair and stream.needs_label else None
    except ImportError:  # a finding of the check of the installation
        return
    except HistoryAwayError as exc:
        fix = "Fix the rights of the file or its folder, stream.backfill.storage, or the network."
        yield problem("backfill.unreadable", _sentence(exc), fix, unreachable=True)
        return
    except SettingsError as exc:
        if not isinstance(exc.__cause__, ImportError):  # as above
            yield problem("backfill.missing", _sentence(exc), "Fix stream.backfill.files, or copy the files there.")
        return
    faults = [each.fault for each in inspected if each.fault is not None]
    yield from faults[:_NAMED]
    if len(faults) > _NAMED:
        fix = "Fix the ones above first, and run doctor again."
        yield info("backfill.others", f"{len(faults) - _NAMED:,} more of {len(inspected):,} files cannot be used.", fix)
    if faults:
        return
    if unlabelled is not None:
        fix = "Write the label into the files as a column, or fix schema.label.name."
        yield problem("backfill.label", f"{unlabelled[0].upper()}{unlabelled[1:]}.", fix)
        return
    rows = sum(each.rows or 0 for each in inspected)
    counted = f" with {rows:,} rows" if rows and all(each.rows is not None for each in inspected) else ""
    yield ok(f"The history has {len(inspected):,} file{'s' * (len(inspected) != 1)}{counted}, which fit [schema].")
    yield from _check_retention(stream, rows * settings.epochs, left)


def _files(stream: StreamSettings, schema: Schema) -> "RowFiles":
    # Imported here since it needs pyarrow, which is an extra.
    from anabranch.ingest.backfill.open_files import RowFiles

    settings = stream.backfill
    assert settings is not None
    longest, envelope = int(stream.max_message_bytes), RowEnvelope.of(stream, schema)
    return RowFiles(settings, schema, settings.time or schema.time, longest, envelope)


def _inspect(mark: FileMark, stream: StreamSettings, schema: Schema) -> _Inspected:
    """Open a file as ingest does."""
    settings, files = stream.backfill, _files(stream, schema)
    assert settings is not None
    try:
        with files.opened(mark) as rows:
            files.check_times(mark, rows)
            if settings.format_of(mark.name) == "parquet":
                return _Inspected(rows.rows, _check_identity(mark, rows.schema.names, settings))
            decoder = files.decoder(mark)
            for part in rows.tables(decoder.columns_in(rows.schema), 0):
                decoded = decoder.decode_all(part.table.slice(0, _LINES))
                rejects = [reject for reject in decoded.rejects if reject.message not in decoded.deletes]
                if rejects:
                    what = f"row {rejects[0].message + 1} cannot be used: {rejects[0].reason}"
                    message = f"{mark.name}: {what}."
                    return _Inspected(
                        None,
                        warning(
                            "backfill.line",
                            message,
                            "Nothing, if it may be dead-lettered; else fix [schema], or the file.",
                        ),
                    )
                break
            return _Inspected(None, None)
    except HistoryAwayError as exc:
        return _Inspected(
            None,
            problem(
                "backfill.unreadable",
                _sentence(exc),
                "Fix the rights of the file or its folder, stream.backfill.storage, or the network.",
                unreachable=True,
            ),
        )
    except HistoryError as exc:
        return _Inspected(
            None,
            problem(
                "backfill.damaged", _sentence(exc), "Write the file again, or leave it out of stream.backfill.files."
            ),
        )
    except SettingsError as exc:
        return _Inspected(
            None,
            problem("backfill.schema", _sentence(exc), "Fix [schema] or [stream.backfill], or leave the file out."),
        )


def _check_identity(mark: FileMark, columns: Sequence[str], settings: BackfillSettings) -> Finding | None:
    """Return that a file lacks columns of `stream.backfill.identity`, if so."""
    identity = settings.identity
    named = (identity.topic, identity.partition, identity.offset) if identity is not None else ()
    missing = [name for name in named if name is not None and name not in columns]
    if not missing:
        return None
    message = f"{mark.name} has no column {' and no column '.join(missing)}, which stream.backfill.identity names."
    return problem("backfill.identity", message, "Fix stream.backfill.identity, or have the sink write these columns.")


def _sentence(exc: Exception) -> str:
    """Return what is wrong, without the way out: that is the finding's."""
    what = str(exc)
    return f"{what.rpartition('; ')[0] or what}."


def _check_retention(stream: StreamSettings, rows: int, left: timedelta | None) -> Iterator[Finding]:
    """Compare the time that the history takes with the time for which each topic keeps its messages."""
    how = "at its present rate"
    if left is None:
        left, how = timedelta(seconds=rows / _ROWS_A_SECOND), f"at {_ROWS_A_SECOND:,} rows a second"
    servers = [server.strip() for server in stream.bootstrap_servers.split(",")]
    if all(reach(server, stream) for server in servers):  # a finding of the broker's check
        return
    try:
        with Inspector(stream) as inspector:
            topics = {name: inspector.topic(name) for name in stream.topics}
    except (BrokerError, SettingsError):  # as above
        return
    for name, topic in topics.items():
        if topic is not None and topic.retention is not None and topic.retention < left:
            message = f"The history takes about {_rough(left)} {how}, but the topic {name} keeps messages for"
            fix = "Raise the topic's retention.ms until the history is read, or read less of it."
            yield warning("backfill.retention", f"{message} {format_duration(topic.retention)} only.", fix)


def _rough(duration: timedelta) -> str:
    """Return a duration in hours, or in minutes if it is short."""
    hours = duration.total_seconds() / 3600
    return f"{hours:,.0f} hours" if hours >= 2 else f"{hours * 60:,.0f} minutes"
