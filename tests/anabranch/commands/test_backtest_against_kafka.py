"""A backtest has the accuracy of a learner that reads the same events from a broker, with one step a round."""

import contextlib
import json
import threading

import numpy as np
import pytest

from anabranch.commands.backtest.measure import run_backtest
from anabranch.commands.backtest.rows import EventsOfFile
from anabranch.config.loader import load_config
from anabranch.core.stream_secret import StreamSecret
from anabranch.ingest.reader.reader import BlockReader
from anabranch.learner.assembly import Assembly, between_steps

EVENTS, BATCH, SEEDS = 2000, 32, range(3)
TEXT = """
name = "moving"
seed = {seed}
state_dir = "{state}"
[stream]
bootstrap_servers = "{servers}"
topics = ["{topic}"]
[schema.features.x]
dtype = "float32"
shape = [4]
scale = "standard"
[schema.label]
name = "y"
classes = 3
[model]
factory = "torch.nn:Linear"
args = {{in_features = 4, out_features = 3}}
[learner]
batch_size = 32
max_delay = "5m"
round = "0.001ms"
device = "cpu"
[learner.optimizer]
name = "adamw"
lr = 0.1
[replay]
capacity = 300
"""
SETTINGS = {
    "replay": [],
    "deterministic": ["learner.deterministic=true", "learner.strategy=der++"],
    "measured ratio": ["learner.replay_ratio=auto", "gate.holdout_fraction=0.2"],
    "by class and loss": ["replay.admission=class-balanced", "replay.sampling=loss", "stream.unlabelled=store"],
}


def moving(path):
    """Write events whose classes change after a half, so that nine of ten at best are right; one of fifty has no
    label, and two are no events."""
    random = np.random.default_rng(0)
    lines = []
    for index in range(EVENTS):
        x = random.standard_normal(4)
        label = int((x + 0.3 * random.standard_normal(4))[:3].argmax() + index // (EVENTS // 2)) % 3
        event = {"x": x.tolist()} | ({} if random.random() < 0.02 else {"y": label})
        lines.append(json.dumps(event))
    lines[10], lines[700] = "nonsense", '{"x": [1, 2]}'
    path.write_text("\n".join(lines) + "\n")
    return lines


def accuracy_of_kafka(spec, rows):
    """Learn from the broker, until `rows` events are scored, with the secret of the seed; return their accuracy."""
    spec.state_dir.mkdir()
    StreamSecret.fixed(spec.seed).write(spec.state_dir)
    stop = threading.Event()
    with contextlib.ExitStack() as stack:
        reader = BlockReader(spec.stream, spec.events, None)
        stack.callback(reader.close)
        assembly = Assembly(spec, threading.Event(), None, stack)
        assert assembly.build_loop(reader)
        loop = assembly.loop
        score = loop.monitor.prequential.score

        def end():
            if score.rows >= rows:
                stop.set()

        reader.open(loop.ledger.positions, stop)
        loop.begin(stop, ())
        loop.last_step = rows // BATCH
        loop.run(stop, (*between_steps(loop, ()), end))
        assert score.rows == rows
        return score.overall


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.services
@pytest.mark.any_broker
@pytest.mark.timeout(600)
@pytest.mark.parametrize("assignments", SETTINGS.values(), ids=SETTINGS)
def test_a_backtest_is_within_a_fifth_of_a_point_of_kafka(kafka, make_topic, produce, tmp_path, assignments):
    topic, file = make_topic(), tmp_path / "moving.jsonl"
    produce(kafka.bootstrap, topic, [line.encode() for line in moving(file)])
    found = []
    for seed in SEEDS:
        text = TEXT.format(seed=seed, state=tmp_path / f"state-{seed}", servers=kafka.bootstrap, topic=topic)
        (tmp_path / "pipeline.toml").write_text(text)
        spec = load_config(tmp_path / "pipeline.toml", {}, assignments=assignments).pipeline
        points = run_backtest(spec, EventsOfFile(file), every=1).points
        point = next(point for point in reversed(points) if point.events % BATCH == 0)
        assert point.events > 0.7 * EVENTS
        found.append((point.overall, accuracy_of_kafka(spec, point.events)))
    ours, of_kafka = np.mean(found, axis=0)
    assert 0.45 < ours < 0.95, "neither chance nor certainty"
    assert abs(ours - of_kafka) <= 0.002, found
    if "learner.deterministic=true" in assignments:
        assert all(one == other for one, other in found), "bit for bit"
