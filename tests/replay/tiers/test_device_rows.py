"""Rows on a device that is not the host: the order of streams, and little memory. On a CPU that acts as CUDA."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.replay import sample_plan
from anabranch.replay.background_store import BackgroundStore
from anabranch.replay.build import build_store
from anabranch.replay.settings import ReplaySettings
from anabranch.replay.tiers import memory
from anabranch.replay.tiers.memory import MemoryTier
from anabranch.replay.tiers.staged_rows import LazyRows
from anabranch.testing.stores import FakeCheckpoints, add_now, plan_ahead
from tests.support.cuda_recorder import CudaRecorder

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PARTITIONS = [TopicPartition("events", 0)]
ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"device_memory": "host"},
    "a small cache above a disk": {"disk": {"bytes": "1MB"}, "device_bytes": "2kB", "sampling": "recent"},
    "a disk alone": {"disk": {"bytes": "1MB"}, "device_bytes": "0"},
    "a corrected sampler": {"sampling": "loss"},
}
each_arrangement = pytest.mark.parametrize("options", ARRANGEMENTS.values(), ids=ARRANGEMENTS)


@pytest.fixture(autouse=True)
def without_cached_tensors():
    """Tensors of an earlier recorder would be on the host."""
    sample_plan._ones.cache_clear()


def open_store(schema, device, folder, **options):
    settings = ReplaySettings.model_validate({"capacity": 200, **options})
    return build_store(settings, schema, device, 0, folder)


def life(store, schema, check):
    """Samples while events come and leave, and a checkpoint is made meanwhile."""
    checkpoints = FakeCheckpoints(store)
    for step in range(24):
        columns = fake_columns(schema, range(step * 40, step * 40 + 40), label=[0, 1, 2, 3])
        columns["weight"] = (1 + columns["offset"] % 3).astype(np.float32)
        add_now(store, columns, PARTITIONS)
        plan_ahead(store, step, 16)
        check(store.planner.sample(step, 16))
        if step in (10, 17):
            checkpoints.checkpoint(step)
    return checkpoints


def numbers(sample):
    return [sample.importance.cpu().numpy(), *(column.cpu().numpy() for column in sample.columns.values())]


@pytest.mark.slow
@each_arrangement
def test_each_sample_is_ordered_after_its_rows_and_equals_that_of_the_host(schema, tmp_path, options):
    expected: list[list[np.ndarray[Any, Any]]] = []
    plain = open_store(schema, CPU, tmp_path / "cpu", **options)
    contents = life(plain, schema, lambda sample: expected.append(numbers(sample))).checkpoint(30)
    plain.close()
    with CudaRecorder() as cuda:
        store, found = open_store(schema, CUDA, tmp_path / "cuda", **options), list[list[np.ndarray[Any, Any]]]()

        def check(sample):
            assert {column.device.type for column in sample.columns.values()} == {"cuda"}
            found.append(numbers(sample))

        payload = life(store, schema, check).checkpoint(30).payload
        store.close()
    cuda.check()
    for ours, theirs in zip(found, expected, strict=True):
        assert all(np.allclose(one, other, rtol=1e-6) for one, other in zip(ours, theirs, strict=True))
    if contents.payload is not None:
        assert payload is not None
        assert payload.equal(contents.payload)


@each_arrangement
def test_a_step_waits_for_no_copy_of_the_store(schema, tmp_path, options):
    with CudaRecorder() as cuda:
        store = BackgroundStore(open_store(schema, CUDA, tmp_path, **options))
        for step in range(12):
            columns = fake_columns(schema, range(step * 40, step * 40 + 40), label=[0, 1, 2, 3])
            columns["weight"] = (1 + columns["offset"] % 3).astype(np.float32)
            store.add(columns, PARTITIONS)
            store.plan_ahead(step, 16)
            store.planned(step)
            store.sample(step, 16)
        store.close()
        assert cuda.waits == Counter()
        assert not [name for name in cuda.sites("copy") if "non_blocking" not in name], "none is pageable"
    cuda.check()


def test_the_rows_of_the_next_sample_are_gathered_before_its_step(schema, tmp_path):
    with CudaRecorder() as cuda:
        store = open_store(schema, CUDA, tmp_path)
        add_now(store, fake_columns(schema, range(100), label=[0, 1, 2, 3]), PARTITIONS)
        plan_ahead(store, 0, 16)
        store.planner.sample(0, 16)
        before = cuda.sites("op").count("index_select")
        assert before == 2
        store.planner.fetch(store.planner.plans[0])
        assert cuda.sites("op").count("index_select") == before
        store.close()


class LargestGather(TorchDispatchMode):
    """Measures the largest tensor that rows are gathered into, and raises when it is larger than the device allows."""

    def __init__(self, fits=1 << 60):
        super().__init__()
        self.fits = fits
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.index_select:
            if result.nbytes > self.fits:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
            self.largest = max(self.largest, result.nbytes)
        return result


@pytest.fixture
def as_on_device(monkeypatch):
    """Let the CPU store rows as a device does."""
    monkeypatch.setattr(memory, "is_host", lambda _device: False)
    return iter([None])


@pytest.mark.usefixtures("as_on_device")
@pytest.mark.parametrize("fits", [1 << 60, 600, 100])
def test_a_checkpoint_reads_in_pieces_of_bounded_size(schema, tmp_path, monkeypatch, fits):
    monkeypatch.setattr(memory, "_READ_BYTES", 1000)
    store = open_store(schema, CPU, tmp_path, capacity=150)
    add_now(store, fake_columns(schema, range(150), label=[0, 1, 2, 3]), PARTITIONS)
    captured = store.begin_snapshot(1)
    with LargestGather(fits) as gather:
        _, change = captured.contents()
    assert 0 < gather.largest <= min(fits, 1000)
    assert change.payload is not None
    found = store._layout.unpack(change.payload)["feature.x"].numpy()
    every = fake_columns(schema, range(150), label=[0, 1, 2, 3])["feature.x"]
    assert np.array_equal(found, every[change.index["offset"]])
    store.close()


@pytest.mark.usefixtures("as_on_device")
def test_a_checkpoint_without_memory_to_read_fails_as_on_a_full_disk(schema, tmp_path):
    store = open_store(schema, CPU, tmp_path)
    add_now(store, fake_columns(schema, range(150), label=[0, 1, 2, 3]), PARTITIONS)
    captured = store.begin_snapshot(1)
    with LargestGather(0), pytest.raises(OSError, match="no memory to read the stored events"):
        captured.contents()
    store.close()


@pytest.mark.slow
@each_arrangement
def test_plans_without_memory_on_the_device_are_kept_on_the_host_until_they_are_sampled(
    schema, tmp_path, monkeypatch, options
):
    samples: dict[bool, list[list[np.ndarray[Any, Any]]]] = {False: [], True: []}
    for short in (False, True):
        with CudaRecorder() as cuda:
            sample_plan._ones.cache_clear()
            store = open_store(schema, CUDA, tmp_path / str(short), **options)
            for step in range(12):
                with monkeypatch.context() as patched:
                    if short:
                        no_memory(patched)
                    columns = fake_columns(schema, range(step * 40, step * 40 + 40), label=[0, 1, 2, 3])
                    add_now(store, columns, PARTITIONS)
                    plan_ahead(store, step, 16)
                samples[short].append(numbers(store.planner.sample(step, 16)))
            FakeCheckpoints(store).checkpoint(1)
            store.close()
        cuda.check()
    for plain, other in zip(samples[False], samples[True], strict=True):
        assert all(np.array_equal(one, two) for one, two in zip(plain, other, strict=True))


def no_memory(monkeypatch):
    """Let no row be gathered on the device."""

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    monkeypatch.setattr(MemoryTier, "_gather", fail)
    monkeypatch.setattr(memory.DeviceRows, "gather", fail)


@pytest.mark.usefixtures("as_on_device")
def test_a_sample_without_memory_keeps_its_plan(schema, tmp_path, monkeypatch):
    store = open_store(schema, CPU, tmp_path)
    add_now(store, fake_columns(schema, range(100), label=[0, 1, 2, 3]), PARTITIONS)
    plan_ahead(store, 0, 16)
    expected = store.planner.plans[0].records["offset"].tolist()
    with monkeypatch.context() as patched:
        no_memory(patched)
        with pytest.raises(torch.OutOfMemoryError):
            store.planner.sample(0, 16)
    assert store.planner.sample(0, 16).records["offset"].tolist() == expected
    store.close()


@pytest.mark.usefixtures("as_on_device")
def test_a_cache_without_memory_for_new_rows_leaves_them_to_the_slower_tier(schema, tmp_path, monkeypatch):
    store = open_store(schema, CPU, tmp_path, disk={"bytes": "1MB"}, device_bytes="4kB")

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    with monkeypatch.context() as patched:
        patched.setattr(MemoryTier, "put", fail)
        add_now(store, fake_columns(schema, range(100), label=[0, 1, 2, 3]), PARTITIONS)
        assert store.tiers.rows(len(store))["device"] == 0
    plan_ahead(store, 0, 16)
    sample = store.planner.sample(0, 16)
    every = fake_columns(schema, range(100), label=[0, 1, 2, 3])["feature.x"]
    assert np.array_equal(sample.columns["feature.x"].numpy(), every[sample.records["offset"]])
    add_now(store, fake_columns(schema, range(100, 140), label=[0, 1, 2, 3]), PARTITIONS)
    assert store.tiers.rows(len(store))["device"] > 0, "the room is used again"
    store.close()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@each_arrangement
def test_a_sample_on_a_gpu_waits_for_nothing(schema, tmp_path, options):
    store = open_store(schema, CUDA, tmp_path, **options)
    for step in range(12):
        columns = fake_columns(schema, range(step * 40, step * 40 + 40), label=[0, 1, 2, 3])
        add_now(store, columns, PARTITIONS)
        plan_ahead(store, step, 16)
        torch.cuda.set_sync_debug_mode("error")
        try:
            sample = store.planner.sample(step, 16)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(sample)
    store.close()


@pytest.mark.gpu
def test_a_sample_on_a_gpu_is_read_after_rows_that_are_still_being_written(schema, tmp_path):
    store = open_store(schema, CUDA, tmp_path)
    memory_tier = store.tiers.all[0]
    assert isinstance(memory_tier, MemoryTier)
    assert memory_tier.stream is not None
    every = fake_columns(schema, range(2000), label=[0, 1, 2, 3])
    for step in range(20):
        with memory_tier.stream.work():
            torch.cuda._sleep(10_000_000)  # a few milliseconds
        part = {name: column[step * 100 : step * 100 + 100] for name, column in every.items()}
        add_now(store, part, PARTITIONS)
        plan_ahead(store, step, 16)
        sample = store.planner.sample(step, 16)
        assert np.array_equal(sample.columns["feature.x"].cpu().numpy(), every["feature.x"][sample.records["offset"]])
    store.close()


@pytest.mark.parametrize("first_is_gathered", [False, True])
def test_the_rows_of_several_plans_are_gathered_at_once(first_is_gathered):
    with CudaRecorder() as cuda:
        tier = MemoryTier(16, 8, torch.device("cuda", 0))
        rows = np.arange(8 * 16, dtype=np.uint8).reshape(8, 16)
        tier.write(np.arange(8), np.empty((8, 2), np.uint64), rows)
        plans = tier.stage_each(np.array([5, 1, 0, 7, 3, 2, 2]), [2, 3, 2])
        if first_is_gathered:
            assert plans[0].prefetch()
        begin = len(cuda.log)
        found = LazyRows.gather_all(plans, [2, 2, None])
        assert found is not None
        queued = [each for each in cuda.log[begin:] if each.kind == "copy" or each.name == "index_select"]
        assert [each.name for each in queued] == ["index_select"], "the slots were sent when they were planned"
        assert np.array_equal(torch.as_tensor(found).cpu().numpy(), rows[[5, 1, 0, 7, 2, 2]])
        tier.close()
    cuda.check()
