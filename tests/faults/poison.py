"""Poisonous events that fit the schema or nearly do: each has an outcome, and none ends a process.

A kind is one way to spoil a good event. Its fate is the outcome that it must have.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kafka import KafkaProducer

from anabranch.learner.status.report import LearnerReport
from tests.faults.figures import Figures
from tests.faults.pipeline import Pipeline, Supervised, make_topic
from tests.pipelines import adds_up

CODE = """
import torch
from torch import nn
class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(7, 3)
    def forward(self, x, n):
        if (x[:, 0] == 4242).any():
            raise ArithmeticError("no 4242")
        output = self.head(torch.cat([torch.tanh(x), self.embedding(n)], 1))
        if output.requires_grad and (x[:, 0] == 2424).any():
            output.register_hook(refuse)
        return output
def refuse(_):
    raise ValueError("no gradient of 2424")
def build():
    return Small()
"""
TEXT = """
{{stream}}
client = "{client}"
max_message_bytes = "64kB"
[schema.features]
x = {{dtype = "float32", shape = [3]}}
n = {{dtype = "int64"}}
[schema]
label = {{name = "y", classes = 3}}
[model]
factory = "faulty_model:build"
{{learner}}
device = "cpu"
replicas = {replicas}
[gate]
holdout_fraction = 0.02
"""
_LARGE = 50_000
_INFLATED = 8_000_000
_SECONDS_FOR_1000 = 10.0


@dataclass(frozen=True)
class Message:
    """A record as it is sent; with `alone` in a separate batch, since the fault affects the whole batch."""

    value: bytes | None
    key: bytes | None = None
    headers: Sequence[tuple[str, bytes]] = ()
    time_ms: int | None = None
    alone: bool = False
    inflated: bool = False


@dataclass(frozen=True)
class Kind:
    """One way to be poisonous: `make` spoils a good event.

    Its `fate` is to be `dead` (dead-lettered), `skipped` (as unlabelled), or `used` (trained on or held out); where the
    model `raises` it is skipped as `model`, or held out.
    """

    name: str
    fate: str
    make: Callable[[dict[str, Any]], Message]


class _NotText(str):
    """A header's name whose bytes are not UTF-8."""

    __slots__ = ()

    def encode(self, *_: object) -> bytes:
        """Return bytes that no decoder accepts."""
        return b"\xff\xfe"


def good(dice: random.Random) -> dict[str, Any]:
    """Return a good event."""
    return {"x": [dice.uniform(-1, 1) for _ in range(3)], "n": dice.randrange(10), "y": dice.randrange(3)}


def _with(**fields: Any) -> Callable[[dict[str, Any]], Message]:
    return lambda event: Message(json.dumps({**event, **fields}).encode())


def _value(value: bytes) -> Callable[[dict[str, Any]], Message]:
    return lambda _: Message(value)


def _text(change: Callable[[bytes], bytes]) -> Callable[[dict[str, Any]], Message]:
    return lambda event: Message(change(json.dumps(event).encode()))


def _around(**given: Any) -> Callable[[dict[str, Any]], Message]:
    return lambda event: Message(json.dumps(event).encode(), **given)


def _without(name: str) -> Callable[[dict[str, Any]], Message]:
    return lambda event: Message(json.dumps({key: value for key, value in event.items() if key != name}).encode())


KINDS = (
    Kind("index just out of range", "raises", _with(n=10)),
    Kind("index far out of range", "raises", _with(n=10**6)),
    Kind("negative index", "raises", _with(n=-1)),
    Kind("largest index", "raises", _with(n=2**63 - 1)),
    Kind("smallest index", "raises", _with(n=-(2**63))),
    Kind("value that the model refuses", "raises", _with(x=[4242, 0, 0])),
    Kind("value without a gradient", "raises", _with(x=[2424, 0, 0])),
    Kind("huge numbers", "used", _with(x=[1e38, -1e38, 3e38])),
    Kind("tiny numbers", "used", _with(x=[1e-45, -1e-45, 1e-400])),
    Kind("unknown fields", "used", _with(other={"a": [1] * 100}, y2="?")),
    Kind("unlabelled", "skipped", _without("y")),
    Kind("NaN", "dead", _with(x=[float("nan"), 0, 0])),
    Kind("infinity", "dead", _with(x=[float("inf"), 0, 0])),
    Kind("minus infinity", "dead", _with(x=[0, -float("inf"), 0])),
    Kind("beyond float32", "dead", _with(x=[1e39, 0, 0])),
    Kind("label too large", "dead", _with(y=3)),
    Kind("label negative", "dead", _with(y=-1)),
    Kind("label a string", "dead", _with(y="1")),
    Kind("label a fraction", "dead", _with(y=0.5)),
    Kind("integer beyond int64", "dead", _with(n=2**64)),
    Kind("fraction for an integer", "dead", _with(n=0.5)),
    Kind("feature missing", "dead", _without("x")),
    Kind("feature null", "dead", _with(x=None)),
    Kind("feature a long string", "dead", _with(x="x" * _LARGE)),
    Kind("too few numbers", "dead", _with(x=[0, 0])),
    Kind("too many numbers", "dead", _with(x=[0] * 5000)),
    Kind("numbers nested", "dead", _with(x=[[0, 0, 0]])),
    Kind("deeply nested", "dead", _value(b"[" * _LARGE)),
    Kind("deeply nested field", "dead", _text(lambda text: text[:-1] + b', "a": ' + b"[" * 20_000 + b"}")),
    Kind("torn", "dead", _text(lambda text: text[:-5])),
    Kind("not UTF-8", "dead", _text(lambda text: text.replace(b'"x"', b'"\xff\xfe": 1, "x"'))),
    Kind("UTF-16", "dead", _text(lambda text: text.decode().encode("utf-16"))),
    Kind("NUL within", "dead", _text(lambda text: text[:3] + b"\x00" + text[3:])),
    Kind("several events", "dead", _text(lambda text: b"[" + text + b"]")),
    Kind("no bytes", "dead", _value(b"")),
    Kind("larger than may be", "dead", _value(b"x" * 100_000)),
    Kind(
        "header nearly as large as may be", "dead", lambda _: Message(b"x", headers=[("anabranch-x", b"v" * 900_000)])
    ),
    Kind("spoofed headers", "dead", lambda _: Message(b"x", headers=[("anabranch-source", b"other[0]@1")])),
    Kind("name of a header not UTF-8", "dead", _around(headers=[(_NotText("k"), b"v")], alone=True)),
    Kind("a batch that inflates", "dead", lambda _: Message(b" " * _INFLATED, alone=True, inflated=True)),
    Kind("thousand headers", "used", _around(headers=[(f"h{number}", b"v") for number in range(1000)])),
    Kind("timestamp zero", "used", _around(time_ms=0)),
    Kind("timestamp of 2001", "used", _around(time_ms=10**12)),
    Kind("key of no bytes", "used", _around(key=b"")),
    Kind("key of binary", "used", _around(key=b"\xff\x00" * 1000)),
)


@dataclass
class Found:
    """The outcome of a stream with poison.

    Attributes:
        sent: all messages.
        report: the last report of the learner.
        restarts: of the learner and of its ingest process.
        wrong: a lower bound of the events with another outcome than their fate.
        said: the end of the log.
    """

    sent: int
    report: LearnerReport
    restarts: int
    wrong: int
    said: str

    @property
    def without_outcome(self) -> int:
        """Events without an outcome."""
        return self.sent - sum(self.report.outcomes.values())


def mixed(dice: random.Random, count: int, poison: int) -> Iterator[tuple[Kind | None, Message]]:
    """Yield `count` good events with `poison` poisonous ones of all kinds among them; the last one is good."""
    bad = [KINDS[number % len(KINDS)] for number in range(poison)]
    dice.shuffle(bad)
    positions = sorted(dice.randrange(count) for _ in bad)
    for number in range(count):
        while positions and positions[0] == number:
            positions.pop(0)
            kind = bad.pop()
            yield kind, kind.make(good(dice))
        yield None, Message(json.dumps(good(dice)).encode())


def send(bootstrap: str, topic: str, messages: Iterator[tuple[Kind | None, Message]]) -> dict[str, int]:
    """Write them, and return their number by fate; good ones are `used`."""
    fates: dict[str, int] = {}
    options = {"bootstrap_servers": bootstrap, "acks": "all", "max_request_size": 2 * _INFLATED}
    plain, zipped = KafkaProducer(**options, linger_ms=20), KafkaProducer(**options, compression_type="gzip")
    try:
        for kind, message in messages:
            fate = "used" if kind is None else kind.fate
            fates[fate] = fates.get(fate, 0) + 1
            if message.alone:
                plain.flush()
            sender = zipped if message.inflated else plain
            sent = sender.send(topic, message.value, message.key, list(message.headers), timestamp_ms=message.time_ms)
            if message.alone:
                sent.get(30)
        plain.flush()
    finally:
        plain.close()
        zipped.close()
    return fates


def train_with_poison(
    folder: Path, bootstrap: str, client: str, count: int, poison: int, seed: int, replicas: int = 1
) -> Found:
    """Run a learner on a stream with poison."""
    name = f"{client}-{replicas}"
    topic = make_topic(bootstrap, f"poison-{name}")
    pipeline = Pipeline(folder / name, bootstrap, topic, CODE, TEXT.format(client=client, replicas=replicas))
    fates = send(bootstrap, topic, mixed(random.Random(seed), count, poison))
    sent = sum(fates.values())
    patience = 120.0 + sent / 1000 * _SECONDS_FOR_1000
    with Supervised(pipeline) as learner:
        report = learner.wait_for(
            lambda report: sum(part.finished for part in report.partitions.values()) >= sent,
            "every outcome",
            patience=patience,
        )
        said = learner.log.read_text(errors="replace")
        restarts = learner.supervisor.restarts["learner"] + said.count("the ingest process died")
    return Found(sent, report, restarts, _wrong(report, fates), said[-2000:])


def _wrong(report: LearnerReport, fates: dict[str, int]) -> int:
    """Return a lower bound of the events with a wrong outcome: events that raise may be held out too."""
    outcomes, skipped = report.outcomes, report.skipped
    raised = skipped.get("model", 0)
    held = fates.get("raises", 0) - raised
    wrong = abs(outcomes["dead_lettered"] - fates.get("dead", 0)) + max(0, -held)
    wrong += abs(skipped.get("unlabelled", 0) - fates.get("skipped", 0))
    return wrong + abs(outcomes["trained"] + outcomes["held_out"] - held - fates["used"]) + (not adds_up(report))


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Measure the part `poison`."""
    count, poison = (5_000, 200) if quick else (100_000, 1_000)
    ways = "with either client, and with two replicas"
    figures.part("poison", f"{poison} events of {len(KINDS)} kinds among {count} good ones, {ways}")
    results = [
        train_with_poison(folder, bootstrap, client, count, poison, seed=1, replicas=replicas)
        for client, replicas in (("kafka-python", 1), ("confluent", 1), ("kafka-python", 2))
    ]
    outcomes = " ".join(f"{result.report.outcomes} {result.report.skipped}" for result in results)
    figures.add("poison_events", sum(result.sent for result in results), outcomes)
    figures.add("poison_without_outcome", sum(result.without_outcome for result in results))
    figures.add("poison_wrong_outcome", sum(result.wrong for result in results))
    restarts = sum(result.restarts for result in results)
    figures.add("poison_restarts", restarts, " ".join(result.said[-300:] for result in results) if restarts else "")
