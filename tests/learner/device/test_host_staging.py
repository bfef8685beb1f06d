"""Copies to the host: their order on the device, their memory, and the files that are written from them."""

import logging
import threading
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints
from anabranch.learner.device import host_staging
from anabranch.learner.device.host_staging import HostStaging
from anabranch.learner.device.memory_ledger import ledger
from anabranch.learner.errors import CopyMemoryError
from anabranch.learner.evaluate.scoring import Scorer
from anabranch.learner.loop.reporter import live_bytes
from anabranch.learner.model.device import Precision
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from tests.support.cuda_recorder import CudaRecorder

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def some_tensors(device):
    torch.manual_seed(0)
    tensors = {
        "weight": torch.randn(64, 48),
        "half": torch.randn(5, 3).bfloat16(),
        "image": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "count": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "step": torch.tensor(3.0),
    }
    return {name: tensor if name == "step" else tensor.to(device) for name, tensor in tensors.items()}


@pytest.fixture(params=[80 << 30, 0], ids=["with room for clones", "without room"])
def cuda(request):
    with CudaRecorder(memory=request.param) as recorder:
        yield recorder


def copied_in_a_thread(copies):
    found: dict[str, Tensor] = {}
    thread = threading.Thread(target=lambda: found.update(copies))
    thread.start()
    thread.join()
    return found


def test_copies_are_of_the_values_at_the_boundary_and_training_does_not_wait(cuda):
    tensors, expected = some_tensors(CUDA), some_tensors(CPU)
    before = Counter(cuda.waits)
    copies = HostStaging(CUDA).copy(tensors.items())
    for tensor in tensors.values():
        tensor.zero_()  # the next step
    assert cuda.waits == before, "the host waits for the device on the path of a step"
    found = copied_in_a_thread(copies)
    cuda.check()
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert tensor.device == CPU
        assert torch.equal(tensor, expected[name])
        assert tensor.stride() == expected[name].stride()


def test_a_step_that_ran_on_before_its_copy_would_be_noticed():
    """The recorder sees the edge that the test above relies on."""
    with CudaRecorder() as cuda:
        tensor, stream = torch.ones(8, device="cuda"), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        host = torch.empty(8, pin_memory=True)
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        tensor.zero_()
        with pytest.raises(AssertionError, match="without an edge"):
            cuda.check()


def test_gathered_tensors_are_on_the_device_one_at_a_time():
    alive = weakref.WeakSet[Any]()
    most = 0

    class Whole:
        """Its lifetime is that of a whole tensor."""

    def gathered():
        nonlocal most
        for index in range(4):
            whole = torch.full((8,), float(index), device="cuda")
            whole.owner = Whole()  # type: ignore[attr-defined]
            alive.add(whole.owner)  # type: ignore[attr-defined]
            most = max(most, len(alive))
            yield str(index), whole
            del whole

    with CudaRecorder() as cuda:
        found = copied_in_a_thread(HostStaging(CUDA).copy(gathered(), gathered=True))
        cuda.check()
    assert most <= 2, "the one that is copied, and the one that its successor replaces in the loop"
    assert {name: tensor[0].item() for name, tensor in found.items()} == {str(i): float(i) for i in range(4)}


def test_a_clone_that_does_not_fit_is_no_error_and_none_is_tried_for_a_while(monkeypatch, caplog):
    tried = []

    def fail(*_):
        tried.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    now = [1000.0]
    monkeypatch.setattr(torch, "_foreach_copy_", fail)
    monkeypatch.setattr(host_staging.time, "monotonic", lambda: now[0])
    with CudaRecorder() as cuda, caplog.at_level(logging.INFO):
        staging = HostStaging(CUDA)
        for seconds in (0, 30, 31):
            now[0] += seconds
            found = copied_in_a_thread(staging.copy(some_tensors(CUDA).items()))
            assert torch.equal(found["weight"], some_tensors(CPU)["weight"])
        cuda.check()
    assert len(tried) == 2, "it has to pause, and then to try again"
    assert "steps wait for copies" in caplog.text


def test_other_errors_of_a_clone_are_raised(monkeypatch):
    def fail(*_):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch, "_foreach_copy_", fail)
    with CudaRecorder(), pytest.raises(torch.AcceleratorError):
        HostStaging(CUDA).copy(some_tensors(CUDA).items())


def test_without_page_locked_memory_copies_are_pageable(monkeypatch, cuda):
    empty_strided = torch.empty_strided

    def fail_to_pin(*args, **options):
        if options.get("pin_memory"):
            raise RuntimeError("CUDA error: out of memory")
        return empty_strided(*args, **options)

    monkeypatch.setattr(torch, "empty_strided", fail_to_pin)
    found = copied_in_a_thread(HostStaging(CUDA).copy(some_tensors(CUDA).items()))
    cuda.check()
    assert torch.equal(found["weight"], some_tensors(CPU)["weight"])


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_a_copy_without_memory_on_the_host_raises_an_error_of_its_class(device, monkeypatch):
    def fail(*_, **_options):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    with CudaRecorder(memory=0):
        tensors = {"weight": torch.ones(3, device=device)}
        staging = HostStaging(device)
        monkeypatch.setattr(Tensor if device == CPU else torch, "clone" if device == CPU else "empty_strided", fail)
        with pytest.raises(CopyMemoryError, match="DefaultCPUAllocator"):
            staging.copy(tensors.items())
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
            staging.copy(tensors.items(), gathered=True)


def test_copies_that_failed_fail_again_and_are_never_partial(monkeypatch):
    with CudaRecorder():
        copies = HostStaging(CUDA).copy(some_tensors(CUDA).items())
        monkeypatch.setattr(host_staging, "_page_locked", lambda _: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            len(copies)
        monkeypatch.undo()
        with pytest.raises(MemoryError):
            dict(copies)


def test_clones_reach_the_host_in_chunks_and_serving_goes_first(monkeypatch):
    monkeypatch.setattr(host_staging, "CHUNK_BYTES", 1024)
    with CudaRecorder() as cuda:
        staging, tensors = HostStaging(CUDA), {str(index): torch.randn(300, device="cuda") for index in range(5)}
        before: list[int] = []
        copies = staging.copy(tensors.items())
        staging.before_chunk = lambda: before.append(sum(entry.kind == "copy" for entry in cuda.log))
        assert staging.cloned_bytes == 5 * 1200
        dict(copies)
        cuda.check()
        assert staging.cloned_bytes == 0
    pieces = [after - at for at, after in zip(before, [*before[1:], 10], strict=True)]
    assert sum(pieces) == 10, "each tensor is two pieces"
    assert len(before) == 6
    assert max(pieces) == 2, "a chunk is larger than it may be"


def test_clones_are_freed_as_they_reach_the_host(monkeypatch):
    monkeypatch.setattr(host_staging, "CHUNK_BYTES", 1000)
    with CudaRecorder() as cuda:
        tensors = {str(index): torch.randn(250, device="cuda") for index in range(8)}
        staging, live = HostStaging(CUDA), list[int]()
        weights = cuda.live_bytes
        copies = staging.copy(tensors.items())

        def check():
            cuda.check()
            live.append(cuda.live_bytes - weights)

        staging.before_chunk = check
        dict(copies)
        cuda.check()
        assert cuda.live_bytes == weights
    assert live[0] == 8000
    assert live[-1] <= 2000


def test_a_cpu_takes_one_clone_at_once():
    tensors = some_tensors(CPU)
    copies = HostStaging(CPU).copy(tensors.items())
    assert type(copies) is dict
    for name, tensor in tensors.items():
        assert torch.equal(copies[name], tensor)
        assert not len(tensor.reshape(-1)) or copies[name].data_ptr() != tensor.data_ptr()


def make_trainer(schema, device, strategy="er", layers=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 128), *(nn.Linear(128, 128) for _ in range(layers)), nn.Linear(128, 3)).to(
        device
    )
    settings = LearnerSettings.model_validate({"strategy": strategy})
    fp32 = Precision("fp32", None)
    return Trainer(TrainingSetup(model, Classification(), STRATEGIES[strategy](), schema, settings, device, fp32))


def step(trainer, schema):
    trainer.step(trainer.examples(fake_columns(schema, range(8), label=[0, 1, 2])))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["er", "ewc"])
def test_the_files_of_a_checkpoint_are_the_same_byte_for_byte(tmp_path, schema, strategy, cuda):
    def written(device):
        trainer = make_trainer(schema, device, strategy)
        for _ in range(3):
            step(trainer, schema)
        checkpoints = Checkpoints(tmp_path / device.type, "schema", 1)
        tensors = trainer.tensors()
        step(trainer, schema)
        path = checkpoints.write(1, Checkpoint(3, tensors, {}), 1.0)
        return {file.name: file.read_bytes() for file in path.rglob("*.safetensors")}

    on_cuda, on_cpu = written(CUDA), written(CPU)
    cuda.check()
    assert on_cuda.keys() == on_cpu.keys() >= {"model.safetensors", "optimizer.safetensors"}
    assert on_cuda == on_cpu


def test_neither_a_publish_nor_a_checkpoint_makes_a_step_wait(schema, cuda):
    trainer = make_trainer(schema, CUDA)
    step(trainer, schema)
    before = Counter(cuda.waits)
    step(trainer, schema)
    of_a_step, before = cuda.waits - before, Counter(cuda.waits)
    kept = trainer.snapshot(), trainer.tensors()
    assert cuda.waits == before
    step(trainer, schema)
    assert cuda.waits - before == of_a_step, "the next step waits as often as others"
    copied_in_a_thread(kept[0])
    cuda.check()


def test_the_device_holds_24_bytes_a_parameter_at_a_checkpoint_and_as_many_as_the_ledger_says(schema, monkeypatch):
    with CudaRecorder(memory=0) as cuda:
        trainer = make_trainer(schema, CUDA)
        columns = fake_columns(schema, range(8), label=[0, 1, 2])
        scorer = Scorer(trainer.model, Classification(), schema, CUDA)
        step(trainer, schema)
        for _ in range(3):
            scorer.score(dict(trainer.snapshot()), columns)
        torch.cuda.reset_peak_memory_stats()
        copied = [copied_in_a_thread(part) for part in trainer.tensors().values()]
        parameters = sum(weight.numel() for weight in trainer.model.parameters())
        assert sum(len(part) for part in copied) > 0
        cuda.check()
        assert 23 <= cuda.peak_bytes / parameters <= 24.5  # besides, single numbers and the columns of the step
        counted = ledger(parameters)
        assert cuda.peak_bytes <= 1.02 * (sum(counted.values()) - counted["contexts"])
        others = {"scorer": scorer.device_bytes, "checkpoint_staging": trainer.staging.cloned_bytes}
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {})
        live = live_bytes(CUDA, trainer.model, trainer.update.optimizer, others)
    for purpose in ("weights", "gradients", "optimizer", "scorer"):
        assert live[purpose] == pytest.approx(counted[purpose], rel=0.01), purpose


@pytest.mark.gpu
@pytest.mark.parametrize("room", [True, False])
def test_a_gpu_copies_what_the_weights_were(room, monkeypatch):
    if not room:
        monkeypatch.setattr(HostStaging, "_has_room", lambda *_: False)
    tensors = {name: tensor.to("cuda") for name, tensor in some_tensors(CPU).items()}
    tensors["large"] = torch.randn(3, 7 << 20, device="cuda")
    expected = {name: tensor.cpu() for name, tensor in tensors.items()}
    staging = HostStaging(torch.device("cuda"))
    for _ in range(3):
        copies = staging.copy(tensors.items())
        for tensor in tensors.values():
            tensor.zero_()
        found = copied_in_a_thread(copies)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        for name, value in expected.items():
            tensors[name].copy_(value)
    assert staging.cloned_bytes == 0
