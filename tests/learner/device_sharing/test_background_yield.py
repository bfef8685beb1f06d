"""Threads besides the training thread wait while requests need the device."""

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from learner.config import DeviceSharingSettings
from learner.device_memory import host_staging
from learner.device_memory.host_staging import HostStaging
from learner.device_sharing.background_yield import BackgroundYield, background_yield
from learner.device_sharing.lease import Servers, hold_server
from learner.device_sharing.sharing import DeviceSharingSpec
from tests.support.cuda_recorder import CudaRecorder

SLO = timedelta(milliseconds=20)
PATIENCE = timedelta(hours=1)
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def spec(policy: str = "inference-first") -> DeviceSharingSpec:
    return DeviceSharingSpec(DeviceSharingSettings.model_validate({"policy": policy}), SLO, PATIENCE)


def test_a_call_returns_at_once_without_requests(tmp_path: Path) -> None:
    with background_yield(spec(), tmp_path, CUDA, threading.Event()) as before_chunk:
        before_chunk()
        with hold_server(tmp_path, SLO) as mark:
            with mark.waiting():
                pass
            before_chunk()


@pytest.mark.slow
def test_a_call_returns_once_the_request_is_answered(tmp_path: Path) -> None:
    with (
        hold_server(tmp_path, SLO) as mark,
        background_yield(spec(), tmp_path, CUDA, threading.Event()) as before_chunk,
    ):
        returned = threading.Event()
        thread = threading.Thread(target=lambda: (before_chunk(), returned.set()))
        with mark.waiting():
            thread.start()
            assert not returned.wait(0.2)
        assert returned.wait(20)
        thread.join()


def test_a_call_waits_no_longer_than_its_bound(tmp_path: Path) -> None:
    servers = Servers(tmp_path, PATIENCE)
    with hold_server(tmp_path, SLO) as mark, mark.waiting():
        begin = time.monotonic()
        BackgroundYield(servers, threading.Event(), longest=0.05)()
        assert time.monotonic() - begin >= 0.05
    servers.close()


def test_nothing_waits_once_the_learner_stops(tmp_path: Path) -> None:
    stop, servers = threading.Event(), Servers(tmp_path, PATIENCE)
    with hold_server(tmp_path, SLO) as mark, mark.waiting():
        stop.set()
        begin = time.monotonic()
        BackgroundYield(servers, stop, longest=1000.0)()
        assert time.monotonic() - begin < 100
    servers.close()


@pytest.mark.parametrize(("policy", "device"), [("exclusive", CUDA), ("inference-first", CPU)])
def test_nothing_waits_where_the_kernel_or_nobody_shares(tmp_path: Path, policy: str, device: torch.device) -> None:
    with (
        hold_server(tmp_path, SLO) as mark,
        mark.waiting(),
        background_yield(spec(policy), tmp_path, device, threading.Event()) as before_chunk,
    ):
        assert before_chunk is bool


def test_several_threads_may_call_it(tmp_path: Path) -> None:
    with hold_server(tmp_path, SLO), background_yield(spec(), tmp_path, CUDA, threading.Event()) as before_chunk:
        threads = [threading.Thread(target=lambda: [before_chunk() for _ in range(200)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.mark.slow
def test_no_chunk_of_a_copy_starts_while_a_request_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_staging, "CHUNK_BYTES", 1000)
    servers, marked = Servers(tmp_path, PATIENCE), threading.Event()
    with CudaRecorder() as cuda, hold_server(tmp_path, SLO) as mark:
        before_chunk, staging, calls = BackgroundYield(servers, threading.Event()), HostStaging(CUDA), list[int]()

        def check() -> None:
            calls.append(len(copies_of(cuda)))
            if len(calls) == 3:
                marked.set()
                answered.wait(20)
            before_chunk()

        answered = threading.Event()
        staging.before_chunk = check
        copies = staging.copy({str(index): torch.randn(250, device="cuda") for index in range(5)}.items())
        thread = threading.Thread(target=lambda: len(copies))
        thread.start()
        assert marked.wait(20)
        with mark.waiting():
            answered.set()
            time.sleep(0.2)
            assert len(copies_of(cuda)) == 2, "a chunk has started before the answer"
        thread.join()
        assert len(copies_of(cuda)) == 5
        cuda.check()
    servers.close()


def copies_of(cuda: CudaRecorder) -> list[str]:
    return [name for name in cuda.sites("copy") if name.startswith("cuda to cpu")]
