"""A lost device ends the process, and a lack of memory at start is no wrong setting."""

import asyncio
import contextlib
import dataclasses
import importlib
import threading
from typing import Any

import httpx
import pytest
import torch
from prometheus_client import CollectorRegistry

from anabranch.config.loader import load_config
from anabranch.core.errors import AnabranchError, DependencyError, SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.learner.device.out_of_memory import MemoryUse
from anabranch.runtime.lifecycle import Exit
from anabranch.runtime.supervisor import RestartPolicy, Supervisor, pipeline_parts
from anabranch.serving import server as serving_server
from anabranch.serving.dashboard.status import Overview
from anabranch.serving.errors import ConflictError, DeviceError, UnavailableError
from anabranch.serving.http.app import build_app
from anabranch.serving.http.request_body import BodyReader
from anabranch.serving.inference import batcher as serving_batcher
from anabranch.serving.inference.service import Service
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.model import deployment, loaded_version
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.model.device import device_errors, pick_device, use_device
from anabranch.serving.model.loaded_version import ServedVersion
from anabranch.serving.reporting.report import read_report
from anabranch.serving.rollout.commands import pin
from anabranch.serving.rollout.hot_swap import VersionSwapper
from anabranch.serving.settings import ServingSettings
from tests.support.waiting import PATIENCE_SECONDS

MODULE = "anabranch_serving_test_models"
LOST = torch.AcceleratorError("CUDA error: device-side assert triggered")
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.fixture
def doomed(deploy):
    """A deployment whose model loses its device on a value above 1000, with version 1."""
    publisher = deploy("doomed")
    publisher.publish(1)
    publisher.deployment.check()
    yield publisher
    importlib.import_module(MODULE).lost.clear()


def bad(body_of):
    body = body_of(1)
    body["inputs"][0]["data"] = [2000.0] * 4
    return body


def raises(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.slow
def test_a_lost_device_ends_serving_and_answers_no_request(doomed, served, body_of):
    statuses: list[int] = []

    def ask(running, client):
        assert client.post(running.infer, json=body_of(1)).status_code == 200
        for body in [bad(body_of)] + [body_of(1)] * 1000:
            response = client.post(running.infer, json=body, timeout=PATIENCE_SECONDS)
            statuses.append(response.status_code)
            assert "retry-after" in response.headers

    def serve():
        with served(doomed) as running:
            with httpx.Client() as client, pytest.raises(httpx.TransportError):
                ask(running, client)
            for path in ("live", "ready"):
                assert status_of(f"{running.url}/v2/health/{path}") in (503, None)

    with pytest.raises(DeviceError, match="device of the model is lost until this process ends: CUDA error"):
        serve()
    assert set(statuses) == {503}


def status_of(url, method="GET"):
    """Return the status of the reply; None if no process accepts the connection or replies."""
    try:
        return httpx.request(method, url, timeout=PATIENCE_SECONDS).status_code
    except httpx.TransportError:
        return None


def test_a_device_error_is_not_one_that_ends_up():
    assert not issubclass(DeviceError, AnabranchError)


def test_liveness_readiness_and_requests_are_503_once_the_process_is_about_to_end(numbers, body_of):
    numbers.publish(1)
    bugs: list[BaseException] = []
    metrics, settings = ServingMetrics(CollectorRegistry()), ServingSettings()
    swap = VersionSwapper(numbers.deployment, 8, metrics, lambda: None, bugs.append)
    swap.poll()
    unused: Any = None
    service = Service(numbers.deployment, settings, swap, unused, metrics, bugs)
    overview, bodies = Overview(numbers.deployment, swap, "", None), BodyReader(settings)
    app = build_app(service, settings, metrics, overview, unused, bodies)

    async def statuses():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            paths = ("/v2/health/live", "/v2/health/ready", "/v2/models/tiny/ready", "/v2/models/tiny/versions/1/ready")
            return [(await client.get(path)).status_code for path in paths]

    async def infer():
        through = body_of(1, parameters={"min_trained_through": "events:0=10"})
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return (await client.post("/v2/models/tiny/infer", json=through)).status_code

    assert asyncio.run(statuses()) == [200] * 4
    bugs.append(LOST)
    assert asyncio.run(statuses()) == [503] * 4
    assert asyncio.run(infer()) == 503


@pytest.mark.slow
@pytest.mark.parametrize("where", ["load_version", "warm-up", "shadow", "command"])
def test_a_device_that_is_lost_while_a_version_is_loaded_ends_serving(numbers, served, eventually, monkeypatch, where):
    def serve():
        with served(numbers, shadow=1.0 if where == "shadow" else 0.0) as running:
            if where == "load_version":
                monkeypatch.setattr(torch.nn.Module, "load_state_dict", raises(LOST))
            else:
                monkeypatch.setattr(ServedVersion, "run", raises(LOST))
            numbers.publish(2, verdict="fail" if where in ("shadow", "command") else "pass")
            if where == "command":
                assert status_of(f"{running.url}/api/versions/2:promote", "POST") == 503
            eventually(lambda: status_of(f"{running.url}/v2/health/live") != 200)

    numbers.publish(1)
    with pytest.raises(DeviceError):
        serve()


def test_a_command_whose_version_loses_the_device_is_no_conflict(numbers, monkeypatch):
    numbers.publish(1)
    bugs: list[BaseException] = []
    swap = VersionSwapper(numbers.deployment, 8, ServingMetrics(CollectorRegistry()), lambda: None, bugs.append)
    monkeypatch.setattr(ServedVersion, "run", raises(LOST))
    with pytest.raises(UnavailableError):
        swap.apply(pin, 1)
    assert len(bugs) == 1
    assert not isinstance(bugs[0], ConflictError)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "device", "weights"),
    [
        ("doomed", "cpu", {"number": torch.ones(())}),
        pytest.param("indexed", "cuda", {"effect.weight": torch.ones(10, 1)}, marks=pytest.mark.gpu),
    ],
)
def test_under_up_serving_is_started_again_after_its_device_was_lost(
    pipeline, deploy, body_of, eventually, caplog, factory, device, weights
):
    config = load_config(pipeline(factory=factory, more=f'device = "{device}"'))
    deploy(factory).publish(1, weights=weights, schema=Schema(config.pipeline.events).digest)
    (part,) = [part for part in pipeline_parts(config) if part.name == "serving"]
    supervisor = Supervisor([part], RestartPolicy())
    stop, codes = threading.Event(), []
    thread = threading.Thread(target=lambda: codes.append(supervisor.run(stop)))
    thread.start()

    def ready(other_than=0):
        report = read_report(config.state_dir)
        return report if report is not None and report.ready and report.pid != other_than else None

    try:
        first = eventually(ready, 60)
        with contextlib.suppress(httpx.TransportError):
            reply = httpx.post(f"{first.address}/v2/models/tiny/infer", json=bad(body_of), timeout=PATIENCE_SECONDS)
            assert reply.status_code == 503
        second = eventually(lambda: ready(first.pid), 60)
        reply = httpx.post(f"{second.address}/v2/models/tiny/infer", json=body_of(1), timeout=PATIENCE_SECONDS)
        assert reply.json()["outputs"][0]["data"] == [1.0]
    finally:
        stop.set()
        thread.join(PATIENCE_SECONDS)
    assert codes == [Exit.DONE]
    assert supervisor.restarts == {"serving": 1}
    assert f"serving (pid {first.pid}) ended with exit code 1; it is started again" in caplog.text


@pytest.mark.parametrize("error", [NO_MEMORY, RuntimeError("CUDA error: CUDA-capable device(s) is/are busy")], ids=repr)
def test_a_device_without_memory_at_start_is_no_wrong_setting(numbers, served, monkeypatch, error):
    monkeypatch.setattr(torch.nn.Module, "__call__", raises(error))
    with pytest.raises(DeviceError):
        with served(numbers):
            pass


def test_a_device_that_is_busy_or_full_is_no_wrong_setting_and_one_that_is_not_there_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SettingsError, match=r'serving.device = "cuda:7" is not there: torch sees 1 CUDA devices'):
        pick_device("cuda:7")
    for error, kind in (
        (NO_MEMORY, DeviceError),
        (LOST, DeviceError),
        (torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"), SettingsError),
        (RuntimeError("Found no NVIDIA driver on your system"), SettingsError),
        (AssertionError("Torch not compiled with CUDA enabled"), SettingsError),
    ):
        monkeypatch.setattr(deployment.torch, "zeros", raises(error))
        with pytest.raises(kind):
            pick_device("cuda:0")


def test_other_errors_pass_unchanged():
    for error in (ValueError("a bug"), SettingsError("a setting"), DeviceError("lost")):
        with pytest.raises(type(error)) as raised, device_errors():
            raise error
        assert raised.value is error


@pytest.mark.slow
def test_each_thread_that_touches_the_device_makes_it_the_current_one_first(
    numbers, served, body_of, eventually, monkeypatch
):
    chosen: dict[str, torch.device] = {}
    ran: dict[str, bool] = {}

    def choose(device):
        chosen.setdefault(threading.current_thread().name, device)

    for module in (serving_server, serving_batcher, loaded_version):
        monkeypatch.setattr(module, "use_device", choose)
    run = ServedVersion.run

    def run_recorded(version, *arguments):
        name = threading.current_thread().name
        ran.setdefault(name, name in chosen)
        return run(version, *arguments)

    monkeypatch.setattr(ServedVersion, "run", run_recorded)
    check = Deployment.check

    def check_recorded(served):
        ran["start"] = threading.current_thread().name in chosen
        check(served)

    monkeypatch.setattr(Deployment, "check", check_recorded)
    numbers.publish(1)
    numbers.publish(2, verdict="fail")
    with served(numbers, shadow=1.0) as running:
        eventually(lambda: running.report().shadow)
        assert httpx.post(running.infer, json=body_of(1)).status_code == 200
        assert httpx.post(f"{running.url}/api/versions/2:promote").status_code == 200
    commands = [name for name in ran if name.startswith("asyncio")]
    assert len(commands) == 1
    assert {"start", "serving-model", "serving-swap", "serving-shadow"} == set(ran) - set(commands)
    assert all(ran.values()), ran
    assert set(chosen.values()) == {torch.device("cpu")}


def test_a_cuda_device_is_made_current_by_its_index(monkeypatch):
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("cuda:1", "cuda", "cpu"):
        use_device(torch.device(name))
    assert chosen == [1, 0]


@pytest.mark.slow
def test_an_id_out_of_range_is_400_for_that_request_alone_and_never_reaches_the_model(deploy, served, monkeypatch):
    publisher = deploy("monthly")
    publisher.publish(1, weights={"effect.weight": torch.ones(12, 3)})
    seen: list[int] = []
    run = ServedVersion.run

    def run_recorded(version, features, *more):
        seen.extend(features["month"].tolist())
        return run(version, features, *more)

    def body(month):
        return {"inputs": [{"name": "month", "shape": [1], "datatype": "INT64", "data": [month]}]}

    with served(publisher) as running:
        monkeypatch.setattr(ServedVersion, "run", run_recorded)
        with httpx.Client() as client:
            for month, status in ((1, 200), (0, 400), (13, 400), (-(2**63), 400), (12, 200)):
                reply = client.post(running.infer, json=body(month))
                assert reply.status_code == status, reply.text
            raw = client.post(
                running.infer,
                content=(13).to_bytes(8, "little"),
                headers={"Inference-Header-Content-Length": "0"},
            )
            assert raw.status_code == 400
    assert seen == [1, 12]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_serving_on_the_second_gpu_takes_no_memory_on_the_first(numbers, served, body_of):
    before = torch.cuda.memory_reserved(0)
    numbers.deployment = dataclasses.replace(numbers.deployment, device=torch.device("cuda", 1))
    numbers.publish(1)
    with served(numbers) as running:
        assert httpx.post(running.infer, json=body_of(3)).status_code == 200
    assert torch.cuda.memory_reserved(0) == before


def test_a_device_that_is_away_for_now_does_not_end_the_other_parts(monkeypatch):
    module = importlib.import_module("anabranch.serving.model.device")
    monkeypatch.setattr(module, "driver_fault", lambda: "torch sees no device, although the driver is there")
    with pytest.raises(DependencyError, match=r'serving\.device = "cuda": torch sees no device'):
        module.pick_device("cuda")
    monkeypatch.setattr(module, "driver_fault", lambda: None)
    with pytest.raises(SettingsError, match="cannot be used here"):
        module.pick_device("cuda")


def test_a_model_that_is_too_large_for_servings_part_of_the_device_names_the_settings(monkeypatch):
    module = importlib.import_module("anabranch.serving.model.device")
    use, cuda = MemoryUse(free=60 << 30, limit=20 << 30, own=12 << 30), torch.device("cuda")
    monkeypatch.setattr(module, "memory_use", lambda _device: use)
    with (
        pytest.raises(SettingsError, match=r"device_sharing\.memory.* serving\.workers"),
        module.device_errors(cuda),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
    with pytest.raises(DeviceError, match="too little memory for now"), module.device_errors(cuda):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
