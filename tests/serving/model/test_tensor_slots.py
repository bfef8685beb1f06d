"""Versions are loaded in turns into the tensors of those before, and none changes another that is still in use."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor, nn

from anabranch.learner.model.trained_set import decide_trained_set
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.model.loaded_version import ServedVersion, load_version
from anabranch.serving.model.tensor_slots import TensorSlot, TensorSlots, loads_plainly
from anabranch.serving.rollout.hot_swap import VersionSwapper
from tests.support.waiting import PATIENCE_SECONDS

CPU = torch.device("cpu")
ROW = {"x": np.zeros((1, 4), np.float32)}


def addresses(module):
    return [tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers())]


def load(publisher, number):
    publisher.publish(number)
    return load_version(publisher.deployment, publisher.versions.manifest(number), 8)


def answer(version):
    return float(version.run(ROW)["prediction"][0])


def test_two_sets_of_tensors_are_filled_in_turns_from_swap_to_swap(numbers):
    swap = VersionSwapper(numbers.deployment, 8, ServingMetrics(CollectorRegistry()), lambda: None, pytest.fail)
    used = []
    for number in range(1, 7):
        numbers.publish(number)
        assert swap.poll()
        assert swap.current is not None
        assert answer(swap.current) == number
        used.append(addresses(swap.current._module))
    assert used[0] != used[1]
    assert used == [used[0], used[1]] * 3


def test_a_version_that_requests_still_hold_keeps_its_weights_and_a_third_set_is_made(numbers):
    versions = [load(numbers, number) for number in (1, 2, 3)]
    assert len({tuple(addresses(version._module)) for version in versions}) == 3
    assert [answer(version) for version in versions] == [1, 2, 3]
    first = addresses(versions[0]._module)
    del versions[0]
    assert addresses(load(numbers, 4)._module) == first
    assert [answer(version) for version in versions] == [2, 3]


def test_a_version_that_cannot_be_loaded_gives_its_tensors_back(numbers, monkeypatch):
    first = load(numbers, 1)
    spare = addresses(load(numbers, 2)._module)
    with monkeypatch.context() as patch:
        patch.setattr(ServedVersion, "run", lambda *_: 1 / 0)
        for number in (3, 4):
            with pytest.raises(Exception, match="ZeroDivisionError"):
                load(numbers, number)
    assert addresses(load(numbers, 5)._module) == spare
    assert answer(first) == 1


def test_at_most_one_set_of_tensors_is_kept_besides_those_in_use():
    slots = TensorSlots()
    taken = [slots.take() for _ in range(3)]
    for slot in taken:
        slots.put(slot)
    assert slots.take() is taken[0]
    assert slots.take() not in taken


class Counting(nn.Module):
    """Changes itself in each run: a buffer that is saved, one that is not, and an attribute."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("saved", torch.zeros(2))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)
        self.runs = 0
        self.cache: dict[str, Tensor] = {}

    def forward(self, x):
        self.runs += 1
        self.cache["last"] = x
        self.saved += 1
        self.unsaved += 1
        return self.weight + self.saved


def frozen(template):
    """Return a module that learns all its weights, as serving has it: without gradients."""
    decide_trained_set(template)
    return template.requires_grad_(False)


def taken_over(template, change):
    """Return two modules that were loaded one after the other; the first was changed between."""
    slot = TensorSlot()
    frozen(template)
    first = slot.load(template, template.state_dict(), CPU, plainly=True)
    change(first)
    return first, slot.load(template, template.state_dict(), CPU, plainly=True)


def test_nothing_but_memory_is_taken_over_from_the_version_before():
    first, second = taken_over(Counting(), lambda module: module(torch.ones(2)))
    assert addresses(first) == addresses(second)
    assert isinstance(second, Counting)
    assert (second.runs, second.cache) == (0, {})
    assert second.saved.tolist() == second.unsaved.tolist() == [0, 0]


def test_hooks_do_not_add_up_from_version_to_version():
    _, second = taken_over(nn.Linear(2, 2), lambda module: module.register_forward_hook(lambda *_: None))
    assert not second._forward_hooks


def test_tensors_that_the_template_shares_stay_shared_and_others_stay_separate():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(2, 2, bias=False)
            self.other = nn.Linear(2, 2, bias=False)
            self.other.weight = self.one.weight
            self.third = nn.Linear(2, 2, bias=False)

    def tie(module):
        assert isinstance(module, Tied)
        slot._tensors["third.weight"] = slot._tensors["one.weight"]

    template = frozen(Tied())
    weights = {name: torch.full((2, 2), float(number)) for number, name in enumerate(template.state_dict())}
    slot = TensorSlot()
    tie(slot.load(template, template.state_dict(), CPU, plainly=True))
    second = slot.load(template, weights, CPU, plainly=True)
    assert isinstance(second, Tied)
    assert second.one.weight is second.other.weight
    assert second.third.weight.data_ptr() != second.one.weight.data_ptr()
    assert second.third.weight.tolist() == [[2, 2], [2, 2]]


@pytest.mark.parametrize(
    "change", [lambda tensor: tensor.double(), lambda tensor: tensor.new_zeros(3), lambda tensor: tensor.to("meta")]
)
def test_a_tensor_that_does_not_fit_is_not_taken_over(change):
    slot, template = TensorSlot(), frozen(nn.Linear(2, 2))
    first = slot.load(template, template.state_dict(), CPU, plainly=True)
    graphs = slot.graphs
    slot._tensors["bias"] = nn.Parameter(change(first.bias), requires_grad=False)
    second = slot.load(template, template.state_dict(), CPU, plainly=True)
    assert isinstance(second, nn.Linear)
    assert second.weight.data_ptr() == first.weight.data_ptr()
    assert second.bias.tolist() == template.bias.tolist()
    assert slot.graphs is not graphs, "graphs read the tensor that was replaced"
    graphs = slot.graphs
    slot.load(template, template.state_dict(), CPU, plainly=True)
    assert slot.graphs is graphs


class Deriving(nn.Module):
    """Computes an attribute when its weights are loaded, and grows a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(1))
        self.total = 0.0

    def _load_from_state_dict(self, state, prefix, *more):
        self.bank = state[prefix + "bank"].clone()
        self.total = float(self.bank.sum())


def test_modules_whose_code_takes_part_in_loading_are_loaded_as_before():
    slot, template = TensorSlot(), nn.Sequential(Deriving())
    for rows in (1, 3, 2):
        module = slot.load(template, {"0.bank": torch.ones(rows)}, CPU, plainly=loads_plainly(template))
        assert (module[0].total, module[0].bank.tolist()) == (float(rows), [1.0] * rows)  # type: ignore[index]


def hooked():
    module = nn.Linear(1, 1)
    module.register_load_state_dict_pre_hook(lambda *_: None)
    return module


def hooked_after():
    module = nn.Linear(1, 1)
    module.register_load_state_dict_post_hook(lambda *_: None)
    return module


class Extra(nn.Module):
    def set_extra_state(self, state):
        pass


class Viewing(nn.Module):
    """Reads a buffer also by a view of it, which is an attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(4))
        self.first = [self.table[:2]]


def test_a_view_of_a_buffer_follows_the_weights_of_every_version():
    template, slot = Viewing(), TensorSlot()
    assert not loads_plainly(template)
    for number in range(1, 4):
        weights = {"table": torch.full((4,), float(number))}
        module: Any = slot.load(template, weights, torch.device("cpu"), plainly=loads_plainly(template))
        assert module.table.tolist() == [number] * 4
        assert module.first[0].tolist() == [number] * 2
    assert loads_plainly(nn.LSTM(2, 3)), "its list has the parameters themselves"


def test_which_modules_load_plainly():
    for module in (nn.Linear(1, 1), nn.BatchNorm1d(2), nn.Sequential(nn.MultiheadAttention(2, 1)), Counting()):
        assert loads_plainly(module), module
    for module in (Deriving(), hooked(), hooked_after(), nn.Sequential(Extra())):
        assert not loads_plainly(module), module


def test_warm_up_is_launched_outside_of_the_stream_of_requests(numbers, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr(
        type(numbers.deployment), "stream", lambda _: opened.append("requests") or torch.no_grad(), raising=True
    )
    load(numbers, 1)
    opened.clear()
    version = load(numbers, 2)
    assert opened == []
    version.run(ROW)
    assert opened == ["requests"]


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_weights_reach_a_device_in_pieces_by_one_page_locked_buffer(cuda, monkeypatch, last):
    """Also those that do not end with a piece, and that are not stored as they are in memory."""
    monkeypatch.setattr("anabranch.serving.model.tensor_slots._PIECE_BYTES", 16)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Linear(3, 1)).eval()
    template = model.to(memory_format=torch.channels_last) if last else model  # type: ignore[call-overload]
    slot, kept = TensorSlot(), None
    for number in range(3):
        weights = {
            name: (torch.arange(value.numel()).reshape(value.shape) + number).to(value.dtype)
            for name, value in template.state_dict().items()
        }
        module = slot.load(template, weights, cuda, plainly=True)
        assert all(torch.equal(value.cpu(), weights[name]) for name, value in module.state_dict().items())
        assert kept is None or addresses(module) == kept
        kept = addresses(module)
    with pytest.raises(RuntimeError, match="size mismatch"):
        slot.load(template, {**weights, "1.bias": torch.zeros(6)}, cuda, plainly=True)


@pytest.mark.gpu
def test_swaps_allocate_nothing_on_a_gpu_while_requests_run(linear_on):
    publisher = linear_on("cuda")
    for number in (1, 2, 3):
        publish_linear(publisher, number)
    kept = [load_version(publisher.deployment, publisher.versions.manifest(number), 8) for number in (1, 2)]
    stop, answered = threading.Event(), threading.Event()
    wrong: list[Any] = []

    def ask():
        while not stop.is_set():
            found = kept[-1].run(ROW)["probabilities"]
            wrong.extend([found] if not np.isfinite(found).all() else [])
            answered.set()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        assert answered.wait(PATIENCE_SECONDS)
        before = torch.cuda.memory_allocated()  # with the workspace that cuBLAS has for each thread
        spare = addresses(kept[0]._module)
        kept.pop(0)
        third = load_version(publisher.deployment, publisher.versions.manifest(3), 8)
        assert addresses(third._module) == spare
    finally:
        stop.set()
        thread.join()
    assert torch.cuda.memory_allocated() <= before + 1_000_000
    assert not wrong


def publish_linear(publisher, number):
    weights = {"weight": torch.full((3, 4), float(number)), "bias": torch.arange(3.0)}
    publisher.publish(number, weights=weights)


@pytest.fixture
def linear_on(deploy):
    """Make a deployment of a linear classifier on a device."""
    import dataclasses

    def make(device):
        publisher = deploy("linear")
        publisher.deployment = dataclasses.replace(publisher.deployment, device=torch.device(device, 0))
        return publisher

    return make
