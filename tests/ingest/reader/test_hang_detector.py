"""Time without a message is counted only while this process waits for one."""

from anabranch.ingest.reader.reader import SILENT_SECONDS, HangDetector, Liveness

AFTER_PING = [Liveness.ALIVE, Liveness.SILENT, Liveness.ALIVE]


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def check_for(detector, clock, seconds):
    """Check ten times a second for `seconds`; return what was returned, each change of it once."""
    changes: list[Liveness] = []
    for _ in range(int(seconds * 10)):
        clock.now += 0.1
        liveness = detector.check()
        if changes[-1:] != [liveness]:
            changes.append(liveness)
    return changes


def test_a_process_is_pinged_once_and_hangs_only_after_that():
    clock = Clock()
    detector = HangDetector(clock)
    assert check_for(detector, clock, SILENT_SECONDS - 1) == [Liveness.ALIVE, Liveness.PING, *AFTER_PING]
    detector.reset()
    assert check_for(detector, clock, SILENT_SECONDS + 1) == [
        Liveness.ALIVE,
        Liveness.PING,
        *AFTER_PING,
        Liveness.HUNG,
    ]


def test_a_process_that_does_not_answer_is_silent_within_30_s():
    clock = Clock()
    detector = HangDetector(clock)
    while detector.check() is not Liveness.SILENT:
        clock.now += 0.1
    assert clock.now < 26


def test_time_in_which_the_detector_was_suspended_does_not_count():
    clock = Clock()
    detector = HangDetector(clock)
    clock.now += 3600
    assert detector.check() is Liveness.ALIVE
    assert check_for(detector, clock, SILENT_SECONDS / 2 - 2) == [Liveness.ALIVE]
