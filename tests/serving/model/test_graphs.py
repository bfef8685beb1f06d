"""Runs as CUDA graphs: sizes, padding, versions that are copied into captured tensors, and what cannot be captured.

Without a GPU a fake graph keeps the promise of a real one: it calls the captured function, on the captured tensors.
"""

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from anabranch.serving.model.graphs import CudaCapture, Graphs, capture_on, sizes_up_to
from anabranch.serving.model.loaded_version import load_version
from anabranch.serving.protocol.codec import EMBEDDING

CPU = torch.device("cpu")


class FakeGraphs:
    """Captures functions, and counts them; `replayed` has the number of each that ran again."""

    def __init__(self):
        self.captured = 0
        self.replayed: list[int] = []

    def __call__(self, device):
        assert device == CPU
        return self.capture

    def capture(self, run):
        self.captured += 1
        outputs = run().clone()
        number = self.captured

        def replay():
            self.replayed.append(number)
            outputs.copy_(run())

        return replay, outputs


@pytest.fixture
def fake():
    return FakeGraphs()


@pytest.fixture
def graphed(deploy, fake):
    """Make a deployment whose runs are captured by `fake`, or as given."""

    def make(factory="linear", capture=fake, **changes):
        publisher = deploy(factory)
        publisher.deployment = dataclasses.replace(publisher.deployment, capture=capture, **changes)
        return publisher

    return make


def load(publisher, number, max_batch=8):
    weights = {"weight": torch.full((3, 4), float(number)) * torch.arange(1.0, 4)[:, None], "bias": torch.ones(3)}
    publisher.publish(number, weights=weights)
    return load_version(publisher.deployment, publisher.versions.manifest(number), max_batch)


def rows(count):
    return {"x": np.random.default_rng(count).normal(size=(count, 4)).astype(np.float32)}


def eager(version, features):
    graphs, version._graphs = version._graphs, None
    try:
        return version.run(features)
    finally:
        version._graphs = graphs


@pytest.mark.parametrize(
    ("max_batch", "sizes"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])]
)
def test_sizes_are_powers_of_two_and_the_largest_batch(max_batch, sizes):
    assert sizes_up_to(max_batch) == sizes


def test_a_batch_is_padded_to_the_next_size_and_answered_as_without_graphs(graphed, fake):
    version = load(graphed(), 1)
    assert fake.captured == 4  # of 8, 4, 2 and 1 rows, in this order
    for count, graph in ((1, 4), (2, 3), (3, 2), (4, 2), (5, 1), (7, 1), (8, 1), (3, 2)):
        fake.replayed.clear()
        found, expected = version.run(rows(count)), eager(version, rows(count))
        assert fake.replayed == [graph]
        assert list(found) == list(expected)
        for name in expected:
            assert found[name].dtype == expected[name].dtype
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)


def test_rows_that_fill_up_a_batch_are_fillers_and_not_rows_of_other_requests():
    seen: list[Any] = []

    def predict(features):
        seen.append(features["month"].clone())
        return {"prediction": features["month"]}

    graphs = Graphs()
    graphs.capture(FakeGraphs(), predict, lambda count: {"month": np.ones(count, np.int64)}, 4, CPU)
    assert graphs.run({"month": np.array([7, 8, 9, 10])}, {"month": 1})["prediction"].tolist() == [7, 8, 9, 10]  # type: ignore[index]
    assert graphs.run({"month": np.array([5, 6, 7])}, {"month": 1})["prediction"].tolist() == [5, 6, 7]  # type: ignore[index]
    assert seen[-1].tolist() == [5, 6, 7, 1]


def test_answers_stay_as_they_are_when_the_graph_runs_again(graphed):
    version = load(graphed(), 1)
    first = version.run(rows(2))
    before = {name: array.copy() for name, array in first.items()}
    version.run({"x": 9 * rows(2)["x"]})
    for name in before:
        np.testing.assert_array_equal(first[name], before[name])


def test_more_rows_than_the_largest_size_are_run_without_a_graph(graphed, fake):
    version = load(graphed(), 1, max_batch=4)
    fake.replayed.clear()
    assert len(version.run(rows(5))["prediction"]) == 5
    assert fake.replayed == []


def test_swaps_keep_the_graphs_and_each_version_answers_with_its_weights(graphed, fake):
    publisher = graphed()
    served = load(publisher, 1)
    for number in range(2, 7):
        following = load(publisher, number)
        for version in (served, following):
            np.testing.assert_allclose(
                version.run(rows(3))["probabilities"], eager(version, rows(3))["probabilities"], rtol=1e-5
            )
        served = following
    assert fake.captured == 2 * 4, "both sets of tensors are captured once"


def test_embeddings_are_answered_without_graphs(graphed, fake):
    publisher = graphed("mixed")
    model = publisher.deployment.model.model_copy(update={"embedding": "numbers"})
    publisher.deployment = dataclasses.replace(publisher.deployment, model=model)
    weights = {
        "words.weight": torch.ones(8, 3),
        "numbers.weight": torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]),
        "numbers.bias": torch.zeros(3),
    }
    features = {"word": np.zeros((3, 2), np.int64), "size": np.array([[1, 2], [3, 4], [5, 6]], np.float32)}
    expected = features["size"] @ weights["numbers.weight"].numpy().T
    for number in (1, 2, 3):
        publisher.publish(number, weights=weights)
        version = load_version(publisher.deployment, publisher.versions.manifest(number), 4)
        fake.replayed.clear()
        plain, embedded = version.run(features), version.run(features, embed=True)
        assert len(fake.replayed) == 1
        assert EMBEDDING not in plain
        np.testing.assert_allclose(embedded[EMBEDDING], expected, rtol=1e-6)
        np.testing.assert_allclose(embedded["probabilities"], plain["probabilities"], rtol=1e-6)


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if "serving.graphs" in record.getMessage()]


def test_a_model_that_cannot_be_captured_is_served_without_graphs_and_one_warning(graphed, caplog):
    def refuse(*_):
        raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")

    publisher = graphed(capture=refuse)
    for number in (1, 2, 3):
        assert len(load(publisher, number).run(rows(3))["prediction"]) == 3
    (warning,) = warnings_of(caplog)
    assert "has no effect: the model cannot run as CUDA graphs: AcceleratorError: CUDA error: operation" in warning


def test_a_lack_of_memory_for_graphs_is_no_reason_to_capture_none_later(graphed, fake):
    failing = [True]

    def capture(device):
        if failing[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return fake(device)

    publisher = graphed(capture=capture)
    assert load(publisher, 1)._graphs is None
    failing[0] = False
    assert load(publisher, 2)._graphs is not None


def test_graphs_that_answer_otherwise_than_the_model_are_not_used(graphed, caplog):
    def capture(run):
        outputs = run().clone()
        return lambda: outputs.zero_(), outputs

    version = load(graphed(capture=lambda _: capture), 1)
    assert version._graphs is None
    assert "a CUDA graph has another" in warnings_of(caplog)[0]
    assert version.run(rows(1))["probabilities"].sum() > 0.99


def test_a_model_whose_code_takes_part_in_loading_is_not_captured(graphed, fake, caplog):
    publisher = graphed()
    publisher.deployment.template.module.register_load_state_dict_pre_hook(lambda *_: None)
    version = load(publisher, 1)
    assert (version._graphs, fake.captured) == (None, 0)
    assert "takes part in loading weights" in warnings_of(caplog)[0]


def test_a_device_without_graphs_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        assert capture_on(CPU) is None
    assert warnings_of(caplog) == ["serving.graphs has no effect: it needs a CUDA device, but the device is cpu"]
    assert capture_on(torch.device("cuda")) is CudaCapture


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_on_a_gpu_graphs_answer_as_the_model_and_survive_swaps(deploy, precision):
    device = torch.device("cuda", 0)
    publisher = deploy("linear")
    publisher.deployment = dataclasses.replace(
        publisher.deployment, device=device, capture=capture_on(device), precision=precision
    )
    served = load(publisher, 1)
    for number in range(2, 6):
        following = load(publisher, number)
        assert following._graphs is not None
        for version in (served, following):
            for count in (1, 3, 8):
                found, expected = version.run(rows(count)), eager(version, rows(count))
                np.testing.assert_allclose(found["probabilities"], expected["probabilities"], rtol=1e-3, atol=1e-5)
        served = following


@pytest.mark.gpu
def test_on_a_gpu_a_model_that_waits_for_the_device_is_served_without_graphs(deploy, caplog, monkeypatch):
    device = torch.device("cuda", 0)
    publisher = deploy("linear")
    publisher.deployment = dataclasses.replace(publisher.deployment, device=device, capture=capture_on(device))
    forward = nn.Linear.forward

    def waiting(module, x):
        return forward(module, x) if x.sum().item() < 1e9 else x

    monkeypatch.setattr(nn.Linear, "forward", waiting)
    version = load(publisher, 1)
    assert version._graphs is None
    assert len(version.run(rows(3))["prediction"]) == 3
    assert "cannot run as CUDA graphs" in warnings_of(caplog)[0]
