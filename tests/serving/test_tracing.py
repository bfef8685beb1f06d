"""Spans of serving, as a collector gets them: requests over HTTP and gRPC, their batch, and the swap."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import numpy as np
import pytest

from anabranch.core.tracing.settings import TracingSettings
from anabranch.serving.grpc.messages import MESSAGES, SERVICE
from anabranch.serving.reporting.report import read_report
from tests.support.waiting import PATIENCE_SECONDS

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
ROUTE = "/v2/models/{name}/infer"


@pytest.fixture
def traced(numbers, served):
    """Serve version 7 of a traced deployment, which traces nothing by itself: `with traced(**settings) as server`."""

    def serve(**settings):
        numbers.deployment = dataclasses.replace(numbers.deployment, tracing=TracingSettings(sample=0))
        numbers.publish(7)
        return served(numbers, **settings)

    return serve


@pytest.mark.slow
def test_requests_continue_the_traces_of_their_callers_and_name_their_batch(traced, body_of, collector):
    with traced(max_delay="60s", max_batch=3) as server, ThreadPoolExecutor(3) as pool:
        answers = list(  # three rows of three requests make a batch
            pool.map(
                lambda parent: httpx.post(server.infer, json=body_of(1), headers={"traceparent": parent}),
                [SAMPLED, SAMPLED, UNSAMPLED],
            )
        )
    assert [answer.status_code for answer in answers] == [200] * 3
    requests, (batch,) = collector.named(f"POST {ROUTE}", 2), collector.named("predict")
    assert sorted(batch.links) == sorted((each.trace, each.id) for each in requests)
    assert batch.attributes == {"anabranch.version": 7, "anabranch.batch.requests": 3, "anabranch.batch.rows": 3}
    for each in requests:
        assert (each.trace, each.parent, each.kind, each.service) == (TRACE, SPAN, 2, "anabranch-serving")
        assert each.links == [(batch.trace, batch.id)]
        assert each.attributes == {
            "http.request.method": "POST",
            "http.route": ROUTE,
            "url.path": "/v2/models/tiny/infer",
            "url.scheme": "http",
            "http.response.status_code": 200,
        }
    assert {each.name for each in collector.spans} == {f"POST {ROUTE}", "predict", "swap"}
    assert [each.attributes for each in collector.named("swap")] == [{"anabranch.version": 7}]


@pytest.mark.slow
def test_requests_that_fail_end_their_spans(traced, body_of, collector):
    with traced() as server:
        headers = {"traceparent": SAMPLED}
        refused = httpx.post(server.infer, json={"inputs": []}, headers=headers)
        url = server.infer.replace("/infer", f"/versions/{'9' * 9000}/infer")
        absent = httpx.post(url, json=body_of(1), headers=headers)
    assert (refused.status_code, absent.status_code) == (400, 404)
    (first,) = collector.named(f"POST {ROUTE}")
    (second,) = collector.named("POST /v2/models/{name}/versions/{version}/infer")
    assert [each.attributes["http.response.status_code"] for each in (first, second)] == [400, 404]
    assert len(second.attributes["url.path"]) == 256  # thousands of spans may wait
    assert not first.failed  # it is the caller's fault


@pytest.mark.slow
def test_calls_of_grpc_continue_the_trace_of_their_metadata(traced, collector, eventually):
    x = np.ones((1, 4), np.float32)
    message = MESSAGES["ModelInferRequest"](model_name="tiny")
    message.inputs.add(name="x", datatype="FP32", shape=x.shape)
    message.raw_input_contents.append(x.tobytes())
    with traced(grpc_port=0) as server:
        report = eventually(lambda: (r := read_report(server.deployment.state_dir)) and r.grpc_address and r)
        with grpc.insecure_channel(report.grpc_address) as channel:
            call = channel.unary_unary(
                f"/{SERVICE}/ModelInfer",
                request_serializer=type(message).SerializeToString,
                response_deserializer=MESSAGES["ModelInferResponse"].FromString,
            )
            call(message, timeout=PATIENCE_SECONDS, metadata=[("traceparent", SAMPLED), ("tracestate", "vendor=1")])
            call(message, timeout=PATIENCE_SECONDS, metadata=[("traceparent", UNSAMPLED)])
            message.model_name = "other"
            with pytest.raises(grpc.RpcError):
                call(message, timeout=PATIENCE_SECONDS, metadata=[("traceparent", SAMPLED)])
    answered, refused = collector.named(f"{SERVICE}/ModelInfer", 2)
    assert (answered.trace, answered.parent, answered.failed) == (TRACE, SPAN, False)
    assert answered.attributes == {
        "rpc.system": "grpc",
        "rpc.service": SERVICE,
        "rpc.method": "ModelInfer",
        "rpc.grpc.status_code": 0,
    }
    assert refused.attributes["rpc.grpc.status_code"] == grpc.StatusCode.NOT_FOUND.value[0]
    assert len(collector.named("predict")) == 1


@pytest.mark.slow
def test_no_request_waits_for_a_collector_that_hangs(traced, body_of, collector, eventually):
    collector.go_on = threading.Event()
    collector.status = 400
    with traced() as server:
        headers = {"traceparent": SAMPLED}
        assert httpx.post(server.infer, json=body_of(1), headers=headers).status_code == 200
        collector.asked.wait()
        assert httpx.post(server.infer, json=body_of(1), headers=headers).status_code == 200
        collector.go_on.set()
        metrics = f"{server.url}/metrics"
        eventually(lambda: 'anabranch_tracing_left_out_total{reason="export"}' in httpx.get(metrics).text, 60)
    assert collector.spans == []
