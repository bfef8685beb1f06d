"""Tracing: what is traced, what is left out and counted, and that nobody waits for a collector."""

import sys
import threading
import time
from collections import Counter

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from anabranch.core.errors import SettingsError
from anabranch.core.tracing import provider, spans
from anabranch.core.tracing.context import MOST_LINKS, is_sampled, sampled_contexts
from anabranch.core.tracing.provider import BackgroundExport
from anabranch.core.tracing.settings import TracingSettings
from tests.support.waiting import PATIENCE_SECONDS

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


@pytest.fixture
def left_out():
    """What was left out, by reason."""
    return Counter()


@pytest.fixture
def tracer(collector, left_out, tmp_path):
    """The tracer of this process, which traces nothing by itself."""
    settings = TracingSettings(sample=0)
    count = lambda why, n: left_out.update({why: n})  # noqa: E731
    with spans.tracing(settings, "learner", tmp_path, count):
        current = spans.current_tracer()
        assert current is not None
        yield current


def traced(tracer, field=SAMPLED, state=None, **attributes):
    """Begin a request with these fields, which is one to trace."""
    assert tracer.chooses(field)
    return tracer.request("r", field, state, attributes)


@pytest.mark.parametrize(
    ("field", "sampled"),
    [
        (SAMPLED, True),
        (UNSAMPLED, False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"cc-{TRACE}-{SPAN}-01-of-the-future", True),
        (f"cc-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01x", None),
        (f"{SAMPLED}-x", None),
        (f"ff-{TRACE}-{SPAN}-01", None),
        (f"00-{'0' * 32}-{SPAN}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (SAMPLED.upper(), None),
        (SAMPLED[:-1], None),
        ("", None),
        ("\N{SNOWMAN}" * 55, None),
    ],
)
def test_a_traceparent_says_whether_its_sender_traces(field, sampled):
    assert is_sampled(field) is sampled


def test_headers_of_records_may_hold_anything():
    headers = [
        [],
        [("traceparent", b"\xff\xfe" * 40)],
        [("traceparent", None)],
        [("other", b"x"), ("traceparent", SAMPLED.encode())],
        [("traceparent", UNSAMPLED.encode()), ("traceparent", SAMPLED.encode())],
        [("traceparent", SAMPLED.encode() + b"x" * 1_000_000)],
        [("traceparent", f"cc-{TRACE}-{SPAN}-01-later".encode())],
    ]
    assert list(sampled_contexts(headers)) == [(3, SAMPLED), (6, f"cc-{TRACE}-{SPAN}-01")]  # type: ignore[arg-type]


def test_without_settings_nothing_is_traced(tmp_path, left_out):
    with spans.tracing(None, "serving", tmp_path, lambda why, n: left_out.update({why: n})):
        assert spans.current_tracer() is None
        with spans.span("publish") as span:
            span.set_attribute("anabranch.version", 1)
        assert spans.span("publish") is spans.NO_SPAN
        spans.record("swap", 1.0)
    assert not left_out


@pytest.mark.slow
def test_a_callers_decision_is_continued(tracer, collector):
    assert not any(map(tracer.chooses, (UNSAMPLED, None, "nonsense")))
    traced(tracer, SAMPLED, "vendor=1", a=1).end({"b": 2}, failed=True)
    (seen,) = collector.named("r")
    assert (seen.trace, seen.parent, seen.failed, seen.kind) == (TRACE, SPAN, True, 2)
    assert (seen.attributes, seen.service) == ({"a": 1, "b": 2}, "anabranch-learner")


@pytest.mark.slow
def test_fields_of_callers_are_bounded_and_come_into_no_log(tracer, collector, caplog):
    for state in ("no member", "a=1,a=2", f"a={'x' * 60_000}", f"a={'x' * 200}," * 3):
        request = traced(tracer, SAMPLED, state)
        assert not request.span.get_span_context().trace_state
        request.end({}, failed=False)
    request = traced(tracer, f"cc-{TRACE}-{SPAN}-01-{'x' * 60_000}", "vendor=1,t@v=2")
    assert dict(request.span.get_span_context().trace_state) == {"vendor": "1", "t@v": "2"}
    request.end({}, failed=False)
    assert {(each.trace, each.parent) for each in collector.named("r", 5)} == {(TRACE, SPAN)}
    assert not caplog.records


def test_requests_without_context_are_sampled(collector, tmp_path):
    with spans.tracing(TracingSettings(sample=1), "serving", tmp_path, lambda why, n: None):
        tracer = spans.current_tracer()
        assert tracer is not None
        assert not tracer.chooses(UNSAMPLED)
        for field in ("nonsense", f"{SAMPLED}-x", None):
            traced(tracer, field, "vendor=1").end({}, failed=False)
    seen = collector.named("r", 3)  # the end of the block exports what waits
    assert [(each.parent, each.failed) for each in seen] == [("", False)] * 3


@pytest.mark.slow
def test_a_batch_and_its_requests_are_linked(tracer, collector):
    requests = [traced(tracer) for _ in range(MOST_LINKS + 2)]
    with tracer.batch("predict", requests, {}):
        pass
    for each in requests:
        each.end({}, failed=False)
    (batch,), seen = collector.named("predict"), collector.named("r", len(requests))
    assert batch.links == [(each.trace, each.id) for each in seen[:MOST_LINKS]]
    assert [each.links for each in seen] == [[(batch.trace, batch.id)]] * MOST_LINKS + [[]] * 2
    assert batch.trace != TRACE


@pytest.mark.slow
def test_a_request_that_is_over_is_not_linked_with_a_later_batch(tracer, collector, caplog):
    late, failed = traced(tracer), traced(tracer)
    late.end({}, failed=False)
    with pytest.raises(ZeroDivisionError), tracer.batch("predict", [late, failed], {}):
        raise ZeroDivisionError("no rows")
    failed.end({}, failed=True)
    (batch,), seen = collector.named("predict"), collector.named("r", 2)
    assert (batch.failed, len(batch.links)) == (True, 2)
    assert [(each.failed, each.links) for each in seen] == [(False, []), (True, [(batch.trace, batch.id)])]
    assert not caplog.records


@pytest.mark.slow
def test_a_step_is_linked_with_its_events(tracer, collector):
    for contexts in ([], [SAMPLED], [SAMPLED] * (MOST_LINKS + 1)):
        with tracer.step("train", contexts, dict):
            pass
    seen = collector.named("train", 2)
    assert [each.links for each in seen] == [[(TRACE, SPAN)], [(TRACE, SPAN)] * MOST_LINKS]
    assert TRACE not in {each.trace for each in seen}


@pytest.mark.slow
def test_spans_within_spans_are_children(tracer, collector):
    def publish_and_fail():
        with spans.span("publish", {"anabranch.step": 1}):
            with spans.span("gate") as inner:
                inner.set_attribute("anabranch.verdict", "pass")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        publish_and_fail()
    (publish,), (gate,) = collector.named("publish"), collector.named("gate")
    assert (gate.parent, gate.attributes) == (publish.id, {"anabranch.verdict": "pass"})
    assert publish.failed
    assert not gate.failed


class Exporter(SpanExporter):
    """Exports once it may, and then as the test says."""

    def __init__(self):
        self.go_on, self.began = threading.Event(), threading.Event()
        self.result: SpanExportResult | Exception = SpanExportResult.SUCCESS
        self.exported = 0

    def export(self, spans):
        self.began.set()
        self.go_on.wait()
        if isinstance(self.result, Exception):
            raise self.result
        self.exported += len(spans)  # type: ignore[arg-type]
        return self.result

    def shutdown(self):
        self.go_on.set()


@pytest.fixture
def exported(left_out):
    """`exported(exporter)`: what exports spans, and what makes one."""
    exporters = []

    def export(exporter):
        exporters.append(exporter)
        background = BackgroundExport(exporter, lambda why, n: left_out.update({why: n}), most_waiting=512)
        tracers = TracerProvider(shutdown_on_exit=False)
        tracers.add_span_processor(background)
        return background, lambda: tracers.get_tracer("test").start_span("s").end()

    yield export
    for exporter in exporters:
        exporter.go_on.set()


def test_a_slow_collector_costs_spans_and_no_time(exported, left_out):
    exporter = Exporter()
    background, span = exported(exporter)
    for _ in range(512):  # which are exported at once
        span()
    assert exporter.began.wait(PATIENCE_SECONDS)
    for _ in range(515):
        span()  # returns while the exporter hangs
    assert left_out == {"queue": 3}
    exporter.go_on.set()
    background.shutdown()
    assert exporter.exported == 1024
    span()
    assert left_out == {"queue": 4}


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, ValueError("no such host")])
def test_what_cannot_be_exported_is_counted(result, exported, left_out):
    exporter = Exporter()
    exporter.result = result
    exporter.go_on.set()
    background, span = exported(exporter)
    for _ in range(3):
        span()
    background.shutdown()
    assert left_out == {"export": 3}


def test_the_end_does_not_wait_for_a_collector_that_hangs(exported, monkeypatch, left_out):
    monkeypatch.setattr(provider, "_LONGEST_END", provider._LONGEST_END / 100)
    exporter = Exporter()
    exporter.result = SpanExportResult.FAILURE
    background, span = exported(exporter)
    for _ in range(512):
        span()
    assert exporter.began.wait(PATIENCE_SECONDS)
    span()
    background.shutdown()  # returns, though the exporter has not
    assert left_out == {"export": 1}
    exporter.go_on.set()
    while left_out != {"export": 513}:  # none twice, and none is exported later
        time.sleep(0.001)
    assert exporter.exported == 512


@pytest.mark.slow
def test_a_collector_that_is_away_is_counted(tmp_path, monkeypatch, left_out, free_port):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr(provider, "_LONGEST_END", provider._LONGEST_END * 30)
    with spans.tracing(TracingSettings(), "serving", tmp_path, lambda why, n: left_out.update({why: n})):
        spans.record("swap", 0.5)
    assert left_out == {"export": 1}


SETUP = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
parts = []
def set_up(part):
    parts.append(part)
def fails(part):
    raise OSError(f"no {part}")
"""


def test_setup_is_the_users(tmp_path, monkeypatch):
    (tmp_path / "anabranch_test_setup.py").write_text(SETUP)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with spans.tracing(TracingSettings(setup="anabranch_test_setup:set_up"), "serving", tmp_path, lambda *_: None):
        spans.record("swap", 0.1)
    assert sys.modules["anabranch_test_setup"].parts == ["serving"]
    for setup, why in (("anabranch_test_setup:fails", "no serving"), ("anabranch_test_setup:none", "no function")):
        with (
            pytest.raises(SettingsError, match=f'tracing.setup = "{setup}".*: .*{why}'),
            spans.tracing(TracingSettings(setup=setup), "serving", tmp_path, lambda *_: None),
        ):
            pass
    assert spans.current_tracer() is None


RAISING = """
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

class Raising(SpanProcessor):
    def {method}(self, *_, **__):
        raise OSError("away")

def set_up(part):
    provider = TracerProvider()
    provider.add_span_processor(Raising())
    trace.get_tracer = provider.get_tracer
"""


@pytest.mark.parametrize("method", ["on_start", "on_end"])
def test_a_processor_of_the_user_that_raises_costs_its_spans_alone(tmp_path, monkeypatch, left_out, method, caplog):
    name = f"anabranch_test_raising_{method}"
    (tmp_path / f"{name}.py").write_text(RAISING.format(method=method))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(trace, "get_tracer", trace.get_tracer)
    settings, done = TracingSettings(setup=f"{name}:set_up"), []
    with spans.tracing(settings, "serving", tmp_path, lambda why, n: left_out.update({why: n})):
        tracer = spans.current_tracer()
        assert tracer is not None
        request = traced(tracer)
        with tracer.batch("b", [request], {}):
            done.append("batch")
        request.end({}, failed=False)
        with tracer.step("s", [SAMPLED], dict), spans.span("inner"):
            done.append("step")
        spans.record("swap", 0.1)
        with pytest.raises(KeyError), spans.span("failing"):
            raise KeyError("its own")
    assert done == ["batch", "step"]
    assert left_out == {"setup": 6}
    assert caplog.text.count("OSError: away") == 1


@pytest.mark.parametrize(
    ("module", "protocol", "command"),
    [
        ("opentelemetry.sdk.trace", "http/protobuf", "pip install 'anabranch\\[otel]'"),
        ("opentelemetry.trace", "http/protobuf", "pip install 'anabranch\\[otel]'"),
        (
            "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
            "grpc",
            "pip install opentelemetry-exporter-otlp-proto-grpc",
        ),
    ],
)
def test_what_is_not_installed_is_named(module, protocol, command, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("anabranch.core.tracing.tracer", "anabranch.core.tracing.provider"):
        if protocol != "grpc":
            monkeypatch.delitem(sys.modules, name)
    with (
        pytest.raises(SettingsError, match=command),
        spans.tracing(TracingSettings(), "serving", tmp_path, lambda *_: None),
    ):
        pass


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "OTEL_EXPORTER_OTLP_PROTOCOL is .http/json.; set it to"),
        ("OTEL_SPAN_LINK_COUNT_LIMIT", "many", "OTEL_SPAN_LINK_COUNT_LIMIT .*many"),
        ("OTEL_BSP_SCHEDULE_DELAY", "0", "schedule_delay_millis must be positive"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(variable, value, sentence, tmp_path, monkeypatch):
    monkeypatch.setenv(variable, value)
    with (
        pytest.raises(SettingsError, match=rf"a variable OTEL_\* cannot be used: .*{sentence}"),
        spans.tracing(TracingSettings(), "serving", tmp_path, lambda *_: None),
    ):
        pass


@pytest.mark.slow
def test_a_span_that_is_over_has_its_own_time(tracer, collector):
    spans.record("checkpoint", 30.0, {"anabranch.checkpoint": 3})
    (seen,) = collector.named("checkpoint")
    assert (seen.attributes, seen.seconds) == ({"anabranch.checkpoint": 3}, pytest.approx(30.0))
