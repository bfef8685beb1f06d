"""A collector of OpenTelemetry for tests: a real HTTP server that decodes OTLP, and fails on demand."""

import contextlib
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.http_server import Handler, serving

_PATIENCE = 60.0


@dataclass(frozen=True)
class Seen:
    """A span that was received; ids are hexadecimal, links are pairs of trace and span."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    links: list[tuple[str, str]]
    attributes: dict[str, Any]
    failed: bool
    service: str
    seconds: float


@dataclass
class Collector:
    """What a collector has received, and what is wrong with it."""

    url: str = ""
    status: int = 200
    """Status of each answer; the spans of others than 200 are not recorded."""
    go_on: threading.Event = field(default_factory=threading.Event)
    """Answers wait for it."""
    asked: threading.Event = field(default_factory=threading.Event)
    """Set by each request."""
    spans: list[Seen] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def wait_for(self, holds):
        """Return all spans once they fulfil a condition."""
        with self.changed:
            assert self.changed.wait_for(lambda: holds(self.spans), _PATIENCE), self.spans
            return [*self.spans]

    def named(self, name, count=1):
        """Return the spans of a name, once there are `count` of them."""
        self.wait_for(lambda spans: sum(each.name == name for each in spans) >= count)
        return [each for each in self.spans if each.name == name]

    def receive(self, body):
        """Record the spans of a request."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        message = ExportTraceServiceRequest.FromString(body)
        with self.changed:
            for of_resource in message.resource_spans:
                service = _values(of_resource.resource.attributes).get("service.name", "")
                for scope in of_resource.scope_spans:
                    self.spans += [_seen(each, service) for each in scope.spans]
            self.changed.notify_all()


def _values(attributes):
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def _seen(span, service):
    links = [(link.trace_id.hex(), link.span_id.hex()) for link in span.links]
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
    return Seen(span.name, *ids, span.kind, links, _values(span.attributes), span.status.code == 2, service, seconds)


@contextlib.contextmanager
def collector_server():
    """Run a collector on a free port of 127.0.0.1."""
    collector = Collector()
    collector.go_on.set()

    class Collecting(Handler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.asked.set()
            collector.go_on.wait()
            if collector.status == 200:
                collector.receive(body)  # before the answer, after which they may be asked for
            self.reply(b"", collector.status)

    with serving(Collecting) as collector.url:
        try:
            yield collector
        finally:
            collector.go_on.set()


@pytest.fixture
def collector(monkeypatch):
    """A collector on this host, to which the variables `OTEL_*` point."""
    with collector_server() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield running
