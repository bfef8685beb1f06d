"""The memory and the files of a pipeline do not grow in the second half of a simulated year.

A year is some hundred ticks on a simulated clock. Each tick has every action that could leave something behind: events
are trained and held out, versions published, judged, withdrawn, refused and served, keys erased, reports written. For
each part that lives as long as its process the largest size of the first half is compared with that of the second.
"""

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from anabranch.ingest.events.block import Block, Coverage, Outcome, SkipReason
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.metrics import IngestMetrics
from anabranch.ingest.reader.cursors import Partition
from anabranch.ingest.reader.reader import HangDetector
from anabranch.ingest.settings.stream import LagPolicySettings, SchemaSettings
from anabranch.ingest.worker.lag_reporter import StallDetector
from anabranch.learner.checkpoints.checkpointer import CheckpointPruning
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints
from anabranch.learner.evaluate.holdout import HoldoutSet
from anabranch.learner.evaluate.outcomes import TaskMeasures
from anabranch.learner.evaluate.replay_ratio import AdaptiveReplayRatio, ScoreSum
from anabranch.learner.evaluate.scoring import EventScores
from anabranch.learner.evaluate.stream_monitor import Drift, Prequential, Scored
from anabranch.learner.loop.reporter import Reporter
from anabranch.learner.loop.tombstones import Tombstones
from anabranch.learner.model.faulty_events import Raised
from anabranch.learner.settings.learner import DriftSettings, GateSettings, VersionsSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.learner.status.report import LearnerReport
from anabranch.learner.stream.batches import Batches
from anabranch.learner.stream.lag import LagPolicy
from anabranch.learner.stream.ledger import Ledger
from anabranch.learner.stream.record_times import RecordTimes
from anabranch.learner.stream.trained_through import NewlyTrained, PartitionProgress
from anabranch.learner.versions.format import Manifest, ModelReference, Verdict, Versions, reference_to
from anabranch.learner.versions.gate import QualityGate
from anabranch.learner.versions.publisher import Publisher, Snapshot, VersionWriter
from anabranch.replay.erasure.erasure_log import Applied, ErasureLog
from anabranch.serving.dashboard.time_series import History
from anabranch.serving.http.server import RateLimit
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.rollout.hot_swap import VersionSwapper
from anabranch.serving.rollout.version_list import VersionList
from tests.memory_storage import MemoryStorage

YEAR = 365 * 86_400.0
SAMPLES = 25
"""Of the size, in each half of the year."""
LEAK = 4
"""Bytes per tick that are not a leak: less than one reference, and growth with the logarithm of the time."""
BLOCK = 600
"""Of a deque, which takes and frees memory in blocks."""
EVENTS = TopicPartition("events", 0)
MODEL = ModelSettings(factory="m:build", task="regression")


def size_of(thing, seen):
    """Return the bytes of an object and of everything that it references, except functions and classes."""
    if id(thing) in seen or isinstance(thing, type) or (callable(thing) and not hasattr(thing, "__dict__")):
        return 0
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        return thing.nbytes
    parts: list[object] = []
    if isinstance(thing, np.ndarray):
        parts = [thing.base]
    elif isinstance(thing, Mapping):
        parts = [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | Set | deque):
        parts = list(thing)
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()) if name != "__weakref__"]
    parts += [getattr(thing, name) for name in slots if hasattr(thing, name)]
    parts += vars(thing).values() if hasattr(thing, "__dict__") else ()
    return sys.getsizeof(thing) + sum(size_of(part, seen) for part in parts)


@dataclass
class Year:
    """The objects from which the parts are made."""

    folder: Path
    schema: Schema
    dice: np.random.Generator
    now: float = 1e9

    def storage(self, name):
        return MemoryStorage(self.folder / name)


@dataclass
class Driven:
    """Parts, and the function of a tick."""

    held: object
    tick: Callable[[int], object]
    files: tuple[Path, ...] = ()
    half: int = 300
    """Ticks of half a year."""

    def size(self):
        return size_of(self.held, set()) + sum(path.stat().st_size for path in self.files)


def windows(year):
    prequential, drift = Prequential(), Drift(DriftSettings())

    def learn(tick):
        wrong = 0.3 if tick // 500 % 2 else 0.1
        scored = Scored(64, 64.0 - float(year.dice.binomial(64, wrong)), float(year.dice.random()))
        prequential.add(scored)
        if drift.add(tick, scored):
            drift.respond()

    return Driven((prequential, drift), learn, half=1500)


def measured_ratio(year):
    ratio = AdaptiveReplayRatio(0.5, bounded=True)

    def learn(tick):
        for step in range(20 * tick, 20 * tick + 20):
            erased = 0.3 if ratio.now > 0.5 else 0.9
            old = ScoreSum(64, 64 * (1 - erased) + float(year.dice.random())) if ratio.probes(step) else None
            ratio.observe(ScoreSum(64, 60.0), old)

    return Driven(ratio, learn)


def ledger_and_lag(year):
    """The learner always has a lag, and publishes nothing: the events that it trained wait."""
    counted = IngestMetrics(CollectorRegistry())
    ledger = Ledger(rows=counted.rows)
    ledger.add_partition(EVENTS, 0)
    blocks: list[Block] = []
    source = SimpleNamespace(poll=lambda _timeout: blocks.pop() if blocks else None, release=lambda _block: None)
    partitions = [Partition(EVENTS, 0, None)]
    stream = SimpleNamespace(ends_time=0.0, reads_history=False, partitions=partitions, pass_over=lambda: None)
    policy = LagPolicy(LagPolicySettings(action="sample"), 0, stream, clock=lambda: year.now, wall=lambda: year.now)
    batches = Batches(source, 16, timedelta(0), policy)

    def learn(tick):
        begin = 40 * tick
        columns = fake_columns(year.schema, range(begin + 5, begin + 35))
        columns["time_ms"] = np.full(30, int(year.now * 1000))
        columns["outcome"][::7] = Outcome.HELD_OUT
        blocks.append(Block(columns, (Coverage(0, begin, begin + 40, removed=5),)))
        while (batch := batches.next(threading.Event())) is not None:
            for span in batch.spans:
                ledger.advance(span)
        ledger.partitions[0].update(Partition(EVENTS, 0, 100 * tick + 1000, "topic-id"))
        stream.ends_time = year.now
        policy.update(ledger.partitions, ledger.moved)
        ledger.moved.clear()
        ledger.count()
        ledger.state(), policy.state()

    return Driven((ledger, policy, batches, counted), learn)


def raised_and_stalled(year):
    raised, stalls = Raised(lambda: year.now), StallDetector()
    silence = HangDetector(lambda: year.now)

    def check(tick):
        raised.add(5 * tick, 2, f"ValueError: {tick}")
        for _ in range(3):
            raised.log("which are skipped", [f"events[0]@{tick}"], f"ValueError: {tick}")
        raised.problem(5 * tick)
        topic = TopicPartition("events", tick % 5)
        stalls.check({topic: Position(tick // 50)}, {topic: 10**6}, 2.0)
        silence.check()

    return Driven((raised, stalls, silence), check)


class RandomScorer:
    """Scores held-out events at random, with the accuracy that the weights contain; sometimes raises on an event."""

    bounded = True

    def __init__(self, schema, dice):
        self.schema = schema
        self.measures = TaskMeasures(object(), schema.label)
        self._dice = dice
        self.raised: deque[tuple[NDArray[np.uint64], str]] = deque()

    def score(self, weights, columns):
        return (self._dice.random(len(columns.get("label", ()))) < float(weights["right"])).astype(np.float64)

    def score_and_find(self, weights, columns, rule=None):
        scores = self.score(weights, columns)
        return EventScores(scores, np.empty((len(scores), 0), np.float32), np.empty(0, np.uint64), rule)

    def seconds(self):
        return 0.0

    def keep_on_device(self, weights): ...


def publisher(year, *, holds_out):
    """The holdout set, the publisher and its gate; one version of ten is bad. Serving does not run."""
    versions, scorer = Versions(year.folder, year.storage("versions")), RandomScorer(year.schema, year.dice)
    reference, gate = reference_to(MODEL), GateSettings(holdout_rows=80, min_rows=40)
    quality_gate = QualityGate(versions, gate, scorer, reference)  # type: ignore[arg-type]
    holdout, made_by = HoldoutSet(year.schema, 80, 0), LearnerMetrics(CollectorRegistry()).gate_verdicts
    settings = VersionsSettings(keep=4, keep_hourly=6)
    publishes = Publisher(VersionWriter(versions, reference, year.schema, 1), quality_gate, settings, made_by)

    def publish(tick):
        if holds_out:
            holdout.add(fake_columns(year.schema, range(7 * tick, 7 * tick + 7), label=(0, 1, 2)), [EVENTS])
        learned = RecordTimes()
        learned.add(np.full(40, int(year.now * 1000)))
        weights = {"right": torch.tensor(0.1 if tick % 10 == 9 else 0.8)}
        snapshot = Snapshot(tick + 1, weights, {"events:0": PartitionProgress(tick)}, holdout.held, 0.5, learned)
        publishes._publish(snapshot)
        publishes._watch(holdout.held)

    return Driven((publishes, quality_gate, holdout), publish)


def checkpoints(year):
    checkpoints = Checkpoints(year.folder / "checkpoints", year.schema.digest, 1, year.storage("fetched"))

    def checkpoint(tick):
        checkpoints.write(tick + 1, Checkpoint(tick, {"model": {"w": torch.zeros(3)}}, {"step": tick}), year.now)
        if tick % 3 == 2:
            checkpoints.storage.folder(tick + 1).write("rank-0/model.safetensors", [b"damaged"])
            checkpoints.newest()
        CheckpointPruning(checkpoints, 2).prune()

    return Driven(checkpoints, checkpoint)


def reporter(year):
    loop: Any = SimpleNamespace(
        state=SimpleNamespace(steps=0, rows_new=0, rows_replay=0), raising_events=None, non_finite=None
    )
    parts: Any = SimpleNamespace(
        source=SimpleNamespace(hold_out=None),
        lag=None,
        publisher=SimpleNamespace(gate=SimpleNamespace(hold=None, scorer=RandomScorer(year.schema, year.dice))),
        extensions=(),
        checkpointer=None,
        erasure=None,
        late=None,
        trainer=SimpleNamespace(model=torch.nn.Identity()),
    )
    collectors = LearnerMetrics(CollectorRegistry())
    reports = Reporter(year.folder, None, loop, parts, SimpleNamespace(learner=collectors))  # type: ignore[arg-type]

    def report(tick):
        loop.state.steps, loop.state.rows_new = tick, 64 * tick
        groups = {f"{key:016x}": 0.5 for key in year.dice.integers(0, 2**60, 8).tolist()}
        newest = LearnerReport(
            pid=1, generation=1, started=0.0, time=year.now, steps=tick, rates=reports._rates(None, None),
            accuracy={"now": 0.5}, letters_dropped={"loop": tick, "refused": 2 * tick}, classes={"a": 0.5},
            groups=groups,
        )  # fmt: skip
        collectors.report.update(newest)

    return Driven((reports, collectors), report)


def erasure(year):
    """The same 40 keys are erased repeatedly, each by a tombstone of the stream."""
    log, tombstones = ErasureLog(year.folder / "erasures.log"), Tombstones()
    tombstones.register_partitions([EVENTS])

    def erase(tick):
        columns = fake_columns(year.schema, range(10 * tick, 10 * tick + 10))
        columns["key_hash"] = np.arange(10, dtype=np.uint64) + np.uint64(tick % 40)
        columns["reason"][5] = SkipReason.TOMBSTONE
        spans: Any = [SimpleNamespace(columns=columns, positions={0: Position(10 * tick + 10)})]
        log.append(list(tombstones.records(spans, lambda: {EVENTS: Position(10 * tick)})))
        log.append(Applied(time=year.now, through=log.count, store=1, holdout=0))
        if log.is_long:
            ErasureLog(log.path).compact()
            log.refresh()

    return Driven((log, tombstones), erase, (log.path,))


def serving(year):
    """Versions are swapped in, refused for three reasons, withdrawn once they are served, and rolled back by hand."""
    versions = Versions(year.folder, year.storage("versions"))
    deployment: Any = SimpleNamespace(
        versions=versions, schema=year.schema, model=MODEL, state_dir=year.folder, device=torch.device("cpu")
    )
    counted = ServingMetrics(CollectorRegistry())
    swap = VersionSwapper(deployment, 8, counted, lambda: None, lambda error: pytest.fail(str(error)))
    registry, history = VersionList(deployment, swap, year.now), History(["a", "b"], ((1, 20), (3600, 20)))
    limit = RateLimit()

    def publish(number, verdict="pass", **changes):
        members: dict[str, Any] = {
            "number": number, "generation": 1, "parent": None, "time": year.now, "step": number,
            "trained_through": {"events:0": PartitionProgress(number)},
            "metrics": {"old": 0.5}, "schema": year.schema.digest,
            "encoders": {}, "model": ModelReference("m:build", {}, "regression"), "files": {},
            "learned": NewlyTrained(1, [int(year.now * 1000)]),
        }  # fmt: skip
        versions.write({"w": torch.zeros(1)}, Manifest(**{**members, **changes}), Verdict(verdict, ["a reason"]))  # type: ignore[arg-type]

    def serve(tick):
        first = 1_000_000 + 5 * tick  # of as many digits all the time
        publish(first)
        swap.poll()
        publish(first + 1, schema=f"another {first}")
        publish(first + 2, generation=0)
        publish(first + 3, trained_through={"events:0": PartitionProgress(0)})
        publish(first + 4, "fail")
        swap.poll()
        if tick % 2:
            versions.write_verdict(first, Verdict("fail", [f"worse {first}"]))
            swap.poll()
        for number in versions.numbers()[:-12]:
            versions.delete(number)
        registry.newest()
        history.add(year.now, {"a": float(tick), "b": None})
        counted.request((200, 404, 429, 503)[tick % 4], 0.01)
        counted.request(200, 0.01)
        counted.observe_freshness(10, np.array([0.1, 0.2]))
        counted.requests_per_second()
        limit.filter(RECORD)

    return Driven((swap, registry, history, counted, limit), serve, half=150)


RECORD: Any = SimpleNamespace(msg="", args=(), getMessage=lambda: "")
PARTS: dict[str, Callable[[Year], Driven]] = {
    "windows": windows,
    "measured ratio": measured_ratio,
    "ledger and lag": ledger_and_lag,
    "raised and stalled": raised_and_stalled,
    "publisher": lambda year: publisher(year, holds_out=True),
    "publisher of a stream that holds nothing out": lambda year: publisher(year, holds_out=False),
    "checkpoints": checkpoints,
    "reporter": reporter,
    "erasure": erasure,
    "serving": serving,
}


@pytest.fixture
def year(tmp_path, monkeypatch):
    """A year whose clock all modules use, with bounds of tens instead of thousands."""
    settings = {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": {"name": "y", "classes": 3}}
    made = Year(tmp_path, Schema(SchemaSettings.model_validate(settings)), np.random.default_rng(0))
    for name, bound in (
        ("anabranch.learner.stream.record_times._MOST", 200),
        ("anabranch.learner.stream.record_times._THINNED", 50),
        ("anabranch.learner.loop.tombstones._MANY", 200),
        ("anabranch.replay.erasure.erasure_log._SMALL_BYTES", 20_000),
        ("anabranch.serving.metrics._WINDOW_SAMPLES", 50),
        ("anabranch.serving.metrics._WINDOW_SWAPS", 50),
        ("anabranch.serving.rollout.state_file._MOST_ROLLED_BACK", 20),
    ):
        monkeypatch.setattr(name, bound)
    monkeypatch.setattr(
        "anabranch.serving.rollout.candidate_loader.load_version", lambda _deployment, manifest, *_: Loaded(manifest)
    )
    monkeypatch.setattr("os.fsync", lambda _descriptor: None)
    with monkeypatch.context() as clocks:
        clocks.setattr(time, "monotonic", lambda: made.now)
        clocks.setattr(time, "time", lambda: made.now)
        clocks.setattr("anabranch.serving.metrics.monotonic", lambda: made.now)
        yield made


class Loaded:
    """A version without answers."""

    def __init__(self, manifest):
        self.manifest, self.number, self.trained_through = manifest, manifest.number, ""


@pytest.mark.slow
@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS)
def test_a_part_is_not_larger_after_a_year_than_after_half_of_it(make, year):
    driven = make(year)
    sizes: list[int] = []
    for tick in range(2 * driven.half):
        year.now += YEAR / 2 / driven.half
        driven.tick(tick)
        if (tick + 1) % (driven.half // SAMPLES) == 0:
            sizes.append(driven.size())
    half, whole = max(sizes[:SAMPLES]), max(sizes[SAMPLES:])
    assert whole - half <= LEAK * driven.half + BLOCK, f"{half} bytes after half a year, {whole} after a year"


def test_growth_by_a_reference_per_tick_is_found():
    leak: list[object] = []
    before = size_of(leak, set())
    leak += [math.pi] * 500
    assert size_of(leak, set()) - before > LEAK * 500 + BLOCK
