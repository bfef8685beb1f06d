"""`anabranch dead-letters`: what could not be used, and how to send it again once the cause is fixed."""

import contextlib
import logging
import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from anabranch.command import AsJson, DryRun, Yes, command, confirm, output, say
from anabranch.config.loader import Config
from anabranch.core.errors import AnabranchError, SettingsError
from anabranch.ingest.formats.registry import wrapped
from anabranch.ingest.kafka.dead_letter_reader import StoredLetter, read_dead_letters
from anabranch.ingest.kafka.producer import EventProducer
from anabranch.ingest.settings.stream import StreamSettings

_SOURCE = re.compile(r"(.+)\[(\d+)\]@\d+")
_SHOWN_BYTES = 200

log = logging.getLogger(__name__)


@command("anabranch dead-letters ls --limit 20")
def ls(
    config: Config,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, metavar="N", help="Only the last N.")] = None,
    as_json: AsJson = False,
) -> None:
    """List dead letters: where each message came from, why it could not be used, and its value."""
    letters = list_letters(config, limit)
    output([letter_document(letter) for letter in letters] if as_json else None, lambda: render_letters(letters))


@command('anabranch dead-letters resend --source "events[0]@4711"')
def resend(
    config: Config,
    source: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE", help="Send this message, such as events\\[0]@4711; repeatable."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Send all messages.")] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Send messages of dead letters to their topics again, after the cause is fixed. A second run sends them twice."""
    if every == bool(source):
        raise typer.BadParameter("name messages by --source, or take all by --all")
    chosen = None if every else source
    if not (yes or dry_run):
        confirm("dead-letters resend", "\n".join(send_again(config, chosen, dry_run=True).sentences()), yes=False)
    result = send_again(config, chosen, dry_run=dry_run)
    if as_json:
        output(result.document(), lambda: None)
    else:
        say(*result.sentences())


@dataclass
class Resent:
    """What `dead-letters resend` did, or would do."""

    sent: list[str] = field(default_factory=list)
    """Sources of the messages."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Why a message cannot be sent again, by source."""
    dry_run: bool = False

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    def sentences(self) -> list[str]:
        """Return it for a person."""
        verb = "would send" if self.dry_run else "sent"
        skipped = [f"skipped {source}: {why}" for source, why in self.skipped.items()]
        return [f"{verb} {len(self.sent):,} messages again", *skipped]


def list_letters(config: Config, limit: int | None) -> list[StoredLetter]:
    """Return the dead letters, the newest of each partition last; with `limit` only the last ones.

    Raises:
        BrokerError: the broker cannot be reached, or has no such topic.
    """
    return list(deque(read_dead_letters(config.pipeline.stream), maxlen=limit))


def letter_document(letter: StoredLetter) -> dict[str, Any]:
    """Return a dead letter as JSON values; bytes that are not UTF-8 are replaced."""
    headers = [[name, _text(value)] for name, value in letter.headers]
    return asdict(letter) | {"key": _text(letter.key), "value": _text(letter.value), "headers": headers}


def render_letters(letters: Sequence[StoredLetter]) -> RenderableType:
    """Return the table of `dead-letters ls`."""
    if not letters:
        return Text("there are no dead letters")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("source", no_wrap=True)
    table.add_column("error", overflow="fold")
    table.add_column("value", no_wrap=True, overflow="ellipsis", max_width=40)
    for letter in letters:
        rows = "" if letter.rows is None else f" (rows {letter.rows})"
        value = (_text(letter.value) or "")[:_SHOWN_BYTES].replace("\n", " ")
        table.add_row(letter.source, Text(letter.error + rows), Text(value))
    return table


def send_again(config: Config, sources: Collection[str] | None, *, dry_run: bool) -> Resent:
    """Send messages of dead letters to the topics and partitions that they came from, each source once.

    Letters are sent while they are read. Those that are written after the first is read are not sent.

    Args:
        config: the pipeline.
        sources: which ones, such as `payments[0]@4711`; None means all.
        dry_run: whether nothing is sent.

    Raises:
        SettingsError: there is no dead letter of a source, or the topic refuses a message.
        BrokerError: the broker cannot be reached, or has no such topic.
    """
    stream, result = config.pipeline.stream, Resent(dry_run=dry_run)
    if sources is not None:
        missing = set(sources) - {letter.source for letter in read_dead_letters(stream)}
        if missing:
            raise SettingsError(
                f"there is no dead letter of {', '.join(sorted(missing))} in {stream.dead_letter_topic}"
            )
    with contextlib.ExitStack() as stack:
        producers: dict[str, EventProducer] = {}
        for letter in _once(read_dead_letters(stream)):
            if sources is not None and letter.source not in sources:
                continue
            match = _SOURCE.fullmatch(letter.source)
            topic, partition = (match[1], int(match[2])) if match else ("", 0)
            if (why := _refusal(letter, topic, stream)) is not None:
                result.skipped[letter.source] = why
                continue
            if not dry_run:
                if topic not in producers:
                    producers[topic] = stack.enter_context(_producer(stream, topic))
                assert letter.value is not None
                row_of_file = letter.format is not None
                value, headers = wrapped(stream, letter.value) if row_of_file else (letter.value, letter.headers)
                producers[topic].send(value, key=letter.key, headers=headers or letter.headers, partition=partition)
            result.sent.append(letter.source)
    return result


@contextlib.contextmanager
def _producer(stream: StreamSettings, topic: str) -> Iterator[EventProducer]:
    """Yield a producer, whose events are acknowledged when the context ends; on an error log how many are."""
    producer = EventProducer(stream, topic)
    try:
        producer.open()
        yield producer
        producer.flush()
    except AnabranchError:
        log.warning("%d messages were sent to %s again before the error", producer.acknowledged, topic)
        raise
    finally:
        producer.close()


def _once(letters: Iterator[StoredLetter]) -> Iterator[StoredLetter]:
    """Yield the first letter of each source: after a crash of the learner there may be two."""
    seen: set[str] = set()
    for letter in letters:
        if letter.source not in seen:
            seen.add(letter.source)
            yield letter


def _refusal(letter: StoredLetter, topic: str, stream: StreamSettings) -> str | None:
    """Return why a message cannot be sent again; None when it can."""
    if topic not in stream.all_topics:
        return "its source is not in stream.topics or stream.labels.topics"
    if letter.format not in (None, stream.format):
        return f"it is a row of a file, written as {letter.format}, and stream.format is {stream.format}; encode it so"
    if letter.truncated is not None:
        return f"the letter was too large, and lacks {letter.truncated}"
    if letter.value is None:
        return "it has no value"
    if letter.rows is not None:
        return f"only its rows {letter.rows} were bad, and the others were used; send those rows alone"
    return None


def _text(content: bytes | None) -> str | None:
    return None if content is None else content.decode(errors="replace")
