"""Silence is counted only while somebody listens."""

from ingest.reader.hang_detector import SILENT_SECONDS, HangDetector, Liveness

LATER = [Liveness.NOTHING, Liveness.SILENT, Liveness.NOTHING]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def looks(silence: HangDetector, clock: Clock, seconds: float) -> list[Liveness]:
    """Look so long, ten times a second; return what was told, each change of it once."""
    told: list[Liveness] = []
    for _ in range(int(seconds * 10)):
        clock.now += 0.1
        one = silence.look()
        if told[-1:] != [one]:
            told.append(one)
    return told


def test_a_process_is_asked_once_and_hangs_only_after_that() -> None:
    clock = Clock()
    silence = HangDetector(clock)
    assert looks(silence, clock, SILENT_SECONDS - 1) == [Liveness.NOTHING, Liveness.ASK, *LATER]
    silence.heard()
    assert looks(silence, clock, SILENT_SECONDS + 1) == [Liveness.NOTHING, Liveness.ASK, *LATER, Liveness.HANGS]


def test_one_that_does_not_answer_is_said_to_be_silent_within_30_s() -> None:
    clock = Clock()
    silence = HangDetector(clock)
    while silence.look() is not Liveness.SILENT:
        clock.now += 0.1
    assert clock.now < 26


def test_whoever_was_suspended_blames_nobody() -> None:
    clock = Clock()
    silence = HangDetector(clock)
    clock.now += 3600
    assert silence.look() is Liveness.NOTHING
    assert looks(silence, clock, SILENT_SECONDS / 2 - 2) == [Liveness.NOTHING]
