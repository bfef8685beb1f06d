"""Tracing: what is traced, what is left out and counted, and that nobody waits for a collector."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import TraceState
from opentelemetry.trace import span as trace_api

from anabranch.core.errors import SettingsError
from anabranch.core.tracing import provider, spans
from anabranch.core.tracing.config import TracingSettings
from anabranch.core.tracing.context import MOST_LINKS, is_sampled, is_tracestate, sampled_contexts
from anabranch.core.tracing.provider import BackgroundExport
from anabranch.core.tracing.tracer import RequestSpan, Tracer
from tests.support.collector import Collector

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


@pytest.fixture
def left_out() -> Counter[str]:
    """What was left out, by reason."""
    return Counter()


@pytest.fixture
def tracer(collector: Collector, left_out: Counter[str], tmp_path: Path) -> Iterator[Tracer]:
    """The tracer of this process, which traces nothing by itself but ten steps a second."""
    settings = TracingSettings(sample=0)
    count = lambda why, n: left_out.update({why: n})  # noqa: E731
    with spans.tracing(settings, "learner", tmp_path, count):
        current = spans.current_tracer()
        assert current is not None
        yield current


def traced(tracer: Tracer, field: str | None = SAMPLED, state: str | None = None, **attributes: int) -> RequestSpan:
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
def test_a_traceparent_says_whether_its_sender_traces(field: str, sampled: bool | None) -> None:
    assert is_sampled(field) is sampled


def test_headers_of_records_may_hold_anything() -> None:
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


@given(st.one_of(st.text(max_size=40), st.from_regex(r"(a|b|c@d|[!=\s]|,|=){0,40}", fullmatch=True)))
@example("a=1,a=2")
@example(",".join(f"k{number}=1" for number in range(33)))
@example(f"a={'x' * 600}")
@example("vendor=1, t@v=a b ,,")
def test_a_tracestate_is_continued_if_opentelemetry_takes_it_without_a_warning(field: str) -> None:
    if is_tracestate(field):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trace_api, "_logger", None)  # to which it would write
            TraceState.from_header([field])
    else:
        assert not TraceState.from_header([field])


def test_without_settings_nothing_is_traced(tmp_path: Path, left_out: Counter[str]) -> None:
    with spans.tracing(None, "serving", tmp_path, lambda why, n: left_out.update({why: n})):
        assert spans.current_tracer() is None
        with spans.span("publish") as span:
            span.set("anabranch.version", 1)
        assert span is spans.NO_SPAN
        spans.record("swap", 1.0)
        spans.count_left_out("links", 3)
    assert not left_out


@pytest.mark.slow
def test_a_callers_decision_is_continued(tracer: Tracer, collector: Collector) -> None:
    assert not any(map(tracer.chooses, (UNSAMPLED, None, "nonsense")))
    traced(tracer, SAMPLED, "vendor=1", a=1).end({"b": 2}, failed=True)
    (seen,) = collector.named("r")
    assert (seen.trace, seen.parent, seen.failed, seen.kind) == (TRACE, SPAN, True, 2)
    assert (seen.attributes, seen.service) == ({"a": 1, "b": 2}, "anabranch-learner")


@pytest.mark.slow
def test_fields_of_callers_are_bounded_and_come_into_no_log(
    tracer: Tracer, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    for state in ("no member", "a=1,a=2", f"a={'x' * 60_000}", f"a={'x' * 200}," * 3):
        request = traced(tracer, SAMPLED, state)
        assert not request.started().get_span_context().trace_state
        request.end({}, failed=False)
    request = traced(tracer, f"cc-{TRACE}-{SPAN}-01-{'x' * 60_000}", "vendor=1,t@v=2")
    assert dict(request.started().get_span_context().trace_state) == {"vendor": "1", "t@v": "2"}
    request.end({}, failed=False)
    assert {(each.trace, each.parent) for each in collector.named("r", 5)} == {(TRACE, SPAN)}
    assert not caplog.records


def test_callers_do_not_decide_how_many_requests_are_traced(tracer: Tracer, left_out: Counter[str]) -> None:
    now = 100.0
    settings = TracingSettings(sample=1, requests_per_second=3)
    limited = Tracer(tracer.api, settings, tracer.left_out, tracer.recorder, lambda: now)
    assert [limited.chooses(field) for field in [SAMPLED, None] * 5] == [True] * 4 + [False] * 6
    assert not limited.chooses(UNSAMPLED)
    assert left_out == {"rate": 6}
    now += 0.5
    assert limited.chooses(SAMPLED)


def test_requests_without_context_are_sampled(collector: Collector, tmp_path: Path) -> None:
    with spans.tracing(TracingSettings(sample=1), "serving", tmp_path, lambda why, n: None):
        tracer = spans.current_tracer()
        assert tracer is not None
        assert not tracer.chooses(UNSAMPLED)
        for field in ("nonsense", f"{SAMPLED}-x", None):
            traced(tracer, field, "vendor=1").end({}, failed=False)
    seen = collector.named("r", 3)  # the end of the block exports what waits
    assert [(each.parent, each.failed) for each in seen] == [("", False)] * 3


@pytest.mark.slow
def test_a_batch_and_its_requests_are_linked(tracer: Tracer, collector: Collector, left_out: Counter[str]) -> None:
    requests = [traced(tracer) for _ in range(MOST_LINKS + 2)]
    with tracer.batch("predict", requests, {}):
        pass
    for each in requests:
        each.end({}, failed=False)
    (batch,), seen = collector.named("predict"), collector.named("r", len(requests))
    assert batch.links == [(each.trace, each.id) for each in seen[:MOST_LINKS]]
    assert [each.links for each in seen] == [[(batch.trace, batch.id)]] * MOST_LINKS + [[]] * 2
    assert batch.trace != TRACE
    assert left_out == {"links": 2}


@pytest.mark.slow
def test_a_step_is_linked_with_its_events_at_a_bounded_rate(
    tracer: Tracer, collector: Collector, left_out: Counter[str]
) -> None:
    now = 100.0
    settings = TracingSettings(sample=0, steps_per_second=2)
    limited = Tracer(tracer.api, settings, tracer.left_out, tracer.recorder, lambda: now)
    assert limited.step("train", [], dict) is spans.NO_SPAN
    assert not left_out
    for _ in range(5):
        with limited.step("train", [SAMPLED], dict):
            pass
    assert left_out == {"rate": 2}
    now += 60
    for _ in range(5):
        with limited.step("train", [SAMPLED] * (MOST_LINKS + 1), dict):
            pass
    seen = collector.named("train", 6)
    assert [len(each.links) for each in seen] == 3 * [1] + 3 * [MOST_LINKS]
    assert {link for each in seen for link in each.links} == {(TRACE, SPAN)}
    assert left_out == {"rate": 2 + 2, "links": 3}


@pytest.mark.slow
def test_spans_within_spans_are_children(tracer: Tracer, collector: Collector) -> None:
    def publish_and_fail() -> None:
        with spans.span("publish", {"anabranch.step": 1}):
            with spans.span("gate") as inner:
                inner.set("anabranch.verdict", "pass")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        publish_and_fail()
    (publish,), (gate,) = collector.named("publish"), collector.named("gate")
    assert (gate.parent, gate.attributes) == (publish.id, {"anabranch.verdict": "pass"})
    assert publish.failed
    assert not gate.failed


class Exporter(SpanExporter):
    """Exports once it may, and then as the test says."""

    def __init__(self) -> None:
        self.go_on, self.began = threading.Event(), threading.Event()
        self.result: SpanExportResult | Exception = SpanExportResult.SUCCESS
        self.exported = 0

    def export(self, spans: object) -> SpanExportResult:
        self.began.set()
        self.go_on.wait()
        if isinstance(self.result, Exception):
            raise self.result
        self.exported += len(spans)  # type: ignore[arg-type]
        return self.result

    def shutdown(self) -> None:
        self.go_on.set()


def test_a_slow_collector_costs_spans_and_no_time(left_out: Counter[str]) -> None:
    exporter = Exporter()
    background = BackgroundExport(exporter, lambda why, n: left_out.update({why: n}), most_waiting=5)
    tracer = TracerProvider(shutdown_on_exit=False)
    tracer.add_span_processor(background)  # type: ignore[arg-type]
    start = tracer.get_tracer("test").start_span
    start("first").end()
    background.force_flush()
    exporter.began.wait()
    for _ in range(8):
        start("next").end()  # returns while the exporter hangs
    assert left_out == {"queue": 3}
    exporter.go_on.set()
    background.shutdown()
    assert exporter.exported == 6


@pytest.mark.parametrize(("every", "spans"), [(timedelta(hours=1), 512), (timedelta(milliseconds=1), 1)])
def test_spans_are_exported_after_a_time_and_once_many_wait(every: timedelta, spans: int) -> None:
    exporter = Exporter()
    exporter.go_on.set()
    background = BackgroundExport(exporter, lambda *_: None, every=every)
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(background)  # type: ignore[arg-type]
    for _ in range(spans):
        assert not exporter.began.is_set() or spans == 1
        tracers.get_tracer("test").start_span("s").end()
    assert exporter.began.wait(30)
    background.shutdown()
    assert exporter.exported == spans


@pytest.mark.parametrize("result", [SpanExportResult.FAILURE, ValueError("no such host")])
def test_what_cannot_be_exported_is_counted(
    result: SpanExportResult | Exception, left_out: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    exporter = Exporter()
    exporter.result = result
    exporter.go_on.set()
    background = BackgroundExport(exporter, lambda why, n: left_out.update({why: n}))
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(background)  # type: ignore[arg-type]
    for _ in range(3):
        tracers.get_tracer("test").start_span("s").end()
    background.shutdown()
    assert left_out == {"export": 3}
    assert caplog.text.count("spans cannot be exported") == 1


def test_the_end_does_not_wait_for_a_collector_that_hangs(
    monkeypatch: pytest.MonkeyPatch, left_out: Counter[str]
) -> None:
    monkeypatch.setattr(provider, "_LONGEST_END", provider._LONGEST_END / 100)
    exporter = Exporter()
    exporter.result = SpanExportResult.FAILURE
    background = BackgroundExport(exporter, lambda why, n: left_out.update({why: n}))
    tracers = TracerProvider(shutdown_on_exit=False)
    tracers.add_span_processor(background)  # type: ignore[arg-type]
    tracers.get_tracer("test").start_span("s").end()
    background.force_flush()
    exporter.began.wait()
    tracers.get_tracer("test").start_span("s").end()
    background.shutdown()  # returns, though the exporter has not
    background._thread.join()
    assert left_out == {"export": 2}


@pytest.mark.slow
def test_a_collector_that_is_away_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: Counter[str], free_port: Callable[[], int]
) -> None:
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


def test_setup_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "anabranch_test_setup.py").write_text(SETUP)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with spans.tracing(TracingSettings(setup="anabranch_test_setup:set_up"), "serving", tmp_path, lambda *_: None):
        spans.record("swap", 0.1)
    assert sys.modules["anabranch_test_setup"].parts == ["serving"]
    for setup, why in (("anabranch_test_setup:fails", "no serving"), ("anabranch_test_setup:none", "no attribute")):
        with (
            pytest.raises(SettingsError, match=f'tracing.setup = "{setup}" fails: .*{why}'),
            spans.tracing(TracingSettings(setup=setup), "serving", tmp_path, lambda *_: None),
        ):
            pass
    assert spans.current_tracer() is None


@pytest.mark.parametrize(
    ("module", "command"), [("opentelemetry.sdk.trace", "opentelemetry-sdk"), ("opentelemetry.trace", "otel")]
)
def test_what_is_not_installed_is_named(
    module: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for name in ("anabranch.core.tracing.tracer", "anabranch.core.tracing.provider"):
        if module == "opentelemetry.trace":
            monkeypatch.delitem(sys.modules, name)
    with (
        pytest.raises(SettingsError, match=f"pip install .*{command}"),
        spans.tracing(TracingSettings(), "serving", tmp_path, lambda *_: None),
    ):
        pass


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_SPAN_LINK_COUNT_LIMIT", "many"),
        *(("OTEL_BSP_SCHEDULE_DELAY", value) for value in ("soon", "0", "-1", "9" * 30)),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(
    variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with (
        pytest.raises(SettingsError, match=f"{variable} .*{value}"),
        spans.tracing(TracingSettings(), "serving", tmp_path, lambda *_: None),
    ):
        pass


@pytest.mark.slow
def test_a_span_that_is_over_has_its_own_time(tracer: Tracer, collector: Collector) -> None:
    spans.record("checkpoint", 30.0, {"anabranch.checkpoint": 3})
    (seen,) = collector.named("checkpoint")
    assert (seen.attributes, seen.seconds) == ({"anabranch.checkpoint": 3}, pytest.approx(30.0))
