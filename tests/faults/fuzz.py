"""Malformed messages: none ends a process, and each is dead-lettered.

A case is a message that is malformed by construction: a good one, changed in a way that makes it unusable.
"""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.arrow import pack_batch
from anabranch.ingest.formats.rows import pack_rows, row_dtype
from anabranch.ingest.settings.stream import SchemaSettings
from tests.faults.pipeline import Pipeline, Supervised, make_topic, producer
from tests.pipelines import adds_up
from tests.support.formats import FORMATS
from tests.support.topics import TopicReader

FEATURES = {"x": {"dtype": "float32", "shape": [3]}, "n": {"dtype": "int8"}, "d": {"dtype": "float64", "shape": [2, 2]}}
SETTINGS: dict[str, Any] = {
    "features": FEATURES,
    "label": {"name": "y", "classes": 3},
    "weight": {"name": "w"},
    "time": {"name": "t"},
}
SCHEMA = Schema(SchemaSettings.model_validate(SETTINGS))
CODE = """
from torch import nn
class Small(nn.Linear):
    def forward(self, x, n, d):
        return super().forward(x)
def build():
    return Small(3, 3)
"""
TEXT = """
{{stream}}
format = "{form}"
max_message_bytes = "64kB"
[schema.features]
x = {{dtype = "float32", shape = [3]}}
n = {{dtype = "int8"}}
d = {{dtype = "float64", shape = [2, 2]}}
[schema]
label = {{name = "y", classes = 3}}
weight = {{name = "w"}}
time = {{name = "t"}}
[model]
factory = "faulty_model:build"
{{learner}}
device = "cpu"
[gate]
holdout_fraction = 0.0
"""
_BATCH = 64
_GOOD_EVERY = 8
_DEEP = 100_000
Spoil = Callable[[random.Random], bytes]


@dataclass
class Fuzzed:
    """Outcomes of malformed messages.

    Attributes:
        cases: number of messages.
        crashes: exceptions, and processes that ended.
        passed: malformed messages that were not rejected, and good ones that were.
    """

    cases: int = 0
    crashes: list[str] = field(default_factory=list)
    passed: list[bytes] = field(default_factory=list)

    def add(self, other: "Fuzzed") -> None:
        """Add the counts of another."""
        self.cases += other.cases
        self.crashes += other.crashes
        self.passed += other.passed


def event(dice: random.Random) -> dict[str, Any]:
    """Return a good event."""
    return {
        "x": [dice.uniform(-9, 9) for _ in range(3)],
        "n": dice.randint(-128, 127),
        "d": [[dice.uniform(-9, 9) for _ in range(2)] for _ in range(2)],
        "y": dice.randrange(3),
        "w": dice.uniform(0, 2),
        "t": 1.7e9 + dice.random(),
    }


def packed(form: str, some: dict[str, Any]) -> bytes:
    """Return a good event as a message."""
    if form == "json":
        return json.dumps(some).encode()
    return pack_rows(SCHEMA, [some]) if form == "rows" else pack_batch(SCHEMA, [some])


def case(form: str, dice: random.Random) -> bytes:
    """Return a malformed message."""
    return dice.choice(_SPOILS[form])(dice)


def _unfit(dice: random.Random) -> dict[str, Any]:
    """Return an event with one field that does not fit the schema."""
    some = event(dice)
    name = dice.choice([name for name in some if name != "y"])
    how = dice.randrange(4)
    if how == 0:
        del some[name]
    elif how == 1:
        some[name] = dice.choice([None, "1", {}, {"a": 1}, [], [[[]]], True, [None], "\ud800", ["x"] * 3])
    elif how == 2:
        some["y"] = dice.choice([3, -1, 1.5, "1", [], {}, True, 10**30, -(10**400)])
    else:
        name, value = dice.choice(
            [
                ("x", [1.0, 2.0]),
                ("x", [1.0] * 4),
                ("x", [1.0, 1e39, 0.0]),
                ("x", [1, "2", 3]),
                ("n", 128),
                ("n", -129),
                ("n", 0.5),
                ("d", [[1.0, 2.0]]),
                ("d", [[1.0], [2.0]]),
                ("d", [1.0, 2.0, 3.0, 4.0]),
                ("w", -0.5),
                ("w", 1e300),
                ("t", "yesterday"),
            ]
        )
        some[name] = value
    return some


def _torn_json(dice: random.Random) -> bytes:
    content = packed("json", event(dice))
    return content[: dice.randrange(len(content))]


def _written_wrongly(dice: random.Random) -> bytes:
    """Return invalid JSON: unknown literals, trailing data, or bytes that are not text."""
    content = packed("json", event(dice))
    index = dice.randrange(1, len(content))
    return dice.choice(
        [
            content.replace(b'"x": [', b'"x": [NaN, ', 1),
            content.replace(b'"w": ', b'"w": -Infinity, "ww": ', 1),
            content + content,
            content + dice.choice([b"}", b"]", b"\x00", b",", b"x"]),
            content[:1] + b'"\xff\xfe": 1, ' + content[1:],
            content[:1] + b'"bell": "\x07", ' + content[1:],
            content[:index] + b"\x00" + content[index:],
            b"\xef\xbb\xbf" + content,
            content.decode().encode("utf-16"),
            content.replace(b'"', b"'"),
            b"[" + content + b"]",
            b"[" * dice.randrange(1, _DEEP),
            b'{"x":' * dice.randrange(1, _DEEP // 10),
            json.dumps(content.decode()).encode(),
        ]
    )


def _bytes(dice: random.Random) -> bytes:
    return dice.randbytes(dice.randrange(200))


def _odd_rows(dice: random.Random) -> bytes:
    """Return bytes that are not whole rows."""
    size = row_dtype(SCHEMA).itemsize
    content = b"".join(packed("rows", event(dice)) for _ in range(dice.randrange(1, 4)))
    return dice.choice([content[: -dice.randrange(1, size)], content + dice.randbytes(dice.randrange(1, size)), b""])


def _bad_rows(dice: random.Random) -> bytes:
    """Return whole rows, each with a number that is not allowed."""
    rows = np.frombuffer(
        b"".join(packed("rows", event(dice)) for _ in range(dice.randrange(1, 4))), row_dtype(SCHEMA)
    ).copy()
    unusable = [math.nan, math.inf, -math.inf]
    for row in rows:
        name = dice.choice(["x", "d", "w", "t", "y"])
        if name == "y":
            row["y"] = dice.choice([3, -2, 2**62, -(2**63)])
        elif name in ("x", "d"):
            row[name][dice.randrange(2)] = dice.choice(unusable)
        else:
            row[name] = dice.choice([*unusable, *([-0.5] if name == "w" else [])])
    return rows.tobytes()


def _arrow(columns: dict[str, Any]) -> bytes:
    batch = pa.RecordBatch.from_pydict(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content


def _torn_arrow(dice: random.Random) -> bytes:
    content = packed("arrow", event(dice))
    end = len(content) - 8  # without the mark of its end a stream is whole as well
    return dice.choice([content[: dice.randrange(end)], content + content, content + b"\x00" * 3, content[8:]])


def _unfit_arrow(dice: random.Random) -> bytes:
    """Return columns of other types, or values that are missing or out of range."""
    some = event(dice)
    columns = {
        "x": pa.array([some["x"]], pa.list_(pa.float32(), 3)),
        "n": pa.array([some["n"]], pa.int8()),
        "d": pa.array([some["d"]], pa.list_(pa.list_(pa.float64(), 2), 2)),
        "y": pa.array([some["y"]], pa.int64()),
        "w": pa.array([some["w"]], pa.float64()),
        "t": pa.array([some["t"]], pa.float64()),
    }
    name, spoiled = dice.choice(
        [
            ("x", pa.array([some["x"][:2]])),
            ("x", pa.array([None], pa.list_(pa.float32(), 3))),
            ("x", pa.array([[1.0, None, 2.0]])),
            ("x", pa.array([[1.0, math.nan, 2.0]])),
            ("x", pa.array(["1,2,3"])),
            ("n", pa.array([1000], pa.int64())),
            ("n", pa.array([None], pa.int8())),
            ("n", pa.array([{"a": 1}])),
            ("d", pa.array([[[1.0, 2.0]]])),
            ("y", pa.array([3])),
            ("y", pa.array([-7])),
            ("w", pa.array([-1.0])),
            ("w", pa.array([math.inf])),
            ("t", pa.array([math.nan])),
        ]
    )
    columns[name] = spoiled
    if dice.random() < 0.2:
        del columns[dice.choice(["x", "n", "d", "w", "t"])]
    return _arrow(columns)


_SPOILS: dict[str, list[Spoil]] = {
    "json": [lambda dice: json.dumps(_unfit(dice)).encode(), _torn_json, _written_wrongly, _bytes],
    "rows": [_odd_rows, _bad_rows],
    "arrow": [_torn_arrow, _unfit_arrow, _bytes],
}


def decoded(form: str, cases: int, seed: int) -> Fuzzed:
    """Decode `cases` malformed messages among good ones, in batches."""
    dice, decoder, fuzzed = random.Random(seed), FORMATS[form](SCHEMA), Fuzzed()
    while fuzzed.cases < cases:
        values, bad = _mixed(form, dice)
        fuzzed.cases += len(bad)
        try:
            events = decoder.decode(values)
        except Exception as exc:  # noqa: BLE001 any exception would end the stream
            fuzzed.crashes.append(f"{form}: {type(exc).__name__}: {exc}")
            continue
        rejected = {reject.message for reject in events.rejects}
        used = set(events.message.tolist())
        fuzzed.passed += [values[index] for index in bad if index not in rejected or index in used]
        fuzzed.passed += [value for index, value in enumerate(values) if index not in bad and index not in used]
    return fuzzed


def dead_lettered(folder: Path, bootstrap: str, form: str, cases: int, seed: int) -> Fuzzed:
    """Send malformed messages among good ones to a learner, and compare its dead letters with them."""
    dice, values, bad = random.Random(seed), [], set()
    while len(bad) < cases:
        some, indices = _mixed(form, dice)
        bad |= {len(values) + index for index in indices}
        values += some
    return through_kafka(folder, bootstrap, form, [(value, []) for value in values], bad, TEXT.format(form=form))


def through_kafka(
    folder: Path,
    bootstrap: str,
    form: str,
    messages: Sequence[tuple[bytes, Sequence[tuple[str, bytes]]]],
    bad: set[int],
    text: str,
) -> Fuzzed:
    """Send values with headers to the learner of a config `text`; those at the indices `bad` must be dead letters."""
    fuzzed = Fuzzed(len(bad))
    topic = make_topic(bootstrap, f"fuzz-{form}")
    pipeline = Pipeline(folder / form, bootstrap, topic, CODE, text)
    with producer(bootstrap, topic) as sender:
        for value, headers in messages:
            sender.send(value, headers=headers)
        sender.flush()
    with Supervised(pipeline) as learner:
        report = learner.wait_for(
            lambda report: sum(part.finished for part in report.partitions.values()) >= len(messages), "every outcome"
        )
        restarts = learner.supervisor.restarts["learner"]
        if restarts:
            fuzzed.crashes.append(f"{form}: the learner was started again {restarts} times: {learner.log_tail()}")
    letters = TopicReader()(bootstrap, f"{topic}.dead", len(bad))
    sources = [dict(letter.headers)["anabranch-source"].decode() for letter in letters]
    expected = {f"{topic}[0]@{index}" for index in bad}
    fuzzed.passed = [source.encode() for source in expected.symmetric_difference(sources)]
    good = len(messages) - len(bad)
    if report.outcomes.get("trained") != good or len(sources) != len(bad) or not adds_up(report):
        fuzzed.crashes.append(f"{form}: {report.outcomes} of {good} good events, {len(sources)} dead letters")
    return fuzzed


def _mixed(form: str, dice: random.Random) -> tuple[list[bytes], set[int]]:
    """Return the messages of one fetch, and the indices of the malformed ones."""
    values, bad = [], set()
    for index in range(_BATCH):
        if dice.randrange(_GOOD_EVERY) == 0:
            values.append(packed(form, event(dice)))
        else:
            values.append(case(form, dice))
            bad.add(index)
    return values, bad
