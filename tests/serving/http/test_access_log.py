"""Requests have ids, which the log contains; clients neither fill it nor get internal errors."""

import json
import logging

import httpx
import pytest

import anabranch.serving.http.server
from anabranch.serving.http import access_log as request_log
from anabranch.serving.http.access_log import RequestLog, name_of
from anabranch.serving.http.server import limited_lines
from anabranch.serving.inference.service import Service

LATE = {"min_trained_through": "events:0=11", "timeout_ms": 0}


def logged(caplog):
    return [json.loads(record.message) for record in caplog.records if record.name == "anabranch.requests"]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v2/models/tiny/infer", "/v2", "/", "/nowhere", "/metrics"])
def test_every_answer_has_the_id_of_its_request(numbers, served, path):
    with served(numbers, ready=False, tokens={"read": "a", "admin": "b"}) as server:
        for headers in ({}, {"Authorization": "Bearer a"}):
            answer = httpx.get(server.url + path, headers={**headers, "X-Request-ID": "order-17:a/b"})
            assert answer.headers.get_list("x-request-id") == ["order-17:a/b"]
            assert answer.headers.get_list("x-content-type-options") == ["nosniff"]
            names = {httpx.get(server.url + path, headers=headers).headers["x-request-id"] for _ in range(3)}
            assert len(names) == 3


@pytest.mark.parametrize("given", [b"", b"a b", b'"', b"a\nb", b"\xff", b"x" * 129])
def test_an_id_that_could_forge_a_line_or_a_header_is_replaced(given):
    assert name_of(given) not in (given, name_of(given))
    assert len(name_of(given)) == 16


@pytest.mark.slow
def test_failures_are_logged_with_their_ids_and_successes_if_configured(numbers, served, body_of, caplog):
    numbers.publish(1)
    expected = {"none": [], "errors": [504], "all": [200, 400, 504]}
    for level, statuses in expected.items():
        caplog.clear()
        with caplog.at_level(logging.INFO), served(numbers, request_log=level) as server:
            httpx.post(server.infer, json=body_of(1))
            httpx.post(server.infer, content=b"{")
            httpx.post(server.infer, json=body_of(1, parameters=LATE), headers={"X-Request-ID": "late"})
        lines = logged(caplog)
        assert [line["status"] for line in lines] == statuses
        if lines:
            assert lines[-1].keys() == {"request", "method", "path", "status", "seconds"}
            assert lines[-1]["request"] == "late"
            assert lines[-1]["path"] == "/v2/models/tiny/infer"


@pytest.mark.slow
def test_a_bug_is_logged_with_the_request_id_and_the_client_gets_only_the_id(
    numbers, served, body_of, caplog, monkeypatch
):
    def fail(*_):
        raise RuntimeError("a secret of the inside")

    numbers.publish(1)
    with caplog.at_level(logging.INFO), served(numbers) as server:
        monkeypatch.setattr(Service, "check_name", fail)
        for name, answer in (
            ("one", httpx.post(server.infer, json=body_of(1), headers={"X-Request-ID": "one"})),
            ("two", httpx.get(server.url + "/v2/models/tiny", headers={"X-Request-ID": "two"})),
        ):
            assert answer.status_code == 500
            sentence = f"internal server error; see the server log (request id {name})"
            assert answer.json() == {"error": sentence}
        monkeypatch.undo()
        assert httpx.post(server.infer, json=body_of(1)).status_code == 200
    bugs = [record for record in caplog.records if record.exc_info]
    assert [record.getMessage() for record in bugs] == ["request one failed", "request two failed"]
    assert [line["request"] for line in logged(caplog)] == ["one", "two"]


def test_at_most_a_hundred_lines_a_second_are_logged_with_the_number_left_out(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(request_log.time, "monotonic", lambda: now[0])
    requests = RequestLog("errors")
    with caplog.at_level(logging.INFO):
        for _ in range(250):
            requests.answered(b"x", "POST", "/infer", 503, 0.1)
        assert len(logged(caplog)) == 100
        now[0] += 1
        requests.answered(b"x", "POST", "/infer", 503, 0.1)
        requests.answered(b"x", "POST", "/infer", 503, 0.1)
    assert [line.get("left_out") for line in logged(caplog)[100:]] == [150, None]


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
