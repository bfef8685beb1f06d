"""How long the reader waits until ingest has found the topics."""

from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.ingest.errors import BrokerError
from anabranch.ingest.reader import reader
from anabranch.ingest.reader.reader import BlockReader
from anabranch.ingest.settings.stream import HoldOut, SchemaSettings, StreamSettings
from anabranch.ingest.transport.protocol import Begin, FromIngest, LagReport, PartitionsOpened, Ping


class Listing:
    """A process that sends a report every 20 s, and after some of them is ready."""

    connection = True
    has_died = False

    def __init__(self, reports):
        self.now = 0.0
        self.sent: list[Any] = []
        self._waiting: list[FromIngest] = []
        self._left = reports

    def wait(self, seconds):
        if seconds and self._left >= 0:
            self.now += 20.0
            self._left -= 1
            self._waiting = [LagReport([], None, 0.0) if self._left >= 0 else PartitionsOpened([], [], [])]
        elif seconds:
            self.now += 20.0
        return bool(self._waiting)

    def receive(self):
        return self._waiting.pop()

    def send(self, message):
        self.sent.append(message)


def opened(monkeypatch, process, **stream):
    monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=lambda: process.now))
    schema = SchemaSettings.model_validate(
        {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 3}}
    )
    source = BlockReader(
        StreamSettings.model_validate({"topics": ["t"], **stream}), schema, HoldOut(fraction=0, seed=0)
    )
    monkeypatch.setattr(source, "_process", process)
    source.open()


def test_files_are_listed_for_as_long_as_ingest_reports(monkeypatch):
    process = Listing(reports=100)
    opened(monkeypatch, process, backfill={"files": ["a.parquet"]})
    assert process.now > 2000
    assert isinstance(process.sent[0], Begin)
    assert process.sent[1:] == [Ping()] * 101, "each report is answered: ingest sends eight to a silent learner"


def test_without_files_the_wait_for_the_broker_is_limited(monkeypatch):
    with pytest.raises(BrokerError, match="did not find the topics on"):
        opened(monkeypatch, Listing(reports=100))
