"""A learner with a store on disk equals an undisturbed one after it was killed at random times, bit for bit."""

import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.testing.stores import sample_of
from tests.learner.learner_bench import LearnerBench, small_model
from tests.support.processes import Lives, serve_lives

CRASHES = 10


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_learner_is_unchanged_by_kills_at_random_times(schema, tmp_path, one_thread):
    """After ten learners that wrote a checkpoint were killed, the next one equals a run without kills."""
    killed = tmp_path / "killed"
    times = random.Random(20)
    with contextlib.closing(Lives("-m", "tests.learner.test_kills", str(killed))) as lives:
        newest, longest, crashes = 0, 0.5, 0
        while crashes < CRASHES:
            pid = lives.begin()
            threading.Event().wait(times.uniform(0.02, longest))
            os.kill(pid, signal.SIGKILL)
            lives.await_end()
            before, newest = newest, max(Checkpoints(killed / "checkpoints", schema.digest, 1).numbers(), default=0)
            crashes += newest > before
            if newest == before:  # a slow machine needs longer to write a checkpoint
                longest *= 1.3
    last = _crash_bench(killed, schema, 0)
    last.resume()
    last.stream.blocks = last.stream.next + 20
    last.run()
    torch.manual_seed(0)
    expected = LearnerBench(tmp_path / "expected", schema, small_model(), last.stream.blocks, replay={"capacity": 3000})
    expected.run()
    for name, value in expected.trainer.snapshot().items():
        assert torch.equal(last.trainer.snapshot()[name], value), name
    partition, expected_progress = last.loop.ledger.partitions[0], expected.loop.ledger.partitions[0]
    assert partition.position == expected_progress.position
    assert partition.outcomes.tolist() == expected_progress.outcomes.tolist()
    assert last.store.lost == expected.store.lost == 0
    for bench in (last, expected):
        bench.store.flush_pending()
    # Every event in the store has its own payload, in whichever tier.
    assert len(last.store) == len(expected.store) > 2000
    for column, expected_column in zip(_everything(last.store), _everything(expected.store), strict=True):
        assert torch.equal(column, expected_column)
    for bench in (last, expected):
        bench.close()


def _everything(store):
    sample = sample_of(store, 0, len(store))
    return [sample.columns[name] for name in sorted(sample.columns)]


def _crash_bench(path, schema, blocks):
    """Return a learner with few spare slots, so that slots are reused soon, and many checkpoints."""
    torch.manual_seed(0)
    replay = {"capacity": 3000, "disk": {"bytes": "177kB"}, "device_bytes": "8kB"}
    return LearnerBench(path, schema, small_model(), blocks, every="20ms", replay=replay)


def _serve_forks(path):
    features = {"x": {"dtype": "float32", "shape": [3]}}
    settings = {"features": features, "label": {"name": "y", "classes": 3}}
    schema = Schema(SchemaSettings.model_validate(settings))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:  # the first step imports modules for longer than a learner lives
        warm = _crash_bench(Path(scratch), schema, 3)
        warm.run()
        warm.finish()
        warm.close()

    def live():
        bench = _crash_bench(path, schema, 10**6)
        if bench.found is not None:
            bench.resume()
        bench.run()

    serve_lives(live)


if __name__ == "__main__":
    _serve_forks(Path(sys.argv[1]))
