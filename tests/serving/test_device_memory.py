"""Serving's part of a device, what a server marks there for the learner, and memory that large requests return."""

import dataclasses
import importlib
import platform
import subprocess
import sys
import threading
from datetime import timedelta

import httpx
import pytest
import torch

from anabranch.commands.init.command import write_example
from anabranch.config.loader import load_config
from anabranch.core.errors import SettingsError
from anabranch.learner.device import visible_devices
from anabranch.learner.device.lease import Field, Servers
from anabranch.learner.model import device as device_module
from anabranch.serving.__main__ import deployment_of
from anabranch.serving.model import device as serving_device
from tests.support.waiting import PATIENCE_SECONDS


@pytest.fixture
def calls(monkeypatch):
    """What is asked of torch, in order; every device that is asked for exists."""
    made: list[tuple[object, ...]] = []

    def pick(name):
        made.append(("pick", name))
        return torch.device("cuda", 0)

    monkeypatch.setattr(serving_device, "pick_device", pick)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda part, index: made.append(("fraction", round(part, 6), index)),
    )
    return made


def config(folder, **environment):
    write_example(folder, force=True)
    return load_config(folder / "pipeline.toml", environment)


@pytest.mark.parametrize(("workers", "part"), [("1", 0.25), ("2", 0.125)])
def test_each_worker_is_bounded_to_its_part(tmp_path, calls, workers, part):
    deployment_of(config(tmp_path, ANABRANCH__SERVING__DEVICE="cuda", ANABRANCH__SERVING__WORKERS=workers))
    assert calls == [("pick", "cuda"), ("fraction", part, 0)]


def test_a_uuid_is_the_first_device_that_cuda_sees(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(visible_devices, "machine_devices", lambda: {"GPU-aa11": ["MIG-bb22"]})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa11")
    settings = {"ANABRANCH__SERVING__DEVICE": "MIG-bb22", "ANABRANCH__DEVICE_SHARING__POLICY": "exclusive"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=r'serving.device = "MIG-bb22": torch .* sees no such device'):
        deployment_of(config(tmp_path, **settings))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert deployment_of(config(tmp_path, **settings)).device == torch.device("cuda", 0)
    assert visible_devices.os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-bb22"
    assert calls == [("pick", "cuda")]


def test_a_gpu_that_auto_cannot_take_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(device_module, "driver_fault", lambda: "torch sees no device")
    monkeypatch.setattr(serving_device, "pick_device", lambda _: torch.device("cpu"))
    problem = deployment_of(config(tmp_path)).device_problem
    assert problem == 'serving.device = "auto" takes the CPU: torch sees no device'


@pytest.mark.slow
def test_that_problem_is_in_the_report(numbers, served, eventually):
    numbers.deployment = dataclasses.replace(numbers.deployment, device_problem="auto takes the CPU")
    numbers.publish(1)
    with served(numbers) as running:
        eventually(lambda: running.report().problems == ["auto takes the CPU"])


MODULE = "anabranch_serving_test_models"


@pytest.mark.slow
def test_a_server_marks_a_request_for_as_long_as_it_waits(numbers, served, body_of, eventually):
    numbers.publish(1)
    with served(numbers, slo="1ms") as running:
        models = importlib.import_module(MODULE)
        seen = Servers(running.deployment.state_dir, timedelta(seconds=60))
        seen.refresh()
        assert (seen.alive, seen.since(Field.WAITING), seen.since(Field.RUNNING)) == (1, 0, 0)
        models.go_on.clear()
        try:
            codes: list[int] = []
            asking = threading.Thread(
                target=lambda: codes.append(
                    httpx.post(running.infer, json=body_of(1), timeout=PATIENCE_SECONDS).status_code
                )
            )
            asking.start()
            since = eventually(lambda: seen.since(Field.RUNNING))
            assert 0 < seen.since(Field.WAITING) <= since
        finally:
            models.go_on.set()
        asking.join()
        assert codes == [200]
        eventually(lambda: (seen.since(Field.WAITING), seen.since(Field.RUNNING)) == (0, 0))
        assert (seen.total(Field.ANSWERED), seen.total(Field.LATE)) == (1, 1)
        seen.close()


@pytest.mark.slow
def test_a_request_that_is_refused_leaves_no_mark(numbers, served, body_of):
    numbers.publish(1)
    with served(numbers, max_queue=2) as running:
        seen = Servers(running.deployment.state_dir, timedelta(seconds=60))
        seen.refresh()
        assert httpx.post(running.infer, json=body_of(3)).status_code >= 400
        assert (seen.since(Field.WAITING), seen.total(Field.ANSWERED)) == (0, 0)
        seen.close()
    after = Servers(running.deployment.state_dir, timedelta(seconds=60))
    after.refresh()
    assert after.alive == 0
    after.close()


CODE = """
import psutil
from anabranch.serving.freed_memory import return_freed_memory
{call}
process = psutil.Process()
bytearray(31_000_000)  # from here on glibc would take such blocks from its heap
before = process.memory_info().rss
bodies, replies = [], []
for _ in range(4):
    bodies.append(bytearray(15_900_000))
    replies.append(bytearray(100_000))
bodies.clear()
print(process.memory_info().rss - before)
"""


@pytest.mark.process
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_the_memory_of_large_bodies_is_returned_to_the_system_while_small_replies_stay():
    kept = {
        call: int(subprocess.check_output([sys.executable, "-c", CODE.format(call=call)], timeout=PATIENCE_SECONDS))
        for call in ("", "return_freed_memory()")
    }
    assert kept["return_freed_memory()"] < 5_000_000 < 15_000_000 < kept[""]
