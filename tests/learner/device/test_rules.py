"""The rules, one by one, on readings that are written by hand."""

import math
from datetime import timedelta

import pytest

from anabranch.learner.device.health_rules import FLAGS, RISES, XIDS, Level, extrapolated, is_usable, judge, rise
from anabranch.learner.device.reading import DeviceInfo, Reading
from anabranch.learner.settings.learner import DeviceSettings
from tests.support.nvml import reading

INFO = DeviceInfo(uuid="GPU-1", name="a device", slowdown_celsius=90, memory_max_celsius=95, nvlinks=4)
SETTINGS = DeviceSettings()
GPU, MEMORY, CORRECTED = "temperatures.gpu", "temperatures.memory", "ecc_errors.corrected"


def readings(seconds=60, **values):
    """One reading a second; a value is a constant, or a function of the time."""
    return [
        reading(float(time), **{name: value(time) if callable(value) else value for name, value in values.items()})
        for time in range(seconds)
    ]


def symptoms(given, silence=0.0, ranks=1):
    found = judge(given, INFO, SETTINGS, silence=silence, ranks=ranks)
    return {symptom.rule: symptom.level for symptom in found}


def test_a_device_that_reports_nothing_is_well():
    assert symptoms(readings()) == {}


def test_counters_that_began_before_the_process_are_no_symptom():
    assert symptoms(readings(**dict.fromkeys((rule.field for rule in RISES[2:]), 10**6))) == {}


@pytest.mark.parametrize("rule", RISES, ids=lambda rule: rule.field)
def test_a_counter_is_a_symptom_from_its_least_rise_on(rule):
    least = rule.least(SETTINGS)
    before, after = (readings(2, **{rule.field: lambda time, n=n: 7 + n * time}) for n in (least - 1, least))
    assert rule.field not in symptoms(before)
    assert symptoms(after)[rule.field] is rule.level


def test_a_counter_that_was_reset_has_not_risen():
    assert rise(readings(5, pcie_replays=lambda time: 100 - time), "pcie_replays") == 0


def test_a_reading_that_lacks_a_counter_is_passed_over():
    given = readings(5, **{CORRECTED: lambda time: None if time in (0, 4) else 10 * time})
    assert rise(given, CORRECTED) == 20


@pytest.mark.parametrize("rule", FLAGS, ids=lambda rule: rule.field)
def test_a_state_from_before_the_process_does_not_end_it(rule):
    found = symptoms(readings(**{rule.field: 1}))
    assert found == {f"{rule.field} now": rule.level}
    assert Level.FATAL not in found.values()


@pytest.mark.parametrize("number", XIDS)
def test_an_xid_of_the_table_is_a_symptom(number):
    given = [*readings(5), Reading(time=5.0, xids=(number,))]
    fatal = XIDS[number].level == "fatal"
    assert symptoms(given, ranks=2) == {f"xid {number}": Level.FATAL if fatal else Level.EARLY}


def test_an_xid_of_nvlink_is_fatal_for_several_ranks_alone():
    given = [*readings(5), Reading(time=5.0, xids=(74,))]
    assert symptoms(given, ranks=1) == {"xid 74": Level.EARLY}
    assert symptoms(given, ranks=2) == {"xid 74": Level.FATAL}


@pytest.mark.parametrize("number", [13, 31, 43, 45, 68])
def test_an_xid_of_an_application_is_no_symptom_of_the_device(number):
    assert symptoms([*readings(5), Reading(time=5.0, xids=(number,))]) == {}


def test_a_lost_device_is_fatal_and_nothing_else_is_judged():
    given = [*readings(5, nvlink_active=4), Reading(time=5.0, lost="GPU is lost")]
    assert symptoms(given) == {"lost": Level.FATAL}


@pytest.mark.parametrize(
    ("seconds", "level"), [(0.9, None), (1.4, None), (1.5, Level.EARLY), (9.9, Level.EARLY), (10.0, Level.PROBLEM)]
)
def test_silence_is_a_symptom(seconds, level):
    assert symptoms(readings(5), silence=seconds).get("silence") is level


def test_nvlink_connections_that_go_down_are_a_problem_for_several_ranks():
    assert symptoms(readings(nvlink_active=4)) == {}
    assert symptoms(readings(nvlink_active=3), ranks=2) == {"nvlink_active": Level.PROBLEM}
    assert symptoms(readings(nvlink_active=3), ranks=1) == {"nvlink_active": Level.EARLY}


@pytest.mark.parametrize(
    ("reason", "power", "found"),
    [
        ("power_cap", 700, {}),
        ("idle", 60, {}),
        ("clock_setting", 300, {}),
        ("thermal", 650, {"slowdown thermal": Level.EARLY}),
        ("hardware_thermal", 650, {"slowdown thermal": Level.EARLY}),
        ("power_brake", 400, {"slowdown brake": Level.EARLY}),
        ("power_brake", 690, {}),
        ("hardware", 400, {"slowdown brake": Level.EARLY}),
    ],
)
def test_a_slowdown_is_a_symptom_if_it_is_not_due_to_the_limit_of_power(reason, power, found):
    assert symptoms(readings(2, slowdown=[reason], power=power, power_limit=700)) == found
    assert symptoms(readings(2, slowdown=lambda time: [reason] * time, power=power, power_limit=700)) == {}


class TestHeat:
    def test_a_temperature_that_is_high_and_steady_is_no_symptom(self):
        assert symptoms(readings(**{GPU: 86.0, MEMORY: 90.0})) == {}

    @pytest.mark.parametrize("seconds", [10, 30, 60])
    @pytest.mark.parametrize("before", [40, 60, 76, 82])
    def test_a_load_that_begins_is_no_symptom(self, before, seconds):
        """The temperature comes 4 degrees near the limit, by less and less."""
        rising = readings(300, **{GPU: lambda t: round(86 - (86 - before) * math.exp(-max(0, t - 90) / seconds))})
        for now in range(2, 300):
            assert symptoms(rising[:now]) == {}, now

    def test_a_rise_that_reaches_the_limit_within_a_minute_is_one(self):
        assert symptoms(readings(105, **{GPU: lambda time: 66 + 0.22 * time})) == {"temperature": Level.EARLY}

    def test_the_memory_has_its_own_limit(self):
        given = readings(105, **{GPU: 60.0, MEMORY: lambda time: 71 + 0.22 * time})
        assert symptoms(given) == {"memory_temperature": Level.EARLY}

    def test_the_limit_itself_is_one(self):
        assert symptoms(readings(1, **{GPU: 90.0})) == {"temperature": Level.EARLY}


def test_the_gravest_symptom_is_first():
    given = [*readings(5, **{GPU: 91.0}), reading(5.0, **{GPU: 91.0, "remapped_rows.failed": 1, "xids": (48,)})]
    levels = [symptom.level for symptom in judge(given, INFO, SETTINGS, silence=30.0)]
    assert levels == sorted(levels, reverse=True)
    assert set(levels) == {Level.FATAL, Level.PROBLEM, Level.EARLY}


def test_a_sentence_has_the_count_and_the_window():
    settings = DeviceSettings(window=timedelta(minutes=5))
    (symptom,) = judge(readings(3, **{CORRECTED: lambda time: 20 * time}), INFO, settings)
    assert symptom.sentence == "40 memory errors that ECC corrected within 5 min"


def test_rises_are_extrapolated_by_their_ratio():
    assert extrapolated([10, 12, 14]) == 20
    assert extrapolated([10, 14, 16]) == 16 + 2 * (1 / 2 + 1 / 4 + 1 / 8)
    assert extrapolated([10, 11, 14]) == 23  # a ratio is at most 1
    assert extrapolated([10, 10, 12]) == 12  # one rise alone may be a load that begins
    assert extrapolated([14, 12, 10]) == 10


@pytest.mark.parametrize(
    ("values", "usable"),
    [({}, True), ({"recovery": 1}, False), ({"remapped_rows.failed": 1}, False), ({"lost": "gone"}, False)],
)
def test_a_start_uses_devices_that_need_no_reset(values, usable):
    assert is_usable(reading(0.0, **values)) is usable
