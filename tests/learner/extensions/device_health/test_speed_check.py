"""The sniff test: what is slow, and when it is named."""

import math
from types import SimpleNamespace

import pytest
import torch

from anabranch.learner.device.reading import DeviceInfo, Reading
from anabranch.learner.extensions.device_health.extension import DeviceHealth, SpeedCheck, slow_ones
from anabranch.learner.parallel.channel import Action
from anabranch.learner.parallel.leader import Leader
from anabranch.learner.parallel.speed_check import time_product
from anabranch.learner.settings.learner import DeviceSettings
from anabranch.learner.train.parallelism import COLLECTIVE

USUAL = {"rank 0": 1.0, "rank 1": 1.02, "rank 2": 0.99, "rank 3": 1.01, COLLECTIVE: 3.0}


def test_ranks_that_are_alike_are_not_slow():
    assert slow_ones(USUAL, {}, 0.1) == {}


def test_a_rank_above_the_median_of_all_is_slow():
    assert slow_ones({**USUAL, "rank 2": 1.2}, {}, 0.1) == {"rank 2": pytest.approx(1.2 / 1.015 - 1)}


def test_a_device_above_its_earlier_times_is_slow_once_there_are_some():
    before = [1.0, 1.01, 0.99, 1.0]
    assert slow_ones({"cuda:0": 1.5}, {"cuda:0": before}, 0.1) == {}
    assert slow_ones({"cuda:0": 1.5}, {"cuda:0": [*before, 1.02]}, 0.1) == {"cuda:0": 0.5}
    assert slow_ones({"cuda:0": 1.09}, {"cuda:0": [*before, 1.02]}, 0.1) == {}


def test_a_collective_is_compared_with_its_earlier_times_alone():
    assert slow_ones(USUAL, {COLLECTIVE: [2.0] * 5}, 0.1) == {COLLECTIVE: 0.5}


def test_a_device_is_named_when_it_is_slow_three_times_in_a_row():
    times = iter([*[1.0] * 8, 1.3, 1.0, 1.3, 1.3, 1.3, 1.3, 1.0])
    check = SpeedCheck(lambda: {"cuda:0": next(times)}, 0.1)
    warnings, again = [], []
    for _ in range(15):
        again.append(check.run() is not None)
        warnings.append(check.warning)
    slow = "the sniff test is slow: cuda:0 by 30%"
    assert warnings == [None] * 12 + [slow, slow, None]
    assert again == [False] * 8 + [True, False, True, True, False, False, False]


def test_slow_times_do_not_become_the_usual_ones():
    times = iter([*[1.0] * 8, *[1.3] * 200])
    check = SpeedCheck(lambda: {"cuda:0": next(times)}, 0.1)
    for _ in range(208):
        check.run()
    assert check.warning is not None


def test_a_test_without_memory_is_left_for_the_next_time():
    def measure():
        raise torch.OutOfMemoryError

    check = SpeedCheck(measure, 0.1)
    assert check.run() is None
    assert (check.seconds, check.warning) == ({}, None)


def test_a_product_is_timed_on_the_cpu():
    assert 0 < time_product(torch.device("cpu")) < 1


def test_all_ranks_are_timed_and_train_on(play):
    (found,) = play(3, [{"settings": {"replicas": 3}, "steps": [[9, 6]], "times": 3, "time_devices": True}])
    seconds = {
        name.removeprefix("seconds."): float(value) for name, value in found.items() if name.startswith("seconds.")
    }
    assert set(seconds) == {"rank 0", "rank 1", "rank 2", COLLECTIVE}
    assert all(0 < value < 10 for value in seconds.values())


def test_a_rank_without_memory_is_left_out_and_the_collective_with_it():
    sent = []
    answers = {1: 0.5, 2: math.nan}

    def receive(rank, size=8):
        return torch.tensor([answers[rank]], dtype=torch.float64).view(torch.uint8)[:size]

    channel = SimpleNamespace(
        others=range(1, 3),
        size=3,
        device=torch.device("cpu"),
        send_all=lambda action, numbers: sent.append((action, numbers)),
        receive_bytes=receive,
        receive_reply=receive,
    )
    leader = SimpleNamespace(_channel=channel)
    assert set(Leader.time_devices(leader)) == {"rank 0", "rank 1"}
    assert sent == [(Action.TIME_DEVICES, [0])]


@pytest.mark.gpu
def test_a_product_is_timed_on_a_device():
    assert 0 < time_product(torch.device("cuda")) < 1


def test_the_watch_runs_it_every_ten_minutes_and_sooner_after_a_slow_one():
    class Well:
        info = DeviceInfo(uuid="GPU-1", name="a device")

        def read(self, now):
            return Reading(time=now)

    now, ran = 0.0, []

    def measure():
        ran.append(now)
        return {"cuda:0": 1.5 if len(ran) == 7 else 1.0}

    check = SpeedCheck(measure, 0.1)
    watch = DeviceHealth([Well()], DeviceSettings(), lambda: None, speed=check, clock=lambda: now)
    for second in range(0, 6000, 10):
        now = float(second)
        watch.read()
        watch.judge()
        watch.run_if_due()
    assert ran == [600.0, 1200.0, 1800.0, 2400.0, 3000.0, 3600.0, 4200.0, 4210.0, 4810.0, 5410.0]
    assert watch.newest.sniff_seconds == {"cuda:0": 1.0}
    assert watch.warning is None
