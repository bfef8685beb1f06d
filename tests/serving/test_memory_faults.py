"""Memory runs out, or the device is lost, at each operation of a swap and of a batch: nothing is lost or misjudged."""

import dataclasses
import itertools

import httpx
import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.core.failures import Failure, failure_of
from anabranch.serving.errors import UnavailableError
from anabranch.serving.inference.batch_run import BatchRunner, QueuedRequest
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.model.loaded_version import load_version
from anabranch.serving.rollout.hot_swap import VersionSwapper
from tests.support.waiting import PATIENCE_SECONDS

NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
LOST = torch.AcceleratorError("CUDA error: device-side assert triggered")


class FailsAt(TorchDispatchMode):
    """Raises an error at the n-th operation of its block, which a device may need memory for."""

    def __init__(self, number, error):
        super().__init__()
        self.left, self.error = number, error

    @property
    def raised(self):
        return self.left <= 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise self.error
        return function(*args, **(kwargs or {}))


def raised_by(work):
    try:
        work()
    except Exception as exc:  # noqa: BLE001 - the test compares it
        return exc
    return None


class Swapping:
    """A swap without its thread that serves version 1, while version 2 is there."""

    def __init__(self, publisher):
        self.registry, self.now = CollectorRegistry(), 0.0
        publisher.publish(1)
        self.swap = VersionSwapper(
            publisher.deployment, 4, ServingMetrics(self.registry), lambda: None, pytest.fail, lambda: self.now
        )
        assert self.swap.poll()
        publisher.deployment.template.warmed.clear()  # large batches are run for the next version, too
        publisher.publish(2)

    def answer(self):
        assert self.swap.current is not None
        return float(self.swap.current.run({"x": np.zeros((1, 4), np.float32)})["prediction"][0])


@pytest.fixture
def swapping(deploy_in, tmp_path):
    """Make a fresh swap, each in a separate state directory."""
    return lambda number: Swapping(deploy_in("number", tmp_path / str(number)))


@pytest.mark.slow
def test_a_swap_that_runs_out_of_memory_at_any_operation_is_tried_again_and_loses_no_version(swapping):
    delayed = 0
    for number in itertools.count(1):
        one = swapping(number)
        with FailsAt(number, NO_MEMORY) as fault:
            one.swap.poll()
        if not fault.raised:
            break
        assert one.swap.refused == {}
        if one.answer() == 1:
            delayed += 1
            assert str(NO_MEMORY) in one.swap.problems[0]
            one.now += 30
            assert one.swap.poll()
        assert (one.answer(), one.swap.problems) == (2, [])
    assert 5 < delayed < number - 1, "a lack of memory for large batches alone delays no version"
    assert one.answer() == 2


@pytest.mark.slow
def test_a_device_that_is_lost_at_any_operation_of_a_swap_refuses_no_version(swapping):
    for number in itertools.count(1):
        one = swapping(number)
        with FailsAt(number, LOST) as fault:
            error = raised_by(one.swap.poll)
        if error is None:
            break
        assert failure_of(error) is Failure.DEVICE
        assert one.swap.refused == {}
        assert one.answer() == 1
    assert not fault.raised


@pytest.mark.slow
@pytest.mark.parametrize("error", [NO_MEMORY, LOST], ids=repr)
def test_a_batch_that_fails_at_any_operation_is_answered_or_503_and_never_400(numbers, error):
    numbers.publish(3)
    version = load_version(numbers.deployment, numbers.versions.manifest(3), 8)
    for number in itertools.count(1):
        batch = [
            QueuedRequest(version, {"x": np.full((rows, 4), rows, np.float32)}, rows, 0.0, None, False, None)  # type: ignore[arg-type]
            for rows in (1, 2, 1)
        ]
        runner = BatchRunner(8, torch.device("cpu"))
        with FailsAt(number, error) as fault:
            ended_by = raised_by(lambda runner=runner, batch=batch: runner.run(batch))
        if not fault.raised:
            break
        assert ended_by is (LOST if error is LOST else None)
        assert (runner.problem is None) is (error is LOST)
        for request in batch if error is NO_MEMORY else []:
            assert isinstance(request.outcome, dict)
            assert request.outcome["prediction"].tolist() == [3] * request.rows
    assert number > 3


@pytest.mark.slow
def test_a_device_that_stays_full_answers_503_to_all(numbers):
    class Full(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            raise NO_MEMORY

    numbers.publish(3)
    version = load_version(numbers.deployment, numbers.versions.manifest(3), 8)
    row = {"x": np.zeros((1, 4), np.float32)}
    batch = [QueuedRequest(version, row, 1, 0.0, None, False, None) for _ in range(5)]  # type: ignore[arg-type]
    with Full():
        BatchRunner(8, torch.device("cpu")).run(batch)
    assert all(isinstance(request.outcome, UnavailableError) for request in batch)
    assert not any(request.raised for request in batch)


@pytest.mark.gpu
def test_on_a_gpu_a_batch_that_does_not_fit_is_run_in_pieces(deploy, served, body_of):
    publisher = deploy("hungry")
    device = torch.device("cuda", 0)
    publisher.deployment = dataclasses.replace(publisher.deployment, device=device)
    publisher.publish(1)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    taken = torch.cuda.memory_reserved(device)
    assert free > 2 << 30
    torch.cuda.set_per_process_memory_fraction((taken + (256 << 20)) / total, device)
    try:
        with served(publisher, max_batch=64) as running:
            reply = httpx.post(running.infer, json=body_of(64), timeout=PATIENCE_SECONDS)
            assert reply.status_code == 200
            assert reply.json()["outputs"][0]["data"] == [1.0] * 64
            assert "ran out of memory" in httpx.get(f"{running.url}/api/status").text
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.gpu
def test_on_a_gpu_versions_are_swapped_while_requests_are_answered(deploy, served, body_of, eventually):
    publisher = deploy("number")
    publisher.deployment = dataclasses.replace(publisher.deployment, device=torch.device("cuda", 0))
    publisher.publish(1)
    with served(publisher) as running, httpx.Client() as client:
        for number in range(2, 12):
            publisher.publish(number)
            for rows in (1, 3, 200):
                reply = client.post(running.infer, json=body_of(rows)).json()
                assert reply["outputs"][0]["data"] == [float(reply["model_version"])] * rows
            eventually(lambda number=number: running.report().version == number)


@pytest.mark.parametrize("error", [NO_MEMORY, LOST], ids=repr)
def test_a_trial_of_zeros_that_fails_by_no_fault_of_the_model_is_no_verdict(numbers, error):
    numbers.publish(3)
    version = load_version(numbers.deployment, numbers.versions.manifest(3), 8)
    with FailsAt(1, error), pytest.raises(type(error)):
        version.works()
    assert version.works()
