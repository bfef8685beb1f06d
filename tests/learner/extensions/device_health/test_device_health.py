"""The watch on scripted devices: faults, degradations, an ordinary day."""

import itertools
import math
import random
from datetime import timedelta

import pytest
from prometheus_client import CollectorRegistry

from anabranch.learner.device.health_rules import RISES, Level
from anabranch.learner.device.reading import DeviceInfo, Reading
from anabranch.learner.extensions.device_health.extension import DeviceHealth
from anabranch.learner.settings.learner import DeviceSettings
from anabranch.learner.status.metrics import LearnerMetrics
from tests.support.nvml import UUID, reading
from tests.support.waiting import wait_until

SETTINGS = DeviceSettings()


class Run:
    """A watch under a separate clock: one reading, one judgement and one step boundary a second."""

    def __init__(self, device, ranks=1, metrics=None):
        self.now = 0.0
        self.checkpoints = []
        self.reported = None
        """When there was a warning or problem for the first time."""
        self.ended = None
        """When the learner ended by itself."""
        self.killed = None
        """When the watch ended the process."""
        self.watch = DeviceHealth(
            [device],
            SETTINGS,
            lambda: self.checkpoints.append(self.now),
            metrics,
            ranks=ranks,
            clock=lambda: self.now,
            end=self._end,
        )

    def _end(self, code):
        assert code == 1
        self.killed = self.now if self.killed is None else self.killed

    def second(self, *, hangs=False):
        self.watch.read()
        self.watch.judge()
        if self.reported is None and (self.watch.problem or self.watch.warning):
            self.reported = self.now
        if not hangs and self.ended is None:
            try:
                self.watch.run_if_due()
            except SystemExit as exc:
                self.ended = self.now if exc.code == 1 else math.nan
        self.now += 1.0


FAULTS = {
    "memory error not corrected": ("uncorrected=1", Level.FATAL),
    "memory error not corrected, with its event": ("uncorrected=1 xid=48", Level.FATAL),
    "contained memory error": ("xid=94", Level.EARLY),
    "uncontained memory error": ("xid=95", Level.FATAL),
    "fallen off the bus": ("xid=79 error=15", Level.FATAL),
    "lost without an event": ("error=15", Level.FATAL),
    "needs a reset": ("error=16", Level.FATAL),
    "system processor does not answer": ("xid=119", Level.FATAL),
    "system processor fails, and no query is answered": ("xid=120 error=999", Level.FATAL),
    "no spare row": ("remap_failed=1 xid=64", Level.FATAL),
    "NVLink fails": ("xid=74 links_up=3", Level.FATAL),
    "row to be remapped": ("xid=63 remap_pending=1 remapped_corrected=1", Level.EARLY),
    "corrected memory errors": ("corrected=50", Level.EARLY),
    "replays of PCIe": ("pcie_replays=500", Level.EARLY),
    "replays of NVLink": ("nvlink_replays=20 nvlink_recoveries=3", Level.EARLY),
    "too hot": ("temperature=91 slowdown=64", Level.EARLY),
    "brake of the power supply": ("slowdown=136 power=250", Level.EARLY),
    "driver asks for a reset": ("recovery=1", Level.PROBLEM),
}
"""What each fault adds to the script, and what follows."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported_within_two_seconds(fake_nvml, name):
    sign, level = FAULTS[name]
    run = Run(fake_nvml([*[""] * 60, sign]).open(UUID), ranks=2)
    for _ in range(60):
        run.second()
    assert (run.reported, run.checkpoints, run.ended) == (None, [], None)
    began = run.now
    for _ in range(8):
        run.second()
    assert run.reported - began <= 2
    if level is Level.FATAL:
        assert run.ended - began <= 2
        assert run.checkpoints == []  # the weights cannot be trusted
    else:
        assert run.ended is None
        assert [at - began <= 2 for at in run.checkpoints] == [True] * len(run.checkpoints) != []
    assert bool(run.watch.problem) is (level > Level.EARLY)


def test_a_device_that_does_not_answer_is_reported_two_seconds_after_it_was_asked(fake_nvml):
    run = Run(fake_nvml([*[""] * 30, "error=999"]).open(UUID))
    for _ in range(30):
        run.second()
    asked = run.now
    for _ in range(15):
        run.second()
    assert run.reported - asked <= 2
    assert run.checkpoints == [asked + 2, asked + 10]
    assert run.ended is None
    assert "has not answered for more than 10 s" in run.watch.problem
    assert run.watch.newest.devices[0].silence_seconds == 14


def test_a_loop_that_hangs_is_ended_after_a_fatal_fault(fake_nvml):
    run = Run(fake_nvml(["", "xid=79 error=15"]).open(UUID))
    run.second()
    for _ in range(10):
        run.second(hangs=True)
    assert run.ended is None
    assert run.killed is not None
    assert run.killed <= 7


def test_a_symptom_that_lasts_asks_for_one_checkpoint(fake_nvml):
    run = Run(fake_nvml(["", "remap_pending=1"]).open(UUID))
    for _ in range(300):
        run.second()
    assert len(run.checkpoints) == 1


def test_a_symptom_that_comes_back_asks_for_another_one(fake_nvml):
    hot, cold = "temperature=92", "temperature=60"
    run = Run(fake_nvml([hot, cold, hot, *[cold] * 90, hot]).open(UUID))
    for _ in range(100):
        run.second()
    assert run.checkpoints == [0.0, 93.0]


@pytest.mark.slow
def test_real_threads_report_a_fault_and_a_hang_too(fake_nvml):
    settings = DeviceSettings(every=timedelta(milliseconds=100))
    watch = DeviceHealth(
        [fake_nvml([*[""] * 5, "hang=4", "xid=79"]).open(UUID)], settings, lambda: None, end=lambda _: 0
    )
    watch.start()
    try:
        assert "not answered" in wait_until(lambda: watch.warning, "a warning of the hang")
        # Before that the hang may be a problem too.
        wait_until(lambda: "Xid 79" in (watch.problem or ""), "the problem")
        with pytest.raises(SystemExit):
            watch.run_if_due()
    finally:
        watch._closed.set()  # `close` lets the threads go on after a fatal symptom


def test_metrics_and_report_are_those_of_the_last_reading(fake_nvml):
    registry = CollectorRegistry()
    run = Run(
        fake_nvml(["", "temperature=91 xid=63 slowdown=64", ""]).open(UUID), metrics=LearnerMetrics(registry).device
    )
    for _ in range(3):
        run.second()
    value = registry.get_sample_value
    assert value("anabranch_device_temperature_celsius", {"uuid": UUID, "sensor": "gpu"}) == 91
    assert value("anabranch_device_energy_joules_total", {"uuid": UUID}) == 1e6
    assert value("anabranch_device_xid_events_total", {"uuid": UUID, "xid": "63"}) == 1
    assert value("anabranch_device_slowdown", {"uuid": UUID, "reason": "hardware_thermal"}) == 1
    assert value("anabranch_device_symptoms", {"uuid": UUID, "level": "warning"}) == 3
    assert value("anabranch_device_ecc_errors_total", {"uuid": UUID, "kind": "corrected"}) == 3
    (device,) = run.watch.newest.devices
    assert (device.uuid, device.temperatures, device.xids) == (UUID, {"gpu": 91.0, "memory": 70.0}, {"63": 1})
    assert device.processes == {"4242": 20 * 10**9}
    assert len(device.warnings) == 3
    assert device.problems == []


def test_nothing_is_queried_between_steps(fake_nvml):
    class Counted:
        info = DeviceInfo(uuid=UUID, name="a device")
        reads = 0

        def read(self, now):
            self.reads += 1
            return Reading(time=now)

    device = Counted()
    watch = DeviceHealth([device], SETTINGS, lambda: pytest.fail("no checkpoint is due"), clock=lambda: 0.0)
    for _ in range(100):
        watch.run_if_due()
    assert device.reads == 0


class Scripted:
    """A device in Python, for long scripts: yields dicts of values; None is no answer. Other counters stay at 0."""

    info = DeviceInfo(uuid=UUID, name="a device", slowdown_celsius=90, memory_max_celsius=95)
    counters = dict.fromkeys((rise.field for rise in RISES), 0)

    def __init__(self, seconds):
        self._seconds = seconds

    def read(self, now):
        values = next(self._seconds)
        return None if values is None else reading(now, **{**self.counters, **values})


def grows(rng, field, chance, doubles):
    """Errors at a rate that doubles every `doubles` seconds; each is the last one with a probability of `chance`."""
    count, rate, doubling = rng.randrange(1000), 1 / 600, rng.uniform(*doubles)
    while True:
        for _ in range(poisson(rng, rate)):
            count += 1
            if rng.random() < chance:
                return
        rate *= 2 ** (1 / doubling)
        yield {field: count, "temperatures.gpu": 60 + rng.randrange(3)}


def poisson(rng, rate):
    count, left = 0, math.exp(-min(rate, 500)) if rate < 500 else 0.0
    if not left:
        return int(rate)
    product = rng.random()
    while product > left:
        count += 1
        product *= rng.random()
    return count


def heats(rng):
    """A fan that fails: the device is switched off 10 degrees above the temperature at which it slows down."""
    temperature, rate = rng.uniform(55, 80), rng.uniform(2, 20) / 60
    while temperature < 100:
        temperature += rate
        slowdown = ["hardware_thermal"] if temperature >= 90 else []
        yield {"temperatures.gpu": round(temperature + rng.gauss(0, 0.3)), "slowdown": slowdown}


def brakes(rng):
    """A power supply that fails: the hardware slows the device down for some seconds, more and more often."""
    for burst in range(rng.randrange(3, 9)):
        for _ in range(rng.randrange(5, 60 // (burst + 1) + 6)):
            yield {"slowdown": [], "power": 600.0, "power_limit": 700.0}
        for _ in range(rng.randrange(2, 6)):
            yield {"slowdown": ["hardware", "power_brake"], "power": 250.0, "power_limit": 700.0}


def stutters(rng):
    """A device that answers later and later, one second more each time."""
    for gap in range(1, rng.randrange(5, 10)):
        yield from ({"temperatures.gpu": 60} for _ in range(rng.randrange(5, 60)))
        yield from (None for _ in range(gap))


DEGRADATIONS = {
    # One of 400 errors of the memory cannot be corrected, and so on: assumptions, which each bound what can be reached.
    "memory": lambda rng: grows(rng, "ecc_errors.corrected", 1 / 400, (20, 120)),
    "pcie": lambda rng: grows(rng, "pcie_replays", 1 / 4000, (10, 60)),
    "nvlink": lambda rng: grows(rng, "nvlink_errors", 1 / 400, (20, 120)),
    "heat": heats,
    "power": brakes,
    "answers": stutters,
}
SEEDS = range(20)
WRITE_SECONDS = 5
"""How long before the loss a checkpoint has to be requested, so that it is written."""


@pytest.mark.slow
def test_a_checkpoint_is_requested_before_the_loss_in_95_of_100_degradations():
    saved = {}
    for kind, seed in itertools.product(DEGRADATIONS, SEEDS):
        run = Run(Scripted(DEGRADATIONS[kind](random.Random(f"{kind} {seed}"))))
        try:
            while True:
                run.second()
        except (StopIteration, RuntimeError):
            saved[kind, seed] = any(at <= run.now - WRITE_SECONDS for at in run.checkpoints)
    by_kind = {kind: sum(saved[kind, seed] for seed in SEEDS) for kind in DEGRADATIONS}
    assert sum(by_kind.values()) >= 0.95 * len(saved), by_kind


SECONDS_OF_A_DAY = [second for second in range(86_400) if second % 3_600 < 300]


def ordinary_day(rng):
    """A day of a device that is well: load that comes and goes, noise, warm afternoons, rare corrected errors.

    Of each hour there are five minutes, since a whole day of readings takes twelve seconds.
    """
    load, heat, corrected, replays, nvlink, energy, left = 0.0, 0.0, 17, 4000, 3, 1e9, 0
    for second in SECONDS_OF_A_DAY:
        if left <= 0:
            load, left = rng.choice([0.0, 0.3, 0.6, 1.0, 1.0]), rng.expovariate(1 / 300)
        left -= 1
        power = max(60.0, min(700.0, 90 + 610 * load + rng.gauss(0, 25)))
        heat += (power * 0.08 - heat) / 25
        ambient = 24 + 4 * math.sin(2 * math.pi * second / 86_400)
        corrected += rng.random() < 5 / len(SECONDS_OF_A_DAY)
        replays += rng.random() < 100 / len(SECONDS_OF_A_DAY)
        nvlink += rng.random() < 3 / len(SECONDS_OF_A_DAY)
        energy += power
        capped = 0x4 if power > 690 else 0x1 if load == 0 else 0
        # Once in an hour or two a query fails, as when another process starts on the device.
        error = 999 if rng.random() < 1 / 4000 else 0
        peak = 0x8 if rng.random() < 1e-3 and not second % 7 else 0  # one reading alone
        yield {
            "temperature": round(ambient + heat + rng.gauss(0, 0.5)),
            "memory_temperature": round(ambient + heat + 6 + rng.gauss(0, 0.5)),
            "power": power,
            "slowdown": capped | peak,
            "corrected": corrected,
            "pcie_replays": replays,
            "nvlink_replays": nvlink,
            "energy": energy * 1000,
            "utilization": round(100 * load),
            "error": error,
        }


@pytest.mark.slow
def test_an_ordinary_day_has_no_warning(fake_nvml):
    rng = random.Random(22)
    ticks = (" ".join(f"{name}={value:.0f}" for name, value in tick.items()) for tick in ordinary_day(rng))
    run = Run(fake_nvml(ticks).open(UUID))
    for _ in SECONDS_OF_A_DAY:
        run.second()
        assert run.watch.warning is None, (run.now, run.watch.warning)
        assert run.watch.problem is None, (run.now, run.watch.problem)
    assert (run.checkpoints, run.ended) == ([], None)
    assert run.watch.newest.devices[0].energy > 1e9
