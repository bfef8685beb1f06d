"""`anabranch produce`: events from JSON lines into a topic."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from anabranch.config import Config
from anabranch.pacing import Pacer
from ingest.errors import SettingsError
from ingest.producer import EventProducer, create_topics
from ingest.rows import pack_rows, row_dtype
from ingest.schema import Schema

STDIN = Path("-")

Encode = Callable[[bytes], bytes]
"""Makes a message of a line; raises SettingsError with what is wrong with it."""


@dataclass(frozen=True)
class Produced:
    """What was sent."""

    topic: str
    events: int
    last_offsets: dict[str, int]
    """By `topic:partition`."""
    interrupted: bool
    """Whether Ctrl-C ended it before the source did."""

    def offsets(self) -> str:
        """Return the last offsets as replies write `trained_through`: `events:0=4711,events:1=4698`."""
        return ",".join(f"{partition}={offset}" for partition, offset in self.last_offsets.items())


def produce(
    config: Config, source: Path, *, topic: str | None, rate: float | None, partitions: int | None, checked: bool
) -> Produced:
    """Send each line of `source` (`-` is stdin) as an event, until it ends or Ctrl-C; those before a bad line are sent.

    Args:
        topic: by default the pipeline's first.
        rate: events a second; None is as fast as possible.
        partitions: when given, the topic is made with so many, and the dead-letter topic too, where they are missing.
        checked: whether a line that is not one JSON object is an error.

    Raises:
        SettingsError: the file cannot be read, or a line is not what it should be.
        BrokerError: the broker cannot be reached, has no such topic, or takes no events.
    """
    stream = config.pipeline.stream
    name = topic or stream.topics[0]
    encode = _encoder(config, checked=checked)
    producer, pacer = EventProducer(stream, name), Pacer(rate)
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(_opened(source))
        if partitions is not None:
            assert stream.dead_letter_topic is not None
            made = create_topics(stream, {name: partitions, stream.dead_letter_topic: 1})
            if made:
                sys.stderr.write(f"created {' and '.join(made)}\n")
        stack.callback(producer.close)
        producer.open()
        messages = _messages(stack.enter_context(_with_progress(lines, source)), source, encode, checked)
        interrupted = False
        try:
            for message in messages:
                pacer.pace()
                producer.send(message)
        except KeyboardInterrupt:
            interrupted = True
        except SettingsError:
            producer.flush()
            raise
        producer.flush()
    return Produced(name, producer.acknowledged, producer.last_offsets, interrupted)


def _messages(lines: Iterator[bytes], source: Path, encode: Encode, checked: bool) -> Iterator[bytes]:
    for number, line in enumerate(lines, start=1):
        content = line.rstrip(b"\r\n")
        if checked and not content.strip():
            continue
        try:
            yield encode(content)
        except SettingsError as exc:
            name = "stdin" if source == STDIN else source
            raise SettingsError(f"{name}, line {number}: {exc}; the {number - 1} lines before it were sent") from exc


def _encoder(config: Config, *, checked: bool) -> Encode:
    if not checked:
        return bytes
    if config.pipeline.stream.format == "rows":
        schema = Schema(config.pipeline.events)
        row_dtype(schema)
        return lambda line: pack_rows(schema, [_object(line)])
    return _checked


def _checked(line: bytes) -> bytes:
    _object(line)
    return line


def _object(line: bytes) -> dict[str, object]:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError as exc:
        raise SettingsError(f"it is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise SettingsError(f"it is a JSON {type(value).__name__}, not an object")
    return value


@contextlib.contextmanager
def _opened(source: Path) -> Iterator[BinaryIO]:
    if source == STDIN:
        yield sys.stdin.buffer
        return
    try:
        file = source.open("rb")
    except OSError as exc:
        raise SettingsError(f"{source} cannot be read: {exc.strerror}") from exc
    with file:
        yield file


@contextlib.contextmanager
def _with_progress(lines: BinaryIO, source: Path) -> Iterator[Iterator[bytes]]:
    """Yield the lines, and on a terminal show how far they are."""
    if not sys.stderr.isatty():
        yield iter(lines)
        return
    # Imported here since it takes longer to load than a small file to send.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.completed:,.0f} bytes"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None if source == STDIN else source.stat().st_size)

        def advancing() -> Iterator[bytes]:
            for line in lines:
                progress.advance(task, len(line))
                yield line

        yield advancing()
