"""`anabranch produce`: what goes into the topic, and what is said of it."""

import io
import json
import os
import sys

import numpy as np
import pytest

from anabranch.commands.produce import STDIN, send_events
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.registry import make_format
from anabranch.ingest.formats.rows import row_dtype
from anabranch.learner.stream.trained_through import parse_trained_through
from tests.support.formats import FORMATS

pytestmark = pytest.mark.services

EVENT = b'{"x": [0.5%s], "y": 7}' % (b",0" * 63)


@pytest.fixture
def environment(kafka, make_topic, monkeypatch):
    """Points pipelines at the broker; returns the name of a topic of two partitions."""
    topic = make_topic(2)
    monkeypatch.setenv("ANABRANCH__STREAM__BOOTSTRAP_SERVERS", kafka.bootstrap)
    monkeypatch.setenv("ANABRANCH__STREAM__TOPICS", json.dumps([topic]))
    return topic


@pytest.fixture(autouse=True)
def _in_the_folder_of_the_example(example, monkeypatch):
    monkeypatch.chdir(example)


@pytest.fixture
def values(kafka, consume_all):
    """Returns the values in a topic."""

    def read(topic, at_least=0):
        return [record.value for record in consume_all(kafka.bootstrap, topic, at_least)]

    return read


def test_lines_are_sent_as_they_are_and_the_last_offsets_printed(anabranch, environment, example, values):
    code, out, err = anabranch("produce", "events.jsonl")
    assert (code, err) == (0, f"sent 20 events to {environment}; the last offsets:\n")
    assert parse_trained_through(out.strip()) == {f"{environment}:0": 9, f"{environment}:1": 9}
    assert sorted(values(environment, 20)) == sorted((example / "events.jsonl").read_bytes().splitlines())


def test_the_result_as_json(anabranch, environment):
    code, out, _ = anabranch("produce", "events.jsonl", "--json")
    document = json.loads(out)
    assert (code, document["topic"], document["events"]) == (0, environment, 20)
    assert document["last_offsets"] == f"{environment}:0=9,{environment}:1=9"


def test_stdin_is_a_source(anabranch, environment, values, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(EVENT + b"\r\n\n" + EVENT)))
    code, _, err = anabranch("produce", "-")
    assert (code, err) == (0, f"sent 2 events to {environment}; the last offsets:\n")
    assert values(environment, 2) == [EVENT, EVENT]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (b"{broken", "JSON is malformed"),
        (b"[1]", "Expected `object`, got `array`"),
        (b'{"y": 3}', "Object missing required field `x`"),
        (EVENT.replace(b"7}", b"10}"), "Expected `int` <= 9 - at `$.y`"),
        (EVENT.replace(b"0.5", b'"0.5"'), "Expected `float`, got `str` - at `$.x[0]`"),
    ],
)
def test_a_bad_line_is_named_and_those_before_it_are_sent(anabranch, environment, example, values, line, wrong):
    (example / "bad.jsonl").write_bytes(b"\n".join([EVENT, EVENT, line, EVENT]))
    code, out, err = anabranch("produce", "bad.jsonl")
    assert (code, out) == (2, "")
    assert err.startswith(f"anabranch: bad.jsonl, line 3: {wrong}")
    assert err.endswith("; events sent before it: 2; correct it or [schema], or skip such events by --on-error skip\n")
    assert len(values(environment, 2)) == 2


def test_an_integer_out_of_its_bounds_is_named(anabranch, environment, example):
    path = example / "pipeline.toml"
    day = '[schema.features.day]\ndtype = "int64"\nmax = 6\n\n[schema.label]'
    path.write_text(path.read_text().replace("[schema.label]", day))
    (example / "bad.jsonl").write_bytes(EVENT.replace(b'{"x"', b'{"day": 7, "x"'))
    code, _, err = anabranch("produce", "bad.jsonl")
    assert code == 2
    assert err.startswith("anabranch: bad.jsonl, line 1: day is not 6 or less; events sent before it: 0; ")


def test_bad_lines_can_be_left_out(anabranch, environment, example, values):
    (example / "bad.jsonl").write_bytes(b"\n".join([EVENT, *[b"{"] * 12, EVENT]))
    code, _, err = anabranch("produce", "bad.jsonl", "--on-error", "skip")
    assert (code, len(values(environment, 2))) == (0, 2)
    assert err.splitlines()[0].startswith("left out line 2: ")
    assert err.count("left out line") == 10
    assert "left out 12 events that the pipeline cannot use\n" in err


def test_fields_that_the_schema_does_not_know_are_counted(anabranch, environment, example):
    (example / "more.jsonl").write_bytes(EVENT.replace(b"{", b'{"z": 1, '))
    code, _, err = anabranch("produce", "more.jsonl")
    assert code == 0
    assert err.startswith("1 events have fields that the schema does not know\n")


def test_an_event_that_is_larger_than_the_pipeline_takes_is_named(anabranch, environment, example, monkeypatch):
    monkeypatch.setenv("ANABRANCH__STREAM__MAX_MESSAGE_BYTES", "300")
    (example / "large.jsonl").write_bytes(EVENT + b" " * 300)
    code, _, err = anabranch("produce", "large.jsonl")
    assert code == 2
    assert "line 1: oversized: " in err


def test_unchecked_sends_anything(anabranch, environment, example, values):
    (example / "bad.jsonl").write_bytes(b"{broken\n\n\xff\xfe\n")
    code, _, _ = anabranch("produce", "bad.jsonl", "--unchecked")
    assert code == 0
    assert sorted(values(environment, 3)) == [b"", b"{broken", b"\xff\xfe"]


def test_a_missing_file_is_exit_code_2(anabranch, environment):
    code, _, err = anabranch("produce", "none.jsonl")
    assert (code, err) == (2, "anabranch: none.jsonl cannot be read: No such file or directory\n")


def test_a_missing_topic_is_exit_code_3_and_says_how_it_is_made(anabranch, environment, kafka):
    code, _, err = anabranch("produce", "events.jsonl", "--topic", f"{environment}-none")
    sentence = f'topic "{environment}-none" does not exist on {kafka.bootstrap}; --create-topic makes it'
    assert (code, err) == (3, f"anabranch: {sentence}\n")


def test_create_topic_makes_what_is_missing_and_only_that(anabranch, environment, kafka, values, consume_all):
    name = f"{environment}-new"
    arguments = ["produce", "events.jsonl", "--topic", name, "--create-topic", "--partitions", "3"]
    code, out, err = anabranch(*arguments)
    assert code == 0
    # The dead-letter topic was there already.
    assert err.splitlines()[0] == f"created {name}"
    assert sorted(parse_trained_through(out.strip()).values()) == [5, 6, 6]
    code, out, err = anabranch(*arguments)
    assert (code, "created" in err, len(values(name, 40))) == (0, False, 40)


def test_a_rate_is_held(anabranch, environment, example, kafka, consume_all):
    code, _, _ = anabranch("produce", "events.jsonl", "--rate", "40")
    times = sorted(record.timestamp for record in consume_all(kafka.bootstrap, environment, 20))
    assert code == 0
    # The pacer may make up for a slow first event; without a rate it takes some milliseconds.
    assert times[-1] - times[0] >= 19 / 40 * 1000 / 2


def test_rows_are_packed_by_the_schema(environment, example, values):
    config = load_config(example / "pipeline.toml", {**os.environ, "ANABRANCH__STREAM__FORMAT": "rows"})
    produced = send_events(config, example / "events.jsonl", topic=None, rate=None, partitions=None, checked=True)
    dtype = row_dtype(Schema(config.pipeline.events))
    sent = values(environment, 20)
    events = [json.loads(line) for line in (example / "events.jsonl").read_text().splitlines()]
    assert (produced.events, {len(value) for value in sent}) == (20, {dtype.itemsize})
    rows = np.frombuffer(b"".join(sent), dtype)
    assert sorted(rows["y"].tolist()) == sorted(event["y"] for event in events)
    assert sorted(rows["x"][:, 3].tolist()) == pytest.approx(sorted(event["x"][3] for event in events))


def test_arrow_batches_are_packed_by_the_schema(environment, example, values):
    config = load_config(example / "pipeline.toml", {**os.environ, "ANABRANCH__STREAM__FORMAT": "arrow"})
    produced = send_events(config, example / "events.jsonl", topic=None, rate=None, partitions=None, checked=True)
    decoded = FORMATS["arrow"](Schema(config.pipeline.events)).decode(values(environment, 20))
    events = [json.loads(line) for line in (example / "events.jsonl").read_text().splitlines()]
    assert (produced.events, decoded.rejects) == (20, [])
    assert sorted(decoded.columns["label"].tolist()) == sorted(event["y"] for event in events)


def test_events_are_wrapped_where_the_stream_expects_it(environment, example, kafka, consume_all):
    config = load_config(example / "pipeline.toml", {**os.environ, "ANABRANCH__STREAM__ENVELOPE": "cloudevents"})
    produced = send_events(config, example / "events.jsonl", topic=None, rate=None, partitions=None, checked=True)
    records = consume_all(kafka.bootstrap, environment, 20)
    decoded = make_format(config.pipeline.stream, Schema(config.pipeline.events)).decode(
        [record.value for record in records], [record.headers for record in records]
    )
    assert (produced.events, len(decoded.message), decoded.rejects) == (20, 20, [])
    assert len({dict(record.headers)["ce_id"] for record in records}) == 20


@pytest.mark.parametrize("format_", ["rows", "arrow"])
def test_a_line_that_does_not_fit_its_row_is_named(environment, example, format_):
    (example / "bad.jsonl").write_text('{"x": [1, 2], "y": 3}\n')
    config = load_config(example / "pipeline.toml", {**os.environ, "ANABRANCH__STREAM__FORMAT": format_})
    with pytest.raises(SettingsError, match=r"bad\.jsonl, line 1: .*x"):
        send_events(config, example / "bad.jsonl", topic=None, rate=None, partitions=None, checked=True)


def test_ctrl_c_ends_it_with_what_was_sent(environment, example, monkeypatch, values):
    class Endless(io.RawIOBase):
        lines = 0

        def readable(self):
            return True

        def readinto(self, buffer):
            self.lines += 1
            if self.lines > 5:
                raise KeyboardInterrupt
            line = EVENT + b"\n"
            buffer[: len(line)] = line
            return len(line)

    class Stdin:
        buffer = io.BufferedReader(Endless())

    monkeypatch.setattr(sys, "stdin", Stdin())
    config = load_config(example / "pipeline.toml")
    produced = send_events(config, STDIN, topic=None, rate=None, partitions=None, checked=True)
    assert (produced.events, produced.interrupted) == (5, True)
    assert len(values(environment, 5)) == 5


def test_a_format_with_a_registry_is_refused_with_the_way_out(anabranch, environment, example):
    path = example / "pipeline.toml"
    registry = 'format = "avro"\nregistry = {url = "http://localhost:1"}'
    path.write_text(path.read_text().replace('format = "json"', registry))
    code, _, err = anabranch("produce", "events.jsonl")
    assert code == 2
    assert 'produce cannot write stream.format = "avro": use a serializer of the registry' in err


def test_topics_create_makes_those_that_are_missing(environment, anabranch):
    name = f"{environment}-made"
    command = ["topics", "create", "--partitions", "3", "--set", f'stream.topics=["{environment}", "{name}"]']
    assert anabranch(*command, "--dry-run")[1].splitlines() == [
        f"would create {name} with 3 partitions",
        f"{environment} exists",
        f"{environment}.dead exists",
    ]
    created = {"created": {name: 3}, "existed": [environment, f"{environment}.dead"], "dry_run": False}
    assert json.loads(anabranch(*command, "--json")[1]) == created
    assert anabranch(*command)[1] == f"{environment} exists\n{name} exists\n{environment}.dead exists\n"
