"""A schema and a small model for the tests of the learner, and learners and ranks as processes."""

import contextlib
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from tests import forkserver
from tests.learner.learner_bench import LearnerBench, small_model
from tests.pipelines import Learner
from tests.support.waiting import slowness

PROGRAM = Path(__file__).parent / "ranks_program.py"


NUMBERS = Schema(
    SchemaSettings.model_validate(
        {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": {"name": "y", "classes": 3}}
    )
)


@pytest.fixture(scope="session")
def schema():
    """Three numbers, one of three classes."""
    return NUMBERS


@pytest.fixture
def make_model():
    """The same small classifier, with the same weights, at each call."""

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    return make


@pytest.fixture
def make_bench(tmp_path, schema):
    """Makes learners over one state directory, `make_bench(blocks, model, **options)`, one after the other."""
    benches: list[LearnerBench] = []

    def make(blocks, model=None, **options):
        torch.manual_seed(0)
        benches.append(LearnerBench(tmp_path, schema, (model or small_model)(), blocks, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


@pytest.fixture
def start():
    """Starts a learner, `start(config, **environment)`, which is killed at the end of the test."""
    with contextlib.ExitStack() as stack:

        def begin(config, **environment):
            learner = Learner(config, **environment)
            stack.callback(learner.close)
            return learner

        yield begin


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Plays scenarios on so many ranks, and returns what came out of each."""

    def run(size, scenarios, timeout=100):
        folder = tmp_path_factory.mktemp("ranks")
        texts = [json.dumps(scenario) for scenario in scenarios]
        processes = [
            forkserver.start([str(PROGRAM), str(rank), str(size), str(folder), *texts]) for rank in range(size)
        ]
        try:
            assert [process.wait(timeout * slowness()) for process in processes] == [0] * size
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [safetensors.torch.load_file(folder / f"{number}.safetensors") for number in range(len(texts))]

    return run
