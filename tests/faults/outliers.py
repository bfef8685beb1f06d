"""Single events of extreme values among good ones: what a learner predicts for the others is as if they had not come.

A kind is one way to spoil a good event. A variant is a pipeline that learns the same stream in another way. Each of
them reads a stream twice, with one event of each kind and without, and ends with a version: both have to be right of
as many new events, and each outlier has to be named by its offset, in a log or in its dead letter. No event is held
out: a secret of each run chooses those, and one that is not learned from is not named.
"""

import contextlib
import itertools
import json
import math
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kafka import KafkaConsumer, KafkaProducer
from safetensors.torch import load_file

from anabranch.config.loader import load_config
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.formats.json import JsonFormat
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.factory import forward
from anabranch.learner.model.features.learned import FeatureLearning
from anabranch.learner.versions.format import WEIGHTS, Versions
from tests.faults.figures import Figures
from tests.faults.pipeline import Pipeline, Supervised, create_topic, make_topic
from tests.support.registry_server import Registry, registry_server
from tests.support.tokenizer import write_tokenizer

PEOPLE = 50
_NOW_MS = 1_700_000_000_000
_HOUR_MS = 3_600_000

CODE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, numbers, outputs, people):
        super().__init__()
        self.people = nn.Embedding(people, outputs) if people else None
        self.numbers = nn.Linear(numbers, outputs)

    def forward(self, who=None, **numbers):
        output = self.numbers(torch.cat([each.float().reshape(len(each), -1) for each in numbers.values()], dim=1))
        if who is not None:
            output = output + self.people(who).reshape(len(who), -1, output.shape[1]).mean(dim=1)
        return output if output.shape[1] > 1 else output[:, 0]

def build(numbers, outputs, people):
    return Model(numbers, outputs, people)
"""
TEXT = """
{{stream}}
{stream}
[schema.features]
x = {{dtype = "float32", shape = [3]{number}}}
d = {{dtype = "float64"{missing}{number}}}
h = {{dtype = "float16"{number}}}
i = {{dtype = "int64", scale = "{whole}"}}
j = {{dtype = "int32", scale = "{whole}"}}
b = {{dtype = "uint8", scale = "{whole}"}}
t = {{dtype = "int64", cycles = ["day"]}}
who = {{dtype = "string", encode = {encode}}}
[schema]
key = {{name = "id"}}
weight = {{name = "w"}}
label = {{name = "y", {label}}}
[model]
factory = "faulty_model:build"
args = {{numbers = {numbers}, outputs = {outputs}, people = {people}}}
task = "{task}"
{embedding}
{{learner}}
device = "cpu"
batch_size = 64
optimizer = {{name = "adamw", lr = 2e-2}}
[replay]
capacity = 5000
sampling = "{sampling}"
[versions]
publish_every = "2s"
[gate]
holdout_fraction = 0.0
"""

TOKENS = '{tokenizer = "tokenizer.json", length = 4}'
BACKTRACKING = "(a+)+$"
"""A pattern that takes 2^n steps on n letters that something else follows."""


@dataclass(frozen=True)
class Variant:
    """A way to learn the stream: `scale` of the floats, `missing` of `d`, `encode` and `intercept` of `who`.

    `sampling` chooses the replayed events. With `tokens` `who` is encoded by a tokenizer whose pattern takes very many
    steps on some texts, and with `registered` each message names a writer schema in a registry.
    """

    name: str
    scale: str | None = "standard"
    missing: str | None = None
    encode: str = "{hash = 64}"
    intercept: bool = False
    regression: bool = False
    late: bool = False
    sampling: str = "uniform"
    tokens: bool = False
    registered: bool = False

    @property
    def text(self) -> str:
        """The config, in which lines of the stream and of the learner are left out."""
        numbers = 3 + 1 + 1 + 1 + 1 + 1 + 2 + (self.missing == "indicator")
        return TEXT.format(
            number=f', scale = "{self.scale}"' if self.scale else "",
            missing=f', missing = "{self.missing}"' if self.missing else "",
            whole=self.scale or "standard",
            encode=TOKENS if self.tokens else self.encode + (", intercept = true" if self.intercept else ""),
            embedding='embedding = "numbers"' if self.sampling == "similar" else "",
            label='dtype = "float32"' if self.regression else "classes = 2",
            numbers=numbers,
            outputs=1 if self.regression else 2,
            people=0 if self.intercept else 64,
            sampling=self.sampling,
            task="regression" if self.regression else "classification",
            stream='labels = {topics = ["{labels}"], wait = "1h", key = "e"}'
            if self.late
            else 'format = "json-schema"\nregistry = {url = "{registry}"}'
            if self.registered
            else "",
        )


VARIANTS = (
    Variant("standard"),
    Variant("robust", scale="robust"),
    Variant("quantile", scale="quantile"),
    Variant("missing-mean", missing="mean"),
    Variant("missing-indicator", missing="indicator"),
    Variant("raw-missing", scale=None, missing="mean"),
    Variant("learn", encode='{learn = 64, min_count = 2, expire = "12h"}'),
    Variant("intercept", encode='{learn = 128, min_count = 1, expire = "12h"}', intercept=True),
    Variant("regression", regression=True),
    Variant("late-labels", late=True),
    Variant("priorities", sampling="loss"),
    Variant("neighbours", missing="mean", sampling="similar"),
    Variant("raw-neighbours", scale=None, missing="mean", sampling="similar"),
    Variant("tokens", tokens=True),
    Variant("registered", registered=True),
    Variant("regression-priorities", regression=True, sampling="loss"),
    Variant(
        "regression-intercept",
        encode="{learn = 128, min_count = 1}",
        intercept=True,
        regression=True,
    ),
)


@dataclass(frozen=True)
class Kind:
    """One way to spoil an event: its `fields` replace those of a good one.

    `named`: whether its offset has to be reported; `dead`: it becomes a dead letter. `when_ms` is its record time, and
    `label_when_ms` that of its label where that comes late.
    """

    name: str
    fields: Mapping[str, Any]
    named: bool = False
    dead: bool = False
    when_ms: int | None = None
    label_when_ms: int | None = None
    regression: bool | None = None
    """Whether it is for regressions alone, or for classes alone; None: for both."""
    schema: Mapping[str, Any] | None = None
    """The writer schema that its message names, where messages name one."""
    tokens: bool = False
    """Whether it is only for a tokenizer."""


def _kinds() -> Iterator[Kind]:
    for value in (3.4028234e38, -3.4028234e38, 1e30, -1e12, 1e9, 1e6):
        yield Kind(f"x of {value:g}", {"x": [value] * 3}, named=True)
    for value in (1.7976931348623157e308, -1.7e308, 1e140, 1e20):
        yield Kind(f"d of {value:g}", {"d": value}, named=True)
    for value in (65504.0, -65504.0):
        yield Kind(f"h of {value:g}", {"h": value}, named=True)
    for value in (2**63 - 1, -(2**63), 2**53):
        yield Kind(f"i of {value}", {"i": value}, named=True)
    for value in (2**31 - 1, -(2**31)):
        yield Kind(f"j of {value}", {"j": value}, named=True)
    yield Kind("one large number of three", {"x": [0.0, 2e38, 0.0]}, named=True)
    yield Kind("largest of all", {"x": [3e38] * 3, "d": 1e308, "h": 65504, "i": 2**63 - 1, "j": 2**31 - 1}, named=True)
    yield Kind("denormal", {"x": [1e-45, -1e-45, 0.0], "d": 5e-324})
    yield Kind("largest byte", {"b": 255})
    yield Kind("beyond float32", {"x": [1e39, 0, 0]}, dead=True)
    yield Kind("beyond float16", {"h": 1e6}, dead=True)
    yield Kind("beyond int64", {"i": 2**63}, dead=True)
    yield Kind("infinity", {"d": math.inf}, dead=True)
    for value in (2**63 - 1, -(2**63)):
        yield Kind(f"time of {value}", {"t": value}, dead=True)
    yield Kind("time of 1970", {"t": 0})
    yield Kind("a text of 50,000 letters", {"who": "w" * 50_000})
    yield Kind("no text", {"who": ""})
    yield Kind("a text of NUL and emoji", {"who": "\0\U0001f600" * 100})
    yield Kind("weight of 3e38", {"w": 3e38}, named=True)
    yield Kind("weight of 1e6", {"w": 1e6}, named=True)
    yield Kind("smallest weight", {"w": 1e-45})
    yield Kind("weight of 0", {"w": 0})
    yield Kind("negative weight", {"w": -1}, dead=True)
    yield Kind("key of 50,000 letters", {"id": "k" * 50_000})
    yield Kind("no key", {"id": ""})
    yield Kind("key of a number", {"id": 2**63 - 1})
    for name, when_ms in (("1970", 0), ("8 hours ahead", 8 * _HOUR_MS), ("23 hours ahead", 23 * _HOUR_MS)):
        yield Kind(f"record of {name}", {}, when_ms=when_ms)
        yield Kind(f"late label of {name}", {}, label_when_ms=when_ms)
    yield Kind("record in microseconds", {}, when_ms=_NOW_MS * 1000)
    for value in (1e14, -1e15, 1e6, 3.4e38):
        yield Kind(f"label of {value:g}", {"y": value}, named=True, regression=True)
    yield Kind("a text on which a pattern backtracks", {"who": "a" * 40 + "!"}, dead=True, tokens=True)
    for name, schema in _schemas():
        yield Kind(f"a schema that {name}", {}, dead=True, schema=schema)
    yield Kind("label of another type", {"y": "1"}, dead=True)
    yield Kind("label beyond the classes", {"y": 2}, dead=True, regression=False)


def _schemas() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield writer schemas with which to read a record takes very long, or very much memory."""
    for how in ("anyOf", "allOf", "oneOf"):
        levels = {f"a{level}": {how: [{"$ref": f"#/$defs/a{level + 1}"}] * 2} for level in range(30)}
        yield f"doubles 30 times by {how}", {"$defs": {**levels, "a30": {"type": "object"}}, "$ref": "#/$defs/a0"}
    yield "refers to itself", {"$ref": "#"}
    deep: Mapping[str, Any] = {}
    for _ in range(400):
        deep = {"not": deep}
    yield "is 400 levels deep", deep
    alternatives = {"enum": [[number] for number in range(20_000)]}
    yield "compares with 20,000 alternatives", {"properties": {"x": {"contains": alternatives, "minContains": 10**9}}}
    yield "has a pattern that backtracks", {"properties": {"who": {"pattern": "^(?=p)((p|pe|person)+-?)+$(?!x)y"}}}


KINDS = tuple(_kinds())


class Stream:
    """Good events, of which a label follows from numbers and from whose event it is; the same for the same seed."""

    def __init__(self, variant: Variant, seed: int = 0) -> None:
        self._variant = variant
        self._random = np.random.default_rng(seed)
        self._seed, self._next = seed, 0
        self._bias = np.random.default_rng(7).normal(size=PEOPLE)

    def events(self, count: int) -> list[dict[str, Any]]:
        """Return the next events."""
        random, variant = self._random, self._variant
        x, d = random.normal(size=(count, 3)), random.normal(size=count)
        h, i = random.normal(size=count), random.normal(size=count)
        who = random.integers(0, PEOPLE, count)
        target = x[:, 0] - x[:, 1] + d + 0.5 * h + 0.5 * i + 1.5 * self._bias[who]
        label = target if variant.regression else (target > 0).astype(int)
        unit = 1.0 if variant.scale is None else 50.0
        found = []
        for n in range(count):
            event = {
                "x": (x[n] * unit + 10 * (unit > 1)).tolist(),
                "d": float(d[n]),
                "h": float(h[n]),
                "i": int(i[n] * 1000),
                "j": int(random.integers(-100, 100)),
                "b": int(random.integers(0, 20)),
                "t": _NOW_MS // 1000 + n,
                "who": f"person-{who[n]}",
                "id": f"person-{who[n]}",
                "w": 1.0,
                "e": f"{self._seed}-{self._next + n}",
                "y": float(label[n]) if variant.regression else int(label[n]),
            }
            if variant.missing and random.random() < 0.1:
                del event["d"]
            found.append(event)
        self._next += count
        return found


@dataclass(frozen=True)
class Sent:
    """A message, with the kind by which it is spoiled."""

    value: bytes
    when_ms: int | None
    kind: Kind | None


def stream_of(variant: Variant, count: int, kinds: Sequence[Kind], seed: int = 0) -> Iterator[Sent]:
    """Yield `count` good events, with one of each kind among those of the second quarter; the first one is good too."""
    stream = Stream(variant, seed)
    at = np.linspace(count // 4, count // 2, len(kinds)).astype(int).tolist()
    spoiled = dict[int, list[Kind]]()
    for position, kind in zip(at, kinds, strict=True):
        spoiled.setdefault(position, []).append(kind)
    victim = Stream(variant, seed + 1)
    for number, event in enumerate(stream.events(count)):
        for kind in spoiled.get(number, ()):
            when_ms = kind.when_ms
            yield Sent(json.dumps({**victim.events(1)[0], **kind.fields}).encode(), when_ms, kind)
        yield Sent(json.dumps(event).encode(), None, None)


def kinds_of(variant: Variant) -> list[Kind]:
    """Return the kinds that a variant has."""
    return [
        kind
        for kind in KINDS
        if kind.regression in (None, variant.regression)
        and (variant.late or kind.label_when_ms is None)
        and (variant.registered or kind.schema is None)
        and (variant.tokens or not kind.tokens)
    ]


def right(model: torch.nn.Module, variant: Variant, columns: Mapping[str, Any]) -> float:
    """Return the part of events whose label a model predicts, or of a regression comes near to."""
    features = {name[8:]: torch.from_numpy(value) for name, value in columns.items() if name.startswith("feature.")}
    model.eval()
    with torch.no_grad():
        output = forward(model, features).double().numpy()
    label = columns["label"]
    near = np.abs(output - label) < 2.0 if variant.regression else output.argmax(axis=1) == label
    return float(near.mean())


@dataclass(frozen=True)
class Result:
    """The outcome of a stream.

    Attributes:
        right: the part of new events whose label the last version predicts.
        unnamed: kinds whose offset is not reported, although it has to be.
        alive: kinds of which no dead letter was written, although there has to be one.
        restarts: of the learner and its ingest process.
        unfinished: messages without an outcome.
    """

    right: float
    unnamed: Sequence[str]
    alive: Sequence[str]
    restarts: int
    unfinished: int


def learn(folder: Path, bootstrap: str, variant: Variant, count: int, kinds: Sequence[Kind]) -> Result:
    """Run a learner on a stream with one event of each kind."""
    topic = make_topic(bootstrap, f"outliers-{variant.name}")
    labels = f"{topic}-labels"
    if variant.late:
        create_topic(bootstrap, labels, 1)
    text = variant.text.replace("{labels}", labels)
    sent = [*stream_of(variant, count, kinds)]
    total = len(sent) * (1 + variant.late)
    with registry_server() if variant.registered else contextlib.nullcontext() as registry:
        if registry is not None:
            text, sent = text.replace("{registry}", registry.url), [*_registered(registry, topic, sent)]
        pipeline = Pipeline(folder / variant.name / ("spoiled" if kinds else "clean"), bootstrap, topic, CODE, text)
        if variant.tokens:
            split = {"type": "Split", "pattern": {"Regex": BACKTRACKING}, "behavior": "Isolated", "invert": False}
            people = [f"person-{number}" for number in range(PEOPLE)]
            write_tokenizer(pipeline.folder / "tokenizer.json", people, pre_tokenizer=split)
        offsets = _send(bootstrap, topic, labels if variant.late else None, sent)
        return _result(pipeline, variant, count, total, offsets)


def _registered(registry: Registry, topic: str, sent: Sequence[Sent]) -> Iterator[Sent]:
    """Yield each message as serializers write it: a zero, the id of its writer schema, and the record."""
    usual = registry.register(f"{topic}-value", {"type": "object"}, "JSON")
    for each in sent:
        number = usual
        if each.kind is not None and each.kind.schema is not None:
            number = registry.register(f"{topic}-value", each.kind.schema, "JSON")
        yield replace(each, value=struct.pack(">bI", 0, number) + each.value)


def _result(
    pipeline: Pipeline, variant: Variant, count: int, total: int, offsets: Sequence[tuple[int, Kind]]
) -> Result:
    """Learn a stream of `total` messages to its end."""
    topic, bootstrap = pipeline.topic, pipeline.bootstrap
    with Supervised(pipeline) as learner:
        report = learner.wait_for(
            lambda report: sum(part.finished for part in report.partitions.values()) >= total,
            "every outcome",
            patience=240.0 + count / 200,
        )
        restarts = learner.supervisor.restarts["learner"]
    said = learner.log.read_text(errors="replace")
    dead = _dead_offsets(bootstrap, f"{topic}.dead", report.outcomes["dead_lettered"])
    versions = Versions(pipeline.state_dir / "versions")
    weights = load_file(versions.path / str(versions.numbers()[-1]) / WEIGHTS)
    unnamed = [kind.name for offset, kind in offsets if kind.named and not _is_named(said, topic, offset)]
    alive = [kind.name for offset, kind in offsets if kind.dead != (offset in dead)]
    unfinished = total - sum(report.outcomes.values())
    restarts += said.count("the ingest process died") + said.count("the ingest process hangs")
    return Result(_right_of(pipeline, variant, weights), unnamed, alive, restarts, unfinished)


def _send(bootstrap: str, topic: str, labels: str | None, sent: Sequence[Sent]) -> list[tuple[int, Kind]]:
    """Write messages, with labels in another topic; return the offsets of those that are spoiled."""
    producer = KafkaProducer(bootstrap_servers=bootstrap, acks="all", linger_ms=20, max_request_size=2_000_000)
    spoiled, now_ms = list[tuple[int, Kind]](), int(time.time() * 1000)

    def absolute(when_ms: int | None) -> int | None:
        return when_ms + now_ms if when_ms is not None and 0 < when_ms < 48 * _HOUR_MS else when_ms

    try:
        for offset, each in enumerate(sent):
            producer.send(topic, each.value, timestamp_ms=absolute(each.when_ms))
            if each.kind is not None:
                spoiled.append((offset, each.kind))
        producer.flush()
        if labels is not None:
            for each in sent:
                event, when_ms = json.loads(each.value), each.kind.label_when_ms if each.kind is not None else None
                label = json.dumps({"e": event["e"], "y": event["y"]}).encode()
                producer.send(labels, label, timestamp_ms=absolute(when_ms))
            producer.flush()
    finally:
        producer.close()
    return spoiled


def _dead_offsets(bootstrap: str, topic: str, count: int) -> set[int]:
    """Return the offsets of the messages of which there are dead letters."""
    reader = KafkaConsumer(topic, bootstrap_servers=bootstrap, auto_offset_reset="earliest", consumer_timeout_ms=20_000)
    found = set[int]()
    try:
        for letter in itertools.islice(reader, count):
            found.add(int(dict(letter.headers)["anabranch-source"].decode().partition("@")[2]))
    finally:
        reader.close()
    return found


def _is_named(said: str, topic: str, offset: int) -> bool:
    """Return whether a log names an offset, or a range of a step that has it."""
    for first, last in re.findall(re.escape(f"{topic}[0]@") + r"(\d+)(?:\.\.(\d+))?", said):
        if int(first) <= offset <= int(last or first):
            return True
    return False


def _right_of(pipeline: Pipeline, variant: Variant, weights: Mapping[str, torch.Tensor]) -> float:
    config = load_config(pipeline.path).pipeline
    schema = Schema(config.events)
    namespace: dict[str, Any] = {}
    exec(CODE, namespace)
    model = namespace["build"](**config.model.args)
    FeatureLearning().convert(model, ModelContext(torch.device("cpu"), schema))
    model.load_state_dict(dict(weights))
    values = [each.value for each in stream_of(variant, 5000, [], seed=99)]
    return right(model, variant, JsonFormat(schema).decode(values).columns)


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Measure the part `outliers`."""
    count = 10_000 if quick else 100_000
    figures.part("outliers", f"one event of each of {len(KINDS)} kinds among {count}, in {len(VARIANTS)} pipelines")
    lost, unnamed, wrong, restarts, unfinished = list[float](), list[str](), list[str](), 0, 0
    for variant in VARIANTS:
        clean = learn(folder, bootstrap, variant, count, [])
        spoiled = learn(folder, bootstrap, variant, count, kinds_of(variant))
        lost.append(clean.right - spoiled.right)
        unnamed += [f"{variant.name}: {name}" for name in spoiled.unnamed]
        wrong += [f"{variant.name}: {name}" for name in spoiled.alive]
        restarts += clean.restarts + spoiled.restarts
        unfinished += spoiled.unfinished
        print(f"  {variant.name:22} {clean.right:.3f} without, {spoiled.right:.3f} with them", flush=True)
    figures.add("outlier_kinds", len(KINDS))
    figures.add("outlier_accuracy_lost", max(lost))
    figures.add("outlier_unnamed", len(unnamed), ", ".join(unnamed)[:300])
    figures.add("outlier_wrong_outcome", len(wrong) + unfinished, ", ".join(wrong)[:300])
    figures.add("outlier_restarts", restarts)
