"""Measures of what servers have answered, through a broker and the learner's process."""

import contextlib
import json
import time

import pytest
from kafka import KafkaProducer

from anabranch.learner.versions.format import Versions

CONFIG = """
batch_size = 16
stop_timeout = "20s"
optimizer = {{name = "sgd", lr = 0.5}}
[stream.labels]
topics = ["{labels}"]
wait = "1h"
bytes = "5MB"
[schema.key]
name = "id"
[versions]
publish_every = "1h"
[checkpoints]
every = "300ms"
[gate]
holdout_fraction = 0.1
[serving.stream]
topics = ["{events}"]
output = "{answers}"
"""
RIGHT, WRONG = 1, 2
"""Versions: of one half of the answers that are right, and of another that are wrong."""


def event(number):
    return {"id": str(number), "x": [float(number % 3 == each) for each in range(3)]}


def label(number):
    return {"id": str(number), "y": number % 3}


def answer(number, version):
    """What a server writes: an answer that is right, or wrong by the version `WRONG`."""
    chosen = (number + (version == WRONG)) % 3
    probabilities = [0.8 if each == chosen else 0.1 for each in range(3)]
    return {"prediction": chosen, "probabilities": probabilities}


class Answers:
    """A topic of answers, as `[serving.stream]` writes them."""

    def __init__(self, kafka, make_topic):
        self.bootstrap, self.topic = kafka.bootstrap, make_topic(2)

    def write(self, events, numbers, *, partition=0, timestamp_ms=None, version=None):
        """Answer the events of partition 0, whose offsets are their numbers, by `version` or each by another."""
        with contextlib.closing(KafkaProducer(bootstrap_servers=self.bootstrap)) as producer:
            for number in numbers:
                by = version or (RIGHT if number % 2 else WRONG)
                source = f"{events}[0]@{number}".encode()
                headers = [("model_version", str(by).encode()), ("anabranch-source", source)]
                value = json.dumps(answer(number, by)).encode()
                producer.send(self.topic, value, None, headers, partition, timestamp_ms)
            producer.flush()


@pytest.fixture
def answers(kafka, make_topic):
    return Answers(kafka, make_topic)


@pytest.fixture
def served(kafka, make_topic, write_pipeline, answers):
    """Topics of events and labels, and a config that reads answers back."""
    events, labels = make_topic(2), make_topic(1)

    def write(**more):
        rest = CONFIG.format(events=events, labels=labels, answers=answers.topic)
        return write_pipeline(kafka.bootstrap, events, rest, **more)

    return events, labels, write


def counts(report):
    """What became of the answers; only what is not 0."""
    return {} if report.live is None else {name: count for name, count in report.live.answers.items() if count}


def answered(report):
    """Answers whose event has its label by now, or none any more."""
    found = counts(report)
    return found.get("matched", 0) + found.get("unmatched", 0)


@pytest.mark.parametrize("client", ["kafka-python", "confluent"])
def test_each_version_is_measured_by_what_it_has_answered(kafka, served, answers, produce, start, client):
    events, labels, write = served
    learner = start(write(stream=f'client = "{client}"'))
    produce(kafka.bootstrap, events, list(map(event, range(300))), partition=0)
    answers.write(events, range(150))
    answers.write(events, range(150, 300), partition=1)
    report = learner.wait_for(lambda each: each.live is not None and each.live.waiting == 300)
    assert counts(report) == {}
    produce(kafka.bootstrap, labels, list(map(label, range(300))), timestamp_ms=int(time.time() * 1000) + 60_000)
    report = learner.wait_for(lambda each: counts(each) == {"matched": 300} and len(each.live.served) == 3)
    assert {name: each.rows for name, each in report.live.served.items()} == {"all": 300, "1": 150, "2": 150}
    assert report.live.waiting == 0

    def measured(each):
        return all("balanced_accuracy" in found.value for found in each.live.served.values())

    report = learner.wait_for(measured)
    found = {name: each.value["balanced_accuracy"] for name, each in report.live.served.items()}
    assert found == {"all": pytest.approx(0.5), "1": 1.0, "2": 0.0}
    both = report.live.served["all"]
    assert both.lower["balanced_accuracy"] < 0.5 < both.upper["balanced_accuracy"]
    assert 'served_measure{measure="balanced_accuracy",version="1"} 1.0' in learner.get("/metrics")
    assert learner.stop() == 0


def test_a_learner_that_is_killed_counts_no_answer_twice_and_none_never(kafka, served, answers, produce, start):
    events, labels, write = served
    config, later = write(), int(time.time() * 1000) + 60_000
    produce(kafka.bootstrap, events, list(map(event, range(400))), partition=0)
    answers.write(events, range(0, 400, 2))
    learner = start(config)
    learner.wait_for(lambda each: each.live is not None and each.live.waiting == 400 and each.checkpoint)
    learner.kill()
    produce(kafka.bootstrap, labels, list(map(label, range(200))), timestamp_ms=later)
    learner = start(config)
    learner.wait_for(lambda each: counts(each).get("matched", 0) == 100)
    learner.kill()
    answers.write(events, range(1, 400, 2))  # of half of the events the label was there before
    produce(kafka.bootstrap, labels, list(map(label, range(200, 400))), timestamp_ms=later)
    learner = start(config)
    report = learner.wait_for(lambda each: answered(each) == 400)
    found = counts(report)
    assert found.get("unmatched", 0) == found.get("unanswered", 0) <= 100
    assert report.live.served["all"].rows == found["matched"]
    assert report.live.waiting == 0
    assert learner.stop() == 0


def test_events_of_a_history_wait_for_no_answer_and_answers_wait_for_its_end(kafka, served, answers, produce, start):
    events, labels, write = served
    produce(kafka.bootstrap, events, list(map(event, range(40))), partition=0)
    answers.write(events, range(40))
    config = write(stream='[stream.backfill]\nfiles = ["a.jsonl"]\nuntil = "2000-01-01T00:00:00Z"')
    rows = [json.dumps(event(number)) for number in range(1000, 1300)]
    config.with_name("a.jsonl").write_text("\n".join(rows))
    learner = start(config)
    learner.wait_for(lambda each: each.labels is not None and each.labels.waiting == 340 and each.live.waiting == 40)
    produce(kafka.bootstrap, labels, list(map(label, range(40))), timestamp_ms=int(time.time() * 1000) + 60_000)
    report = learner.wait_for(lambda each: each.live.waiting == 0 and answered(each) == 40)
    assert counts(report) == {"matched": 40}


def test_an_answer_that_comes_after_its_label_is_not_measured_and_a_sentence_says_so(
    kafka, served, answers, produce, start
):
    events, labels, write = served
    learner, now = start(write()), int(time.time() * 1000)
    produce(kafka.bootstrap, events, list(map(event, range(60))), partition=0, timestamp_ms=now)
    answers.write(events, range(60), timestamp_ms=now + 2_000)
    produce(kafka.bootstrap, labels, list(map(label, range(60))), timestamp_ms=now + 1_000)
    report = learner.wait_for(lambda each: counts(each).get("late") == 60 and each.warnings)
    assert report.live.served == {}
    assert "60 answers were written after the labels" in "".join(report.warnings)


def test_a_topic_of_answers_that_is_missing_is_a_sentence_until_it_is_there(
    kafka, served, answers, produce, start, make_topic, create_topic
):
    events, labels, write = served
    config, missing = write(), f"{answers.topic}-missing"
    config.write_text(config.read_text().replace(answers.topic, missing))
    learner = start(config)
    produce(kafka.bootstrap, events, list(map(event, range(40))), partition=0)
    learner.wait_for(lambda each: any(missing in problem for problem in each.problems))
    produce(kafka.bootstrap, labels, list(map(label, range(40))))
    learner.wait_for(lambda each: each.outcomes.get("label") == 40)  # training goes on
    create_topic(kafka.bootstrap, missing, 2)
    learner.wait_for(lambda each: not each.problems)


def test_versions_that_answer_worse_than_the_one_before_are_withdrawn(kafka, served, answers, produce, start):
    events, labels, write = served
    config, later = write(), int(time.time() * 1000) + 60_000
    text = config.read_text().replace('publish_every = "1h"', 'publish_every = "100ms"')
    config.write_text(text.replace("[gate]", "[gate]\nmeasures = {log_loss = 0.02}"))
    learner = start(config)
    for numbers, version in ((range(300), RIGHT), (range(300, 600), WRONG)):
        produce(kafka.bootstrap, events, list(map(event, numbers)), partition=0)
        answers.write(events, numbers, version=version)
        learner.wait_for(lambda each: each.live is not None and each.live.waiting == 300)
        produce(kafka.bootstrap, labels, list(map(label, numbers)), timestamp_ms=later)
        learner.wait_for(
            lambda each, through=numbers.stop: counts(each).get("matched") == through and (each.version or 0) >= WRONG
        )
    learner.wait_for(lambda each: each.withdrawn)
    verdict = Versions(learner.state_dir / "versions").verdict(WRONG)
    assert verdict is not None
    assert verdict.verdict == "fail"
    assert f"after {RIGHT} have answered is worse than what those before have, by log_loss" in verdict.reasons[0]
