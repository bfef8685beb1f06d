"""Network clients cannot fill the log."""

import logging

import anabranch.serving.http.server
from anabranch.serving.http.server import limited_lines


def test_ten_lines_a_second_are_written_and_the_next_one_has_the_number_left_out(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("anabranch.serving.http.server.time.monotonic", lambda: now[0])
    logger = logging.getLogger("test.limited")
    with limited_lines((logger.name,)):
        for number in range(50):
            logger.warning("line %d", number)
        assert caplog.messages == [f"line {number}" for number in range(10)]
        now[0] += 1
        logger.warning("line %d", 50)
        logger.warning("line %d", 51)
    assert caplog.messages[10:] == ["line 50 (40 lines before this one were left out)", "line 51"]
    for number in range(50):
        logger.warning("free %d", number)
    assert len(caplog.messages) == 62


def test_uvicorn_and_asyncio_are_limited():
    assert anabranch.serving.http.server.LIMITED == ("uvicorn.error", "asyncio")
