"""The join of answers with late labels: in whatever order they come, in bounded memory, without what is erased."""

import json

import numpy as np
import pytest

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.extensions.served_answers import join as join_module
from anabranch.learner.extensions.served_answers.join import PARTS, AnswerJoin
from anabranch.learner.extensions.served_answers.topic import AnswerDecoder

BASE = np.uint64(0x9E3779B97F4A7C15)
LABEL = Schema(
    SchemaSettings.model_validate({"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 2}})
).label
OPEN, NOT_READ, READ = np.zeros(1, np.int64), 0.0, 100.0


class Bench:
    """Events of one partition, by offset: answered at 1,000 + offset by version offset % 2, labelled at 5,000."""

    def __init__(self):
        self.join = AnswerJoin(LABEL, 2)

    def columns(self, offsets, **more):
        found = np.array(offsets, np.int64)
        zeros = np.zeros(len(found), np.int32)
        keys = {"key_hash": found.astype(np.uint64) + 1, "group_hash": found.astype(np.uint64)}
        return {"partition": zeros, "offset": found, "row": zeros, **keys, **more}, np.full(len(found), BASE)

    def events(self, offsets):
        self.join.add_events(*self.columns(offsets))

    def answers(self, offsets, answered_ms=1000):
        offsets = np.array(offsets)
        output = np.stack([np.zeros(len(offsets)), offsets.astype(np.float64)], axis=1)
        times = np.full(len(offsets), answered_ms)
        self.join.add_answers(*self.columns(offsets, version=offsets % 2, answered_ms=times, output=output))

    def labels(self, offsets, labelled=True):
        offsets = np.array(offsets)
        columns = self.columns(
            offsets, label=offsets % 2, own=np.zeros((len(offsets), 2)), time_ms=np.full(len(offsets), 5000)
        )
        self.join.decide(*columns, np.full(len(offsets), labelled), 50.0)

    def settle(self, first_open=OPEN, read_until=NOT_READ):
        self.join.settle(first_open, read_until)

    @property
    def outcomes(self):
        return [(int(each["offset"]), int(each["version"])) for each in np.sort(self.join.outcomes, order="offset")]


@pytest.mark.parametrize("order", ["events answers labels", "answers events labels", "events labels answers"])
def test_the_order_in_which_events_and_answers_are_read_does_not_matter(order):
    bench = Bench()
    for each in order.split():
        getattr(bench, each)(range(10))
        bench.settle()
    assert bench.outcomes == [(offset, offset % 2) for offset in range(10)]
    assert bench.join.outcomes["key_hash"].tolist() == (bench.join.outcomes["offset"] + 1).tolist()


def test_the_first_answer_counts_and_only_if_it_was_written_before_the_label():
    bench = Bench()
    bench.events(range(6))
    bench.answers([0, 0, 1])
    bench.answers([1, 2], answered_ms=5000)
    bench.answers([3], answered_ms=9000)
    bench.labels(range(6))
    bench.settle()
    assert bench.outcomes == [(0, 0), (1, 1)]
    assert dict(bench.join.counts) == {"matched": 2, "late": 2, "unmatched": 0, "duplicate": 2, "unanswered": 0}
    assert len(bench.join.rows) == 2  # the labels of 4 and 5 wait for answers that are not read yet
    bench.settle(read_until=READ)
    assert (bench.join.counts["unanswered"], len(bench.join.rows)) == (2, 0)


def test_answers_whose_events_get_no_label_leave_once_the_events_have_ended():
    bench = Bench()
    bench.events(range(4))
    bench.answers(range(8))  # 4 to 7 are of events that the learner did not let wait, such as dead letters
    bench.labels([0, 1], labelled=False)
    bench.settle(first_open=np.array([6]))
    assert bench.outcomes == []
    assert bench.join.counts["unmatched"] == 6
    assert sorted(bench.join.rows["offset"].tolist()) == [6, 7]


def test_where_memory_is_short_identities_decide_which_events_are_left_out(monkeypatch):
    monkeypatch.setattr(join_module, "_ROWS", 1000)
    bench = Bench()
    for begin in range(0, 8000, 400):
        bench.events(range(begin, begin + 400))
        bench.answers(range(begin, begin + 400))
        bench.settle()
        assert len(bench.join.rows) <= 1000
    assert bench.join.part in (2**28, 2**29)
    bench.labels(range(8000))
    bench.settle()
    rows = bench.join.outcomes
    assert 400 < len(rows) <= 1000
    assert 0.4 < (rows["label"] == 1).mean() < 0.6
    for begin in range(8000, 40_000, 100):  # a burst does not leave events out permanently
        for each in (bench.events, bench.answers, bench.labels):
            each(range(begin, begin + 100))
        bench.settle()
    assert (bench.join.part, bench.join.least_part < PARTS) == (PARTS, True)


def test_what_is_left_out_stays_while_as_many_events_wait(monkeypatch):
    monkeypatch.setattr(join_module, "_ROWS", 1000)
    bench, parts = Bench(), set()
    for begin in range(0, 60_000, 100):  # 4,000 wait at each time
        bench.events(range(begin, begin + 100))
        bench.answers(range(begin, begin + 100))
        bench.labels(range(max(0, begin - 4000), max(0, begin - 3900)))
        bench.settle()
        if begin > 4000:
            parts.add(bench.join.part)
    assert len(parts) == 1


def test_the_newest_outcomes_of_the_newest_versions_stay(monkeypatch):
    monkeypatch.setattr(join_module, "_OF_VERSION", 3)
    monkeypatch.setattr(join_module, "_VERSIONS", 8)
    bench = Bench()
    for version in range(12):
        offsets = np.arange(version * 10, version * 10 + 5)
        more = {"version": np.full(5, version), "answered_ms": np.ones(5), "output": np.zeros((5, 2))}
        bench.join.add_answers(*bench.columns(offsets, **more))
        bench.labels(offsets)
        bench.settle()
    numbers, rows = np.unique(bench.join.outcomes["version"], return_counts=True)
    assert (numbers.tolist(), set(rows.tolist())) == ([*range(4, 12)], {3})


def test_a_restored_join_goes_on_and_what_is_erased_is_nowhere():
    bench = Bench()
    bench.events(range(8))
    bench.answers(range(6))
    bench.labels([0, 1, 6])
    bench.settle()
    columns = bench.join.columns()
    bench.join.erase(lambda each: np.isin(each["key_hash"], [1, 3]) | (each["offset"] == 4))
    assert bench.outcomes == [(1, 1)]
    assert sorted(bench.join.rows["offset"].tolist()) == [3, 5, 6, 7]
    restored = Bench()
    restored.join.restore(columns, 50.0)
    assert restored.outcomes == [(0, 0), (1, 1)]
    restored.labels(range(2, 6))
    restored.answers([6])
    restored.settle()
    assert [offset for offset, _ in restored.outcomes] == [0, 1, 2, 3, 4, 5, 6]


GOOD = [("model_version", b"7"), ("anabranch-source", b"pay.[1]-x[3]@12")]


@pytest.mark.parametrize(
    ("headers", "value"),
    [
        ([], {"prediction": 0, "probabilities": [0.5, 0.5]}),
        ([("model_version", b"7"), ("anabranch-source", b"pay")], {"prediction": 0, "probabilities": [0.5, 0.5]}),
        ([("model_version", b"\xff"), GOOD[1]], {"prediction": 0, "probabilities": [0.5, 0.5]}),
        (GOOD, b"{"),
        (GOOD, None),
        (GOOD, {"prediction": 1.5}),
        (GOOD, {"probabilities": [0.1, 0.2, 0.7]}),
        (GOOD, {"probabilities": ["a", "b"]}),
        (GOOD, {"probabilities": [10**400, 0]}),
        (GOOD, {"probabilities": [1e300, 0]}),
        (GOOD, b'{"probabilities": ' + b"[" * 100_000),
        ([GOOD[0], ("anabranch-source", None)], {"probabilities": [0.5, 0.5]}),
        ([GOOD[0], ("anabranch-source", b"pay[3]@9999999999999999999999")], {"probabilities": [0.5, 0.5]}),
        ([("model_version", b"9999999999999999999999"), GOOD[1]], {"probabilities": [0.5, 0.5]}),
        ([("model_version", b"-1"), GOOD[1]], {"probabilities": [0.5, 0.5]}),
    ],
)
def test_messages_that_are_no_answers_of_the_task_are_counted_and_others_are_read(headers, value):
    good = {"prediction": 1, "probabilities": [0.0, 1.0]}
    values = [each if each is None or isinstance(each, bytes) else json.dumps(each).encode() for each in (good, value)]
    messages = Messages(TopicPartition("answers", 0), [0, 1], [5, 5], [None, None], values, [GOOD, headers], 2)
    answers, unreadable = AnswerDecoder("two-classes", 2).decode(messages)
    assert unreadable == 1
    assert (answers.source, answers.offset, answers.version) == ([("pay.[1]-x", 3)], [12], [7])
    assert answers.output_NK.tolist() == [[pytest.approx(-87.3, abs=0.1), 0.0]]


def test_a_message_of_several_events_has_an_answer_for_each_or_none():
    value = json.dumps([{"prediction": 1.5}, None, {"prediction": -2}]).encode()
    messages = Messages(TopicPartition("answers", 0), [4], [5], [None], [value], [GOOD], 5)
    answers, unreadable = AnswerDecoder("number", 1).decode(messages)
    assert (answers.row, answers.output_NK.tolist(), unreadable) == ([0, 2], [[1.5], [-2.0]], 0)
