"""Which messages are blamed for the end of an ingest process."""

import logging

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
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
