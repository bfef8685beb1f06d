"""A learner yields to requests: a real one, with marks that the test sets as a server does."""

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.device.cpu_priority import can_restore
from anabranch.learner.device.lease import Field, Servers, hold_learner, hold_server, learners
from anabranch.learner.extensions.device_sharing.extension import DeviceSharing, device_sharing
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import DeviceSharingSettings, LearnerSettings
from anabranch.learner.settings.pipeline import ServedSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.micro_batches import StepHooks
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from tests.pipelines import LINEAR, encoded, events
from tests.support.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.any_broker

SLO = timedelta(milliseconds=20)
CONFIG = """
batch_size = 16
micro_batch_size = 8
[serving]
slo = "20ms"
timeout = "1h"
[device_sharing]
"""
SERVER = """
import sys
from datetime import timedelta
from pathlib import Path
from anabranch.learner.device.lease import hold_server

with hold_server(Path(sys.argv[1]), timedelta(milliseconds=20)) as mark, mark.waiting():
    mark.run()
    print("marked", flush=True)
    sys.stdin.readline()
"""
BARRIER = """
import contextlib
import threading
from pathlib import Path
import torch
from torch import nn

HERE = Path(__file__).parent


class Barrier(nn.Module):
    def forward(self, x):
        if torch.is_grad_enabled() and (HERE / "hold").exists():
            (HERE / "within").touch()
            while not (HERE / "go").exists():
                threading.Event().wait(0.01)
        return x


class After(nn.Module):
    def forward(self, x):
        if torch.is_grad_enabled() and (HERE / "go").exists():
            with contextlib.suppress(FileExistsError):
                (HERE / "after").touch(exist_ok=False)
        return x


def build():
    return nn.Sequential(nn.Linear(3, 3), Barrier(), After())
"""
EVENTS = encoded(events(6000))
FEED_SECONDS = 0.5
"""Between so many events; a learner that is slowed down has more to read than it takes."""


def is_yielding(learner):
    return any(rank[Field.YIELDING] for rank in learners(learner.state_dir))


def steps_of(learner):
    """Read them from the metrics, which the learner reports also while it yields."""
    return learner.metric("learner_steps_total")


@pytest.fixture
def begin(kafka, make_topic, produce, write_pipeline, start):
    """Starts a learner and returns it once it has made a step; there is a stream until the test ends."""
    feeding: list[threading.Thread] = []
    ended = threading.Event()

    def begin(share="", model=LINEAR):
        topic = make_topic()
        config = write_pipeline(kafka.bootstrap, topic, CONFIG + share, model)

        def feed():
            while not ended.is_set():
                produce(kafka.bootstrap, topic, EVENTS)
                ended.wait(FEED_SECONDS)

        feeding.append(threading.Thread(target=feed))
        feeding[-1].start()
        learner = start(config)
        learner.wait_for(lambda report: report.steps > 0)
        return learner

    yield begin
    ended.set()
    for thread in feeding:
        thread.join()


def test_training_stops_while_a_request_is_answered(begin):
    learner = begin()
    with hold_server(learner.state_dir, SLO) as mark:
        learner.until(
            lambda: (report := learner.report) and report.device_sharing and report.device_sharing.servers == 1
        )
        with mark.waiting():
            before = steps_of(learner)
            learner.until(lambda: steps_of(learner) > before)  # a request whose batch is not full keeps no CPU busy
            mark.run()
            learner.until(lambda: is_yielding(learner))
            steps, seconds = steps_of(learner), learner.report
            assert seconds is not None
            learner.until(lambda: (report := learner.report) is not None and report.time > seconds.time + 1)
            assert steps_of(learner) == steps
            assert is_yielding(learner)
            mark.rest()
            mark.run()
            assert os.getpriority(os.PRIO_PROCESS, learner.process.pid) == (19 if can_restore() else 5)
            mark.rest()
            assert os.getpriority(os.PRIO_PROCESS, learner.process.pid) == (0 if can_restore() else 5)
        learner.until(lambda: steps_of(learner) > steps)
    learner.until(lambda: (report := learner.report) and report.device_sharing and report.device_sharing.servers == 0)
    report = learner.report
    assert report is not None
    assert report.device_sharing is not None
    assert report.device_sharing.scheduling is not None
    assert report.device_sharing.times >= 1
    assert report.device_sharing.yielded_seconds >= 0.5
    assert report.device_sharing.wait_p99_seconds is not None
    assert 0 <= learner.metric("device_sharing_training_ratio") <= 1
    assert learner.metric("device_sharing_wait_duration_seconds_count") == 1, "a request is counted once"


def test_training_goes_on_at_once_when_the_server_is_killed(begin):
    learner = begin()
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(learner.state_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    server.stdout.readline()
    learner.until(lambda: is_yielding(learner))
    steps = steps_of(learner)
    if can_restore():
        os.setpriority(os.PRIO_PROCESS, learner.process.pid, 19)  # as a server does that is killed in a batch
    server.kill()
    server.communicate()
    learner.until(lambda: steps_of(learner) > steps)  # without waiting for serving.timeout
    learner.until(lambda: os.getpriority(os.PRIO_PROCESS, learner.process.pid) == (0 if can_restore() else 5))


def test_a_learner_that_yields_stops_in_time_and_makes_its_last_checkpoint(begin):
    learner = begin()
    with hold_server(learner.state_dir, SLO) as mark, mark.waiting():
        mark.run()
        learner.until(lambda: is_yielding(learner))
        learner.process.send_signal(signal.SIGTERM)
        assert learner.process.wait(PATIENCE_SECONDS) == 0
    assert list((learner.state_dir / "checkpoints").glob("*/manifest.json"))


def test_training_gets_its_fraction(begin):
    learner = begin('policy = "fraction"\nfraction = 0.4')
    with hold_server(learner.state_dir, SLO) as mark, mark.waiting():
        mark.run()
        # A step for which a busy machine takes seconds is more than its fraction, for the seconds that are reported on.
        learner.until(
            lambda: (
                (report := learner.report)
                and (sharing := report.device_sharing)
                and sharing.yielded_seconds > 2
                and 0.3 < sharing.training < 0.6
            )
        )


def test_training_on_a_separate_device_yields_to_nobody(begin):
    learner = begin('policy = "exclusive"')
    with hold_server(learner.state_dir, SLO) as mark, mark.waiting():
        mark.run()
        steps = steps_of(learner)
        learner.until(lambda: steps_of(learner) > steps + 50)
    assert os.getpriority(os.PRIO_PROCESS, learner.process.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    assert learners(learner.state_dir) == []
    assert learner.report is not None
    assert learner.report.device_sharing is None


def test_training_yields_within_a_step_for_a_second_where_the_config_says_so(begin):
    learner = begin('yield_at = "layer"', BARRIER)
    folder = learner.state_dir.parent
    with hold_server(learner.state_dir, SLO) as mark:
        learner.until(
            lambda: (report := learner.report) and report.device_sharing and report.device_sharing.servers == 1
        )
        (folder / "hold").touch()
        learner.until((folder / "within").exists)
        with mark.waiting():
            mark.run()
            (folder / "go").touch()
            learner.until((folder / "after").exists)
        mark.rest()
    waited = (folder / "after").stat().st_mtime - (folder / "go").stat().st_mtime
    assert 0.9 < waited < 20, "a stretch between micro-batches takes 30 s"


class FakeTrainer:
    """Has a size of micro-batches."""

    micro_batch_size: int | None = None


@pytest.fixture(autouse=True)
def _stay(monkeypatch):
    """The process of the tests must keep its priority."""
    monkeypatch.setattr("anabranch.learner.extensions.device_sharing.extension.step_back", lambda nice: f"nice {nice}")


def adjusted(tmp_path, trainer, *, fixed=False):
    """Answer late, with training at work, and let the learner adjust once."""
    shared = DeviceSharingSettings(), ServedSettings(slo=timedelta(microseconds=1), timeout=timedelta(hours=1))
    with (
        hold_server(tmp_path, shared[1].slo) as mark,
        device_sharing(*shared, tmp_path, torch.device("cpu"), threading.Event(), fixed=fixed) as sharing,
    ):
        assert sharing is not None
        sharing.begin(trainer, lambda: 64, mark.rest)  # type: ignore[arg-type]
        with mark.waiting():
            mark.run()
            sharing.yield_to_serving(0)
        sharing.run_if_due()


def test_late_answers_make_micro_batches_smaller(tmp_path):
    trainer = FakeTrainer()
    adjusted(tmp_path, trainer)
    assert trainer.micro_batch_size == 32


def test_micro_batches_stay_as_they_are_where_every_bit_counts(tmp_path):
    trainer = FakeTrainer()
    adjusted(tmp_path, trainer, fixed=True)
    assert trainer.micro_batch_size is None


def test_a_size_that_memory_has_set_is_not_exceeded(tmp_path):
    shared = DeviceSharingSettings(), ServedSettings(slo=SLO, timeout=timedelta(hours=1))
    servers, trainer = Servers(tmp_path, shared[1].timeout), FakeTrainer()
    with hold_learner(tmp_path) as slot:
        sharing = DeviceSharing(*shared, servers, slot, torch.device("cpu"), threading.Event())
        trainer.micro_batch_size = 16
        sharing.begin(trainer, lambda: 64, bool)  # type: ignore[arg-type]
        sharing.run_if_due()
        assert trainer.micro_batch_size == 16
        assert slot[Field.ROWS] == 16


class Traced(nn.Module):
    """A layer that says when it runs, forth and back."""

    def __init__(self, name, say):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self._name, self._say = name, say

    def forward(self, x):
        name, say = self._name, self._say

        class Trace(torch.autograd.Function):
            @staticmethod
            def forward(_ctx, value):
                say(f"{name} forth")
                return value.clone()

            @staticmethod
            def backward(_ctx, gradient):  # type: ignore[override]
                say(f"{name} back")
                return gradient

        traced: Tensor = Trace.apply(x * self.weight)  # type: ignore[no-untyped-call]
        return traced


@pytest.mark.parametrize(
    ("yield_at", "asked", "before", "after"),
    [
        ("layer", "b forth", "b forth", "c forth"),
        ("layer", "c back", "c back", "b back"),
        ("micro-batch", "b forth", "a back", None),
    ],
)
def test_training_yields_to_a_request_at_the_next_border(tmp_path, yield_at, asked, before, after, schema):
    said: list[str] = []
    cpu, precision = torch.device("cpu"), choose_precision("fp32", torch.device("cpu"))
    shared = (
        DeviceSharingSettings.model_validate({"yield_at": yield_at}),
        ServedSettings(slo=SLO, timeout=timedelta(hours=1)),
    )
    with hold_server(tmp_path, SLO) as mark, device_sharing(*shared, tmp_path, cpu, threading.Event()) as sharing:
        assert sharing is not None

        def say(what):
            said.append(what)
            if what == asked:
                mark.run()

        def answer():
            said.append("yields")
            mark.rest()

        model = nn.Sequential(*(Traced(name, say) for name in "abc"))
        trainer = Trainer(
            TrainingSetup(model, Classification(), STRATEGIES["none"](), schema, LearnerSettings(), cpu, precision),
            hooks=StepHooks(before_micro_batch=sharing.yield_to_serving),
        )
        sharing.begin(trainer, lambda: 4, answer)
        sharing.prepare(model, 1)
        new = trainer.examples(fake_columns(schema, range(4), label=[0, 1, 2]))
        trainer.step(new)
        steps = len(said)
        sharing.yield_to_serving(0)
        assert sharing.report()["device_sharing"].times == 1
    index = said.index("yields")
    assert said[index - 1] == before
    assert said[index + 1 :][:1] == ([after] if after else [])
    assert (index < steps) == (yield_at == "layer")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_other_ranks_are_kept_waiting_for_so_long_in_a_step_at_most_however_many_micro_batches_it_has(
    tmp_path, schema, monkeypatch, ranks
):
    """In a flood of requests, with a minute as 0.12 s and 30 s as 0.05: two whole stretches, and what is left."""
    monkeypatch.setattr("anabranch.learner.extensions.device_sharing.extension._LONGEST_SECONDS", 0.05)
    monkeypatch.setattr("anabranch.learner.extensions.device_sharing.extension._LONGEST_IN_STEP_SECONDS", 0.12)
    cpu, precision = torch.device("cpu"), choose_precision("fp32", torch.device("cpu"))
    shared = DeviceSharingSettings(), ServedSettings(slo=SLO, timeout=timedelta(minutes=10))
    settings = LearnerSettings(micro_batch_size=2)
    model = nn.Linear(3, 3)
    with (
        hold_server(tmp_path, shared[1].slo) as mark,
        device_sharing(*shared, tmp_path, cpu, threading.Event()) as sharing,
        mark.waiting(),
    ):
        assert sharing is not None
        trainer = Trainer(
            TrainingSetup(model, Classification(), STRATEGIES["none"](), schema, settings, cpu, precision),
            hooks=StepHooks(before_micro_batch=sharing.yield_to_serving),
        )
        new = trainer.examples(fake_columns(schema, range(12), label=[0, 1, 2]))
        sharing.prepare(model, ranks)
        mark.run()
        for step in (1, 2):
            trainer.step(new)
            if ranks == 1:
                assert sharing.report()["device_sharing"].times == 6 * step
            else:
                assert step <= sharing.report()["device_sharing"].times <= 3 * step
                assert sharing.report()["device_sharing"].yielded_seconds >= 0.12 * step
