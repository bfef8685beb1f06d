"""`anabranch produce`: events from JSON lines, CSV or Parquet into a topic."""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from anabranch.command import AsJson, command, output
from anabranch.commands.event_files.files import (
    STDIN,
    Delimiter,
    EventFile,
    FileArgument,
    FileFormat,
    FileRecord,
    SourceFormat,
    open_source,
)
from anabranch.config.loader import Config
from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.event_fields import event_of, in_units
from anabranch.ingest.formats.json_text import decoded
from anabranch.ingest.formats.registry import make_format, wrapped
from anabranch.ingest.kafka.producer import EventProducer, create_topics
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.ingest.worker.value_decoder import ValueDecoder
from anabranch.runtime.rate_limiter import Pacer

OnError = Literal["stop", "skip"]

_BATCH = 256
"""Events that are checked together; from stdin each goes at once."""
_NAMED_FAULTS = 10


@command("anabranch produce events.jsonl --create-topic --rate 1000")
def produce(
    source: FileArgument,
    config: Config,
    topic: Annotated[str | None, typer.Option(help="Topic; by default the pipeline's first.")] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Events a second; by default as fast as possible.")
    ] = None,
    create_topic: Annotated[
        bool, typer.Option("--create-topic", help="Create the topic and the dead-letter topic if they do not exist.")
    ] = False,
    partitions: Annotated[int, typer.Option(min=1, help="Partitions of a created topic.")] = 2,
    format_: FileFormat = None,
    delimiter: Delimiter = None,
    on_error: Annotated[
        Literal["stop", "skip"],
        typer.Option(
            metavar="WHAT",
            help="At an event that the pipeline cannot use: stop, or skip and report it; by default stop.",
        ),
    ] = "stop",
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Send events without checking that the pipeline can use them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Send events to the topic, and print the last offset per partition in the format of trained_through."""
    produced = send_events(
        config,
        source,
        topic=topic,
        rate=rate,
        partitions=partitions if create_topic else None,
        checked=not unchecked,
        kind=format_,
        delimiter=delimiter,
        on_error=on_error,
    )
    if as_json:
        output(produced.document(), lambda: None)
    else:
        for sentence in produced.sentences():
            typer.echo(sentence, err=True)
        typer.echo(produced.offsets())
    if produced.interrupted:
        raise KeyboardInterrupt


@dataclass
class Produced:
    """What was sent."""

    topic: str
    events: int = 0
    last_offsets: dict[str, int] = field(default_factory=dict)
    """By `topic:partition`."""
    interrupted: bool = False
    """Whether Ctrl-C ended it before the source did."""
    skipped: int = 0
    """Events that the pipeline could not use, and that were left out."""
    unknown_fields: int = 0
    """Events with fields that the schema does not know."""
    columns_left_out: list[str] = field(default_factory=list)
    """Columns that the schema does not know."""

    def offsets(self) -> str:
        """Return the last offsets as replies write `trained_through`: `events:0=4711,events:1=4698`."""
        return ",".join(f"{partition}={offset}" for partition, offset in self.last_offsets.items())

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "topic": self.topic,
            "events": self.events,
            "last_offsets": self.offsets(),
            "skipped": self.skipped,
            "unknown_fields": self.unknown_fields,
            "columns_left_out": self.columns_left_out,
        }

    def sentences(self) -> Iterator[str]:
        """Yield what was sent and what was not, for a person."""
        if self.columns_left_out:
            yield f"left out columns that are not in [schema]: {', '.join(self.columns_left_out)}"
        if self.unknown_fields:
            yield f"{self.unknown_fields:,} events have fields that the schema does not know"
        if self.skipped:
            yield f"left out {self.skipped:,} events that the pipeline cannot use"
        yield f"sent {self.events:,} events to {self.topic}; the last offsets:"


@dataclass(frozen=True)
class _Message:
    """What is sent for a record, or the fault that keeps it from being sent."""

    location: str
    value: bytes = b""
    key: bytes | None = None
    fault: str = ""


def send_events(
    config: Config,
    path: Path,
    *,
    topic: str | None,
    rate: float | None,
    partitions: int | None,
    checked: bool,
    kind: SourceFormat | None = None,
    delimiter: str | None = None,
    on_error: OnError = "stop",
) -> Produced:
    """Send each event of `path` (`-` is stdin), until it ends or Ctrl-C; those before a bad one are sent.

    Events with one `[schema.key]` go to one partition, as Kafka's own clients choose it; others to each in turn.

    Args:
        topic: by default the pipeline's first.
        rate: events a second; None is as fast as possible.
        partitions: when given, missing topics are created: the topic with this number, and the dead-letter topic.
        checked: whether an event that the pipeline would dead-letter is a fault.
        kind: format of the file; by default from its suffix.
        delimiter: of CSV.
        on_error: whether a fault ends it, or is named and passed over.

    Raises:
        SettingsError: the file cannot be read, or an event is not what it should be.
        BrokerError: the broker cannot be reached, has no such topic, or takes no events.
    """
    stream = config.pipeline.stream
    produced = Produced(topic or stream.topics[0])
    encoder = _Encoder(config, checked=checked)
    producer = EventProducer(stream, produced.topic)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(
            open_source(path, kind, delimiter, encoder.schema, checked=checked, envelope=stream.envelope)
        )
        produced.columns_left_out = source.left_out
        if partitions is not None:
            assert stream.dead_letter_topic is not None
            made = create_topics(stream, {produced.topic: partitions, stream.dead_letter_topic: 1})
            if made:
                sys.stderr.write(f"created {' and '.join(made)}\n")
        stack.callback(producer.close)
        producer.open()
        advance = stack.enter_context(_progress(source))
        messages = encoder.messages(source, 1 if path == STDIN else _BATCH)
        fault = _send(messages, producer, Pacer(rate), advance, produced, on_error, stream)
        producer.flush()
    if fault is not None:
        raise SettingsError(
            f"{'stdin' if path == STDIN else path}, {fault.location}: {fault.fault}; events sent before it: "
            f"{producer.acknowledged:,}; correct it or [schema], or skip such events by --on-error skip"
        )
    produced.events, produced.last_offsets = producer.acknowledged, producer.last_offsets
    produced.unknown_fields = encoder.unknown_fields
    return produced


class _Encoder:
    """Makes messages of records in `stream.format`, and finds those that the pipeline would dead-letter."""

    def __init__(self, config: Config, *, checked: bool) -> None:
        stream = config.pipeline.stream
        self.schema = Schema(config.pipeline.events)
        if not stream.format_kind.writes:
            other = "a serializer of the registry" if stream.registry is not None else "your own producer"
            raise SettingsError(f'produce cannot write stream.format = "{stream.format}": use {other}')
        written = make_format(stream.model_copy(update={"envelope": "none"}), self.schema)
        self._decoder = ValueDecoder(written, self.schema, int(stream.max_message_bytes))
        self._pack, self._is_json = written.pack, stream.format == "json"
        self._most_bytes = int(stream.max_message_bytes)
        self._checked = checked
        self.unknown_fields = 0

    def messages(self, records: Iterable[FileRecord], batch: int) -> Iterator[_Message]:
        """Yield a message for each record, checked `batch` at a time."""
        unread = iter(records)
        while some := [self._message(record) for record in itertools.islice(unread, batch)]:
            yield from self._check(some) if self._checked else some

    def _message(self, record: FileRecord) -> _Message:
        if record.fault:
            return _Message(record.location, fault=record.fault)
        content = record.content
        try:
            if isinstance(content, bytes) and (not self._checked or (self._is_json and not self.schema.key)):
                return _Message(record.location, content)
            event = event_of(self.schema, _object(content)) if isinstance(content, bytes) else self._labelled(content)
            key = event.get(self.schema.key) if self.schema.key else None
            if self._is_json:
                value = content if isinstance(content, bytes) else self._pack([event])
            else:
                value = self._pack([self._with_numbers(event)])
        except (SettingsError, TypeError, ValueError) as exc:
            return _Message(record.location, fault=str(exc).removeprefix("event 0: "))
        return _Message(record.location, value, None if key is None else str(key).encode())

    def _with_numbers(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return an event whose times are numbers, as formats that are not JSON need it."""
        return {name: in_units(self.schema, name, value) for name, value in event.items()}

    def _labelled(self, event: dict[str, Any]) -> dict[str, Any]:
        """Leave out a label of NaN, which is how tables of numbers say that there is none."""
        label = event.get(self.schema.label.name)
        return {k: v for k, v in event.items() if k != self.schema.label.name} if label != label else event

    def _check(self, messages: list[_Message]) -> list[_Message]:
        good = [i for i, message in enumerate(messages) if not message.fault]
        decoded, _ = self._decoder.decode([messages[i].value for i in good], [()] * len(good), {})
        self.unknown_fields += decoded.unknown_fields
        for reject in decoded.rejects:
            i = good[reject.message]
            messages[i] = _Message(messages[i].location, fault=reject.reason)
        for i, message in enumerate(messages):
            if len(message.value) > self._most_bytes:
                fault = f"oversized: {len(message.value)} bytes, and stream.max_message_bytes = {self._most_bytes}"
                messages[i] = _Message(message.location, fault=fault)
        return messages


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = decoded(msgspec.json.decode, line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise SettingsError(f"it is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise SettingsError(f"it is a JSON {type(value).__name__}, not an object")
    return value


def _send(
    messages: Iterable[_Message],
    producer: EventProducer,
    pacer: Pacer,
    advance: Callable[[], None],
    produced: Produced,
    on_error: OnError,
    stream: StreamSettings,
) -> _Message | None:
    """Send the messages, in the envelope of the stream, until they end, Ctrl-C, or a fault that ends it, which is
    returned.
    """
    try:
        for message in messages:
            if not message.fault:
                pacer.pace()
                value, headers = wrapped(stream, message.value)
                producer.send(value, key=message.key, headers=headers)
            elif on_error == "stop":
                return message
            else:
                _report_fault(message, produced)
            advance()
    except KeyboardInterrupt:
        produced.interrupted = True
    except SettingsError:
        producer.flush()
        raise
    return None


def _report_fault(message: _Message, produced: Produced) -> None:
    produced.skipped += 1
    if produced.skipped <= _NAMED_FAULTS:
        sys.stderr.write(f"left out {message.location}: {message.fault}\n")
    if produced.skipped == _NAMED_FAULTS:
        sys.stderr.write("further errors are not shown\n")


@contextlib.contextmanager
def _progress(source: EventFile) -> Iterator[Callable[[], None]]:
    """Yield what to call after each event: on a terminal it shows how far they are."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    # Imported here since it takes longer to load than a small file to send.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.fields[events]:,} events"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=source.total, events=0)
        events = itertools.count(1)
        yield lambda: progress.update(task, completed=source.done(), events=next(events))
