"""How far the host runs ahead of a slower device, and callbacks between layers, which leave results unchanged."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.extensions.device_sharing.launches import MOST_AHEAD, LaunchLimiter, call_between_layers
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer

CUDA = torch.device("cuda", 1)
LAUNCH = 0.01
"""Milliseconds of the host for each launch."""


class FakeDevice:
    """Runs what is launched in order. Times are milliseconds."""

    def __init__(self):
        self.host = self.idle_from = 0.0
        self.events = 0
        self.lead = 0.0
        """The most work that was queued at once."""

    def launch(self, milliseconds):
        self.host += LAUNCH
        self.idle_from = max(self.idle_from, self.host) + milliseconds
        self.lead = max(self.lead, self.idle_from - self.host)


@pytest.fixture
def device():
    fake = FakeDevice()

    class FakeEvent:
        def __init__(self, *, enable_timing, blocking):
            assert blocking, "a thread that spins takes a core from serving"
            fake.events += 1
            self._timed = enable_timing

        def record(self, stream):
            assert stream == CUDA, "of the learner's device, not the current one"
            self.at = max(fake.idle_from, fake.host)

        def synchronize(self):
            fake.host = max(fake.host, self.at)

        def elapsed_time(self, end):
            assert self._timed
            elapsed: float = end.at - self.at
            return elapsed

    with mock.patch("torch.cuda.Event", FakeEvent), mock.patch("torch.cuda.current_stream", lambda device: device):
        yield fake


def test_two_micro_batches_are_queued_at_most_and_events_are_used_again(device):
    limiter = LaunchLimiter(CUDA)
    for _ in range(100):
        limiter.wait()
        device.launch(5.0)
    assert device.lead <= MOST_AHEAD * 5.0
    assert device.events <= MOST_AHEAD + 1
    limiter.drain()
    assert device.host == device.idle_from


@pytest.mark.parametrize("milliseconds", [0.001, 0.02, 0.3, 4.0])
def test_between_layers_what_is_queued_is_bounded_by_time(device, milliseconds):
    limiter = LaunchLimiter(CUDA, within=True)
    for _ in range(10):
        limiter.wait()
        for _ in range(200):
            limiter.wait_between_layers()
            device.launch(milliseconds)
    assert device.lead <= MOST_AHEAD * max(1.0, milliseconds) + 2 * milliseconds
    assert device.events <= MOST_AHEAD + 1


def test_layers_that_are_short_are_not_waited_for_one_by_one(device):
    """Each wait lets the device run dry: 2000 layers of 20 us take it 40 ms."""
    limiter, waits = LaunchLimiter(CUDA, within=True), 0
    limiter.wait()
    for _ in range(2000):
        before = device.host
        limiter.wait_between_layers()
        waits += device.host > before
        device.launch(0.02)
    assert waits < 100
    assert device.idle_from < 1.05 * 2000 * 0.02


def test_a_pause_between_layers_is_not_taken_for_their_time(device):
    limiter = LaunchLimiter(CUDA, within=True)
    limiter.wait()
    for _ in range(200):
        limiter.wait_between_layers()
        device.launch(0.02)
    stretch = limiter._stretch
    assert stretch > 10
    for _ in range(3):
        limiter.drain()
        device.host += 1000  # serving has the device
        for _ in range(2 * stretch + 2):
            limiter.wait_between_layers()
            device.launch(0.02)
    assert limiter._stretch > stretch / 2


def test_a_cpu_is_not_waited_for():
    limiter = LaunchLimiter(torch.device("cpu"), within=True)
    with mock.patch("torch.cuda.Event", side_effect=AssertionError):
        limiter.wait()
        limiter.wait_between_layers()
        limiter.drain()


CPU = torch.device("cpu")


def make_model():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.2))
    return nn.Sequential(nn.Flatten(), nn.LeakyReLU(inplace=True), body, nn.Linear(16, 3))


def trained(schema, settings, *, hooked):
    """Take ten steps; return what a checkpoint would have, and how often the callback was called."""
    options = LearnerSettings.model_validate({**settings, "optimizer": {"name": "adam", "lr": 0.02}})
    strategy, model, calls = STRATEGIES[options.strategy.name](), make_model(), 0
    trainer = Trainer(
        TrainingSetup(model, Classification(), strategy, schema, options, CPU, choose_precision("bf16", CPU))
    )

    def count_call():
        nonlocal calls
        calls += 1

    if hooked:
        call_between_layers(trainer.model, count_call)
    for step in range(10):
        torch.manual_seed(step)
        new = trainer.examples(fake_columns(schema, range(step * 8, step * 8 + 8), label=[0, 1, 2]))
        assert trainer.step(new, [new] * len(strategy.samples(8))).finite
    return trainer.tensors(), calls


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"micro_batch_size": 4},
        {"activation_checkpointing": ["2"]},
        {"strategy": "mir"},
        {"strategy": "agem"},
        {"strategy": {"name": "lwf", "every": 2}},
    ],
)
def test_results_are_unchanged_with_a_callback_between_layers(schema, settings):
    plain, never = trained(schema, settings, hooked=False)
    with_hooks, often = trained(schema, settings, hooked=True)
    torch.testing.assert_close(with_hooks, plain, rtol=0, atol=0)
    assert never == 0
    assert often >= 10 * (7 + 5)


def test_the_callback_is_called_before_each_layer_in_both_directions():
    model, calls = make_model(), []
    call_between_layers(model, lambda: calls.append(len(calls)))
    model(torch.randn(4, 3)).sum().backward()
    assert len(calls) == 7 + 5  # backward where there are gradients


def test_copies_and_passes_without_gradients_call_nothing():
    model, calls = make_model(), []
    call_between_layers(model, lambda: calls.append(True))
    with torch.no_grad():
        model(torch.randn(4, 3))
    copy.deepcopy(model)(torch.randn(4, 3)).sum().backward()
    assert calls == []
