"""The recorder of streams and copies finds what it is for, and is silent about correct programs."""

import gc
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.extensions.device_sharing.launches import LaunchLimiter
from anabranch.learner.model.device import Precision
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.replay.tiers.memory import MemoryTier
from tests.support.cuda_recorder import CudaRecorder

CUDA = torch.device("cuda")


def test_a_read_on_another_stream_needs_an_edge():
    with CudaRecorder() as cuda:
        written = torch.zeros(4, device=CUDA)
        side = torch.cuda.Stream(CUDA)
        with torch.cuda.stream(side):
            copied = written + 1
        del copied
    with pytest.raises(AssertionError, match=r"add at .*test_cuda_recorder.*reads on stream .* without an edge"):
        cuda.check()
    assert cuda.problems[0].count("test_a_read_on_another_stream_needs_an_edge") == 2


@pytest.mark.slow
def test_memory_that_another_stream_uses_is_recorded_or_waited_for():
    def program(*, records, waits):
        with CudaRecorder() as cuda:
            side, now = torch.cuda.Stream(CUDA), torch.cuda.current_stream(CUDA)
            with torch.cuda.stream(side):
                written = torch.zeros(4, device=CUDA)
            now.wait_stream(side)
            total = written.sum()
            if records:
                written.record_stream(now)
            if waits:
                side.wait_stream(now)
            del written
            gc.collect()
            total += 1
            return cuda.problems

    assert program(records=True, waits=False) == program(records=False, waits=True) == []
    (problem,) = program(records=False, waits=False)
    assert "is freed while" in problem
    assert "record_stream" in problem


def test_an_asynchronous_copy_needs_pinned_memory():
    with CudaRecorder() as cuda:
        torch.ones(4).pin_memory().to(CUDA, non_blocking=True)
        torch.empty(4, pin_memory=True).to(CUDA, non_blocking=True)
        assert cuda.problems == []
        torch.ones(4).to(CUDA, non_blocking=True)
    with pytest.raises(AssertionError, match="the host's memory is not pinned"):
        cuda.check()


def test_a_copy_in_inference_mode_is_recorded_as_any_other():
    with CudaRecorder() as cuda, torch.inference_mode():
        there = torch.ones(4).to(CUDA, torch.float64)
        assert there.is_cuda
        assert there.sum().cpu().device.type == "cpu"
    cuda.check()
    assert cuda.sites("copy") == ["cpu to cuda", "cuda to cpu"]


def test_the_host_reads_a_copy_after_its_event_alone():
    with CudaRecorder() as cuda:
        host = torch.empty(4, pin_memory=True)
        host.copy_(torch.full((4,), 7.0, device=CUDA), non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        assert host.tolist() == [7.0] * 4
        assert cuda.problems == []
        host.copy_(torch.zeros(4, device=CUDA), non_blocking=True)
        host.sum()
    with pytest.raises(AssertionError, match=r"the host reads \(sum.*still copies"):
        cuda.check()


def test_host_waits_are_counted_by_call_site():
    with CudaRecorder() as cuda:
        x = torch.arange(4, device=CUDA)

        def wait():
            assert x.sum().item() == 6
            assert x.tolist() == [0, 1, 2, 3]
            assert x.cpu().device.type == "cpu"
            torch.cuda.synchronize()
            x.to(CUDA)  # is there already
            assert x.device == torch.device("cuda", 0)
            assert x.is_cuda

        wait()
    cuda.check()
    site = "tests/test_cuda_recorder.py test_host_waits_are_counted_by_call_site.<locals>.wait"
    assert cuda.waits == Counter({site: 4})


def test_tensors_of_two_devices_do_not_go_together():
    with CudaRecorder(devices=2):
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(2, device="cuda:1") + torch.ones(2)
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(2, device="cuda:1") + torch.ones(2, device="cuda:0")
        assert (torch.ones(2, device="cuda:1") + 1).device == torch.device("cuda", 1)
        with pytest.raises(TypeError, match="cpu"):
            torch.ones(2, device="cuda:1").numpy()


def test_other_threads_are_recorded_with_their_own_device_and_stream():
    with CudaRecorder(devices=2) as cuda:
        seen: list[object] = []

        def work():
            torch.cuda.set_device(1)
            seen.append(torch.zeros(1, device=CUDA).device.index)
            seen.append(torch.cuda.current_stream().device.index)

        thread = threading.Thread(target=work, name="worker")
        thread.start()
        thread.join()
        assert seen == [1, 1]
        assert torch.cuda.current_device() == 0
    assert cuda.calls == [("set_device", (1, "worker"))]


def test_a_model_trains_as_on_the_cpu():
    def weights(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 3, device=device)).square().sum().backward()
            assert all(weight.grad is not None and weight.grad.device == weight.device for weight in model.parameters())
            optimizer.step()
        return [weight.detach().cpu() for weight in model.parameters()]

    plain = weights(torch.device("cpu"))
    with CudaRecorder() as cuda:
        recorded = weights(CUDA)
    cuda.check()
    assert cuda.peak_bytes > cuda.live_bytes
    torch.testing.assert_close(recorded, plain)


class TestOurs:
    """Code of the learner and the store runs unchanged."""

    def test_columns_cross_without_a_wait_and_in_order(self):
        features = {"x": {"dtype": "float32", "shape": [3]}}
        schema = Schema(SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 3}}))
        settings, strategy = LearnerSettings(), STRATEGIES["none"]()
        with CudaRecorder() as cuda:
            model = nn.Linear(3, 3).to(CUDA)
            trainer = Trainer(
                TrainingSetup(model, Classification(), strategy, schema, settings, CUDA, Precision("fp32", None))
            )
            waits, copies = Counter(cuda.waits), len(cuda.sites("copy"))
            new = trainer.examples(fake_columns(schema, range(8)))
            assert new.features["x"].is_cuda
            total = new.features["x"].sum()
            del new
            total += 1
            assert cuda.waits == waits
        cuda.check()
        assert set(cuda.sites("copy")[copies:]) == {"cpu to cuda, non_blocking"}

    def test_at_most_two_micro_batches_are_queued(self):
        with CudaRecorder() as cuda:
            limiter = LaunchLimiter(CUDA)
            for _ in range(4):
                limiter.wait()
                torch.zeros(1, device=CUDA)
            limiter.drain()
        cuda.check()
        assert cuda.sites("wait") == ["Event.synchronize"] * 5

    @pytest.mark.parametrize("on_host", [False, True])
    def test_rows_come_from_the_memory_tier(self, on_host):
        rows = np.random.default_rng(0).integers(0, 256, (5, 16), dtype=np.uint8)
        slots = np.arange(5)
        with CudaRecorder() as cuda:
            tier = MemoryTier(16, 8, CUDA, on_host=on_host)
            tier.put(slots, torch.from_numpy(rows))
            gathered = tier.copy(slots[::-1].copy()).rows()
            assert gathered.is_cuda
            assert np.array_equal(gathered.cpu().numpy(), rows[::-1])
            tier.close()
        cuda.check()
