"""Which messages are blamed for the end of an ingest process, and how long it may be silent."""

import logging

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.reader.reader import SILENT_SECONDS, HangDetector, Liveness
from anabranch.ingest.reader.suspects import Suspects

A, B = TopicPartition("events", 0), TopicPartition("events", 1)
TABLE = [(A, Position(0)), (B, Position(0))]


def test_a_message_that_ended_two_processes_alone_is_refused_and_named(caplog):
    suspects = Suspects()
    with caplog.at_level(logging.ERROR):
        assert suspects.add([(B, 10, 20), (A, 1, 3)]) == "events[1]@10 to 19 and messages of 1 more partitions"
        assert suspects.add([(B, 12, 13)]) == "events[1]@12"
        assert suspects.refused(TABLE) == []
        assert not caplog.records
        suspects.add([(B, 12, 13)])
    assert suspects.refused(TABLE) == [(1, 12)]
    assert caplog.messages[0].startswith("events[1]@12: the ingest process ended twice while it decoded this message")


def test_what_was_decoded_together_is_suspected_and_not_refused():
    suspects = Suspects()
    for _ in range(5):
        suspects.add([(A, 10, 20)])
    assert suspects.refused(TABLE) == []
    assert suspects.suspects(TABLE) == [(0, 10, 20)]


def test_a_process_that_decoded_nothing_blames_nothing():
    suspects = Suspects()
    assert suspects.add([]) is None
    assert (suspects.suspects(TABLE), suspects.refused(TABLE)) == ([], [])


def test_partitions_that_are_no_longer_known_are_left_out():
    suspects = Suspects()
    suspects.add([(A, 10, 11)])
    suspects.add([(A, 10, 11)])
    assert (suspects.suspects(TABLE[1:]), suspects.refused(TABLE[1:])) == ([], [])


def test_rows_of_files_are_given_up_after_three_processes_and_not_dead_lettered():
    suspects, file = Suspects(), TopicPartition("history", 0, 0, 1)
    table = [(file, Position(0))]
    for deaths in range(3):
        assert suspects.fatal_row() is None
        assert suspects.add([(file, 4000, 4000)]) == "rows of files from row 4,000 of all on", deaths
    assert suspects.fatal_row() == 4000
    assert (suspects.refused(table), suspects.suspects(table)) == ([], [])


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
