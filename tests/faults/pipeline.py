"""A pipeline for fault injection: its files, its stream, and its parts under the supervisor of `anabranch up`."""

import contextlib
import os
import re
import signal
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import psutil
from confluent_kafka import Producer

from anabranch.config.loader import load_config
from anabranch.ingest.kafka.producer import EventProducer, create_topics
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.learner.status.report import LearnerReport, read_report
from anabranch.runtime.embedded_broker import EmbeddedBroker
from anabranch.runtime.supervisor import RestartPolicy, Supervisor, pipeline_parts
from tests import forkserver
from tests.support.kafka import START, RestartableBroker
from tests.support.ports import first_free_port
from tests.support.waiting import slowness

T = TypeVar("T")

POLL_SECONDS = 0.02
PATIENCE_SECONDS = 120.0


class StuckError(Exception):
    """A wait timed out; the message has the end of the log."""


@contextlib.contextmanager
def broker(folder: Path) -> Iterator[str]:
    """The address of a new broker: the one that START starts, or else the embedded one."""
    if not os.environ.get(START):
        with EmbeddedBroker() as embedded:
            yield embedded.bootstrap
        return
    folder.mkdir(parents=True)
    started = RestartableBroker(folder)
    started.start()
    try:
        yield started.bootstrap
    finally:
        started.kill()


def make_topic(bootstrap: str, name: str, partitions: int = 1) -> str:
    """Create a topic with a unique name and its dead-letter topic, and return its name."""
    topic = f"{name}-{uuid.uuid4().hex[:8]}"
    create_topic(bootstrap, topic, partitions)
    return topic


def create_topic(bootstrap: str, topic: str, partitions: int) -> None:
    """Create a topic and its dead-letter topic."""
    settings = StreamSettings(bootstrap_servers=bootstrap, topics=(topic,))
    create_topics(settings, {topic: partitions, f"{topic}.dead": 1})


@contextlib.contextmanager
def producer(bootstrap: str, topic: str) -> Iterator[EventProducer]:
    """A producer into a topic."""
    settings = StreamSettings(bootstrap_servers=bootstrap, topics=(topic,))
    sender = EventProducer(settings, topic, patience=timedelta(minutes=3))
    sender.open()
    try:
        yield sender
    finally:
        sender.close()


def send(bootstrap: str, topic: str, messages: Iterable[bytes]) -> None:
    """Write messages, and return once they are acknowledged."""
    with producer(bootstrap, topic) as sender:
        for message in messages:
            sender.send(message)
        sender.flush()


def send_in_order(bootstrap: str, topic: str, messages: Iterable[tuple[int, bytes]]) -> None:
    """Write messages, each to its partition; return once they are acknowledged, in this order."""
    sender = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,  # otherwise messages that are sent again may come out of order
            "linger.ms": 50,
            "queue.buffering.max.messages": 500_000,
        }
    )
    for partition, value in messages:
        while True:
            try:
                sender.produce(topic, value, partition=partition)
            except BufferError:
                sender.poll(0.1)
            else:
                break
    assert sender.flush(PATIENCE_SECONDS) == 0, "the broker has not acknowledged all messages"


class Pipeline:
    """A folder with `pipeline.toml` and the code of a model, and the reports of its learner."""

    def __init__(self, folder: Path, bootstrap: str, topic: str, code: str, text: str) -> None:
        """Write them; `text` is the config without name, stream's address and status address.

        `{stream}` and `{learner}` in it become the first lines of these sections.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.bootstrap, self.topic = folder, bootstrap, topic
        self.path = folder / "pipeline.toml"
        self.state_dir = folder / "var"
        self.status = f"127.0.0.1:{first_free_port()}"
        text = text.replace("{stream}", f'[stream]\nbootstrap_servers = "{bootstrap}"\ntopics = ["{topic}"]')
        text = text.replace("{learner}", f'[learner]\nstatus = "{self.status}"')
        self.path.write_text(f'name = "faults"\n{text}')
        (folder / "faulty_model.py").write_text(code)

    def report(self) -> LearnerReport | None:
        """Return the newest report of a learner."""
        return read_report(self.state_dir)

    def steps(self) -> int | None:
        """Return the steps of the learner's process by its own metrics; None while it does not answer."""
        try:
            with urllib.request.urlopen(f"http://{self.status}/metrics", timeout=1) as reply:
                match = re.search(rb"^anabranch_learner_steps_total (\S+)$", reply.read(), re.MULTILINE)
        except OSError:
            return None
        return int(float(match[1])) if match else None


class Supervised:
    """The learner of a pipeline, or other `parts`, restarted as by `anabranch up`; stopped when the context ends."""

    def __init__(
        self,
        pipeline: Pipeline,
        parts: tuple[str, ...] = ("learner",),
        descriptors: int | None = None,
        **environment: str,
    ) -> None:
        """`descriptors` is the limit of open files and sockets of each process; None for the limit of this process."""
        self.pipeline = pipeline
        self.log = pipeline.folder / "parts.log"
        self._stop = threading.Event()
        config = load_config(pipeline.path, environment)
        variables = {"OMP_NUM_THREADS": "1", **environment}
        chosen = [
            replace(part, command=_limited(part.command, descriptors), environment=variables, output=self.log)
            for part in pipeline_parts(config)
            if part.name in parts
        ]
        # It is killed repeatedly on purpose, so it is restarted without a back-off.
        self.supervisor = Supervisor(chosen, RestartPolicy(lasting=timedelta(0)))
        self._thread = threading.Thread(target=self._run)
        self.exit: object = None
        """The result of the supervisor."""

    def _run(self) -> None:
        self.exit = self.supervisor.run(self._stop)

    def __enter__(self) -> "Supervised":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the parts, as after SIGTERM."""
        self._stop.set()
        self._thread.join()

    def pid(self, part: str = "learner") -> int:
        """Return the pid of a part; wait until it runs."""
        return self.until(lambda: self.supervisor.pids().get(part), f"a {part} that runs")

    def kill(self, part: str = "learner") -> int:
        """SIGKILL a part, and return its pid."""
        pid = self.pid(part)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return pid

    def wait_for(
        self,
        condition: Callable[[LearnerReport], bool],
        what: str,
        no_more: int = 0,
        patience: float = PATIENCE_SECONDS,
    ) -> LearnerReport:
        """Return the first report with a true `condition`, of a running learner or its ranks, not of pid `no_more`."""

        def poll() -> LearnerReport | None:
            report = self.pipeline.report()
            if report is None or report.pid == no_more:
                return None
            own_pids = {report.pid, report.launcher} & set(self.supervisor.pids().values())
            return report if own_pids and condition(report) else None

        return self.until(poll, what, patience)

    def until(self, poll: Callable[[], T | None], what: str, patience: float = PATIENCE_SECONDS) -> T:
        """Return the first true value of `poll`; raises StuckError after `patience` seconds of an idle machine."""
        deadline = time.monotonic() + patience * slowness()
        while not (value := poll()):
            if self._thread.ident is not None and not self._thread.is_alive():
                raise StuckError(
                    f"the supervisor ended with {self.exit} before {what}; their log ends with: {self.log_tail()}"
                )
            if time.monotonic() > deadline:
                raise StuckError(f"no {what} after {patience:.0f} s: {self.pipeline.report()}; {self.log_tail()}")
            time.sleep(POLL_SECONDS)
        return value

    def log_tail(self, most: int = 3000) -> str:
        """Return the end of the parts' log."""
        return self.log.read_text(errors="replace")[-most:] if self.log.exists() else ""

    def family(self) -> list[psutil.Process]:
        """Return the processes of all parts and their children."""
        processes = []
        for pid in self.supervisor.pids().values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                processes += [process, *forkserver.descendants(process)]
        return processes


def _limited(command: tuple[str, ...], descriptors: int | None) -> tuple[str, ...]:
    """Return a command with a limit of open descriptors."""
    if descriptors is None:
        return command
    return ("sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command)
