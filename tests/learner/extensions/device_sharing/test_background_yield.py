"""Threads besides the training thread wait while requests need the device."""

import threading
import time
from datetime import timedelta

import pytest
import torch

from anabranch.learner.device import host_staging
from anabranch.learner.device.host_staging import HostStaging
from anabranch.learner.device.lease import Servers, hold_server
from anabranch.learner.extensions.device_sharing.extension import BackgroundYield, background_yield
from anabranch.learner.settings.learner import DeviceSharingSettings
from anabranch.learner.settings.pipeline import ServedSettings
from tests.support.cuda_recorder import CudaRecorder
from tests.support.waiting import PATIENCE_SECONDS

SLO = timedelta(milliseconds=20)
PATIENCE = timedelta(hours=1)
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def shared(policy="inference-first"):
    return DeviceSharingSettings.model_validate({"policy": policy}), ServedSettings(slo=SLO, timeout=PATIENCE)


def test_a_call_returns_at_once_without_requests(tmp_path):
    with background_yield(*shared(), tmp_path, CUDA, threading.Event()) as before_chunk:
        before_chunk()
        with hold_server(tmp_path, SLO) as mark:
            with mark.waiting():
                pass
            before_chunk()


@pytest.mark.slow
def test_a_call_returns_once_the_request_is_answered(tmp_path):
    with (
        hold_server(tmp_path, SLO) as mark,
        background_yield(*shared(), tmp_path, CUDA, threading.Event()) as before_chunk,
    ):
        returned = threading.Event()
        thread = threading.Thread(target=lambda: (before_chunk(), returned.set()))
        with mark.waiting():
            thread.start()
            assert not returned.wait(0.2)
        assert returned.wait(PATIENCE_SECONDS)
        thread.join()


def test_a_call_waits_no_longer_than_its_bound(tmp_path):
    servers = Servers(tmp_path, PATIENCE)
    with hold_server(tmp_path, SLO) as mark, mark.waiting():
        begin = time.monotonic()
        BackgroundYield(servers, threading.Event(), longest=0.05)()
        assert time.monotonic() - begin >= 0.05
    servers.close()


def test_nothing_waits_once_the_learner_stops(tmp_path):
    stop, servers = threading.Event(), Servers(tmp_path, PATIENCE)
    with hold_server(tmp_path, SLO) as mark, mark.waiting():
        stop.set()
        begin = time.monotonic()
        BackgroundYield(servers, stop, longest=1000.0)()
        assert time.monotonic() - begin < 100
    servers.close()


@pytest.mark.parametrize(("policy", "device"), [("exclusive", CUDA), ("inference-first", CPU)])
def test_nothing_waits_where_the_kernel_or_nobody_shares(tmp_path, policy, device):
    with (
        hold_server(tmp_path, SLO) as mark,
        mark.waiting(),
        background_yield(*shared(policy), tmp_path, device, threading.Event()) as before_chunk,
    ):
        assert before_chunk is bool


def test_several_threads_may_call_it(tmp_path):
    with hold_server(tmp_path, SLO), background_yield(*shared(), tmp_path, CUDA, threading.Event()) as before_chunk:
        threads = [threading.Thread(target=lambda: [before_chunk() for _ in range(200)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.mark.slow
def test_no_chunk_of_a_copy_starts_while_a_request_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(host_staging, "CHUNK_BYTES", 1000)
    servers, marked = Servers(tmp_path, PATIENCE), threading.Event()
    with CudaRecorder() as cuda, hold_server(tmp_path, SLO) as mark:
        before_chunk, staging, calls = BackgroundYield(servers, threading.Event()), HostStaging(CUDA), list[int]()

        def check():
            calls.append(len(copies_of(cuda)))
            if len(calls) == 3:
                marked.set()
                answered.wait(PATIENCE_SECONDS)
            before_chunk()

        answered = threading.Event()
        staging.before_chunk = check
        copies = staging.copy({str(index): torch.randn(250, device="cuda") for index in range(5)}.items())
        thread = threading.Thread(target=lambda: len(copies))
        thread.start()
        assert marked.wait(PATIENCE_SECONDS)
        with mark.waiting():
            answered.set()
            time.sleep(0.2)
            assert len(copies_of(cuda)) == 2, "a chunk has started before the answer"
        thread.join()
        assert len(copies_of(cuda)) == 5
        cuda.check()
    servers.close()


def copies_of(cuda):
    return [name for name in cuda.sites("copy") if name.startswith("cuda to cpu")]
