"""gRPC: the stock client's calls, what is refused and with which status, and that HTTP does not load any of it."""

import errno
import os
import socket
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import torch

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.model.answer_rule import AnswerRule, Calibration
from anabranch.serving.errors import BadRequestError
from anabranch.serving.grpc.messages import MESSAGES, SERVICE
from anabranch.serving.grpc.tensors import parse_request
from anabranch.serving.http.acceptor import most_connections, most_grpc_connections
from anabranch.serving.protocol.codec import Signature
from anabranch.serving.reporting.report import read_report
from anabranch.serving.settings import ServingSettings
from tests.support.waiting import PATIENCE_SECONDS, wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tritonclient.grpc as triton
    from tritonclient.grpc import service_pb2

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The first bytes of a connection of HTTP/2."""
X = np.array([[1.0, 2.0, 3.0, 4.0]] * 3, np.float32)


MIXED = {
    "features": {
        "word": {"dtype": "string", "shape": [2], "encode": {"vocab": ["red"]}},
        "size": {"dtype": "float32", "shape": [2]},
    },
    "label": {"name": "y", "classes": 2},
}


def address_of(server):
    """Return where it listens, once it does."""
    while not ((report := read_report(server.deployment.state_dir)) and report.grpc_address):
        threading.Event().wait(0.01)
    return report.grpc_address


@pytest.fixture
def called(deploy, served):
    """A server of version 7, which answers 7, and `call(method, message, metadata)` on its channel."""
    publisher = deploy("number")
    publisher.publish(7)
    with served(publisher, grpc_port=0, max_body_bytes=100_000, max_held_bytes=200_000, max_queue=99_999) as server:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(address_of(server), options) as channel:

            def call(method, message, metadata=(), **options):
                answer = channel.unary_unary(
                    f"/{SERVICE}/{method}",
                    request_serializer=None if isinstance(message, bytes) else type(message).SerializeToString,
                    response_deserializer=MESSAGES[f"{method}Response"].FromString,
                )
                return answer(message, timeout=PATIENCE_SECONDS, metadata=metadata, **options)

            yield server, call


def infer(x=X, name="tiny", **fields):
    """Return a request with raw contents."""
    message = MESSAGES["ModelInferRequest"](model_name=name, **fields)
    message.inputs.add(name="x", datatype="FP32", shape=x.shape)
    message.raw_input_contents.append(x.tobytes())
    return message


def refused(call, message, method="ModelInfer", **options):
    with pytest.raises(grpc.RpcError) as refusal:
        call(method, message, **options)
    return refusal.value.code(), refusal.value.details()


def test_a_reply_has_the_calibration_and_the_decision_of_its_version(deploy, served):
    publisher, costs = deploy("linear"), [[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [50.0, 50.0, 0.0]]
    rule = AnswerRule(Calibration("platt", 500, bias=[1.0, 0.0, 0.0]), costs)
    publisher.publish(1, {"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}, rule=rule)
    with served(publisher, grpc_port=0) as server, closing(triton.InferenceServerClient(address_of(server))) as client:
        given = triton.InferInput("x", list(X.shape), "FP32")
        given.set_data_from_numpy(X)
        reply = client.infer("tiny", [given])
    expected = torch.tensor([1.0, 0.0, 0.0]).softmax(0).numpy()
    np.testing.assert_allclose(reply.as_numpy("probabilities"), np.tile(expected, (3, 1)), atol=1e-6)
    assert reply.as_numpy("prediction").tolist() == [2, 2, 2]
    assert reply.get_response().parameters["calibration"].string_param == "platt"


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_messages_have_the_fields_of_the_protocol(name):
    ours, theirs = MESSAGES[name].DESCRIPTOR, getattr(service_pb2, name).DESCRIPTOR

    def fields(message):
        return {
            each.name: (
                each.number,
                each.type,
                each.is_repeated,
                each.containing_oneof.name if each.containing_oneof else None,
                each.message_type and fields(each.message_type),
            )
            for each in message.fields
        }

    assert fields(ours) == fields(theirs)
    assert ours.full_name == theirs.full_name


@pytest.mark.slow
def test_the_stock_client_gets_predictions(deploy, served):
    publisher = deploy("mixed")
    weights = {
        "words.weight": torch.zeros(8, 3),
        "numbers.weight": torch.zeros(3, 2),
        "numbers.bias": torch.arange(3.0),
    }
    publisher.publish(4, weights=weights)
    words = np.array([["red", "blue"], ["green", "ünknown"]], object)
    with served(publisher, grpc_port=0) as server:
        client = triton.InferenceServerClient(address_of(server))
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("tiny")
        assert client.is_model_ready("tiny", "4")
        assert not client.is_model_ready("tiny", "5")
        assert client.get_server_metadata().name == "anabranch"
        metadata = client.get_model_metadata("tiny", as_json=True)
        assert metadata["inputs"][0] == {"name": "word", "datatype": "BYTES", "shape": ["-1", "2"]}
        word = triton.InferInput("word", [2, 2], "BYTES")
        word.set_data_from_numpy(words)
        outputs = [triton.InferRequestedOutput("probabilities")]
        result = client.infer("tiny", [word], outputs=outputs, request_id="r1", model_version="4")
        answer = result.get_response()
        expected = torch.arange(3.0).softmax(0).expand(2, 3).numpy()
        np.testing.assert_allclose(result.as_numpy("probabilities"), expected, rtol=1e-6)
        assert (answer.id, answer.model_version, result.as_numpy("prediction")) == ("r1", "4", None)
        assert answer.parameters["trained_through"].string_param == "events:0=40"
        client.close()


@pytest.mark.slow
def test_typed_contents_are_read_as_raw_ones_are(called):
    _, call = called
    message = MESSAGES["ModelInferRequest"](model_name="tiny")
    message.inputs.add(name="x", datatype="FP32", shape=[3, 4]).contents.fp32_contents.extend(X.ravel())
    answers = [call("ModelInfer", each).raw_output_contents[0] for each in (message, infer())]
    assert answers[0] == answers[1] == np.full(3, 7, np.float32).tobytes()


@pytest.mark.slow
def test_each_refusal_has_its_status_and_sentence(called):
    _, call = called
    invalid, missing = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
    typed = MESSAGES["ModelInferRequest"](model_name="tiny")
    typed.inputs.add(name="x", datatype="FP32", shape=[1, 4]).contents.int_contents.extend([1, 2, 3, 4])
    short = MESSAGES["ModelInferRequest"](model_name="tiny")
    short.inputs.add(name="x", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend([1, 2])
    both = infer()
    both.inputs[0].contents.fp32_contents.append(1)
    through = infer()
    through.parameters["min_trained_through"].string_param = "events:0=99"
    through.parameters["timeout_ms"].int64_param = 1
    classes = infer(outputs=[{"name": "prediction"}])
    classes.outputs[0].parameters["classification"].int64_param = 2
    sequence, region = infer(), infer()
    sequence.parameters["sequence_id"].int64_param = 7
    region.inputs[0].parameters["shared_memory_region"].string_param = "a"
    for message, code, sentence in [
        (
            classes,
            invalid,
            "output 'prediction' has the parameter classification = 2, but not a number for each class",
        ),
        (sequence, invalid, "the request has the parameter sequence_id = 7, which this server does not serve"),
        (region, invalid, "input 'x' has the parameter shared_memory_region = 'a'"),
        (infer(name="other"), missing, "there is no model 'other'"),
        (infer(model_version="8"), missing, "version 8 is not resident"),
        (infer(X[:, :3]), invalid, "input 'x' has shape [-1, 4], not [3, 3]"),
        (infer(np.full((1, 4), np.nan, np.float32)), invalid, "NaN or infinite"),
        (infer(outputs=[{"name": "z"}]), invalid, "there is no output 'z'"),
        (infer(raw_input_contents=[b""]), invalid, "raw_input_contents has 2 elements for 1 inputs"),
        (infer(inputs=[{}] * 9), invalid, "the request has 10 inputs; inputs are x"),
        (typed, invalid, "FP32 is sent in fp32_contents or raw_input_contents"),
        (short, invalid, "input 'x' has 2 elements, but its shape asks for 4"),
        (both, invalid, "contents besides raw_input_contents"),
        (MESSAGES["ModelInferRequest"](model_name="tiny"), invalid, "the request has no inputs"),
        (b"\xff\xff", invalid, "the message is no ModelInferRequest"),
        (through, grpc.StatusCode.DEADLINE_EXCEEDED, "the served version has learned events:0=70"),
    ]:
        given = refused(call, message)
        assert (given[0], sentence in given[1]) == (code, True), given
    metadata = MESSAGES["ModelMetadataRequest"](name="other")
    assert refused(call, metadata, "ModelMetadata")[0] == missing


@pytest.mark.slow
@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_a_message_that_is_too_long_is_refused_compressed_or_not(called, compression):
    server, call = called
    code, _ = refused(call, infer(np.zeros((100_000, 4), np.float32)), compression=compression)
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert call("ModelInfer", infer(), compression=compression).model_version == "7"
    assert server.deployment.name == "tiny"


@pytest.mark.parametrize("unit", [b"\x2a\x00", b"\x32\x00", b"\x3a\x00", b"\x22\x00"])
def test_a_message_of_many_small_ones_is_refused_before_it_is_parsed(unit):
    """Two bytes each become up to 88: 16 MB of them took 700 MB."""
    signature = Signature(Schema(SchemaSettings.model_validate(MIXED)), [], 100)
    parsed: list[Any] = []
    with pytest.raises(BadRequestError, match=r"more than \d+ fields"):
        parsed.append(parse_request(signature, unit * 1_000_000))
    assert not parsed


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        (b"\x2a\xff", "ends within a field"),
        (b"\x2a\x05", "ends within"),
        (b"\x0b", "a kind"),
        (b"\xff" * 11, "64 bits"),
    ],
)
def test_a_long_message_that_is_malformed_is_refused(end, sentence):
    signature = Signature(Schema(SchemaSettings.model_validate(MIXED)), [], 100)
    with pytest.raises(BadRequestError, match=sentence):
        parse_request(signature, b"\x12\x80\x80\x08" + bytes(131_072) + end)


def test_a_long_message_of_all_that_a_request_may_have_is_read():
    signature = Signature(Schema(SchemaSettings.model_validate(MIXED)), [], 10_000)
    message = MESSAGES["ModelInferRequest"](model_name="m", id="i", outputs=[{"name": "a"}] * 64)
    for index in range(64):
        message.parameters[f"key {index}"].int64_param = index
    message.inputs.add(name="word", datatype="BYTES", shape=[10_000, 2]).contents.bytes_contents.extend(
        [b"red"] * 20_000
    )
    message.inputs.add(name="size", datatype="FP32", shape=[10_000, 2]).contents.fp32_contents.extend([1.0] * 20_000)
    assert parse_request(signature, message.SerializeToString()) == message


@pytest.mark.slow
def test_a_long_request_gets_a_long_reply(deploy, served):
    publisher = deploy("number")
    publisher.publish(7)
    rows = 300_000
    with served(publisher, grpc_port=0, max_queue=rows) as server:
        client = triton.InferenceServerClient(address_of(server))
        x = triton.InferInput("x", [rows, 4], "FP32")
        x.set_data_from_numpy(np.ones((rows, 4), np.float32))
        for compression in (None, "gzip", "deflate"):
            answer = client.infer("tiny", [x], compression_algorithm=compression).as_numpy("prediction")
            np.testing.assert_array_equal(answer, np.full(rows, 7, np.float32))
        client.close()


@pytest.mark.slow
def test_calls_of_one_client_are_answered_at_the_same_time(called):
    _, call = called
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda rows: call("ModelInfer", infer(np.ones((rows, 4), np.float32))), range(1, 200)))
    assert [answer.outputs[0].shape[0] for answer in answers] == list(range(1, 200))


@pytest.mark.slow
def test_requests_hold_no_more_bytes_than_those_of_http(called):
    server, call = called
    module = sys.modules[server.deployment.model.factory.partition(":")[0]]
    module.go_on.clear()
    try:
        with ThreadPoolExecutor(8) as pool:
            waiting = [pool.submit(call, "ModelInfer", infer(np.zeros((3000, 4), np.float32))) for _ in range(8)]
            refusal = next(as_completed(waiting, timeout=PATIENCE_SECONDS)).exception()
            module.go_on.set()
        assert isinstance(refusal, grpc.RpcError)
        assert (refusal.code(), "bytes of requests already" in refusal.details()) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            True,
        )
        assert ("retry-after", "1") in [tuple(each) for each in refusal.trailing_metadata()]
        assert any(each.exception() is None for each in waiting)
    finally:
        module.go_on.set()


@pytest.mark.slow
def test_a_token_is_asked_for_as_over_http(deploy, served):
    publisher = deploy("number")
    publisher.publish(7)
    with (
        served(publisher, grpc_port=0, tokens={"read": "secret", "admin": "other"}) as server,
        grpc.insecure_channel(address_of(server)) as channel,
    ):

        def code(method, message, token):
            call = channel.unary_unary(f"/{SERVICE}/{method}", request_serializer=type(message).SerializeToString)
            try:
                call(
                    message, timeout=PATIENCE_SECONDS, metadata=[("authorization", f"Bearer {token}")] if token else []
                )
            except grpc.RpcError as exc:
                return exc.code()
            return grpc.StatusCode.OK

        for method, message in (
            ("ModelInfer", infer()),
            ("ModelReady", MESSAGES["ModelReadyRequest"](name="tiny")),
            ("ModelMetadata", MESSAGES["ModelMetadataRequest"](name="tiny")),
            ("ServerMetadata", MESSAGES["ServerMetadataRequest"]()),
        ):
            assert code(method, message, None) == grpc.StatusCode.UNAUTHENTICATED
            assert code(method, message, "wrong") == grpc.StatusCode.UNAUTHENTICATED
            assert code(method, message, "secret") == code(method, message, "other") == grpc.StatusCode.OK
        for method in ("ServerLive", "ServerReady"):
            assert code(method, MESSAGES[f"{method}Request"](), None) == grpc.StatusCode.OK


@pytest.mark.slow
def test_a_call_without_a_token_is_refused_before_its_message_is_read(deploy, served):
    publisher = deploy("number")
    publisher.publish(7)
    with (
        served(publisher, grpc_port=0, tokens={"read": "secret", "admin": "other"}) as server,
        grpc.insecure_channel(address_of(server)) as channel,
    ):
        # A stream that sends no message: only a server that waits for none can answer.
        sent = threading.Event()
        call = channel.stream_unary(f"/{SERVICE}/ModelInfer")
        with pytest.raises(grpc.RpcError) as refusal:
            call((sent.wait(20) for _ in range(1)), timeout=20)  # type: ignore[misc]
        sent.set()
        assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.slow
@pytest.mark.parametrize(("method", "field"), [("ServerLive", "live"), ("ServerReady", "ready")])
def test_a_call_that_needs_no_token_is_answered_before_its_message_is_read(called, method, field):
    """Otherwise calls whose message never comes would take all places of the server."""
    server, _ = called
    sent = threading.Event()
    with grpc.insecure_channel(address_of(server)) as channel:
        call = channel.stream_unary(
            f"/{SERVICE}/{method}", response_deserializer=MESSAGES[f"{method}Response"].FromString
        )
        assert getattr(call((sent.wait(20) for _ in range(1)), timeout=10), field)
    sent.set()


@pytest.mark.slow
def test_several_tokens_are_refused_over_grpc_and_http(deploy, served):
    """A proxy in front may have checked another of them."""
    publisher = deploy("number")
    publisher.publish(7)
    given = [("authorization", "Bearer secret"), ("authorization", "Bearer wrong")]
    with (
        served(publisher, grpc_port=0, tokens={"read": "secret", "admin": "other"}) as server,
        grpc.insecure_channel(address_of(server)) as channel,
    ):
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        for metadata in (given, given[::-1], given[:1] * 2):
            with pytest.raises(grpc.RpcError, match="2 Authorization headers; send one") as refusal:
                call(infer().SerializeToString(), timeout=PATIENCE_SECONDS, metadata=metadata)
            assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert httpx.get(f"{server.url}/v2/models/tiny", headers=metadata).status_code == 400


@pytest.mark.slow
def test_a_panic_while_a_call_is_answered_is_answered(called, monkeypatch):
    class PanicException(BaseException):  # as PyO3 has it
        pass

    def panic(*_):
        raise PanicException("index out of bounds")

    _, call = called
    with monkeypatch.context() as patch:
        patch.setattr("anabranch.serving.grpc.calls.read_request", panic)
        assert refused(call, infer())[0] == grpc.StatusCode.INTERNAL
    assert call("ModelInfer", infer()).model_version == "7"


def closes(connection):
    """Return whether the server closes a connection, after what it sends."""
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("opening", "bound"),
    [(b"", "anabranch.serving.grpc.server.HEAD_PATIENCE"), (PREFACE, "anabranch.serving.grpc.server._IDLE")],
    ids=["silent", "preface"],
)
def test_a_connection_without_a_call_is_closed(deploy, served, monkeypatch, opening, bound):
    publisher = deploy("number")
    publisher.publish(7)
    monkeypatch.setattr(bound, timedelta(milliseconds=300))
    with served(publisher, grpc_port=0) as server:
        host, port = address_of(server).rsplit(":", 1)
        with socket.create_connection((host, int(port)), timeout=PATIENCE_SECONDS) as connection:
            connection.sendall(opening)
            assert closes(connection)


@pytest.mark.slow
def test_connections_beyond_the_bound_are_closed_and_leave_http_its_own(deploy, served, monkeypatch):
    publisher = deploy("number")
    publisher.publish(7)
    monkeypatch.setattr("anabranch.serving.grpc.server.most_grpc_connections", lambda: 3)
    with served(publisher, grpc_port=0) as server, ExitStack() as stack:
        host, port = address_of(server).rsplit(":", 1)
        connections = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(6)]
        for connection in connections:
            connection.sendall(PREFACE)
            connection.settimeout(0.5)
        assert sum(map(closes, connections)) == 3
        assert httpx.get(f"{server.url}/v2/health/live").status_code == 200
        for connection in connections:
            connection.close()
        with grpc.insecure_channel(address_of(server)) as channel:
            live = channel.unary_unary(f"/{SERVICE}/ServerLive")
            live(b"", timeout=PATIENCE_SECONDS, wait_for_ready=True)


@pytest.mark.slow
def test_calls_whose_message_never_ends_are_bounded_in_time_and_number_and_health_is_answered(
    deploy, served, monkeypatch
):
    publisher = deploy("number")
    publisher.publish(7)
    monkeypatch.setattr("anabranch.serving.grpc.calls._MOST_CALLS", 2)
    never = threading.Event()
    with served(publisher, grpc_port=0, timeout="3s") as server, ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(address_of(server)))
        stack.callback(never.set)
        infer_call = channel.stream_unary(f"/{SERVICE}/ModelInfer")
        stuck: list[Any] = []
        metadata = channel.unary_unary(f"/{SERVICE}/ServerMetadata")

        def metadata_code():
            try:
                metadata(b"", timeout=PATIENCE_SECONDS)
            except grpc.RpcError as exc:
                return exc.code()
            return grpc.StatusCode.OK

        def is_full():
            """A machine that stops for three seconds sees the calls end; others begin then."""
            if all(call.done() for call in stuck):
                stuck[:] = [infer_call.future((never.wait(60) for _ in range(1)), timeout=60) for _ in range(2)]
            return metadata_code() == grpc.StatusCode.RESOURCE_EXHAUSTED

        wait_until(is_full)
        assert channel.unary_unary(f"/{SERVICE}/ServerLive")(b"", timeout=PATIENCE_SECONDS) == b"\x08\x01"
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=PATIENCE_SECONDS) == b"\x08\x01"
        for call in stuck:
            assert call.exception(PATIENCE_SECONDS).code() == grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until(lambda: metadata_code() == grpc.StatusCode.OK)


@pytest.mark.slow
def test_cancelled_and_refused_calls_release_their_slots_and_bytes(deploy, served, monkeypatch):
    publisher = deploy("number")
    publisher.publish(7)
    monkeypatch.setattr("anabranch.serving.grpc.calls._MOST_CALLS", 2)
    large = infer(np.ones((4000, 4), np.float32)).SerializeToString()
    with (
        served(publisher, grpc_port=0, max_body_bytes=70_000, max_held_bytes=140_000) as server,
        grpc.insecure_channel(address_of(server)) as channel,
    ):
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        module = sys.modules[publisher.deployment.model.factory.partition(":")[0]]
        try:
            for _ in range(4):
                module.running.clear()
                module.go_on.clear()
                waiting = call.future(large, timeout=60)
                assert module.running.wait(PATIENCE_SECONDS)
                waiting.cancel()
                module.go_on.set()
                with pytest.raises(grpc.RpcError, match="no ModelInferRequest"):
                    call(b"\xff\xff", timeout=PATIENCE_SECONDS)
        finally:
            module.go_on.set()

        def both_fit():
            calls = [call.future(large, timeout=60) for _ in range(2)]
            return all(each.exception(PATIENCE_SECONDS) is None for each in calls)

        wait_until(both_fit)


@pytest.mark.slow
def test_a_message_that_is_slow_makes_room_for_those_that_wait(deploy, served, monkeypatch):
    publisher = deploy("number")
    publisher.publish(7)
    never = threading.Event()
    with served(publisher, grpc_port=0, max_body_bytes=100_000, max_held_bytes=100_000) as server, ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(address_of(server)))
        stack.callback(never.set)
        begun = threading.Event()
        stuck = channel.stream_unary(f"/{SERVICE}/ModelInfer").future(
            (begun.set() or never.wait(60) for _ in range(1)),  # type: ignore[misc]
            timeout=60,
        )
        assert begun.wait(PATIENCE_SECONDS)
        call = channel.unary_unary(
            f"/{SERVICE}/ModelInfer", response_deserializer=MESSAGES["ModelInferResponse"].FromString
        )
        assert call(infer().SerializeToString(), timeout=PATIENCE_SECONDS).model_version == "7"
        call(infer().SerializeToString(), timeout=PATIENCE_SECONDS)
        refusal = stuck.exception(PATIENCE_SECONDS)
        assert refusal.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "other calls wait for their turn" in refusal.details()


@pytest.mark.slow
def test_without_a_descriptor_for_the_versions_the_server_goes_on_with_the_one_it_has(deploy, served, monkeypatch):
    publisher = deploy("number")
    publisher.publish(7)
    listdir, refusals = os.listdir, []

    def listed(path="."):
        if Path(path) == publisher.versions.path:
            refusals.append(path)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return listdir(path)

    with served(publisher) as server:
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", listed)
            wait_until(lambda: len(refusals) > 10)
            wait_until(lambda: any("Too many open files" in each for each in server.report().problems))
            assert httpx.get(f"{server.url}/api/status").json()["versions"][0]["number"] == 7
        publisher.publish(8)
        wait_until(lambda: server.report().version == 8 and not server.report().problems)


@pytest.mark.slow
def test_the_health_service_of_grpc_says_whether_requests_may_be_sent(deploy, served):
    publisher = deploy("number")
    with (
        served(publisher, ready=False, grpc_port=0, tokens={"read": "secret", "admin": "other"}) as server,
        grpc.insecure_channel(address_of(server)) as channel,
    ):
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check(b"", timeout=PATIENCE_SECONDS) == b"\x08\x02"  # status = NOT_SERVING
        publisher.publish(7)
        wait_until(lambda: check(b"", timeout=PATIENCE_SECONDS) == b"\x08\x01")  # status = SERVING


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        f"/{SERVICE}/ModelStreamInfer",
        f"/{SERVICE}/RepositoryModelLoad",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    ],
)
def test_there_are_no_other_calls(deploy, served, path):
    with (
        served(deploy("number"), ready=False, grpc_port=0) as server,
        grpc.insecure_channel(address_of(server)) as channel,
        pytest.raises(grpc.RpcError) as refusal,
    ):
        channel.unary_unary(path)(b"", timeout=PATIENCE_SECONDS)
    assert refusal.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.slow
def test_tls_has_the_configured_certificate(deploy, served, certificate):
    publisher = deploy("number")
    publisher.publish(7)
    cert, key = certificate(2)
    with served(publisher, grpc_port=0, tls={"cert": str(cert), "key": str(key)}) as server:
        address = address_of(server)
        with socket.create_connection(address.rsplit(":", 1)) as plain:
            plain.sendall(b"this is no TLS" * 9)
            with suppress(ConnectionError):
                while plain.recv(99):
                    pass
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(cert.read_bytes())) as channel:
            answer = channel.unary_unary(
                f"/{SERVICE}/ModelInfer", response_deserializer=MESSAGES["ModelInferResponse"].FromString
            )(infer().SerializeToString(), timeout=PATIENCE_SECONDS)
    assert answer.model_version == "7"


@pytest.mark.slow
def test_a_call_in_flight_is_answered_when_the_server_stops(deploy, served):
    publisher = deploy("number")
    publisher.publish(7)
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        server = stack.enter_context(served(publisher, grpc_port=0))
        module = sys.modules[publisher.deployment.model.factory.partition(":")[0]]
        address = address_of(server)
        host, port = address.rsplit(":", 1)
        with grpc.insecure_channel(address) as channel:
            call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
            module.running.clear()
            module.go_on.clear()
            try:
                answer = pool.submit(call, infer().SerializeToString(), timeout=PATIENCE_SECONDS)
                assert module.running.wait(PATIENCE_SECONDS)
                stopped = pool.submit(stack.close)
                while True:
                    try:
                        socket.create_connection((host, int(port))).close()
                    except ConnectionError:
                        break
            finally:
                module.go_on.set()
            assert MESSAGES["ModelInferResponse"].FromString(answer.result(PATIENCE_SECONDS)).model_version == "7"
            stopped.result(PATIENCE_SECONDS)  # although the client keeps its channel


@pytest.mark.slow
def test_without_a_version_the_server_lives_and_is_not_ready(deploy, served):
    with (
        served(deploy("number"), ready=False, grpc_port=0) as server,
        grpc.insecure_channel(address_of(server)) as channel,
    ):
        for method, field, expected in (("ServerLive", "live", True), ("ServerReady", "ready", False)):
            call = channel.unary_unary(
                f"/{SERVICE}/{method}", response_deserializer=MESSAGES[f"{method}Response"].FromString
            )
            assert getattr(call(b"", timeout=PATIENCE_SECONDS), field) is expected
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer", request_serializer=lambda each: each.SerializeToString())
        with pytest.raises(grpc.RpcError, match="no version of tiny is ready yet") as refusal:
            call(infer(), timeout=PATIENCE_SECONDS)
        assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE


@pytest.mark.slow
def test_a_port_that_is_taken_is_named(deploy_in, served, tmp_path):
    publisher = deploy_in("number", tmp_path / "first")
    publisher.publish(7)
    with served(publisher, grpc_port=0) as first:
        port = int(address_of(first).rpartition(":")[2])
        second = deploy_in("number", tmp_path / "second")
        with pytest.raises(SettingsError, match=rf"serving\.grpc_port = {port} cannot be bound"):
            with served(second, grpc_port=port):
                raise AssertionError


def test_workers_need_a_port_that_they_share():
    for port in (0, 8000):
        with pytest.raises(ValueError, match="name a port for all workers"):
            ServingSettings.model_validate({"grpc_port": port, "workers": 2})


@pytest.mark.parametrize("descriptors", [1024, 4096, 65_536])
def test_connections_of_http_and_grpc_leave_descriptors_for_files(monkeypatch, descriptors):
    monkeypatch.setattr("resource.getrlimit", lambda _: (descriptors, descriptors))
    http, grpc_ = most_connections(tls=False, grpc=True), most_grpc_connections()
    assert http + grpc_ <= descriptors - 128
    assert min(http, grpc_) >= 448
