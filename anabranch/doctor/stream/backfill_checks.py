"""The history: whether its files are there, can be read and fit the schema, and whether the topics outlast it."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from anabranch.core.durations import format_duration
from anabranch.core.errors import SettingsError
from anabranch.doctor.findings import CheckContext, Finding, found, ok
from anabranch.doctor.kafka_checks import reach
from ingest.backfill.files import FileMark, listed
from ingest.backfill_settings import BackfillSettings
from ingest.config import StreamSettings
from ingest.errors import BrokerError, HistoryAwayError, HistoryError
from ingest.events.schema import Schema
from ingest.kafka.topic_inspector import Inspector
from learner.state_dir.report import LearnerReport, read_report

if TYPE_CHECKING:
    from ingest.backfill.open_files import RowFiles

_AT_ONCE = 16
_NAMED = 3
"""Files that are named; of the others with a fault there is a count."""
_LINES = 20
"""Lines of a file of JSON lines that are decoded."""
_ROWS_A_SECOND = 10_000
"""Assumed rate of training where no learner has reported how fast it reads the history."""


class _Inspected(NamedTuple):
    """The rows of a file where its footer has their number, and what is wrong with it."""

    rows: int | None
    fault: Finding | None


def check_history(context: CheckContext) -> Iterator[Finding]:
    """Check the files of `[stream.backfill]`, and whether the topics keep their messages until they are read."""
    stream = context.config.pipeline.stream
    settings = stream.backfill
    if settings is None:
        return
    until = settings.until_time
    if until is not None and until > datetime.now(UTC):
        message = f'stream.backfill.until = "{settings.until}" is in the future, so that the topics are read from their'
        yield found("backfill.until", f"{message} end on: what they have by then is left out.")
    try:
        schema = Schema(context.config.pipeline.events)
        marks = listed(settings)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            inspected = list(pool.map(lambda mark: _inspect(mark, stream, schema), marks))
        fair = not any(each.fault for each in inspected)
        problem = _files(stream, schema).no_labels(marks) if fair and stream.needs_label else None
    except ImportError:  # a finding of the check of the installation
        return
    except HistoryAwayError as exc:
        yield found("backfill.unreadable", _sentence(exc))
        return
    except SettingsError as exc:
        if not isinstance(exc.__cause__, ImportError):  # as above
            yield found("backfill.missing", _sentence(exc))
        return
    faults = [each.fault for each in inspected if each.fault is not None]
    yield from faults[:_NAMED]
    if len(faults) > _NAMED:
        yield found("backfill.others", f"{len(faults) - _NAMED:,} more of {len(inspected):,} files cannot be used.")
    if faults:
        return
    if problem is not None:
        yield found("backfill.label", f"{problem[0].upper()}{problem[1:]}.")
        return
    rows = sum(each.rows or 0 for each in inspected)
    counted = f" with {rows:,} rows" if rows and all(each.rows is not None for each in inspected) else ""
    yield ok(f"The history has {len(inspected):,} file{'s' * (len(inspected) != 1)}{counted}, which fit [schema].")
    yield from _check_retention(stream, rows * settings.epochs, read_report(context.config.state_dir))


def _files(stream: StreamSettings, schema: Schema) -> "RowFiles":
    # Imported here since it needs pyarrow, which is an extra.
    from ingest.backfill.open_files import RowFiles

    settings = stream.backfill
    assert settings is not None
    return RowFiles(settings, schema, settings.time or schema.time, int(stream.max_message_bytes))


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
                rejects = decoder.decode_all(part.table.slice(0, _LINES)).rejects
                if rejects:
                    message = f"{mark.name}: line {rejects[0].message + 1} cannot be used: {rejects[0].reason}."
                    return _Inspected(None, found("backfill.line", message))
                break
            return _Inspected(None, None)
    except HistoryAwayError as exc:
        return _Inspected(None, found("backfill.unreadable", _sentence(exc)))
    except HistoryError as exc:
        return _Inspected(None, found("backfill.damaged", _sentence(exc)))
    except SettingsError as exc:
        return _Inspected(None, found("backfill.schema", _sentence(exc)))


def _check_identity(mark: FileMark, columns: Sequence[str], settings: BackfillSettings) -> Finding | None:
    """Return that a file lacks columns of `stream.backfill.identity`, if so."""
    identity = settings.identity
    named = (identity.topic, identity.partition, identity.offset) if identity is not None else ()
    missing = [name for name in named if name is not None and name not in columns]
    if not missing:
        return None
    message = f"{mark.name} has no column {' and no column '.join(missing)}, which stream.backfill.identity names."
    return found("backfill.identity", message)


def _sentence(exc: Exception) -> str:
    """Return what is wrong, without the way out: that is the finding's."""
    what = str(exc)
    return f"{what.rpartition('; ')[0] or what}."


def _check_retention(stream: StreamSettings, rows: int, report: LearnerReport | None) -> Iterator[Finding]:
    """Compare the time that the history takes with the time for which each topic keeps its messages."""
    left, how = timedelta(seconds=rows / _ROWS_A_SECOND), f"at {_ROWS_A_SECOND:,} rows a second"
    backfill = None if report is None else report.backfill
    if backfill is not None:
        if backfill.done or backfill.seconds_left is None:
            return
        left, how = timedelta(seconds=backfill.seconds_left), "at its present rate"
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
            yield found("backfill.retention", f"{message} {format_duration(topic.retention)} only.")


def _rough(duration: timedelta) -> str:
    """Return a duration in hours, or in minutes if it is short."""
    hours = duration.total_seconds() / 3600
    return f"{hours:,.0f} hours" if hours >= 2 else f"{hours * 60:,.0f} minutes"
