"""`anabranch dead-letters ls` and `resend`, with a broker."""

import json

import pytest
from kafka import KafkaProducer

from anabranch.commands import dead_letters
from anabranch.ingest.kafka.kafka_python.null_headers import sendable
from anabranch.ingest.kafka.producer import EventProducer

pytestmark = pytest.mark.services


@pytest.fixture
def topics(kafka, make_topic, monkeypatch):
    """The names of an event topic and of its dead-letter topic, in which there are five letters."""
    events, dead = make_topic(3), make_topic(1)
    monkeypatch.setenv("ANABRANCH__STREAM__BOOTSTRAP_SERVERS", kafka.bootstrap)
    monkeypatch.setenv("ANABRANCH__STREAM__TOPICS", json.dumps([events]))
    monkeypatch.setenv("ANABRANCH__STREAM__DEAD_LETTER_TOPIC", dead)
    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap, acks="all")
    for number, value, more in (
        (0, b"first", {}),
        (1, b"second", {}),
        (0, b"first", {}),
        (2, b"rows", {"anabranch-rows": b"3,17"}),
        (3, None, {"anabranch-truncated": b"value"}),
    ):
        own = [("trace", b"t%d" % number), ("trace", b""), ("anabranch-error", b"of an earlier pipeline"), ("z", None)]
        added = {
            "anabranch-error": b"label 12 is not in 0..9",
            "anabranch-source": b"%s[%d]@%d" % (events.encode(), 2 * (number == 1), number),
        }
        producer.send(dead, value=value, key=b"k%d" % number, headers=sendable([*own, *added.items(), *more.items()]))
    producer.flush()
    producer.close()
    return events, dead


@pytest.fixture
def run(example, anabranch):
    return lambda *arguments: anabranch("dead-letters", *arguments, "-c", example / "pipeline.toml")


def test_letters_are_listed_with_source_error_and_value(run, topics):
    events, _ = topics
    code, out, err = run("ls")
    assert (code, err, len(out.splitlines())) == (0, "", 6)
    assert f"{events}[0]@0" in out
    assert "label 12 is not in 0..9 (rows 3,17)" in out
    (last,) = json.loads(run("ls", "--limit", "1", "--json")[1])
    assert (last["source"], last["truncated"], last["value"]) == (f"{events}[0]@3", "value", None)


def test_each_message_is_sent_again_once_and_what_cannot_be_is_named(run, topics, kafka, consume_all):
    events, _ = topics
    code, out, _ = run("resend", "--all", "--dry-run")
    assert (code, out.splitlines()[0]) == (0, "would send 2 messages again")
    code, out, _ = run("resend", "--all", "--yes")
    assert (code, out.splitlines()) == (
        0,
        [
            "sent 2 messages again",
            f"skipped {events}[0]@2: only its rows 3,17 were bad, and the others were used; send those rows alone",
            f"skipped {events}[0]@3: the letter was too large, and lacks value",
        ],
    )
    first, second = consume_all(kafka.bootstrap, events, 2)
    assert (first.partition, first.key, first.value) == (0, b"k0", b"first")
    assert (second.partition, second.key, second.value) == (2, b"k1", b"second"), "the partition it came from"
    earlier = [("anabranch-error", b"of an earlier pipeline"), ("z", None)]
    assert list(second.headers) == [("trace", b"t1"), ("trace", b""), *earlier], "its own headers alone"


def test_a_row_of_a_file_is_sent_again_only_where_messages_are_json(run, topics, kafka, consume_all, monkeypatch):
    """With offsets of Kafka, it has the source of an event of the topic."""
    events, dead = topics
    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap, acks="all")
    added = {"anabranch-error": b"x is null", "anabranch-source": b"%s[0]@7" % events.encode()}
    producer.send(dead, b'{"x": null}', headers=[*added.items(), ("anabranch-format", b"json")])
    producer.flush()
    producer.close()
    source = f"{events}[0]@7"
    monkeypatch.setenv("ANABRANCH__STREAM__FORMAT", "rows")
    code, out, _ = run("resend", "--source", source, "--yes")
    why = "it is a row of a file, written as json, and stream.format is rows; encode it so"
    assert (code, out.splitlines()) == (0, ["sent 0 messages again", f"skipped {source}: {why}"])
    monkeypatch.setenv("ANABRANCH__STREAM__FORMAT", "json")
    assert run("resend", "--source", source, "--yes")[1].splitlines() == ["sent 1 messages again"]
    assert [record.value for record in consume_all(kafka.bootstrap, events, 1)] == [b'{"x": null}']


def test_letters_written_meanwhile_are_not_sent_and_memory_is_bounded(run, topics, kafka, consume_all, monkeypatch):
    events, dead = topics
    producer = KafkaProducer(bootstrap_servers=kafka.bootstrap)
    sources = [("anabranch-error", b"bad"), ("anabranch-source", f"{events}[0]@100".encode())]
    before, sent = EventProducer.send, []

    def send(self, value, **options):
        producer.send(dead, b"a letter again", headers=sources)
        producer.flush()
        sent.append(value)
        before(self, value, **options)

    read = dead_letters.read_dead_letters

    def read_lazily(settings):
        for number, letter in enumerate(read(settings)):
            assert number < 2 or sent, "letters are sent while they are read"
            yield letter

    monkeypatch.setattr(EventProducer, "send", send)
    monkeypatch.setattr(dead_letters, "read_dead_letters", read_lazily)
    assert run("resend", "--all", "--yes")[1].startswith("sent 2 messages again")
    producer.close()
    assert sorted(record.value for record in consume_all(kafka.bootstrap, events, 2)) == [b"first", b"second"]


def test_one_message_is_sent_again_by_its_source(run, topics, kafka, consume_all):
    events, dead = topics
    assert json.loads(run("resend", "--source", f"{events}[2]@1", "--yes", "--json")[1])["sent"] == [f"{events}[2]@1"]
    assert [each.value for each in consume_all(kafka.bootstrap, events, 1)] == [b"second"]
    code, _, err = run("resend", "--source", "nowhere[0]@1", "--yes")
    assert (code, err) == (2, f"anabranch: there is no dead letter of nowhere[0]@1 in {dead}\n")


def test_without_a_choice_nothing_is_sent(run):
    code, out, err = run("resend")
    assert (code, out) == (2, "")
    assert "name messages by --source, or take all by --all" in err
