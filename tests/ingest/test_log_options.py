"""The processes that the learner starts write log lines as it does."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch.core.logs import LogFormat, LogLevel, LogSettings, configure_logging
from ingest.config import HoldOut, SchemaSettings, StreamSettings
from ingest.reader.reader import BlockReader
from tests.support.kafka import SessionBroker
from tests.support.topics import TopicFactory

pytestmark = [pytest.mark.process, pytest.mark.any_broker]
LISTED = "the history has 1 files with 1 rows and 19 bytes"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    configure_logging()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.fixture
def lines(
    kafka: SessionBroker, make_topic: TopicFactory, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[[LogLevel, LogFormat], list[str]]:
    """Returns what an ingest process logs that lists one file."""
    (tmp_path / "events.jsonl").write_text('{"x": 1.0, "y": 2}\n')
    settings = {"bootstrap_servers": kafka.bootstrap, "topics": [make_topic()]}
    settings |= {"backfill": {"files": [str(tmp_path / "*.jsonl")]}}
    schema = {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 3}}

    def run(level: LogLevel, form: LogFormat) -> list[str]:
        configure_logging(LogSettings(level, form))
        stream = StreamSettings.model_validate(settings).resolved("test")
        reader = BlockReader(stream, SchemaSettings.model_validate(schema), HoldOut(fraction=0, seed=0))
        try:
            reader.open()
        finally:
            reader.close()
        return capfd.readouterr().err.splitlines()

    return run


def test_the_format_is_that_of_the_learner(lines: Callable[[LogLevel, LogFormat], list[str]]) -> None:
    entries = [json.loads(line) for line in lines("info", "json")]
    said = [(each["level"], each["logger"], each["message"]) for each in entries]
    assert ("info", "ingest.backfill.history", LISTED) in said
    assert any(line.endswith(f"INFO ingest.backfill.history {LISTED}") for line in lines("info", "text"))


def test_the_level_is_that_of_the_learner(lines: Callable[[LogLevel, LogFormat], list[str]]) -> None:
    assert lines("error", "text") == []
