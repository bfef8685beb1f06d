"""Predictions of a running server, from Python; and servers that refuse, are slow, or are something else."""

import contextlib
import json
import threading
import time
from datetime import datetime

import numpy as np
import pyarrow as pa
import pytest

import anabranch
from anabranch.api.client import _column, _Input
from anabranch.core.errors import DependencyError, SettingsError
from anabranch.serving.reporting.report import read_report
from tests.anabranch.api.conftest import orders
from tests.pipelines import Part
from tests.support.http_server import Handler, serving
from tests.support.waiting import PATIENCE_SECONDS

X = {"x": np.zeros((2, 3), np.float32)}
METADATA = json.dumps(
    {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [-1, 3]},
            {"name": "n", "datatype": "INT64", "shape": [-1]},
            {"name": "s", "datatype": "BYTES", "shape": [-1]},
        ]
    }
).encode()
REPLY = {"name": "prediction", "datatype": "INT64", "shape": [2], "data": [4, 5]}


def reply_of(**changes):
    output = {**REPLY, **changes}
    return json.dumps({"model_name": "m", "model_version": "7", "outputs": [output], "parameters": {}}).encode()


@pytest.fixture
def _serving(pipeline):
    """A serving process, which serves version 3."""
    with contextlib.closing(Part("serving", pipeline.path)) as process:

        def ready():
            report = read_report(pipeline.state_dir)
            return report is not None and report.ready and report.pid == process.process.pid

        process.until(ready)
        yield
        process.stop()


@pytest.mark.process
@pytest.mark.usefixtures("_serving")
def test_a_server_answers_as_the_version_that_it_serves(pipeline):
    url, data = read_report(pipeline.state_dir).address, orders(700)
    expected = anabranch.load(pipeline.state_dir, "newest").predict(data)
    with anabranch.Client(url, "lesen", timeout=PATIENCE_SECONDS) as client:
        found = client.predict(data)
        assert found["prediction"].tolist() == expected["prediction"].tolist()
        np.testing.assert_allclose(found["probabilities"], expected["probabilities"], atol=1e-6)
        assert (found["model_version"] == 3).all()
        # Where a value is missing, the default of the schema counts: the other events are answered as before.
        shop, amount = data["shop"].astype(object), data["amount"].copy()
        shop[::7], amount[::5] = None, np.nan
        missing = {**data, "shop": shop, "amount": amount}
        found, filled = client.predict(missing), {**missing, "shop": np.where(shop == None, "b", shop)}  # noqa: E711
        expected = anabranch.load(pipeline.state_dir, 3).predict(filled)
        np.testing.assert_allclose(found["probabilities"], expected["probabilities"], atol=1e-6)
        # Frames: a table, and times that are no numbers yet.
        times = (data["at"] * 1e6).astype("datetime64[us]")
        table = pa.table({**data, "x": data["x"].tolist(), "at": times, "unknown": times})
        found = client.predict(table.slice(0, 9))
        assert found.column_names == ["prediction", "probabilities.0", "probabilities.1", "model_version"]
        np.testing.assert_allclose(
            found["probabilities.1"],
            client.predict({name: column[:9] for name, column in data.items()})["probabilities"][:, 1],
        )
        client.close()
        assert len(client.predict(table)) == 700
        with pytest.raises(SettingsError, match="answered 400: input 'at' is missing"):
            client.predict({name: column for name, column in data.items() if name != "at"})
    with pytest.raises(SettingsError, match="answered 401"):
        predict(url, data)
    with pytest.raises(SettingsError, match="answered 404"):
        predict(f"{url}/v2/models/other", data, token="lesen")


@contextlib.contextmanager
def answering(*answers, metadata=METADATA):
    """A server that gives these answers to requests for predictions, in turn: status, body and headers."""
    left, asked = list(answers), []

    class Server(Handler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.reply(b'{"name": "m"}' if self.path == "/api/status" else metadata)

        def do_POST(self):
            asked.append(self.rfile.read(int(self.headers["Content-Length"])))
            answer = left.pop(0)
            if callable(answer):
                answer(self)
            else:
                status, body, headers = answer
                self.reply(body, status, **headers)

    with serving(Server) as url:
        yield url, asked


def predict(url, data=X, **options):
    with anabranch.Client(url, **{"timeout": PATIENCE_SECONDS, **options}) as client:
        return client.predict(data)


LATER = 503, b'{"error": "it starts"}', {"Retry_After": "0"}


@pytest.mark.parametrize(
    "times", [[datetime.fromisoformat("2026-01-01T12"), None], np.array(["2026-01-01T12", "NaT"], "datetime64[h]")]
)
def test_times_without_a_zone_are_utc(times, monkeypatch):
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        column, missing = _column(_Input("at", "FP64", [-1]), np.asarray(times), {"at": 1000})
    finally:
        monkeypatch.undo()
        time.tzset()
    assert (column.tolist(), missing.tolist()) == ([1_767_268_800_000, 0], [False, True])


def test_what_passes_is_asked_again_and_nothing_else():
    with answering(LATER, (429, b"", {"Retry_After": "0"}), (200, reply_of(), {})) as (url, asked):
        found = predict(url)
    assert found["prediction"].tolist() == [4, 5]
    assert found["model_version"].tolist() == [7, 7]
    assert len(asked) == 3
    assert len({*asked}) == 1
    for status, body, headers in [(503, LATER[1], {}), (503, LATER[1], {"Retry_After": "1000"}), (500, b"", {})]:
        with answering((status, body, headers)) as (url, asked):
            with pytest.raises(DependencyError, match=f"answered {status}: {'it starts' if body else 'no reason'}"):
                predict(url, timeout=500)
            assert len(asked) == 1


def close(handler):
    handler.close_connection = True


def test_a_connection_that_was_closed_while_it_was_idle_is_opened_again():
    def last(handler):
        handler.reply(reply_of())
        close(handler)  # without the header that says so

    with answering(last, (200, reply_of(), {})) as (url, asked), anabranch.Client(url) as client:
        assert len(client.predict(X)["prediction"]) == len(client.predict(X)["prediction"]) == 2
        assert len(asked) == 2
    with answering(close, close) as (url, asked), pytest.raises(DependencyError, match="cannot be reached"):
        predict(url)
    assert len(asked) == 2, "once over the connection of the metadata, once over a new one"


def test_a_server_that_is_slow_or_away_does_not_block():
    gone = threading.Event()

    def drip(handler):
        handler.send_response(200)
        handler.end_headers()
        while not gone.wait(0.01):
            try:
                handler.wfile.write(b" ")
                handler.wfile.flush()
            except OSError:
                return

    with answering(drip) as (url, _), anabranch.Client(url) as client:
        client._model_inputs()  # over the same connection
        client._timeout = 0.3
        with pytest.raises(DependencyError, match=r"has not answered within 0.3 s"):
            client.predict(X)
        gone.set()
    for away in (url, "http://a..b:8000"):
        with pytest.raises(DependencyError, match="cannot be reached"):
            predict(away)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"[1]", {}),
        (b"\xff", {}),
        (reply_of(shape=[3]), {}),
        (reply_of(datatype="FP31"), {}),
        (reply_of(data=[1, 2, 3]), {}),
        (reply_of(data=None), {}),
        (reply_of(data=None, parameters={"binary_data_size": 99}), {}),
        (reply_of(data=None, parameters={"binary_data_size": 16}), {"Inference_Header_Content_Length": "x"}),
        (reply_of(data=None, parameters={"binary_data_size": 16}), {"Inference_Header_Content_Length": "3"}),
    ],
)
def test_an_answer_that_no_server_of_ours_gives_is_one_sentence(body, headers):
    with answering((200, body, headers)) as (url, _), pytest.raises(DependencyError, match="as a server of Anabranch"):
        predict(url)


def test_metadata_that_no_server_of_ours_gives_is_one_sentence():
    for metadata in (b"", b'{"inputs": [{"name": "x", "datatype": "FP31", "shape": [-1]}]}'):
        with answering(metadata=metadata) as (url, _), pytest.raises(DependencyError):
            predict(url)


BAD = [
    ({"y": [1]}, "the data has none of the model's inputs: x, n, s"),
    ({"x": [[1, 2]]}, "the column x cannot be FP32 [3], which the model takes: its values have the shape [2]"),
    ({"x": [[1, 2, "b"]]}, "the column x cannot be FP32 [3], which the model takes: its values are <U21"),
    ({"n": [1.0, 1.5]}, "the column n cannot be INT64, which the model takes: 1.5 is none"),
    ({"n": [2**63]}, "the column n cannot be INT64, which the model takes: 9223372036854775808 is none"),
    ({"n": ["a"]}, "the column n cannot be INT64, which the model takes: its values are <U1"),
    ({"n": []}, "the data has no event to predict"),
    ({"s": [1, None]}, "the column s cannot be BYTES, which the model takes: 1 is no text"),
    (3, "data is of type int, and has to be a dict of arrays by name, or a data frame of pandas, polars or Arrow"),
]


@pytest.mark.parametrize(("data", "sentence"), BAD, ids=range(len(BAD)))
def test_data_that_the_model_does_not_take_is_not_sent(data, sentence):
    with answering() as (url, asked), pytest.raises(SettingsError) as error:
        predict(url, data)
    assert str(error.value) == sentence
    assert asked == []


@pytest.mark.parametrize("token", ["secret\n", "sécret"])
def test_a_token_that_is_none_is_said_at_once_and_not_shown(token):
    with pytest.raises(SettingsError, match="Client: token has a line break or another character") as error:
        anabranch.Client("http://127.0.0.1:8000", token)
    assert "cret" not in str(error.value)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:b", "http://[a"])
def test_what_is_no_url_is_said_at_once(url):
    with pytest.raises(SettingsError, match="is no address of a server, such as http://127"):
        anabranch.Client(url)


def test_times_have_the_unit_of_the_schema():
    schema = anabranch.Schema(
        {"features": {"n": {"dtype": "int64", "cycles": ["day"], "unit": "ms"}}, "label": {"name": "y", "classes": 2}}
    )
    one = reply_of(shape=[1], data=[1])
    with answering((200, one, {}), (200, one, {})) as (url, asked):
        for moment in (
            np.array(["2026-05-01"], "datetime64[D]"),
            pa.table({"n": pa.array([1777593600], pa.timestamp("s", "UTC"))})["n"],
        ):
            predict(url, {"n": moment}, schema=schema)
    assert [np.frombuffer(body[-8:], np.int64).item() for body in asked] == [1777593600000] * 2
    assert time.gmtime(1777593600)[:3] == (2026, 5, 1)
