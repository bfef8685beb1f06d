"""`anabranch up` when its parts or the supervisor are killed: parts are restarted, and no process is left over."""

import contextlib
import json
import os
import signal

import psutil
import pytest

from anabranch.learner.versions.format import Versions
from tests import forkserver
from tests.faults.pipeline import POLL_SECONDS, Pipeline, make_topic, send
from tests.faults.serving_kills import TEXT, Clients, ready
from tests.pipelines import LINEAR, adds_up, encoded, events, total
from tests.support.ports import first_free_port
from tests.support.waiting import slowness, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Started:
    """A command of a pipeline that runs in a new session."""

    def __init__(self, pipeline, *command):
        self._log = pipeline.folder / "commands.log"
        with self._log.open("ab") as output:
            self.process = forkserver.start(
                ["-m", "anabranch", *command, "-c", str(pipeline.path)],
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def family(self):
        """Return its process and all descendants."""
        return [psutil.Process(self.process.pid), *forkserver.descendants(self.process)]

    def until(self, poll, what, patience=100.0):
        """Return the first true value of `poll`; fail if the command ends first."""

        def polled():
            value = poll()
            assert value or self.process.poll() is None, f"it ended with {self.process.returncode}: {self.log_tail()}"
            return value

        return wait_until(polled, lambda: f"{self.log_tail()}: {what}", patience, every=POLL_SECONDS)

    def log_tail(self):
        """Return the end of what commands of the pipeline said."""
        return self._log.read_text()[-4000:]

    def stop(self):
        """SIGTERM, and the exit code."""
        self.process.terminate()
        return self.process.wait(60 * slowness())


@pytest.fixture
def start():
    """Starts a command of a pipeline: `start(pipeline, "up")`; its processes are killed at the end."""
    started: list[Started] = []

    def begin(pipeline, *command):
        started.append(Started(pipeline, *command))
        return started[-1]

    yield begin
    for running in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in running.family():
                process.kill()
        running.process.wait()


def pid_of(pipeline, part):
    try:
        return int(json.loads((pipeline.state_dir / f"{part}.json").read_text())["pid"])
    except FileNotFoundError:
        return None


def test_a_killed_supervisor_leaves_no_process_and_the_next_one_continues(kafka, tmp_path, start):
    port, topic = first_free_port(), make_topic(kafka.bootstrap, "parts")
    pipeline = Pipeline(tmp_path, kafka.bootstrap, topic, LINEAR, TEXT.format(port=port))
    first = start(pipeline, "up")
    send(kafka.bootstrap, topic, encoded(events(300)))
    first.until(
        lambda: ready(port) and (report := pipeline.report()) is not None and total(report) == 300,
        "an outcome for each event",
    )
    family = first.family()
    assert len(family) >= 4, "these are not all parts"

    first.process.kill()
    second = start(pipeline, "up")
    assert psutil.wait_procs(family, 100)[1] == []
    send(kafka.bootstrap, topic, encoded(events(300)))

    def trained():
        report = pipeline.report()
        return report.pid in {process.pid for process in second.family()} and total(report) == 600

    second.until(trained, "an outcome for each event once more")
    assert adds_up(pipeline.report())
    second.until(lambda: ready(port), "a prediction")

    learner, serving = pid_of(pipeline, "learner"), pid_of(pipeline, "serving")
    os.kill(serving, signal.SIGKILL)
    second.until(lambda: pid_of(pipeline, "serving") not in (serving, None) and ready(port), "a prediction again")
    assert pid_of(pipeline, "learner") == learner
    family = second.family()
    assert second.stop() == 0, second.log_tail()
    assert psutil.wait_procs(family, 100)[1] == []

    alone = start(pipeline, "serve")
    alone.until(lambda: ready(port), "a prediction without a learner")
    with Clients(port) as clients:
        alone.until(lambda: clients.asked.requests > 20, "some replies")
    assert clients.asked.failures == []
    assert clients.asked.versions == {Versions(pipeline.state_dir / "versions").numbers()[-1]}


def test_a_standby_continues_when_the_learner_is_killed(kafka, tmp_path, start):
    topic = make_topic(kafka.bootstrap, "standby")
    text = TEXT.format(port=first_free_port()).replace("{learner}", "{learner}\nstandby = true")
    pipeline = Pipeline(tmp_path, kafka.bootstrap, topic, LINEAR, text)
    parts = start(pipeline, "up")

    def trained(rows):
        report = pipeline.report()
        return report is not None and total(report) == rows

    def standby():
        children = forkserver.children(parts.process)
        return [child.process.pid for child in children if "--standby" in child.arguments]

    send(kafka.bootstrap, topic, encoded(events(300)))
    parts.until(lambda: trained(300), "an outcome for each event")
    (expected,) = parts.until(standby, "a standby")
    os.kill(pid_of(pipeline, "learner"), signal.SIGKILL)
    send(kafka.bootstrap, topic, encoded(events(300)))
    parts.until(lambda: trained(600), "an outcome for each event once more")
    assert adds_up(pipeline.report())
    assert pid_of(pipeline, "learner") == expected
    parts.until(lambda: len(standby()) == 2, "another standby")
    family = parts.family()
    assert parts.stop() == 0, parts.log_tail()
    assert psutil.wait_procs(family, 100)[1] == []
