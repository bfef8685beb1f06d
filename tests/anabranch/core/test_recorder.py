"""Spans of requests and batches are created by another thread, later, as if they had been when they were due."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

from anabranch.core.tracing import recorder
from anabranch.core.tracing.config import TracingSettings
from anabranch.core.tracing.recorder import Recorder
from anabranch.core.tracing.tracer import Tracer

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NEVER = timedelta(hours=1)


class Processor(SpanProcessor):
    """Keeps ended spans, and the threads that started them; `on_end` does what the test says."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self.threads: set[str] = set()
        self.ends: Callable[[], object] = bool

    def on_start(self, span: object, parent_context: object = None) -> None:
        self.threads.add(threading.current_thread().name)

    def on_end(self, span: ReadableSpan) -> None:
        self.ends()
        self.spans.append(span)


class Ended:
    """An ended span, and whether it was created."""

    def __init__(self) -> None:
        self.created = threading.Event()

    def create(self) -> None:
        self.created.set()


@pytest.fixture
def left_out() -> Counter[str]:
    """What was left out, by reason."""
    return Counter()


@pytest.fixture
def count(left_out: Counter[str]) -> Callable[[str, int], object]:
    """Counts what was left out."""
    return lambda why, n: left_out.update({why: n})


@pytest.fixture
def processor() -> Processor:
    """Gets the spans of `tracer`."""
    return Processor()


@pytest.fixture
def tracer(processor: Processor, count: Callable[[str, int], object]) -> Iterator[Callable[[Recorder], Tracer]]:
    """Makes a tracer with a recorder."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    yield lambda records: Tracer(provider.get_tracer("test"), TracingSettings(sample=1), count, records)
    provider.shutdown()


def test_spans_have_the_times_of_what_they_describe_and_are_created_elsewhere(
    tracer: Callable[[Recorder], Tracer], processor: Processor, count: Callable[[str, int], object]
) -> None:
    with Recorder(count, NEVER) as records:
        begin = time.time_ns()
        request = tracer(records).request("r", None, None, {"a": 1})
        middle = time.time_ns()
        with tracer(records).batch("predict", [request], {"b": 2}):
            pass
        request.end({"c": 3}, failed=False)
        end = time.time_ns()
        assert not processor.threads
    batch, answered = processor.spans
    assert processor.threads == {"tracing-record"}
    assert begin <= answered.start_time <= middle <= batch.start_time <= batch.end_time <= answered.end_time <= end  # type: ignore[operator]
    assert (answered.attributes, batch.attributes) == ({"a": 1, "c": 3}, {"b": 2})
    assert [link.context for link in answered.links] == [batch.context]
    assert [link.context for link in batch.links] == [answered.context]


def test_a_request_is_linked_with_its_batch_if_it_ends_after_the_batch_has_begun(
    tracer: Callable[[Recorder], Tracer], processor: Processor, count: Callable[[str, int], object]
) -> None:
    with Recorder(count, timedelta(0)) as records:
        before, during = (tracer(records).request(name, SAMPLED, None, {}) for name in ("before", "during"))
        before.end({}, failed=False)
        with tracer(records).batch("predict", [before, during], {}):
            during.end({}, failed=True)
            while len(processor.spans) < 2:  # created while the batch runs
                time.sleep(0.001)
    first, second, batch = processor.spans
    assert (first.name, second.name, batch.name) == ("before", "during", "predict")
    assert not first.links
    assert [link.context for link in second.links] == [batch.context]
    assert [link.context for link in batch.links] == [first.context, second.context]
    assert not second.status.is_ok


def test_a_batch_that_raises_has_failed(
    tracer: Callable[[Recorder], Tracer], processor: Processor, count: Callable[[str, int], object]
) -> None:
    with (
        Recorder(count, NEVER) as records,
        pytest.raises(ZeroDivisionError),
        tracer(records).batch("predict", [tracer(records).request("r", None, None, {})], {}),
    ):
        raise ZeroDivisionError("no rows")
    (batch,) = processor.spans
    assert batch.status.description == "ZeroDivisionError: no rows"
    assert [(event.name, event.timestamp) for event in batch.events] == [("exception", batch.end_time)]


def test_spans_are_created_after_a_time_and_once_many_wait(count: Callable[[str, int], object]) -> None:
    for every, waiting in ((timedelta(milliseconds=1), 1), (NEVER, recorder._AT_ONCE + 1)):
        spans = [Ended() for _ in range(waiting)]
        with Recorder(count, every) as records:
            for span in spans:
                records.put(span)
            assert spans[-1].created.wait(30)
            later = Ended()
            records.put(later)
        assert later.created.is_set()


def test_a_slow_processor_costs_spans_and_no_time(
    tracer: Callable[[Recorder], Tracer],
    processor: Processor,
    count: Callable[[str, int], object],
    left_out: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "_LONGEST_END", recorder._LONGEST_END / 100)
    began, go_on = threading.Event(), threading.Event()
    processor.ends = lambda: began.set() or go_on.wait()
    with Recorder(count, timedelta(0), most_waiting=5) as records:
        tracer(records).request("r", None, None, {}).end({}, failed=False)
        began.wait()
        for _ in range(8):
            tracer(records).request("r", None, None, {}).end({}, failed=False)  # returns while the processor hangs
        assert left_out == {"queue": 3}
    assert left_out == {"queue": 8}  # nor does the end wait for it
    records.put(Ended())
    assert left_out == {"queue": 9}
    go_on.set()
    records._thread.join()
    assert len(processor.spans) == 1


def test_a_processor_that_raises_costs_its_spans(
    tracer: Callable[[Recorder], Tracer],
    processor: Processor,
    count: Callable[[str, int], object],
    left_out: Counter[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        if left_out["export"] < 2:
            raise IndexError("no such span")

    processor.ends = fail
    with Recorder(count, NEVER) as records:
        for _ in range(3):
            tracer(records).request("r", None, None, {}).end({}, failed=False)
    assert left_out == {"export": 2}
    assert len(processor.spans) == 1
    assert caplog.text.count("a span cannot be created") == 1
