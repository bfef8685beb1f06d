"""The reader of answers, where they come without a pause: up to when it has read them, and of which partitions."""

import math
import time
from datetime import timedelta

import pytest

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.client import Lag, Messages
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.learner.extensions.served_answers import topic as topic_module
from anabranch.learner.extensions.served_answers.topic import AnswerDecoder, AnswersReader


class Busy:
    """A client of a topic that gets a message while another is read: none of its polls is empty."""

    def __init__(self, settings):
        self.num_partitions, self.read, self.assigned = 1, 0, []

    def open(self):
        pass

    def topic_ids(self):
        return {}

    def partitions(self):
        return [TopicPartition("answers", index) for index in range(self.num_partitions)]

    def first_offsets(self, partitions, start, moment):
        return dict.fromkeys(partitions, 0)

    def assign(self, positions):
        self.assigned = [*positions]

    def poll(self, timeout, limit):
        self.read += 1
        headers = [("model_version", b"7"), ("anabranch-source", b"pay[0]@1")]
        value = b'{"prediction": 1}'
        return [Messages(self.assigned[0], [self.read - 1], [5], [None], [value], [headers], self.read)]

    def lag(self):
        return Lag({each: self.read + 1 if each.partition == 0 else 0 for each in self.assigned})


@pytest.fixture
def reader(monkeypatch):
    monkeypatch.setitem(topic_module.CLIENTS, "kafka-python", Busy)
    monkeypatch.setattr(topic_module, "_ASK_SECONDS", 0.0)
    stream = StreamSettings(topics=("pay",))
    return AnswersReader(stream, "answers", timedelta(hours=1), AnswerDecoder("number", 1), lambda: None)


def test_what_had_been_written_at_some_time_is_read_although_more_comes_all_the_time(reader):
    begin = time.monotonic()
    reader._run()
    assert reader.take()[1] == -math.inf, "of two answers one is read"
    for _ in range(3):
        reader._run()
    answers, caught_up = reader.take()
    assert len(answers) == 3
    assert begin < caught_up <= time.monotonic()
    assert reader.problem is None


def test_new_partitions_are_read_although_more_comes_all_the_time(reader):
    reader._run()
    reader._client.num_partitions = 2
    reader._run()
    assert len(reader._client.assigned) == 2
