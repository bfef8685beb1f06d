"""The index process as its command line starts it."""

import logging
import sys

import pytest

from anabranch.replay.embedding_index import process


def test_the_index_process_logs_as_the_learner_does(monkeypatch):
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    monkeypatch.setattr(logging.root, "handlers", logging.root.handlers[:])
    monkeypatch.setattr(sys, "argv", ["", "--connection", "0", "--settings", "{", "--log-level", "error"])
    monkeypatch.setattr(process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(process.os, "nice", lambda _: None)
    with pytest.raises(ValueError, match="truncated"):
        process.main()
    assert logging.root.level == logging.ERROR
