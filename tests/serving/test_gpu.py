"""Serving on a CUDA device; where there is none, on that of the recorder, which computes on the CPU."""

import asyncio
import gc
import sys
import threading
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.device.lease import hold_server
from anabranch.learner.settings.model import ModelSettings
from anabranch.serving.errors import RequestError
from anabranch.serving.inference.batcher import Batcher
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.model.loaded_version import ServedVersion
from anabranch.serving.rollout.hot_swap import VersionSwapper
from anabranch.serving.settings import ServingSettings

REQUEST = {"x": np.zeros((3, 4), np.float32)}


def swapper_of(publisher):
    def fail(exc):
        raise exc

    return VersionSwapper(publisher.deployment, 8, ServingMetrics(CollectorRegistry()), lambda: None, fail)


def test_a_version_answers_on_a_device_as_on_the_cpu(deploy, cuda):
    answers = []
    publisher = deploy("mixed")
    weights = {
        name: torch.linspace(-1, 1, value.numel()).reshape(value.shape)
        for name, value in publisher.deployment.template.module.state_dict().items()
    }
    publisher.publish(1, weights)
    rows = {"word": np.array([[1, 2], [3, 0]], np.int64), "size": np.array([[0.5, 1], [2, 3]], np.float32)}
    for device in (torch.device("cpu"), cuda):
        publisher.deployment = replace(publisher.deployment, device=device)
        swapper = swapper_of(publisher)
        swapper.poll()
        assert swapper.current is not None
        answers.append(swapper.current.run(rows))
    for name, value in answers[0].items():
        np.testing.assert_allclose(answers[1][name], value, rtol=1e-5, atol=1e-6)


def test_a_request_that_holds_a_version_is_answered_by_it_after_swaps(numbers, cuda):
    numbers.deployment = replace(numbers.deployment, device=cuda)
    swapper = swapper_of(numbers)
    numbers.publish(1)
    swapper.poll()
    held = swapper.current
    assert held is not None
    for number in (2, 3):
        numbers.publish(number)
        swapper.poll()
        assert swapper.current is not None
        assert swapper.current.run(REQUEST)["prediction"].tolist() == [number] * 3
    assert held.run(REQUEST)["prediction"].tolist() == [1] * 3


@pytest.mark.slow
def test_the_server_answers_after_a_batch_for_which_memory_did_not_suffice(numbers, cuda, tmp_path, monkeypatch):
    numbers.deployment = replace(numbers.deployment, device=cuda)
    swapper = swapper_of(numbers)
    numbers.publish(1)
    swapper.poll()
    run, version = ServedVersion.run, swapper.current
    assert version is not None
    missing = [True]

    def short(self, features, embed=False):
        if missing.pop() if missing else False:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return run(self, features, embed)

    bugs: list[BaseException] = []

    async def ask(mark):
        with Batcher(ServingSettings(), bugs.append, mark) as batcher:
            return [
                await asyncio.gather(batcher.predict(version, REQUEST, 3), return_exceptions=True) for _ in range(2)
            ]

    monkeypatch.setattr(ServedVersion, "run", short)
    with hold_server(tmp_path / "lease", timedelta(milliseconds=20)) as mark:
        (first,), (second,) = asyncio.run(ask(mark))
    assert bugs == []
    assert isinstance(first, RequestError | dict)  # later releases may answer it in parts
    assert second["prediction"].tolist() == [1] * 3


@pytest.mark.gpu
def test_swaps_take_the_memory_of_two_versions_and_of_no_more(deploy):
    publisher = deploy("linear")
    publisher.deployment = replace(publisher.deployment, device=torch.device("cuda", 0))
    weights = publisher.deployment.template.module.state_dict()
    swapper, after = swapper_of(publisher), []
    for number in range(1, 9):
        publisher.publish(number, {name: value + number for name, value in weights.items()})
        swapper.poll()
        gc.collect()
        after.append(torch.cuda.memory_allocated())
    assert max(after[3:]) <= after[2]


@pytest.mark.gpu
def test_requests_are_answered_while_another_stream_keeps_the_device_busy(numbers):
    """With the highest priority, which the swap's thread and the batcher share."""
    device = torch.device("cuda", 0)
    numbers.deployment = replace(numbers.deployment, device=device)
    swapper = swapper_of(numbers)
    numbers.publish(1)
    swapper.poll()
    assert swapper.current is not None
    stop = threading.Event()
    start = torch.randn(2048, 2048, device=device)  # no random numbers while a graph is captured

    def train():
        x = start
        while not stop.is_set():
            for _ in range(8):
                x = (x @ x).softmax(1)
            torch.cuda.synchronize(device)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(50):
            assert swapper.current.run(REQUEST)["prediction"].tolist() == [1] * 3
    finally:
        stop.set()
        thread.join()


def test_a_version_is_served_with_its_channels_last_and_answers_alike(tmp_path, monkeypatch, deploy):
    """Weights are loaded into the memory format of the configured model, from a file that does not depend on it."""
    layers = "nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3)"
    source = f"from torch import nn\n\ndef build():\n    return nn.Sequential({layers})\n"
    (tmp_path / "anabranch_test_images.py").write_text(source)
    monkeypatch.setattr(sys, "path", [*sys.path])
    features = {"x": {"dtype": "float32", "shape": [3, 6, 6]}}
    schema = Schema(SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 3}}))
    publisher, answers = deploy("linear"), []
    x = np.random.default_rng(0).standard_normal((2, 3, 6, 6), np.float32)
    weights: dict[str, torch.Tensor] = {}
    for number, last in enumerate((False, True), 1):
        model = ModelSettings(factory="anabranch_test_images:build", channels_last=last)
        publisher.deployment = replace(publisher.deployment, schema=schema, model=model, folder=tmp_path)
        weights = weights or publisher.deployment.template.module.state_dict()
        publisher.publish(number, weights)
        swapper = swapper_of(publisher)
        swapper.poll()
        assert swapper.current is not None
        weight = next(swapper.current._module.parameters())
        assert weight.is_contiguous(memory_format=torch.channels_last) == last
        answers.append(swapper.current.run({"x": x})["probabilities"])
    np.testing.assert_allclose(answers[1], answers[0], rtol=1e-4, atol=1e-6)
