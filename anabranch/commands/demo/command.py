"""`anabranch demo`: starts everything, watches it, and ends it in order."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from anabranch.command import command
from anabranch.commands.demo.dataset import Digits, load_digits
from anabranch.commands.demo.load_generator import LoadGenerator, answers, request_body
from anabranch.commands.demo.pipeline import DemoPipeline, lay_out
from anabranch.commands.demo.producer import StreamProducer
from anabranch.commands.demo.report import make_report, plain_line, summary, to_json
from anabranch.commands.demo.snapshot import Completion, DemoSnapshot, SnapshotSources
from anabranch.core.errors import AnabranchError, SettingsError
from anabranch.core.temporary_files import temporary_folder
from anabranch.ingest.kafka.producer import create_topics, delete_topics
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.runtime.embedded_broker import EmbeddedBroker, free_port
from anabranch.runtime.lifecycle import Exit, stop_on_signals
from anabranch.runtime.supervisor import Supervisor

DEFAULT_PORT = 8000
_POLL_SECONDS = 0.25
_LINE_SECONDS, _HEADLESS_SECONDS = 1.0, 10.0
"""From one line to the next."""
_START_SECONDS = 120.0
_TAIL_LINES = 8

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """The options of the command line."""

    events: int | None = None
    headless: bool = False
    report: Path | None = None
    bootstrap: str | None = None
    baseline: bool = True
    rate: float = 600.0
    requests: float = 50.0
    port: int | None = None
    seed: int = 0


@command("anabranch demo --events 20000 --headless --report report.json")
def demo(
    events: Annotated[int | None, typer.Option(min=1, help="Stop after N events.", metavar="N")] = None,
    headless: Annotated[
        bool, typer.Option("--headless", help="Print a line each ten seconds instead of each second.")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Write a JSON report at the end.", metavar="FILE")] = None,
    bootstrap: Annotated[
        str | None,
        typer.Option(
            help="Use this Kafka broker; the demo creates topics there and deletes them.", metavar="HOST:PORT"
        ),
    ] = None,
    no_baseline: Annotated[
        bool, typer.Option("--no-baseline", help="Do not run the baseline that learns without replay.")
    ] = False,
    rate: Annotated[float, typer.Option(min=1, help="Events a second.")] = 600.0,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of serving; by default 8000 or a free one.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the stream.")] = 0,
) -> Exit:
    """Run the whole pipeline on this machine: broker, stream, learner, serving, requests. Nothing else is needed."""
    return run_demo(Options(events, headless, report, bootstrap, not no_baseline, rate, port=port, seed=seed))


def run_demo(options: Options) -> Exit:
    """Run the demo until its events have their outcomes or a signal comes; leave no file or process.

    Returns:
        DONE; BUG when events do not get their outcome; the exit code of a part that a restart cannot fix.
    """
    begin = time.monotonic()
    logging.getLogger().setLevel(logging.WARNING)
    port = _port(options.port)
    if options.report is not None and not options.report.absolute().parent.is_dir():
        raise SettingsError(f"--report {options.report}: there is no folder {options.report.parent}")
    _say("loading the digits")
    digits = load_digits(options.seed)
    with stop_on_signals() as stop, contextlib.ExitStack() as stack:
        folder = stack.enter_context(temporary_folder("anabranch-demo-"))
        bootstrap = options.bootstrap or stack.enter_context(_embedded_broker())
        pipeline = lay_out(
            folder,
            bootstrap,
            port,
            own_broker=options.bootstrap is not None,
            baseline=options.baseline,
            endless=options.events is None,
        )
        stack.enter_context(_topics(pipeline, keep=options.bootstrap is None))
        request = folder / "request.json"
        request.write_bytes(request_body(digits.request_pixels[0]))
        demo = _Demo(pipeline, digits, options, begin)
        code = demo.run(request, stop)
        figures = demo.figures()
        _say(summary(figures).rstrip())
        if code is Exit.DONE and not (stop.is_set() and options.events):
            _write_report(figures, options)
        return code


class _Demo:
    """The parts that run, from the first to the last."""

    def __init__(self, pipeline: DemoPipeline, digits: Digits, options: Options, begin: float) -> None:
        config = pipeline.config
        self._pipeline = pipeline
        self._events = options.events
        self._line_seconds = _HEADLESS_SECONDS if options.headless else _LINE_SECONDS
        self._supervisor = Supervisor(pipeline.parts)
        stream, port = config.pipeline.stream, config.pipeline.serving.port
        self._producer = StreamProducer(stream, digits, options.events, options.rate, options.seed)
        self._load = LoadGenerator("127.0.0.1", port, config.pipeline.name, digits, options.requests, options.seed)
        self._sources = SnapshotSources(
            begin, config.state_dir, pipeline.baseline_state_dir, self._producer, self._load
        )
        self._completion = Completion(baseline=pipeline.baseline_state_dir is not None)

    def figures(self) -> DemoSnapshot:
        """Return the figures of this moment."""
        return self._sources.read(self._supervisor.restarts)

    def run(self, request: Path, stop: threading.Event) -> Exit:
        """Start all, watch until the end, stop all: requests, stream, learner with baseline and serving, in this
        order.

        `request` has the body of a request that a user may send.

        Raises:
            AnabranchError: the stream cannot be sent.
        """
        with contextlib.ExitStack() as stack:
            _say(f"starting {', '.join(part.name for part in self._pipeline.parts)}")
            stack.callback(self._supervisor.stop)
            self._supervisor.start()
            ended = self._await_parts(stop)
            if ended is not None or stop.is_set():
                return ended or Exit.DONE
            url = self._pipeline.url
            _say(f"the stream begins; the dashboard is at {url}/ and Ctrl-C stops everything")
            _say(f"try: curl -s {url}/v2/models/{self._pipeline.config.pipeline.name}/infer -d @{request}")
            stack.callback(self._producer.stop)
            self._producer.start()
            stack.callback(self._load.stop)
            self._load.start()
            ended = self._watch(stop)
            _say("stopping")
        return ended

    def _await_parts(self, stop: threading.Event) -> Exit | None:
        """Wait until every learner has reported and serving answers, so that freshness does not include the start."""
        deadline = time.monotonic() + _START_SECONDS
        port = self._pipeline.config.pipeline.serving.port
        reports = [part.report for part in self._pipeline.parts if part.report and part.name != "serving"]
        while not (all(report.exists() for report in reports) and answers("127.0.0.1", port, "/v2/health/live")):
            ended = self._check()
            if ended is not None:
                return ended
            if stop.wait(_POLL_SECONDS):
                return None
            if time.monotonic() > deadline:
                _say(f"learner and serving are not up after {_START_SECONDS:.0f} s")
                self._show_logs()
                return Exit.BUG
        return None

    def _watch(self, stop: threading.Event) -> Exit:
        line_at = 0.0
        while not stop.wait(_POLL_SECONDS):
            ended = self._check()
            if ended is not None:
                return ended
            self._load.classes_seen = self._producer.classes_seen
            figures = self.figures()
            if time.monotonic() >= line_at:
                line_at = time.monotonic() + self._line_seconds
                _say(plain_line(figures))
            if self._events is not None:
                missing = self._completion.missing(figures)
                if missing is None:
                    return Exit.DONE
                if self._completion.is_overdue(figures):
                    _say(f"nothing has moved for a minute: {missing}")
                    self._show_logs()
                    return Exit.BUG
        return Exit.DONE

    def _check(self) -> Exit | None:
        ended = self._supervisor.check()
        if ended is not None and self._supervisor.ended is not None:
            self._show_logs(self._supervisor.ended.name)
            return ended
        if self._producer.error is not None:
            raise self._producer.error
        return ended

    def _show_logs(self, *names: str) -> None:
        """Write the last lines of parts' logs, since the logs themselves are about to be removed."""
        for path in sorted((self._pipeline.config.folder / "logs").glob("*.log")):
            if not names or path.stem in names:
                lines = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
                sys.stderr.write("".join(f"{path.stem}: {line}\n" for line in lines))


@contextlib.contextmanager
def _embedded_broker() -> Iterator[str]:
    _say("starting a Kafka-protocol broker")
    with EmbeddedBroker() as broker:
        yield broker.bootstrap


@contextlib.contextmanager
def _topics(pipeline: DemoPipeline, *, keep: bool) -> Iterator[None]:
    """Make the demo's topics, and remove them at the end unless they go with their broker (`keep`)."""
    stream: StreamSettings = pipeline.config.pipeline.stream
    create_topics(stream, pipeline.topics)
    try:
        yield
    finally:
        if not keep:
            try:
                delete_topics(stream, pipeline.topics)
            except AnabranchError as exc:
                _say(f"{exc}; the topics are left behind: {', '.join(pipeline.topics)}")


def _port(asked: int | None) -> int:
    port = free_port(asked or DEFAULT_PORT)
    if asked and port != asked:
        raise SettingsError(f"--port {asked} is taken")
    return port


def _write_report(figures: DemoSnapshot, options: Options) -> None:
    content = to_json(make_report(figures))
    if options.report is not None:
        try:
            options.report.write_bytes(content)
        except OSError as exc:
            raise SettingsError(f"--report {options.report} cannot be written: {exc.strerror}") from exc
    elif options.events is not None:
        sys.stdout.write(content.decode())


def _say(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
