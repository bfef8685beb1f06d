"""The processes that the learner starts write log lines as it does."""

import json
import logging

import pytest

from anabranch.core.logs import LogSettings, configure_logging
from anabranch.ingest.reader.reader import BlockReader
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings

pytestmark = [pytest.mark.process, pytest.mark.any_broker]
LISTED = "the history has 1 files with 1 rows and 19 bytes"


@pytest.fixture(autouse=True)
def restored():
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    configure_logging()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.fixture
def lines(kafka, make_topic, tmp_path, capfd):
    """Returns what an ingest process logs that lists one file."""
    (tmp_path / "events.jsonl").write_text('{"x": 1.0, "y": 2}\n')
    settings = {"bootstrap_servers": kafka.bootstrap, "topics": [make_topic()]}
    settings |= {"backfill": {"files": [str(tmp_path / "*.jsonl")]}}
    schema = {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 3}}

    def run(level, form):
        configure_logging(LogSettings(level, form))
        stream = StreamSettings.model_validate(settings).resolved("test")
        reader = BlockReader(stream, SchemaSettings.model_validate(schema), HoldOut(fraction=0, seed=0))
        try:
            reader.open()
        finally:
            reader.close()
        return capfd.readouterr().err.splitlines()

    return run


def test_the_format_is_that_of_the_learner(lines):
    entries = [json.loads(line) for line in lines("info", "json")]
    said = [(each["level"], each["logger"], each["message"]) for each in entries]
    assert ("info", "anabranch.ingest.backfill.history", LISTED) in said
    assert any(line.endswith(f"INFO anabranch.ingest.backfill.history {LISTED}") for line in lines("info", "text"))


def test_the_level_is_that_of_the_learner(lines):
    assert lines("error", "text") == []
