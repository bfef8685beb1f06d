"""A teacher behind HTTP: what is sent, what is taken, and every way in which a server may fail."""

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.errors import TeacherError
from anabranch.learner.extensions.teacher.endpoint import EndpointTeacher
from anabranch.learner.model.task import Classification, MultiLabel, Regression
from anabranch.learner.settings.model import TeacherSettings
from tests.support.inference_stub import HEADER, InferenceStub, Reply, serving
from tests.support.waiting import PATIENCE_SECONDS

X = np.array([[0.25, 0.0], [0.5, 1.0], [1.0, 0.0]], np.float32)
COLUMNS = {"offset": np.arange(3), "feature.x": X}


def schema_of(**features):
    features = features or {"x": {"dtype": "float32", "shape": [2]}}
    return Schema(SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 2}}))


made: list[EndpointTeacher] = []


@pytest.fixture(autouse=True)
def close_connections():
    yield
    while made:
        made.pop().close()


def teacher_of(url, task=None, schema=None, step_size=10, **settings):
    given = {"url": url, "model": "m", "retries": 0, "timeout": "20s", **settings}
    task = task or Classification()
    shape = () if isinstance(task, Regression) else (2,)
    features = (schema or schema_of()).features
    made.append(EndpointTeacher(TeacherSettings.model_validate(given), features, task, shape, step_size, Path()))
    return made[-1]


@pytest.fixture(params=[False, True], ids=["json", "binary"])
def stub(request):
    with serving(InferenceStub(binary=request.param)) as stub:
        yield stub


@pytest.fixture
def json_stub():
    with serving(InferenceStub()) as stub:
        yield stub


def test_probabilities_become_logits_with_the_same_probabilities(stub):
    logits = teacher_of(stub.url).answer(COLUMNS)
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert np.allclose(probabilities, np.stack([1 - X[:, 0], X[:, 0]], axis=1), atol=1e-6)


def test_of_several_classes_each_has_its_own_logit(stub):
    stub.infer = lambda x: stub.reply(np.stack([x[:, 0], x[:, 0] / 2], axis=1))
    logits = teacher_of(stub.url, MultiLabel()).answer(COLUMNS)
    assert np.allclose(1 / (1 + np.exp(-logits)), np.stack([X[:, 0], X[:, 0] / 2], axis=1), atol=1e-6)


@pytest.mark.slow
def test_logits_and_numbers_are_taken_as_they_are(stub):
    stub.infer = lambda x: stub.reply(100 * x)
    assert np.array_equal(teacher_of(stub.url, logits=True).answer(COLUMNS), 100 * X)
    stub.infer = lambda x: stub.reply(7 * x[:, 0])
    assert np.array_equal(teacher_of(stub.url, Regression(), output="probabilities").answer(COLUMNS), 7 * X[:, 0])
    stub.infer = lambda x: stub.reply(7 * x[:, :1])  # a column of numbers
    assert np.array_equal(teacher_of(stub.url, Regression(), output="probabilities").answer(COLUMNS), 7 * X[:, 0])


def test_a_request_has_the_datatype_that_the_server_names_and_the_token(stub):
    if not stub.binary:
        stub.metadata["inputs"][0]["datatype"] = "FP64"
    teacher_of(stub.url, token="secret").answer(COLUMNS)
    assert [(method, path) for method, path, *_ in stub.requests] == [
        ("GET", "/v2"),
        ("GET", "/v2/models/m"),
        ("POST", "/v2/models/m/infer"),
    ]
    assert {headers["authorization"] for _, _, headers, _ in stub.requests} == {"Bearer secret"}
    *_, headers, body = stub.requests[-1]
    length = headers.get(HEADER.lower())
    assert (length is not None) == stub.binary
    head = json.loads(body[: int(length)] if length is not None else body)
    assert head["inputs"][0]["shape"] == [3, 2]
    assert head["inputs"][0]["datatype"] == ("FP32" if stub.binary else "FP64")
    assert head["outputs"][0]["name"] == "probabilities"


def test_the_events_of_a_step_are_divided_evenly_among_requests(json_stub):
    rows: list[int] = []

    def infer(x):
        rows.append(len(x))
        return json_stub.answer(x)

    json_stub.infer = infer
    columns = {"offset": np.arange(10), "feature.x": np.full((10, 2), 0.5, np.float32)}
    assert len(teacher_of(json_stub.url, request_rows=4).answer(columns)) == 10
    assert rows == [3, 3, 4]


@pytest.mark.parametrize(
    ("seconds", "asked"), [(0, [2, 4, 8, 6]), (12, [2] * 10), (5, [2] * 10)], ids=["quick", "slow", "not quick"]
)
def test_a_server_has_the_timeout_for_each_step_of_a_round_and_a_quick_one_is_asked_about_several(
    json_stub, monkeypatch, seconds, asked
):
    now, rows = [0.0], list[int]()
    monkeypatch.setattr("anabranch.learner.extensions.teacher.endpoint.time", SimpleNamespace(monotonic=lambda: now[0]))

    def infer(x):
        rows.append(len(x))
        now[0] += seconds
        return json_stub.answer(x)

    json_stub.infer = infer
    columns = {"offset": np.arange(20), "feature.x": np.full((20, 2), 0.5, np.float32)}
    teacher = teacher_of(json_stub.url, step_size=2, request_rows=8, retries=1, timeout="20s")
    assert np.isfinite(teacher.answer(columns)).all()
    assert rows == asked
    json_stub.infer = lambda x: rows.append(len(x)) or Reply({"error": "no"}, 400)
    for _ in range(2):  # of a round nothing is sent after a refusal, nor is it as many events as before
        with pytest.raises(TeacherError, match="answers 400"):
            teacher.answer(columns)
    assert rows[len(asked) :] == [8 if seconds == 0 else 2, 2]


def test_events_with_values_that_are_no_probabilities_have_none(stub):
    values = np.array([[0.5, 0.5], [0.9, 0.9], [np.nan, 1.0]])
    stub.infer = lambda _x: stub.reply(values)
    found = teacher_of(stub.url).answer(COLUMNS)
    assert np.isnan(found).any(axis=1).tolist() == [False, True, True]


def test_a_number_whose_square_is_infinite_is_not_learned_from(stub):
    stub.infer = lambda x: stub.reply(np.array([1.0, 1e30, -1e20]))
    found = teacher_of(stub.url, Regression(), output="probabilities").answer(COLUMNS)
    assert np.isnan(found).tolist() == [False, True, True]


@pytest.mark.slow
def test_a_request_that_fails_for_now_is_repeated(json_stub):
    replies = [Reply({"error": "busy"}, 503), Reply({"error": "busy"}, 429)]
    json_stub.infer = lambda x: replies.pop() if replies else json_stub.answer(x)
    assert np.isfinite(teacher_of(json_stub.url, retries=2).answer(COLUMNS)).all()
    assert [path for _, path, *_ in json_stub.requests].count("/v2/models/m/infer") == 3


FAULTS: dict[str, tuple[Callable[[InferenceStub, Any], Reply], str]] = {
    "500": (
        lambda stub, x: Reply({"error": "no\nmemory\x07"}, 500),
        r"answers 500 to POST /v2/models/m/infer \(no memory \)",
    ),
    "no text": (lambda stub, x: Reply(b"<html>", 502), "answers 502 to POST /v2/models/m/infer$"),
    "401": (lambda stub, x: Reply({"error": "who?"}, 401), r"answers 401 .*: check model.teacher.token"),
    "redirect": (
        lambda stub, x: Reply(b"", 302, Location="http://169.254.169.254/latest"),
        "answers 302 .*: redirects are not followed; set model.teacher.url to where it is",
    ),
    "garbage": (
        lambda stub, x: Reply(b"\xff\x00" * 50),
        "answers with something else than outputs of the Open Inference",
    ),
    "nested": (lambda stub, x: Reply(b"[" * 100_000), "answers with something else than outputs of the Open Inference"),
    "no JSON": (lambda stub, x: Reply(b'{"outputs": [NaN]}'), "answers with something else than outputs of the Open"),
    "no output": (lambda stub, x: Reply({"outputs": []}), "answers without the output 'probabilities'"),
    "fewer events": (lambda stub, x: stub.answer(x[:2]), r"of shape \[2, 2\], and \[3, 2\] is needed"),
    "other shape": (lambda stub, x: stub.reply(np.zeros((3, 5))), r"of shape \[3, 5\], and \[3, 2\] is needed"),
    "another shape than it says": (
        lambda stub, x: stub.reply(np.zeros((3, 1)), shape=[3, 2]),
        "that are not .3, 2. numbers",
    ),
    "strings": (lambda stub, x: stub.reply(np.zeros((3, 2)), "BYTES"), "as BYTES, which has no numbers"),
    "NaN": (lambda stub, x: stub.reply(np.full((3, 2), np.nan)), "answers with values of probabilities that are no"),
    "too much": (lambda stub, x: Reply(b" " * 1_000_000), "answers with more than 262336 bytes, which are not read"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_one_sentence_and_no_other_error(json_stub, fault):
    infer, sentence = FAULTS[fault]
    json_stub.infer = lambda x: infer(json_stub, x)
    teacher = teacher_of(json_stub.url)
    with pytest.raises(TeacherError, match=sentence) as raised:
        teacher.answer(COLUMNS)
    assert str(raised.value).startswith(f"the teacher at {json_stub.url} ")
    assert str(raised.value).isprintable()
    json_stub.infer = json_stub.answer
    assert np.isfinite(teacher.answer(COLUMNS)).all(), "it recovers"


@pytest.mark.parametrize(
    ("size", "length"),
    [(-1, "60"), (1 << 40, "60"), ("24", "60"), (None, "1000000"), (None, "-1"), (None, "²")],
)
def test_sizes_of_binary_tensors_are_checked(size, length):
    with serving(InferenceStub(binary=True)) as stub:
        output = {
            "name": "probabilities",
            "datatype": "FP32",
            "shape": [3, 2],
            "parameters": {"binary_data_size": size},
        }
        content = json.dumps({"outputs": [output]}).encode()
        header = str(len(content)) if length == "60" else length.encode().decode("latin-1")
        stub.infer = lambda _x: Reply(content + bytes(24), **{HEADER.replace("-", "_"): header})
        with pytest.raises(TeacherError, match=r"answers with"):
            teacher_of(stub.url).answer(COLUMNS)


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_given_up_at_the_timeout(json_stub):
    def infer(x):
        json_stub.ended.wait(PATIENCE_SECONDS)
        return json_stub.answer(x)

    json_stub.infer = infer
    with pytest.raises(TeacherError, match=r"does not answer within 200ms \(model.teacher.timeout\)"):
        teacher_of(json_stub.url, timeout="200ms", retries=5).answer(COLUMNS)


@pytest.mark.parametrize(
    "forever",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n ",
        b"x",
    ],
)
def test_a_server_that_sends_without_end_is_given_up_too(forever):
    ended = threading.Event()

    def answer(listener):
        with contextlib.suppress(OSError), listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(forever)
            while not ended.wait(0.005):
                connection.sendall(forever[-1:] if b"200" in forever else forever)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        served = pool.submit(answer, listener)
        teacher = teacher_of(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout="100ms")
        try:
            with pytest.raises(TeacherError, match=r"does not answer within 100ms \(model.teacher.timeout\)"):
                teacher.answer(COLUMNS)
        finally:
            ended.set()
        served.result(PATIENCE_SECONDS)


@pytest.mark.parametrize(
    ("kind", "datatype", "values", "known"),
    [
        ("int64", "INT32", [5, 2**32 + 5, -(2**31), 2**31], [True, False, True, False]),
        ("int64", "UINT64", [5, -1, 0, 2**62], [True, False, True, True]),
        ("int64", "FP32", [5, 2**24 + 1, 2**24, -(2**24) - 1], [True, False, True, False]),
        ("int64", "BOOL", [1, 2, 0, -1], [True, False, True, False]),
        ("float32", "FP16", [1.5, 70_000.0, 0.1, -70_000.0], [True, False, True, False]),
        ("float32", "INT64", [1.0, 1.5, -2.0, 1e30], [True, False, True, False]),
    ],
)
def test_the_server_is_asked_only_about_values_that_its_datatype_has(json_stub, caplog, kind, datatype, values, known):
    json_stub.metadata["inputs"][0] |= {"datatype": datatype, "shape": [-1]}
    asked: list[float] = []

    def infer(x):
        asked.extend(x.reshape(-1).tolist())
        return json_stub.reply(np.full((len(x), 2), 0.5))

    json_stub.infer = infer
    teacher = teacher_of(json_stub.url, schema=schema_of(x={"dtype": kind}))
    columns = {"offset": np.arange(4), "feature.x": np.array(values, kind)}
    for _ in range(2):
        assert (~np.isnan(teacher.answer(columns)).any(axis=1)).tolist() == known
    kept = [value for value, is_known in zip(values, known, strict=True) if is_known]
    assert asked == pytest.approx(kept * 2, rel=1e-3)
    misfit = f"takes {datatype} for 'x', which has no {np.array(values, kind)[1]}"
    assert caplog.text.count(misfit) == 1, "it is logged once"
    with pytest.raises(TeacherError, match=f"{misfit}: bound schema.features.x by min and max"):
        teacher.answer({name: column[1:2] for name, column in columns.items()})


def test_a_server_that_is_not_there_cannot_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(
        TeacherError, match=f"the teacher at http://127.0.0.1:{port} cannot be reached: Connection refused"
    ):
        teacher_of(f"http://127.0.0.1:{port}", retries=1).answer(COLUMNS)


def test_a_connection_that_the_server_has_closed_is_opened_again(json_stub):
    teacher = teacher_of(json_stub.url, retries=1)
    teacher.answer(COLUMNS)
    (connection,) = teacher._idle
    connection.sock.shutdown(socket.SHUT_RDWR)
    assert np.isfinite(teacher.answer(COLUMNS)).all()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"inputs": []}, "has no input 'x' but none: set model.teacher.features"),
        (
            {"outputs": [{"name": "logits", "datatype": "FP32"}]},
            "has no output 'probabilities' but logits: set model.te",
        ),
        (
            {"inputs": [{"name": "x", "datatype": "BYTES"}]},
            "takes BYTES for 'x', and events have float32: leave it out of model.teacher.features",
        ),
        ({"inputs": 3}, "answers with something else than metadata of a model of the Open Inference Protocol v2"),
    ],
)
def test_a_model_that_does_not_fit_is_said_with_the_key_to_change(json_stub, change, sentence):
    json_stub.metadata |= change
    with pytest.raises(TeacherError, match=sentence):
        teacher_of(json_stub.url).answer(COLUMNS)


def test_strings_are_sent_as_ids_and_a_server_that_takes_strings_is_refused(json_stub):
    schema = schema_of(x={"dtype": "string", "encode": {"hash": 16}})
    json_stub.metadata["inputs"] = [{"name": "x", "datatype": "BYTES", "shape": [-1]}]
    with pytest.raises(TeacherError, match="takes BYTES for 'x', and events have ids of strings"):
        teacher_of(json_stub.url, schema=schema).answer({"offset": np.arange(1), "feature.x": np.array([3])})


def test_a_certificate_that_is_not_trusted_and_a_file_without_one_are_named(json_stub, tmp_path):
    address = json_stub.url.removeprefix("http://")
    with pytest.raises(TeacherError, match="cannot be reached"):  # it speaks no TLS
        teacher_of(f"https://{address}").answer(COLUMNS)
    error = ssl.SSLCertVerificationError()
    error.verify_message = "self-signed certificate"
    sentence = str(teacher_of("https://localhost")._failure(error))
    assert sentence == "has a certificate that is not trusted (self-signed certificate): set model.teacher.ca"
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(SettingsError, match=r"model.teacher.ca = .*ca.pem cannot be read as PEM"):
        teacher_of("https://localhost", ca=tmp_path / "ca.pem")


def test_what_is_being_asked_is_given_up_when_the_learner_stops(json_stub):
    teacher = teacher_of(json_stub.url, retries=10)

    def infer(_x):
        teacher.close()
        return Reply({"error": "busy"}, 503)

    json_stub.infer = infer
    with pytest.raises(TeacherError):
        teacher.answer(COLUMNS)
    assert [path for _, path, *_ in json_stub.requests].count("/v2/models/m/infer") == 1


def test_a_request_that_waits_for_its_answer_ends_at_once_when_the_learner_stops(json_stub):
    teacher, asked = teacher_of(json_stub.url, timeout="1h"), threading.Event()

    def infer(x):
        asked.set()
        json_stub.ended.wait(PATIENCE_SECONDS)
        return json_stub.answer(x)

    json_stub.infer = infer
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(teacher.answer, COLUMNS)
        assert asked.wait(PATIENCE_SECONDS)
        teacher.close()
        with pytest.raises(TeacherError):
            answer.result(PATIENCE_SECONDS)
