"""Labels that come after their events, through a broker and the learner's process."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.learner.versions.format import Versions
from tests import forkserver
from tests.pipelines import LINEAR, adds_up

CONFIG = """
batch_size = 16
stop_timeout = "20s"
optimizer = {{name = "sgd", lr = 0.5}}
[stream.labels]
topics = ["{labels}"]
wait = "{wait}"
bytes = "5MB"
{settings}
[schema.key]
name = "id"
[versions]
publish_every = "100ms"
[checkpoints]
every = "300ms"
[gate]
holdout_fraction = 0.1
"""
Pipeline = Callable[..., Path]


def event(number):
    """An event of the class `number % 3`, without its label."""
    return {"id": str(number), "x": [float(number % 3 == each) for each in range(3)]}


def label(number):
    return {"id": str(number), "y": number % 3}


@pytest.fixture
def pipeline(write_pipeline):
    """Writes a pipeline with late labels and returns the path of its config."""

    def write(bootstrap, events, labels, wait="1h", settings="", **keys):
        rest = CONFIG.format(labels=labels, wait=wait, settings=settings)
        return write_pipeline(bootstrap, events, rest, LINEAR, **keys)

    return write


@pytest.fixture
def topics(make_topic):
    return make_topic(partitions=2), make_topic(partitions=2)


def waited(report):
    """How waiting events ended, over all partitions, by outcome; only what is not 0."""
    totals: dict[str, int] = {}
    for partition in report.partitions.values():
        for outcome, count in partition.waited.items():
            totals[outcome] = totals.get(outcome, 0) + count
    return {outcome: count for outcome, count in totals.items() if count}


def ended(report):
    """The number of events that have ended after they waited; checks that no event is lost."""
    assert adds_up(report)
    for partition in report.partitions.values():
        assert partition.waiting + sum(partition.waited.values()) == partition.outcomes.get("waiting", 0)
    return sum(waited(report).values())


def test_events_are_trained_on_with_their_late_labels(kafka, topics, produce, pipeline, start):
    events, labels = topics
    config = pipeline(kafka.bootstrap, events, labels)
    learner = start(config)
    for partition in range(2):
        numbers = range(partition * 300, partition * 300 + 300)
        produce(kafka.bootstrap, events, [event(number) for number in numbers], partition=partition)
    report = learner.wait_for(lambda each: each.outcomes.get("waiting") == 600)
    assert report.steps == 0
    assert ended(report) == 0
    assert {report.partitions[f"{events}:{index}"].trained_through for index in range(2)} == {-1}
    assert {report.partitions[f"{events}:{index}"].seen_through for index in range(2)} == {299}

    shuffled = [label(number) for number in range(600)]
    random.Random(0).shuffle(shuffled)
    produce(kafka.bootstrap, labels, shuffled[:550], partition=0)
    waiting = min(int(each["id"]) for each in shuffled[550:])
    through = (waiting if waiting < 300 else 300) - 1  # searched for a fiftieth of the time at most
    report = learner.wait_for(
        lambda each: ended(each) == 550 and each.partitions[f"{events}:0"].trained_through == through
    )
    assert report.outcomes["label"] == 550
    assert report.outcomes["trained"] == 0
    counts = waited(report)
    assert counts["trained"] + counts["held_out"] == 550
    assert 20 < counts["held_out"] == report.holdout_rows < 110
    assert report.replay_rows == {"device": counts["trained"]}

    produce(kafka.bootstrap, labels, shuffled[550:], partition=1)
    learner.wait_for(lambda each: ended(each) == 600 and each.partitions[f"{events}:1"].trained_through == 299)
    assert learner.stop() == 0
    versions = Versions(learner.state_dir / "versions")
    newest = versions.manifest(versions.numbers()[-1])
    newest_offsets = {f"{events}:0": 299, f"{events}:1": 299, f"{labels}:0": 549, f"{labels}:1": 49}
    labelled_through = {name: trained.offset for name, trained in newest.trained_through.items()}
    assert newest.seen_through == labelled_through == newest_offsets


@pytest.mark.parametrize("client", ["kafka-python", "confluent"])
def test_the_order_of_topics_does_not_matter_and_the_first_label_wins(kafka, topics, produce, pipeline, start, client):
    events, labels = topics
    config = pipeline(kafka.bootstrap, events, labels, stream=f'client = "{client}"')
    learner = start(config)
    second = [{**label(number), "y": (number + 1) % 3} for number in range(30)]
    unknown = [{"id": f"unknown-{number}", "y": 0} for number in range(5)]
    # One partition: labels of other partitions may come in any order.
    produce(kafka.bootstrap, labels, [*map(label, range(90)), *second, *unknown], partition=0)
    learner.wait_for(lambda each: each.outcomes.get("label") == 125)
    produce(kafka.bootstrap, events, list(map(event, range(90))), partition=1)
    report = learner.wait_for(lambda each: ended(each) == 90)
    assert waited(report).keys() <= {"trained", "held_out"}
    assert report.labels is not None
    assert report.labels.labels["matched"] == 90
    assert report.labels.labels["duplicate"] == 30
    assert report.labels.labels["late"] == report.labels.labels["unmatched"] == 0


def test_an_event_whose_label_does_not_come_ends_when_its_wait_is_over(kafka, topics, produce, pipeline, start):
    events, labels = topics
    config = pipeline(kafka.bootstrap, events, labels, "1s")
    now = int(time.time() * 1000)
    produce(kafka.bootstrap, events, list(map(event, range(60))), partition=0, timestamp_ms=now)
    late = {"id": "late", "y": 1}
    produce(kafka.bootstrap, labels, [*map(label, range(20)), late], partition=0, timestamp_ms=now)
    learner = start(config)  # no event times out before the labels that are there by then are read
    report = learner.wait_for(lambda each: ended(each) == 60)
    counts = waited(report)
    # Only events with a label are held out.
    assert counts["trained"] + counts.get("held_out", 0) == 20
    assert counts["skipped"] == 40
    assert report.partitions[f"{events}:0"].waited_skipped == {"timed_out": 40}
    report = learner.wait_for(lambda each: each.labels is not None and each.labels.labels["unmatched"] == 1)
    assert report.labels is not None
    assert report.labels.kept == 0
    assert report.labels.labels["timed_out"] == 40
    assert report.partitions[f"{events}:0"].trained_through == 59
    assert report.partitions[f"{labels}:0"].trained_through == 20


def test_accuracy_is_that_of_the_prediction_at_event_time(kafka, topics, produce, write_pipeline, start):
    """The model learns all events by the first labels, but predicted them before that."""
    events, labels = topics
    rest = CONFIG.format(labels=labels, wait="1h", settings="").replace(
        "holdout_fraction = 0.1", "holdout_fraction = 0"
    )
    zeros = "from torch import nn\ndef build():\n    m = nn.Linear(3, 3)\n    nn.init.zeros_(m.weight)\n"
    model = zeros + "    nn.init.zeros_(m.bias)\n    return m\n"
    learner = start(write_pipeline(kafka.bootstrap, events, rest, model))
    produce(kafka.bootstrap, events, list(map(event, range(600))), partition=0)
    learner.wait_for(lambda each: each.outcomes.get("waiting") == 600)
    produce(kafka.bootstrap, labels, list(map(label, range(600))), partition=0)
    report = learner.wait_for(lambda each: ended(each) == 600)
    # Zeros predict the first class, a third of the events; hindsight would be nearly perfect.
    assert report.accuracy["overall"] == pytest.approx(1 / 3)
    produce(kafka.bootstrap, events, list(map(event, range(600, 1200))), partition=0)
    learner.wait_for(lambda each: each.outcomes.get("waiting") == 1200)
    produce(kafka.bootstrap, labels, list(map(label, range(600, 1200))), partition=0)
    report = learner.wait_for(lambda each: ended(each) == 1200)
    assert report.accuracy["overall"] == pytest.approx(2 / 3)


BINARY = """
batch_size = 16
stop_timeout = "20s"
[stream.labels]
topics = ["{labels}"]
wait = "{wait}"
bytes = "5MB"
unmatched = "negative"
{settings}
[schema.key]
name = "id"
[checkpoints]
every = "300ms"
[gate]
holdout_fraction = 0.1
"""


@pytest.fixture
def binary(write_pipeline):
    """Writes a pipeline of two classes."""

    def write(bootstrap, events, labels, wait, settings):
        rest = BINARY.format(labels=labels, wait=wait, settings=settings)
        config = write_pipeline(bootstrap, events, rest, LINEAR.replace("Linear(3, 3)", "Linear(3, 2)"))
        config.write_text(config.read_text().replace("classes = 3", "classes = 2"))
        return config

    return write


def test_events_are_trained_on_before_their_label_comes_and_again_if_it_is_positive(
    kafka, topics, produce, binary, start
):
    events, labels = topics
    learner = start(binary(kafka.bootstrap, events, labels, "1h", 'early = "negative-then-correct"'))
    produce(kafka.bootstrap, events, list(map(event, range(300))), partition=0)
    report = learner.wait_for(lambda each: each.outcomes.get("waiting") == 300 and each.steps)
    early = learner.metric('learner_rows_trained_total{source="new"}')
    assert 240 < early < 300  # all but those that will be held out, and of the last ones those that wait for a step
    assert report.replay_rows == {"device": 0}
    assert report.accuracy == {}

    produce(kafka.bootstrap, labels, [{"id": str(each), "y": int(each % 3 == 0)} for each in range(300)], partition=0)
    report = learner.wait_for(lambda each: ended(each) == 300)
    trained = waited(report)["trained"]
    assert early <= trained < 300
    assert waited(report) == {"trained": trained, "held_out": 300 - trained}
    assert report.replay_rows == {"device": trained}
    assert report.holdout_rows == 300 - trained
    # Only the positives were trained on a second time.
    again = learner.metric('learner_rows_trained_total{source="new"}') - trained
    assert 60 < again < 110
    assert report.accuracy["overall"] > 0.5
    assert learner.stop() == 0


def test_a_label_that_comes_after_the_time_out_takes_the_negative_back(kafka, topics, produce, binary, start):
    events, labels = topics
    learner = start(binary(kafka.bootstrap, events, labels, "1h", "take_back = true"))
    before = int(time.time() * 1000) - 6_000_000  # a label may come until two hours after the event
    produce(kafka.bootstrap, events, list(map(event, range(100))), partition=0, timestamp_ms=before)
    report = learner.wait_for(lambda each: ended(each) == 100)
    assert set(waited(report)) == {"timed_out", "held_out"}
    stored = report.replay_rows
    late = [{"id": str(each), "y": 1} for each in range(40)]
    produce(kafka.bootstrap, labels, late, partition=0, timestamp_ms=before + 4_800_000)
    report = learner.wait_for(lambda each: each.labels is not None and each.labels.labels["taken_back"] == 40)
    trained = 100 - waited(report)["held_out"]
    report = learner.wait_for(lambda _: learner.metric('learner_rows_trained_total{source="new"}') > trained + 20)
    assert ended(report) == 100
    assert report.replay_rows == stored
    assert learner.stop() == 0


@pytest.mark.slow
def test_a_backlog_ends_as_an_offline_join_although_the_learner_is_killed(kafka, topics, produce, binary, start):
    """Of four events one has a label in time, one after it timed out, one too late to be taken back, and one none."""
    events, labels = topics
    config = binary(kafka.bootstrap, events, labels, "1h", 'early = "negative-then-correct"\ntake_back = true')
    minute, before, numbers = 60_000, int(time.time() * 1000) - 6 * 3_600_000, range(600)
    produce(kafka.bootstrap, events, list(map(event, numbers)), partition=0, timestamp_ms=before)
    for kind, lag in enumerate((10 * minute, 100 * minute, 150 * minute)):
        found = [{"id": str(number), "y": 1} for number in numbers if number % 4 == kind]
        produce(kafka.bootstrap, labels, found, partition=kind % 2, timestamp_ms=before + lag)
    for least in (50, 200, 400):
        learner = start(config)
        learner.wait_for(lambda each, least=least: ended(each) >= least)
        learner.kill()
    learner = start(config)
    report = learner.wait_for(
        lambda each: ended(each) == 600 and each.labels is not None and each.labels.labels["taken_back"] == 150
    )
    counts = waited(report)
    assert counts.keys() == {"trained", "timed_out", "held_out"}
    assert 100 < counts["trained"] <= 150
    assert 380 < counts["timed_out"] <= 450
    assert sum(counts.values()) == 600
    assert report.labels is not None
    found = report.labels.labels
    assert (found["matched"], found["timed_out"], found["taken_back"]) == (150, 450, 150)
    assert (report.labels.waiting, found["dropped"], found["no_room"], report.problems) == (0, 0, 0, [])
    assert learner.stop() == 0


def test_two_ranks_train_on_the_events_that_the_first_joins(kafka, topics, produce, pipeline, start):
    events, labels = topics
    learner = start(pipeline(kafka.bootstrap, events, labels), ANABRANCH__LEARNER__REPLICAS="2")
    produce(kafka.bootstrap, events, list(map(event, range(300))), partition=0)
    learner.wait_for(lambda each: each.outcomes.get("waiting") == 300)
    produce(kafka.bootstrap, labels, list(map(label, range(300))), partition=0)
    report = learner.wait_for(lambda each: ended(each) == 300)
    counts = waited(report)
    assert report.replay_rows == {"device": counts["trained"]}
    assert report.steps < 20  # each of both ranks' 16 events
    assert report.accuracy["overall"] < 0.9
    assert learner.stop() == 0


def test_an_erased_event_does_not_wait_any_more_and_its_label_finds_nothing(kafka, topics, produce, pipeline, start):
    events, labels = topics
    config = pipeline(kafka.bootstrap, events, labels)
    learner = start(config)
    produce(kafka.bootstrap, events, list(map(event, range(60))), partition=0)
    learner.wait_for(lambda each: each.outcomes.get("waiting") == 60)
    # One by a tombstone in each kind of topic, one by a command.
    produce(kafka.bootstrap, events, [None], partition=0, key=b"7")
    produce(kafka.bootstrap, labels, [None], partition=0, key=b"8")
    done = forkserver.run(["-m", "anabranch", "erase", "--key", "9", "--yes", "-c", str(config)], env=os.environ)
    assert done.returncode == 0, done.stderr
    report = learner.wait_for(lambda each: ended(each) == 3 and each.erased_through == 3)
    assert report.partitions[f"{events}:0"].waited_skipped == {"erased": 3}
    learner.kill()
    learner = start(config)
    produce(kafka.bootstrap, labels, list(map(label, range(60))), partition=0)
    report = learner.wait_for(lambda each: ended(each) == 60)
    counts = waited(report)
    assert counts["skipped"] == 3
    assert counts["trained"] + counts.get("held_out", 0) == 57
    assert learner.stop() == 0


def test_without_late_labels_a_learner_does_not_start_while_events_wait(kafka, topics, produce, pipeline, start):
    events, labels = topics
    config = pipeline(kafka.bootstrap, events, labels)
    learner = start(config)
    produce(kafka.bootstrap, events, list(map(event, range(20))), partition=0)
    learner.wait_for(lambda each: each.outcomes.get("waiting") == 20)
    assert learner.stop() == 0
    text = config.read_text()
    begin = text.index("[stream.labels]")
    config.write_text(text[:begin] + text[text.index("[schema.key]", begin) :])
    done = forkserver.run(["-m", "anabranch.learner", "-c", str(config)], env=os.environ)
    assert done.returncode == 2
    said = done.stderr.strip().splitlines()[-1]
    assert "has 20 events that wait for their labels, and there is no [stream.labels]; put it back" in said
