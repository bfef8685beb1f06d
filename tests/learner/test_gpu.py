"""The learner on a CUDA device; where there is none, on that of the recorder, which computes on the CPU.

Each test that needs the real device alone is marked `gpu`, and so is one run of each of the others.
"""

import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.device.lease import hold_server
from anabranch.learner.evaluate.scoring import Scorer, score_each
from anabranch.learner.extensions.device_sharing.extension import device_sharing
from anabranch.learner.extensions.device_sharing.launches import MOST_AHEAD
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.task import Classification
from anabranch.learner.parallel.data_parallel import DataParallelGroup
from anabranch.learner.parallel.process_group import RankAssignment, join_group
from anabranch.learner.settings.learner import DeviceSharingSettings, LearnerSettings
from anabranch.learner.settings.pipeline import ServedSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.micro_batches import StepHooks
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from tests.learner.learner_bench import CPU, LearnerBench
from tests.support.cuda_recorder import CudaRecorder
from tests.support.gpu import rtol

EXACT = {"precision": "fp32", "optimizer": {"name": "sgd", "lr": 0.1}}
STORES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"device_memory": "host"},
    "disk": {"disk": {"bytes": "1MB"}, "device_bytes": "1kB"},
}
each_store = pytest.mark.parametrize("replay", STORES.values(), ids=STORES)


def plain_model():
    """Without dropout, whose random numbers are others on each device."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def bench_on(path, schema, blocks, device, **options):
    path.mkdir(exist_ok=True)
    return LearnerBench(path, schema, plain_model(), blocks, device=device, learner=EXACT, **options)


@pytest.mark.slow
@each_store
def test_a_whole_learner_learns_on_a_device_what_it_learns_on_the_cpu(schema, tmp_path, cuda, replay):
    steps, weights = 6, []
    for name, device in (("cpu", CPU), ("cuda", cuda)):
        bench = bench_on(tmp_path / name, schema, steps, device, replay=replay)
        bench.run()
        bench.finish()
        assert bench.loop.state.steps == steps
        weights.append({key: value.cpu() for key, value in bench.trainer.snapshot().items()})
        bench.close()
    within = rtol(torch.float32, steps)
    for key, value in weights[0].items():
        torch.testing.assert_close(
            weights[1][key], value, rtol=within, atol=within, msg=lambda text, key=key: key + text
        )


@each_store
def test_streams_and_copies_of_a_whole_learner_are_in_order(schema, tmp_path, replay):
    with CudaRecorder() as recorder:
        bench = bench_on(tmp_path, schema, 6, torch.device("cuda", 0), replay=replay)
        bench.run()
        bench.finish()
        bench.close()
    recorder.check()


@pytest.mark.slow
@each_store
def test_a_learner_goes_on_from_its_checkpoint_and_version_on_a_device(schema, tmp_path, cuda, replay):
    first = bench_on(tmp_path, schema, 4, cuda, replay=replay)
    first.run()
    first.finish()
    trained = {key: value.cpu() for key, value in first.trainer.snapshot().items()}
    number = max(first.versions.numbers())
    manifest = first.versions.manifest(number)
    assert manifest is not None
    published = first.versions.weights(manifest)
    first.close()
    assert all(torch.equal(published[key], value) for key, value in trained.items())
    second = bench_on(tmp_path, schema, 8, cuda, replay=replay)
    second.resume()
    assert all(torch.equal(value.cpu(), trained[key]) for key, value in second.trainer.snapshot().items())
    moments = second.trainer.tensors()["optimizer"]
    assert all(value.device.type in {"cuda", "cpu"} for value in moments.values())
    second.run()
    second.finish()
    assert second.loop.state.steps == 8
    second.close()


def test_versions_are_scored_alike_on_a_device_and_on_the_cpu(schema, cuda):
    columns = fake_columns(schema, range(1500), label=[0, 1, 2])
    weights = plain_model().state_dict()
    scores = []
    for device in (CPU, cuda):
        scorer = Scorer(plain_model().to(device), Classification(), schema, device)
        scores.append(scorer.score({key: value.to(device) for key, value in weights.items()}, columns))
    assert (scores[0] == scores[1]).mean() > 0.99  # of events near a border, which round to another class
    assert len(score_each(plain_model().eval().to(cuda), Classification(), schema, columns, cuda)) == 1500


def test_a_marked_request_stops_training_within_the_micro_batches_that_are_queued(schema, tmp_path, cuda):
    """When training yields, the device is idle, and no more than `MOST_AHEAD` micro-batches came after the mark."""
    shared = DeviceSharingSettings(), ServedSettings(slo=timedelta(milliseconds=20), timeout=timedelta(hours=1))
    settings = LearnerSettings.model_validate({**EXACT, "micro_batch_size": 2})
    passes: list[str] = []
    with (
        hold_server(tmp_path, shared[1].slo) as mark,
        device_sharing(*shared, tmp_path, cuda, threading.Event()) as sharing,
    ):
        assert sharing is not None
        waiting = mark.waiting()

        def answer():
            passes.append("yielded" if torch.cuda.current_stream(cuda).query() else "yielded with queued work")
            waiting.__exit__(None, None, None)
            mark.rest()

        def forward(_model, _inputs):
            passes.append("forward")
            if passes.count("forward") == 3:
                waiting.__enter__()
                mark.run()

        model = plain_model().to(cuda)
        model.register_forward_pre_hook(forward)
        trainer = Trainer(
            TrainingSetup(
                model, Classification(), STRATEGIES["none"](), schema, settings, cuda, choose_precision("fp32", cuda)
            ),
            hooks=StepHooks(before_micro_batch=sharing.yield_to_serving),
        )
        sharing.begin(trainer, lambda: 12, answer)
        sharing.prepare(model, 1)
        trainer.step(trainer.examples(fake_columns(schema, range(12), label=[0, 1, 2])))
        assert sharing.report()["device_sharing"].times == 1
    assert passes.count("forward") == 6
    assert "yielded" in passes
    assert passes.index("yielded") - 3 < MOST_AHEAD


@pytest.mark.gpu
@pytest.mark.process
def test_a_deterministic_learner_has_the_same_weights_bit_for_bit():
    """Each in its own process: cuBLAS reads its variable when its first handle is made."""
    code = f"""
import hashlib, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from anabranch.learner.model.device import choose_precision, compute_deterministically
compute_deterministically()
import torch
from torch import nn
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.model.task import Classification
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
features = {{"x": {{"dtype": "float32", "shape": [3, 16, 16]}}}}
schema = Schema(SchemaSettings.model_validate({{"features": features, "label": {{"name": "y", "classes": 3}}}}))
torch.manual_seed(0)
cuda = torch.device("cuda", 0)
layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(16 * 14 * 14, 3)]
settings = LearnerSettings.model_validate({{"deterministic": True}})
model, precision = nn.Sequential(*layers).to(cuda), choose_precision("auto", cuda)
trainer = Trainer(TrainingSetup(model, Classification(), STRATEGIES["er"](), schema, settings, cuda, precision))
for step in range(20):
    new, old = (fake_columns(schema, range(begin, begin + 32), label=[0, 1, 2]) for begin in (step, 90))
    trainer.step(trainer.examples(new), [trainer.examples(old)])
digest = hashlib.sha256()
for name, value in sorted(trainer.snapshot().items()):
    digest.update(value.cpu().numpy().tobytes())
print(digest.hexdigest())
"""
    digests = {
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    }
    assert len(digests) == 1


KINDS = [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:TensorFloat32")  # what the compiler recommends
def test_a_compiled_model_in_a_group_of_ranks_learns_what_it_learns_as_it_is(
    schema, tmp_path, kind, caplog, monkeypatch
):
    if kind == "cpu":
        monkeypatch.setattr("anabranch.learner.train.converters.BACKEND", "aot_eager")
    losses = []
    try:
        for number, compiles in enumerate((False, True)):
            settings = LearnerSettings.model_validate({**EXACT, "device": kind, "compile": compiles})
            with (
                torch._dynamo.config.patch(suppress_errors=False),  # which monkeypatch cannot set back
                join_group(RankAssignment(0, 1, tmp_path / f"rendezvous-{number}"), settings) as device,
            ):
                parts = (plain_model().to(device), Classification(), STRATEGIES["er"](), schema, settings, device)
                trainer = Trainer(
                    TrainingSetup(*parts, choose_precision("fp32", device)), ranks=DataParallelGroup(settings)
                )
                new = trainer.examples(fake_columns(schema, range(12), label=[0, 1, 2]))
                losses.append([trainer.step(new, [new]).loss for _ in range(5)])
    finally:
        torch._dynamo.reset()
        if dist.is_initialized():
            dist.destroy_process_group()
    assert "compiling fails" not in caplog.text
    assert losses[1] == pytest.approx(losses[0], rel=rtol(torch.float32, 5))


@pytest.mark.gpu
def test_what_was_trained_on_a_device_is_restored_on_the_cpu_and_back(schema, make_bench):
    bench = make_bench(3, plain_model, device=torch.device("cuda", 0), learner=EXACT)
    bench.run()
    bench.finish()
    bench.close()
    for device in (CPU, torch.device("cuda", 0)):
        other = make_bench(4, plain_model, device=device, learner=EXACT)
        other.resume()
        assert other.loop.state.steps == 3
        other.close()
