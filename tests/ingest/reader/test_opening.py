"""How long the reader waits until ingest has found the topics."""

from types import SimpleNamespace
from typing import Any

import pytest

from ingest.config import HoldOut, SchemaSettings, StreamSettings
from ingest.errors import BrokerError
from ingest.reader import reader
from ingest.reader.reader import BlockReader
from ingest.transport.protocol import Begin, FromIngest, LagReport, PartitionsOpened, Resume


class Listing:
    """A process that sends a report every 20 s, and after some of them is ready."""

    connection = True
    has_died = False

    def __init__(self, reports: int) -> None:
        self.now = 0.0
        self.sent: list[Any] = []
        self._waiting: list[FromIngest] = []
        self._left = reports

    def wait(self, seconds: float) -> bool:
        if seconds and self._left >= 0:
            self.now += 20.0
            self._left -= 1
            self._waiting = [LagReport([], None, 0.0) if self._left >= 0 else PartitionsOpened([], [], [])]
        elif seconds:
            self.now += 20.0
        return bool(self._waiting)

    def receive(self) -> FromIngest:
        return self._waiting.pop()

    def send(self, message: Any) -> None:
        self.sent.append(message)


def opened(monkeypatch: pytest.MonkeyPatch, process: Listing, **stream: Any) -> None:
    monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=lambda: process.now))
    schema = SchemaSettings.model_validate(
        {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 3}}
    )
    source = BlockReader(
        StreamSettings.model_validate({"topics": ["t"], **stream}), schema, HoldOut(fraction=0, seed=0)
    )
    monkeypatch.setattr(source, "_process", process)
    source.open()


def test_files_are_listed_for_as_long_as_ingest_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Listing(reports=100)
    opened(monkeypatch, process, backfill={"files": ["a.parquet"]})
    assert process.now > 2000
    assert isinstance(process.sent[0], Begin)
    assert process.sent[1:] == [Resume()] * 101, "each report is answered: ingest sends eight to a silent learner"


def test_without_files_the_wait_for_the_broker_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BrokerError, match="did not find the topics on"):
        opened(monkeypatch, Listing(reports=100))
