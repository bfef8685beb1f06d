"""How far the host runs ahead of a device that is slower than it; a fake device with its own clock."""

from unittest import mock

import pytest
import torch

from anabranch.learner.extensions.device_sharing.launches import MOST_AHEAD, LaunchLimiter

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
