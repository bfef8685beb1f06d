"""A learner of several ranks as a process: what it learns, how it comes back, and how it ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from learner.lock import hold_state_directory
from learner.report import LearnerReport, read_report
from learner.version import Versions

CONFIG = """
name = "test"
[stream]
bootstrap_servers = "{bootstrap}"
topics = ["{topic}"]
[schema.features.x]
dtype = "float32"
shape = [3]
[schema.label]
name = "y"
classes = 3
[model]
factory = "tiny_model:build"
[learner]
batch_size = 8
replicas = 2
device = "cpu"
status = "127.0.0.1:{port}"
stop_timeout = "20s"
optimizer = {{name = "sgd", lr = 0.5}}
[versions]
publish_every = "100ms"
[cuts]
every = "200ms"
[gate]
guard_fraction = 0.1
"""
MODEL = "from torch import nn\ndef build():\n    return nn.Linear(3, 3)\n"


@pytest.fixture
def pipeline(tmp_path: Path, free_port: Callable[[], int]) -> Callable[..., Path]:
    """Writes a pipeline and returns the path of its config."""

    def write(bootstrap: str, topic: str, model: str = MODEL) -> Path:
        path = tmp_path / "pipeline.toml"
        path.write_text(CONFIG.format(bootstrap=bootstrap, topic=topic, port=free_port()))
        (tmp_path / "tiny_model.py").write_text(model)
        return path

    return write


class Launched:
    """A learner and its ranks, all of which are killed at the end of its test."""

    def __init__(self, config: Path, **environment: str) -> None:
        self.state_dir = config.parent / "var"
        self.log = config.parent / "learner.log"
        with self.log.open("ab") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "learner", "-c", str(config), "--supervised"],
                stdin=subprocess.PIPE,
                stderr=said,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            )
        self._launcher = psutil.Process(self.process.pid)

    def ranks(self) -> list[psutil.Process]:
        """Return its ranks, in order."""
        found = [child for child in self._launcher.children() if "--group" in child.cmdline()]
        return sorted(found, key=lambda child: int(child.environ()["RANK"]))

    def wait_for(self, condition: Callable[[LearnerReport], bool], no_more: int = 0) -> LearnerReport:
        """Wait until the report of a rank 0 of this launcher says so; the rank of pid `no_more` does not count."""
        deadline = time.monotonic() + 100
        while True:
            report = read_report(self.state_dir)
            mine = report is not None and self.process.pid in (report.launcher, report.pid) and report.pid != no_more
            if report is not None and mine and condition(report):
                return report
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"{report}\n{self.log.read_text()}"
            threading.Event().wait(0.05)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)


@pytest.fixture
def start() -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def begin(config: Path, **environment: str) -> Launched:
        started.append(Launched(config, **environment))
        return started[-1]

    yield begin
    for learner in started:
        learner.process.kill()  # its ranks end with it
        learner.process.wait()
        assert learner.process.stdin is not None
        learner.process.stdin.close()


def events(count: int) -> list[dict[str, Any]]:
    return [{"x": [float(i % 3 == k) for k in range(3)], "y": i % 3} for i in range(count)]


def total(report: LearnerReport) -> int:
    return sum(report.outcomes.values())


def adds_up(report: LearnerReport) -> bool:
    return all(
        part.end - part.start == part.finished + part.passed + part.gaps + part.removed + part.pending
        for part in report.partitions.values()
    )


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_when_a_rank_is_killed_all_come_back_from_the_cut_and_nothing_is_learned_twice(
    kafka: Any,
    make_topic: Callable[..., str],
    produce: Callable[..., list[int]],
    pipeline: Callable[..., Path],
    start: Callable[..., Launched],
    killed: int,
) -> None:
    topic = make_topic(partitions=2)
    learner = start(pipeline(kafka.bootstrap, topic))
    produce(kafka.bootstrap, topic, [*events(300), b"bad"], partition=0)
    produce(kafka.bootstrap, topic, events(30), partition=1)
    report = learner.wait_for(lambda each: total(each) >= 100 and each.cut is not None)
    assert adds_up(report)
    ranks = learner.ranks()
    assert [report.pid, len(ranks)] == [ranks[0].pid, 2]
    ranks[killed].kill()
    produce(kafka.bootstrap, topic, events(300), partition=1)
    report = learner.wait_for(lambda each: total(each) == 631, no_more=report.pid)
    assert learner.log.read_text().count("going on from cut") == 1
    assert adds_up(report)
    assert report.outcomes["dead_lettered"] == 1
    assert report.outcomes["trained"] + report.outcomes["held_out"] == 630
    assert report.replay_rows == {"device": report.outcomes["trained"]}, "an event is in the store twice, or not at all"
    assert report.accuracy["now"] > 0.8
    ranks = learner.ranks()
    begin = time.monotonic()
    assert learner.stop() == 0
    assert time.monotonic() - begin < 20
    assert psutil.wait_procs(ranks, 10)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize(("numbers", "sharding"), [((2, 1), "none"), ((1, 2), "none"), ((1, 2), "fsdp")])
def test_a_cut_is_gone_on_from_with_another_number_of_ranks(
    kafka: Any,
    make_topic: Callable[..., str],
    produce: Callable[..., list[int]],
    pipeline: Callable[..., Path],
    start: Callable[..., Launched],
    numbers: tuple[int, int],
    sharding: str,
) -> None:
    topic = make_topic()
    config = pipeline(kafka.bootstrap, topic)
    for turn, replicas in enumerate(numbers, 1):
        learner = start(
            config,
            ANABRANCH__LEARNER__REPLICAS=str(replicas),
            ANABRANCH__LEARNER__SHARDING=sharding,
            ANABRANCH__LEARNER__OPTIMIZER='{name = "adamw", lr = 0.05}',
        )
        produce(kafka.bootstrap, topic, events(200))
        report = learner.wait_for(lambda each, n=200 * turn: total(each) == n)
        assert learner.stop() == 0
    assert learner.log.read_text().count("going on from cut") == 1
    assert report.steps > report.steps_since_start > 0
    assert report.replay_rows == {"device": report.outcomes["trained"]}
    assert report.outcomes["trained"] + report.outcomes["held_out"] == 400
    versions = Versions(learner.state_dir / "versions")
    newest = versions.manifest(versions.numbers()[-1])
    assert newest.trained_through[f"{topic}:0"].offset == 399
    assert {name: list(value.shape) for name, value in versions.weights(newest).items()} == {
        "weight": [3, 3],
        "bias": [3],
    }


@pytest.mark.slow
def test_when_the_launcher_is_killed_no_rank_outlives_it(
    kafka: Any, make_topic: Callable[..., str], pipeline: Callable[..., Path], start: Callable[..., Launched]
) -> None:
    learner = start(pipeline(kafka.bootstrap, make_topic()))
    learner.wait_for(lambda _: True)
    ranks = learner.ranks()
    learner.process.kill()
    assert psutil.wait_procs(ranks, 20)[1] == []
    with hold_state_directory(learner.state_dir):
        pass


@pytest.mark.slow
def test_what_starting_again_cannot_mend_ends_with_its_own_exit_code(
    kafka: Any, make_topic: Callable[..., str], pipeline: Callable[..., Path], start: Callable[..., Launched]
) -> None:
    learner = start(pipeline(kafka.bootstrap, make_topic(), model="def build():\n    return 3\n"))
    assert learner.process.wait(60) == 2
    said = learner.log.read_text()
    assert said.count("returned int, not a torch.nn.Module") == 1, said
