"""The server over loopback: the protocol's routes, swaps under load, freshness, tokens, and every bound."""

import asyncio
import gc
import json
import socket
import ssl
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from anabranch.core.errors import SettingsError
from anabranch.core.net import listen
from anabranch.learner.errors import ModelError
from anabranch.learner.model.answer_rule import AnswerRule, Calibration
from anabranch.learner.status.report import LearnerReport
from anabranch.learner.status.report import write_report as write_learner_report
from anabranch.serving.http.app import _Infer
from anabranch.serving.http.middleware import REQUEST_ID
from anabranch.serving.http.request_body import BodyReader
from anabranch.serving.inference.batcher import Batcher
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.model.loaded_version import ServedVersion
from anabranch.serving.server import serve
from anabranch.serving.settings import ServingSettings
from tests.support.waiting import PATIENCE_SECONDS


@pytest.fixture
def running(numbers, served):
    numbers.publish(1)
    with served(numbers) as server:
        yield server


@pytest.fixture
def held(numbers):
    """The module of the models; whose `go_on` holds a `Number` inside its run while it is clear."""
    numbers.deployment.check()
    module = sys.modules["anabranch_serving_test_models"]
    module.running.clear()
    yield module
    module.go_on.set()


@pytest.mark.slow
def test_the_protocols_routes_answer(running, body_of):
    expected = {
        "/v2": {"name": "anabranch", "extensions": ["binary_tensor_data", "classification"]},
        "/v2/health/live": {"live": True},
        "/v2/health/ready": {"ready": True},
        "/v2/models/tiny": {
            "name": "tiny",
            "versions": ["1"],
            "platform": "pytorch",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
            "outputs": [{"name": "prediction", "datatype": "FP32", "shape": [-1]}],
        },
        "/v2/models/tiny/ready": {"name": "tiny", "ready": True},
        "/v2/models/tiny/versions/1": {"name": "tiny", "versions": ["1"]},
        "/v2/models/tiny/versions/1/ready": {"name": "tiny", "version": "1", "ready": True},
    }
    for path, members in expected.items():
        response = httpx.get(running.url + path)
        assert response.status_code == 200, path
        assert response.json() | members == response.json()
    for path in ("/v2/models/tiny/infer", "/v2/models/tiny/versions/1/infer"):
        response = httpx.post(running.url + path, json=body_of(2, id="a"))
        assert response.headers["content-type"] == "application/json"
        assert response.json() == {
            "model_name": "tiny",
            "model_version": "1",
            "id": "a",
            "parameters": {"trained_through": "events:0=10"},
            "outputs": [{"name": "prediction", "datatype": "FP32", "shape": [2], "data": [1.0, 1.0]}],
        }


@pytest.mark.slow
def test_a_prediction_of_several_classes_is_a_bool_for_each(deploy, served, body_of):
    publisher = deploy("tagged")
    weights = {"weight": torch.zeros(3, 4), "bias": torch.tensor([2.0, -2.0, 0.0])}
    publisher.publish(1, weights)
    with served(publisher) as running:
        outputs = httpx.get(f"{running.url}/v2/models/tiny").json()["outputs"]
        prediction, probabilities = httpx.post(running.infer, json=body_of(2)).json()["outputs"]
    assert outputs[0] == {"name": "prediction", "datatype": "BOOL", "shape": [-1, 3]}
    assert (prediction["datatype"], prediction["shape"]) == ("BOOL", [2, 3])
    assert prediction["data"] == [True, False, False] * 2
    assert probabilities["data"] == pytest.approx(torch.sigmoid(weights["bias"]).tolist() * 2)


@pytest.mark.slow
def test_what_does_not_exist_is_a_404_that_names_what_does(running, body_of):
    for path, sentence in {
        "/v2/models/other": "no model 'other'; this server has 'tiny'",
        "/v2/models/other/ready": "no model 'other'",
        "/v2/models/tiny/versions/7": "version 7 is not resident; resident: 1",
        "/v2/models/tiny/versions/7/ready": "resident: 1",
        "/nowhere": "Not Found",
    }.items():
        response = httpx.get(running.url + path)
        assert response.status_code == 404
        assert sentence in response.json()["error"]
    for path in ("other/infer", "tiny/versions/7/infer", "tiny/versions/01/infer"):
        response = httpx.post(f"{running.url}/v2/models/{path}", json=body_of(1))
        assert response.status_code == 404
    response = httpx.get(running.infer)
    assert response.status_code == 405
    assert "error" in response.json()


@pytest.mark.slow
def test_before_the_first_version_the_server_lives_but_is_not_ready(numbers, served, body_of, eventually):
    with served(numbers, ready=False) as server:
        assert httpx.get(server.url + "/v2/health/live").status_code == 200
        assert httpx.get(server.url + "/v2/models/tiny").json()["versions"] == []
        for response in (
            httpx.get(server.url + "/v2/health/ready"),
            httpx.get(server.url + "/v2/models/tiny/ready"),
            httpx.post(server.infer, json=body_of(1)),
        ):
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert "no version of tiny is ready yet" in response.json()["error"]
        assert "no version can be served yet" in server.report().problems
        numbers.publish(1)
        body = body_of(1, parameters={"min_trained_through": "events:0=10"})
        assert httpx.post(server.infer, json=body).json()["model_version"] == "1"


@pytest.mark.slow
def test_a_swap_under_load_fails_no_request_and_each_reply_is_by_one_version(numbers, served, body_of):
    numbers.publish(1)
    seen: list[tuple[str, list[float], str]] = []
    done = threading.Event()
    last = 12

    def ask(address, rows):
        with httpx.Client() as client:
            while not done.is_set():
                response = client.post(address, json=body_of(rows))
                assert response.status_code == 200, response.text
                reply = response.json()
                version = reply["model_version"]
                seen.append((version, reply["outputs"][0]["data"], reply["parameters"]["trained_through"]))
                if version == str(last):
                    return

    with served(numbers, max_batch=4) as server, ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, server.infer, rows) for rows in (1, 3, 9, 20)]
        with httpx.Client() as client:
            for number in range(2, last + 1):
                numbers.publish(number)
                body = body_of(1, parameters={"min_trained_through": f"events:0={10 * number}"})
                assert client.post(server.infer, json=body).json()["model_version"] == str(number)
        for future in asking:
            future.result(PATIENCE_SECONDS)
        done.set()
        assert httpx.get(server.url + "/api/status").json()["serving"]["requests"].keys() == {"200"}
    for version, data, trained_through in seen:
        assert set(data) == {float(version)}
        assert trained_through == f"events:0={10 * int(version)}"


@pytest.mark.slow
def test_a_reply_has_the_calibration_and_the_decision_of_its_version(deploy, served, body_of):
    publisher, weights, last = deploy("linear"), {"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}, 6
    replies: list[dict[str, Any]] = []
    done = threading.Event()

    def publish(number):
        costs = [[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [50.0, 50.0, 0.0]] if number % 2 else []
        rule = AnswerRule(Calibration("platt", 500, bias=[float(number), 0.0, 0.0]), costs)
        publisher.publish(number, weights, rule=rule)

    def ask(address, rows):
        with httpx.Client() as client:
            while not done.is_set():
                replies.append(client.post(address, json=body_of(rows)).raise_for_status().json())

    publish(1)
    with served(publisher, max_batch=4) as server, ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask, server.infer, rows) for rows in (1, 9)]
        for number in range(2, last + 1):
            publish(number)
            body = body_of(1, parameters={"min_trained_through": f"events:0={10 * number}"})
            replies.append(httpx.post(server.infer, json=body).raise_for_status().json())
        done.set()
        for future in asking:
            future.result(30)
    for reply in replies:
        number, (prediction, probabilities) = int(reply["model_version"]), reply["outputs"]
        rows = prediction["shape"][0]
        expected = torch.tensor([float(number), 0.0, 0.0]).softmax(0).tolist()
        assert probabilities["data"] == pytest.approx(expected * rows, abs=1e-6)
        assert set(prediction["data"]) == {2 if number % 2 and number < 5 else 0}
        assert reply["parameters"] == {"trained_through": f"events:0={10 * number}", "calibration": "platt"}


@pytest.mark.slow
def test_thirty_swaps_under_load_fail_nothing_and_leave_nothing_behind(numbers, served, body_of, eventually):
    def alive():
        gc.collect()
        return [each for each in gc.get_objects() if type(each) is ServedVersion]

    # Those of earlier tests, which may go meanwhile; or be listed no more, since a server freezes what it finds.
    before = weakref.WeakSet(alive())
    done = threading.Event()
    numbers.publish(1)

    def ask(address):
        answered = 0
        with httpx.Client() as client:
            while not done.is_set():
                response = client.post(address, json=body_of(3))
                assert response.status_code == 200, response.text
                answered += 1
        return answered

    with served(numbers, max_batch=4) as server, ThreadPoolExecutor(2) as pool, httpx.Client() as client:
        asking = [pool.submit(ask, server.infer) for _ in range(2)]
        try:
            for number in range(2, 32):
                numbers.publish(number)
                numbers.versions.delete(number - 5)
                body = body_of(1, parameters={"min_trained_through": f"events:0={10 * number}"})
                assert client.post(server.infer, json=body).json()["model_version"] == str(number)
        finally:
            done.set()
        assert all(future.result(PATIENCE_SECONDS) for future in asking)
        # The last swap wakes the requests that wait for it before it is counted.
        eventually(lambda: client.get(server.url + "/api/status").json()["serving"]["swaps"] == {"swapped": 31})
        eventually(lambda: sum(each not in before for each in alive()) == 1)


@pytest.mark.slow
def test_min_trained_through_waits_for_a_version_that_has_learned_so_far(numbers, running, body_of):
    body = body_of(1, parameters={"min_trained_through": "events:0=11", "timeout_ms": 20_000})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, running.infer, json=body, timeout=PATIENCE_SECONDS)
        assert httpx.post(running.infer, json=body_of(1)).json()["model_version"] == "1"
        numbers.publish(2)
        assert waiting.result(PATIENCE_SECONDS).json()["model_version"] == "2"
    learned = body_of(1, parameters={"min_trained_through": "events:0=20"})
    assert httpx.post(running.infer, json=learned).json()["parameters"] == {"trained_through": "events:0=20"}


@pytest.mark.slow
def test_a_topic_that_is_not_learned_is_a_400_at_once(running, body_of):
    response = httpx.post(running.infer, json=body_of(1, parameters={"min_trained_through": "other:0=1"}))
    assert response.status_code == 400
    assert "other:0 is of no topic that is learned (events)" in response.json()["error"]


@pytest.mark.slow
@pytest.mark.parametrize("through", ["events:0=11", "events:1=0", "events:0=10,events:1=0"])
def test_min_trained_through_is_a_504_when_the_time_is_over(running, body_of, through):
    for timeout_ms in (0, 30):
        body = body_of(1, parameters={"min_trained_through": through, "timeout_ms": timeout_ms})
        response = httpx.post(running.infer, json=body)
        assert response.status_code == 504
        assert "the served version has learned events:0=10" in response.json()["error"]
    pinned = f"{running.url}/v2/models/tiny/versions/1/infer"
    assert httpx.post(pinned, json=body_of(1, parameters={"min_trained_through": through})).status_code == 504


@pytest.mark.slow
def test_a_timeout_of_any_size_is_bounded_by_the_servers(numbers, served, body_of):
    numbers.publish(1)
    with served(numbers, timeout="100ms") as server:
        for timeout_ms in (10**400, 1e300, 1e9):
            body = body_of(1, parameters={"min_trained_through": "events:0=11", "timeout_ms": timeout_ms})
            response = httpx.post(server.infer, json=body)
            assert response.status_code == 504
            assert "serving.timeout" in response.json()["error"]


@pytest.mark.slow
def test_a_request_that_takes_too_long_is_a_504(numbers, served, body_of, held):
    numbers.publish(1)
    with served(numbers, timeout="200ms") as server:
        held.go_on.clear()
        response = httpx.post(server.infer, json=body_of(1))
        held.go_on.set()
        assert response.status_code == 504
        assert "serving.timeout" in response.json()["error"]
        assert httpx.post(server.infer, json=body_of(1)).status_code == 200


@pytest.mark.slow
def test_overload_is_a_429_with_retry_after(numbers, served, body_of, held, eventually):
    numbers.publish(1)
    with served(numbers, max_queue=4, max_delay="0ms") as server, ThreadPoolExecutor(8) as pool:
        held.running.clear()
        held.go_on.clear()
        first = pool.submit(httpx.post, server.infer, json=body_of(1), timeout=PATIENCE_SECONDS)
        assert held.running.wait(PATIENCE_SECONDS)
        others = [pool.submit(httpx.post, server.infer, json=body_of(2), timeout=PATIENCE_SECONDS) for _ in range(3)]
        eventually(lambda: any(future.done() for future in others))
        held.go_on.set()
        assert first.result(PATIENCE_SECONDS).status_code == 200
        responses = [future.result(PATIENCE_SECONDS) for future in others]
        assert sorted(response.status_code for response in responses) == [200, 200, 429]
        (crowded,) = [response for response in responses if response.status_code == 429]
        assert crowded.headers["retry-after"] == "1"
        assert "4 rows wait already" in crowded.json()["error"]
        assert httpx.post(server.infer, json=body_of(5)).status_code == 413


@pytest.mark.slow
def test_a_client_that_disconnects_is_removed_from_the_queue(numbers, served, body_of, held, eventually):
    numbers.publish(1)
    with served(numbers, max_queue=4, max_delay="0ms") as server, ThreadPoolExecutor(2) as pool:
        held.running.clear()
        held.go_on.clear()
        first = pool.submit(httpx.post, server.infer, json=body_of(1), timeout=PATIENCE_SECONDS)
        assert held.running.wait(PATIENCE_SECONDS)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.infer, json=body_of(4), timeout=0.2)
        eventually(lambda: server.report().requests.get("499"))
        last = pool.submit(httpx.post, server.infer, json=body_of(4), timeout=PATIENCE_SECONDS)
        held.go_on.set()
        assert first.result(PATIENCE_SECONDS).status_code == 200
        assert last.result(PATIENCE_SECONDS).status_code == 200


@pytest.mark.slow
def test_a_body_that_is_too_long_is_a_413_with_and_without_a_content_length(numbers, served):
    numbers.publish(1)

    def chunks():
        for _ in range(64):
            yield b" " * 65536

    with served(numbers, max_body_bytes=100_000) as server:
        for content in (b" " * 100_001, chunks()):
            response = httpx.post(server.infer, content=content)
            assert response.status_code == 413
            assert "more than 100000 bytes" in response.json()["error"]
        declared = b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n"
        assert asyncio.run(exchange(server.address, declared)).startswith(b"HTTP/1.1 413 ")


async def exchange(address, request):
    """Send bytes as they are and return the beginning of the answer."""
    host, _, port = address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request)
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(4096), 20)
    writer.close()
    await writer.wait_closed()
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("ready", [True, False])
def test_probes_may_ask_with_head(deploy, served, ready):
    publisher = deploy("number")
    if ready:
        publisher.publish(7)
    with served(publisher, ready=ready) as server:
        for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/tiny/ready"):
            got, asked = httpx.get(server.url + path), httpx.head(server.url + path)
            assert (asked.status_code, asked.content) == (got.status_code, b"")
            assert asked.status_code == (200 if ready or path.endswith("live") else 503)
        assert httpx.head(server.url + "/metrics").status_code == 405


@pytest.mark.slow
def test_an_input_that_breaks_the_model_is_a_400_and_affects_no_other(deploy, served, body_of):
    publisher = deploy("touchy")
    publisher.publish(1, weights={"scale": torch.ones(())})
    with served(publisher) as server:
        for value, sentence in ((-1.0, "fails on this input"), (99.0, "no finite prediction")):
            body = body_of(1)
            body["inputs"][0]["data"] = [value] * 4
            response = httpx.post(server.infer, json=body)
            assert response.status_code == 400
            assert sentence in response.json()["error"]
            assert "Traceback" not in response.text
        assert httpx.post(server.infer, json=body_of(1)).json()["outputs"][0]["data"] == [4.0]


@pytest.mark.slow
def test_an_input_on_which_the_model_exits_is_a_400_and_affects_no_other(deploy, served, body_of):
    publisher = deploy("quitting")
    publisher.publish(7)
    with served(publisher) as server:
        body = body_of(1)
        body["inputs"][0]["data"] = [-1.0] * 4
        response = httpx.post(server.infer, json=body)
        assert (response.status_code, "sys.exit(0)" in response.json()["error"]) == (400, True)
        assert httpx.post(server.infer, json=body_of(1)).json()["outputs"][0]["data"] == [7.0]


@pytest.mark.slow
def test_the_batcher_can_distinguish_connections(running, body_of, monkeypatch):
    peers: list[Any] = []
    predict = Batcher.predict

    async def recorded(*args):
        peers.append(args[-1])
        return await predict(*args)

    monkeypatch.setattr(Batcher, "predict", recorded)
    with httpx.Client() as one, httpx.Client() as other:
        for client in (one, other, one):
            assert client.post(running.infer, json=body_of(1)).status_code == 200
    assert peers[0] == peers[2] != peers[1]


@pytest.fixture
def fuzzed(running):
    with httpx.Client() as client:
        yield lambda content, headers: client.post(running.infer, content=content, headers=headers)


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.none() | st.text("0123456789-+x", max_size=5) | st.integers(0, 400).map(str))
def test_arbitrary_bodies_are_never_a_5xx(fuzzed, content, header_length):
    headers = {} if header_length is None else {"Inference-Header-Content-Length": header_length}
    response = fuzzed(content, headers)
    assert 400 <= response.status_code < 500 or (header_length == "0" and response.status_code == 200)
    if response.status_code != 200:
        assert response.json()["error"]


@pytest.mark.slow
def test_a_compressed_body_is_refused(running):
    assert httpx.post(running.infer, content=b"x", headers={"Content-Encoding": "gzip"}).status_code == 415


@pytest.mark.slow
def test_binary_tensors_over_http(running):
    x = np.ones((2, 4), "<f4").tobytes()
    header = json.dumps(
        {
            "inputs": [
                {"name": "x", "shape": [2, 4], "datatype": "FP32", "parameters": {"binary_data_size": len(x)}},
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    headers = {"Inference-Header-Content-Length": str(len(header))}
    response = httpx.post(running.infer, content=header + x, headers=headers)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/octet-stream"
    length = int(response.headers["inference-header-content-length"])
    (output,) = json.loads(response.content[:length])["outputs"]
    assert output["parameters"] == {"binary_data_size": 8}
    assert np.frombuffer(response.content[length:], "<f4").tolist() == [1, 1]


@pytest.mark.slow
def test_status_contains_learner_and_serving(running, body_of, eventually):
    httpx.post(running.infer, json=body_of(1))
    httpx.post(running.infer, content=b"?")
    eventually(lambda: running.report().swaps)  # which are counted after the version is there
    status = httpx.get(running.url + "/api/status").json()
    assert status["name"] == "tiny"
    assert status["learner"] is None
    assert status["serving"]["version"] == 1
    assert status["serving"]["trained_through"] == "events:0=10"
    assert status["serving"]["requests"] == {"200": 1, "400": 1}
    assert status["serving"]["swaps"] == {"swapped": 1}
    assert 0 < status["serving"]["request_p50_seconds"] <= status["serving"]["request_p99_seconds"] < 10
    assert status["serving"]["problems"] == []
    write_learner_report(running.deployment.state_dir, LearnerReport(pid=1, generation=1, started=0, time=0, steps=7))
    assert httpx.get(running.url + "/api/status").json()["learner"]["steps"] == 7
    eventually(lambda: running.report().requests == {"200": 1, "400": 1})
    assert running.report().address == running.url


@pytest.mark.slow
def test_the_last_report_is_not_ready(numbers, served):
    numbers.publish(1)
    with served(numbers) as server:
        assert server.report().ready
    assert not server.report().ready


@pytest.mark.slow
def test_metrics_have_the_promised_names(running, body_of):
    httpx.post(running.infer, json=body_of(1))
    text = httpx.get(running.url + "/metrics").text
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert families == {
        "anabranch_serving_requests_total",
        "anabranch_serving_request_duration_seconds",
        "anabranch_serving_queue_row_seconds_total",
        "anabranch_serving_version",
        "anabranch_serving_freshness_duration_seconds",
        "anabranch_serving_input_psi",
        "anabranch_serving_drifted_input_psi",
        "anabranch_serving_shadow_rows_total",
        "anabranch_serving_shadow_disagreement_total",
        "anabranch_serving_swaps_total",
        "anabranch_serving_problems",
        "anabranch_serving_follow_lag_seconds",
        "anabranch_serving_log_answers_total",
        "anabranch_serving_stream_messages_total",
        "anabranch_serving_stream_lag",
        "anabranch_serving_stream_answer_duration_seconds",
        "anabranch_tracing_left_out_total",
    }
    assert 'anabranch_serving_requests_total{code="200"} 1.0' in text
    (waited,) = [line for line in text.splitlines() if line.startswith("anabranch_serving_queue_row_seconds_total ")]
    assert float(waited.split()[1]) > 0


@pytest.mark.slow
def test_with_a_token_every_route_but_health_requires_one(numbers, served, body_of):
    numbers.publish(1)
    with served(numbers, tokens={"read": "lesen", "admin": "admin"}) as server:
        assert httpx.get(server.url + "/v2/health/live").status_code == 200
        assert httpx.get(server.url + "/v2/health/ready").status_code == 200
        for path in ("/v2", "/v2/models/tiny", "/metrics", "/api/status", "/openapi.json", "/nowhere"):
            response = httpx.get(server.url + path)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            assert "error" in response.json()
        for header in ("Bearer", "Bearer lese", "Bearer lesenn", "Basic lesen", "lesen", "Bearer \xff"):
            headers = {"Authorization": header.encode("latin-1")}
            assert httpx.post(server.infer, json=body_of(1), headers=headers).status_code == 401  # type: ignore[arg-type]
        for header in ("Bearer lesen", "bearer lesen", "Bearer admin"):
            response = httpx.post(server.infer, json=body_of(1), headers={"Authorization": header})
            assert response.status_code == 200
        assert server.report().address in server.url


@pytest.mark.slow
def test_a_rollout_command_requires_the_admin_token(numbers, served):
    numbers.publish(1)
    with served(numbers, tokens={"read": "lesen", "admin": "admin"}) as server:
        path = server.url + "/api/versions/1:pin"
        for header, code in (("", 401), ("Bearer nobody", 401), ("Bearer \xff", 401), ("Bearer lesen", 403)):
            reply = httpx.post(path, headers={"Authorization": header.encode("latin-1")})  # type: ignore[arg-type]
            assert (reply.status_code, "error" in reply.json()) == (code, True)
        admin = {"Authorization": "Bearer admin"}
        other = httpx.post(path, headers={**admin, "Origin": "http://elsewhere.example"})
        assert other.status_code == 403
        assert numbers.versions.state().pinned is None
        own = httpx.post(path, headers={**admin, "Origin": server.url})
        assert (own.status_code, own.json()["pinned"]) == (200, 1)
        assert httpx.get(path, headers=admin).status_code == 405


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [{}, {"admin": "admin"}])
def test_on_loopback_a_rollout_command_requires_only_the_token_that_is_set(numbers, served, tokens):
    numbers.publish(1)
    with served(numbers, tokens=tokens) as server:
        assert httpx.get(server.url + "/api/status").status_code == 200
        assert httpx.post(server.url + "/api/versions/1:pin").status_code == (401 if tokens else 200)


@pytest.mark.slow
def test_without_a_token_requests_for_another_host_are_refused(running, numbers, body_of):
    port = running.address.rpartition(":")[2]
    for host in (f"elsewhere.example:{port}", "127.0.0.1.elsewhere.example", "192.168.0.7", "[::1", "0.0.0.0"):
        headers = {"Host": host, "Origin": f"http://{host}"}
        for reply in (
            httpx.get(running.url + "/api/status", headers=headers),
            httpx.post(running.infer, json=body_of(1), headers=headers),
            httpx.post(running.url + "/api/versions/1:pin", headers=headers),
        ):
            assert (reply.status_code, "ask for localhost" in reply.json()["error"]) == (403, True)
    assert numbers.versions.state().pinned is None
    for host in (f"localhost:{port}", "LOCALHOST", f"127.0.0.1:{port}", "127.0.0.2", f"[::1]:{port}"):
        assert httpx.post(running.infer, json=body_of(1), headers={"Host": host}).status_code == 200
    assert httpx.get(running.url + "/v2/health/live", headers={"Host": "elsewhere.example"}).status_code == 200


@pytest.mark.slow
def test_with_a_token_a_request_may_be_for_any_name(numbers, served, body_of):
    numbers.publish(1)
    with served(numbers, tokens={"read": "lesen"}) as server:
        headers = {"Host": "fraud.example", "Authorization": "Bearer lesen"}
        assert httpx.post(server.infer, json=body_of(1), headers=headers).status_code == 200


@pytest.mark.slow
def test_rollout_commands_are_applied_before_they_are_answered(running, numbers, body_of, eventually):
    def served():
        return str(httpx.post(running.infer, json=body_of(1)).json()["model_version"])

    def order(what):
        return httpx.post(f"{running.url}/api/versions/{what}")

    numbers.publish(2)
    eventually(lambda: served() == "2")
    numbers.publish(3, verdict="fail")
    assert order("3:promote").json()["promoted"] == 3
    assert served() == "3"
    assert order("3:reject").json()["rolled_back"] == [3]
    assert served() == "2"
    assert order("1:rollback").json() | {"previous": None} == {
        "serving": 1,
        "previous": None,
        "pinned": None,
        "rolled_back": [2, 3],
        "promoted": 1,
        "replaced": None,
        "recent": [1, 2, 3, 2, 1],
    }
    assert served() == "1"
    assert order("1:rollback").status_code == 409
    assert order("2:promote").json()["rolled_back"] == [3]
    assert served() == "2"
    assert order("1:pin").json()["pinned"] == 1
    assert served() == "1"
    refused = order("2:promote")
    assert (refused.status_code, refused.json()["error"]) == (
        409,
        "version 1 is pinned, and nothing else is served; unpin it first",
    )
    eventually(lambda: running.report().pinned == 1)
    assert order("1:unpin").status_code == 200
    assert served() == "2"
    for nonsense in ("9:pin", "-1:pin", "x:pin", "1:paint", f"{'9' * 99}:pin", "1:", "1"):
        assert order(nonsense).status_code == 404


@pytest.mark.slow
def test_tls_with_the_configured_certificate(numbers, served, certificate):
    cert, key = certificate(2)
    numbers.publish(1)
    with served(numbers, tls={"cert": str(cert), "key": str(key)}) as server:
        assert server.url.startswith("https://")
        trust = ssl.create_default_context(cafile=str(cert))
        assert httpx.get(server.url + "/v2/health/ready", verify=trust).status_code == 200


def test_settings_that_cannot_work_end_the_start_with_their_key(numbers, deploy):
    stop = threading.Event()
    with listen("serving.port", "serving.host", "127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"serving.port = {port} is taken on 127.0.0.1"):
            serve(numbers.deployment, ServingSettings(port=port), stop)
    with pytest.raises(SettingsError, match=r'serving.host = "192.0.2.1"'):
        listen("serving.port", "serving.host", "192.0.2.1", 0)
    with pytest.raises(SettingsError, match=r"serving.tls: .* cannot be used"):
        serve(numbers.deployment, ServingSettings.model_validate({"port": 0, "tls": {"cert": "no", "key": "no"}}), stop)
    with pytest.raises(ModelError, match="broken"):
        serve(deploy("broken").deployment, ServingSettings(port=0), stop)


def test_small_replies_are_not_held_back_by_nagle():
    with listen("serving.port", "serving.host", "127.0.0.1", 0) as listener:
        assert listener.proto == 6  # IPPROTO_TCP: asyncio sets TCP_NODELAY only then


@pytest.mark.slow
def test_an_answer_before_the_body_was_read_closes_the_connection(numbers, served, body_of):
    numbers.publish(1)
    body = body_of(1)
    with served(numbers, tokens={"read": "secret"}, max_body_bytes=1024) as running, httpx.Client() as client:
        good = {"Authorization": "Bearer secret"}
        for path, headers, content, status, closes in [
            (running.infer, {}, json.dumps(body), 401, True),
            (running.infer, good, "x" * 2000, 413, True),
            (running.infer, {**good, "Content-Encoding": "gzip"}, "x", 415, True),
            (running.url + "/nothing", good, "x", 404, True),
            (running.infer, good, "x", 400, False),
            (running.infer, good, json.dumps(body), 200, False),
        ]:
            response = client.post(path, content=content, headers=headers)
            assert response.status_code == status, path
            assert (response.headers.get("connection") == "close") is closes, status


@pytest.mark.slow
def test_ambiguous_heads_are_refused_before_a_token_is_compared(numbers, served):
    numbers.publish(1)
    with served(numbers, tokens={"read": "secret"}) as running:
        many = httpx.get(running.url + "/v2", headers=[(f"x-{n}", "") for n in range(101)])
        assert (many.status_code, many.headers["connection"]) == (431, "close")
        assert "header fields; send 100 at most" in many.json()["error"]
        live = b"GET /v2/health/live HTTP/1.1\r\nHost: h\r\n"
        both = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        host, _, port = running.address.partition(":")
        for request in (both + live + b"\r\n", live + b"Host: other\r\nConnection: close\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as client:
                client.sendall(request)
                answers = b""
                while piece := client.recv(4096):
                    answers += piece
            assert answers.startswith(b"HTTP/1.1 400")
            assert answers.count(b"HTTP/1.1") == 1


@pytest.mark.slow
def test_a_rollout_command_from_an_origin_that_is_no_url_is_forbidden(numbers, served):
    numbers.publish(1)
    with served(numbers) as running:
        response = httpx.post(f"{running.url}/api/versions/1:pin", headers={"Origin": "http://["})
        assert response.status_code == 403


@pytest.mark.slow
def test_a_report_that_cannot_be_read_does_not_end_serving(numbers, served, eventually):
    numbers.publish(1)
    state_dir = numbers.deployment.state_dir
    (state_dir / "learner.json").mkdir(parents=True)
    with served(numbers) as running:
        for _ in range(2):  # the history is sampled between two reports
            last = running.report().time
            eventually(lambda last=last: running.report().time > last)
        assert httpx.get(running.url + "/api/status").json()["learner"] is None


def test_a_body_and_its_reply_count_as_held_until_the_reply_is_read():
    class Echo:
        async def infer(self, *_):
            return b"r" * 100_000, None

    async def main():
        read, sent = asyncio.Event(), 0

        async def receive():
            return {"type": "http.request", "body": b"b" * 1000}

        async def send(message):  # as uvicorn: waits for what was sent before to be read
            nonlocal sent
            if sent > 65_536:
                await read.wait()
            sent += len(message.get("body", b""))

        settings = ServingSettings()
        infer = _Infer(Echo(), settings, ServingMetrics(CollectorRegistry()), BodyReader(settings))  # type: ignore[arg-type]
        scope = {"headers": [], "path_params": {"name": "tiny"}, "type": "http", "method": "POST", REQUEST_ID: "r"}
        task = asyncio.create_task(infer(scope, receive, send))  # type: ignore[arg-type]
        while not sent:
            await asyncio.sleep(0)
        assert infer._bodies.held_bytes == 101_000
        read.set()
        await task
        assert infer._bodies.held_bytes == 0

    asyncio.run(asyncio.wait_for(main(), 20))
