"""`anabranch dead-letters`: what could not be used, and how to send it again once the cause is fixed."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from anabranch.config.loader import Config
from anabranch.core.errors import SettingsError
from ingest.kafka.dead_letter_reader import StoredLetter, read_dead_letters
from ingest.kafka.producer import EventProducer

_SOURCE = re.compile(r"(.+)\[\d+\]@\d+")
_SHOWN_BYTES = 200


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
    letters = list(read_dead_letters(config.pipeline.stream))
    return letters if limit is None else letters[-limit:]


def letter_document(letter: StoredLetter) -> dict[str, Any]:
    """Return a dead letter as JSON values; bytes that are not UTF-8 are replaced."""
    return asdict(letter) | {"key": _text(letter.key), "value": _text(letter.value)}


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


def resend(config: Config, sources: Collection[str] | None, *, dry_run: bool) -> Resent:
    """Send messages of dead letters to the topics that they came from, each source once.

    Args:
        config: the pipeline.
        sources: which ones, such as `payments[0]@4711`; None means all.
        dry_run: whether nothing is sent.

    Raises:
        SettingsError: there is no dead letter of a source, or the topic refuses a message.
        BrokerError: the broker cannot be reached, or has no such topic.
    """
    stream, result = config.pipeline.stream, Resent(dry_run=dry_run)
    chosen = list(_once(letter for letter in read_dead_letters(stream) if sources is None or letter.source in sources))
    missing = set(sources or ()) - {letter.source for letter in chosen}
    if missing:
        raise SettingsError(f"there is no dead letter of {', '.join(sorted(missing))} in {stream.dead_letter_topic}")
    messages: dict[str, list[StoredLetter]] = {}
    for letter in chosen:
        match = _SOURCE.fullmatch(letter.source)
        topic = match[1] if match else ""
        if (why := _refusal(letter, topic, stream.topics)) is not None:
            result.skipped[letter.source] = why
        else:
            messages.setdefault(topic, []).append(letter)
            result.sent.append(letter.source)
    if not dry_run:
        for topic, letters in messages.items():
            _send(config, topic, letters)
    return result


def _send(config: Config, topic: str, letters: Sequence[StoredLetter]) -> None:
    producer = EventProducer(config.pipeline.stream, topic)
    try:
        producer.open()
        for letter in letters:
            assert letter.value is not None
            producer.send(letter.value, key=letter.key)
        producer.flush()
    finally:
        producer.close()


def _once(letters: Iterator[StoredLetter]) -> Iterator[StoredLetter]:
    """Yield the first letter of each source: after a crash of the learner there may be two."""
    seen: set[str] = set()
    for letter in letters:
        if letter.source not in seen:
            seen.add(letter.source)
            yield letter


def _refusal(letter: StoredLetter, topic: str, topics: Collection[str]) -> str | None:
    """Return why a message cannot be sent again; None when it can."""
    if topic not in topics:
        return "its source is not in stream.topics"
    if letter.truncated is not None:
        return f"the letter was too large, and lacks {letter.truncated}"
    if letter.value is None:
        return "it has no value"
    if letter.rows is not None:
        return f"only its rows {letter.rows} were bad, and the others were used; send those rows alone"
    return None


def _text(content: bytes | None) -> str | None:
    return None if content is None else content.decode(errors="replace")
