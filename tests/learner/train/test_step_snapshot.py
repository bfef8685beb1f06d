"""Snapshots: nested ones, buffers that change their tensors, masks of minus infinity, and memory that is used again."""

import contextlib
import math

import pytest
import torch
from torch import nn

from anabranch.learner.train.step_snapshot import Snapshots
from tests.support.operations import Operations

CPU = torch.device("cpu")


def normalized(layers=3):
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(3, 3), nn.BatchNorm1d(3))))


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_nested_snapshots_restore_each_its_own_state():
    model = normalized()
    snapshots = Snapshots(model, CPU)
    for _ in range(3):
        first = state(model)
        with snapshots.taken() as outer:
            model(torch.randn(4, 3))
            second = state(model)
            with snapshots.taken() as inner:
                model(torch.randn(4, 3))
                with snapshots.taken():
                    model(torch.randn(4, 3))
                inner.restore()
                assert equal(state(model), second)
            model(torch.randn(4, 3))
            outer.with_current_rng().restore()
            assert equal(state(model), first)
        model(torch.randn(4, 3))


def test_a_snapshot_that_was_taken_in_a_failed_block_does_not_disturb_the_next():
    model = normalized()
    snapshots = Snapshots(model, CPU)
    with contextlib.suppress(RuntimeError), snapshots.taken():
        model(torch.randn(4, 5))
    before = state(model)
    with snapshots.taken() as snapshot:
        model(torch.randn(4, 3))
        snapshot.restore()
    assert equal(state(model), before)


def test_the_memory_of_copies_is_used_again_also_after_buffers_were_restored():
    model = normalized()
    snapshots, addresses = Snapshots(model, CPU), set()
    for step in range(4):
        with snapshots.taken() as snapshot:
            addresses.add(tuple(value.data_ptr() for value in snapshot._values))
            model(torch.randn(4, 3))
            if step % 2:
                snapshot.restore_buffers()
    assert len(addresses) == 1


class Changing(nn.Module):
    """Has buffers that come, go, grow, have a graph and are of several dtypes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        for name, value in {
            "mean": torch.zeros(3),
            "precise": torch.zeros(2, dtype=torch.float64),
            "steps": torch.zeros((), dtype=torch.int64),
            "empty": torch.zeros(0),
            "seen": None,
            "kept": torch.ones(2),
        }.items():
            self.register_buffer(name, value)

    def forward(self, x):
        self.mean = 0.5 * self.mean.detach() + self.weight * x.mean(0)
        self.steps += 1
        self.precise.add_(1.0)
        self.seen = x
        self.kept = None
        return x * self.mean


def test_buffers_of_all_kinds_are_restored():
    model = Changing()
    snapshots = Snapshots(model, CPU)
    before = state(model)
    for _ in range(3):
        with snapshots.taken() as snapshot:
            model(torch.randn(4, 3)).sum().backward()
            assert model.mean.requires_grad
            snapshot.restore()
            model.seen = None
        assert equal(state(model), before)
        assert not model.mean.requires_grad


def test_a_buffer_that_was_resized_is_restored_to_its_old_shape():
    model = normalized(1)
    snapshots = Snapshots(model, CPU)
    with snapshots.taken() as snapshot:
        model.get_buffer("1.running_mean").resize_(7)
        assert snapshot.magnitude() is not None
        snapshot.restore()
    assert model.get_buffer("1.running_mean").shape == (3,)
    with snapshots.taken() as snapshot:
        model.get_buffer("1.running_mean").fill_(3.0)
        snapshot.restore()
    assert not model.get_buffer("1.running_mean").any()


def test_a_snapshot_can_be_taken_after_one_for_which_there_was_no_memory(monkeypatch):
    model = normalized()
    snapshots, before = Snapshots(model, CPU), state(model)

    def fail(_buffer):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            snapshots.of_step()
    snapshot = snapshots.of_step()
    model(torch.randn(4, 3))
    snapshot.restore()
    assert equal(state(model), before)


class Masked(nn.Module):
    """Has a mask of which some values are not finite, besides statistics."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -math.inf, 0.0]))
        self.norm = nn.BatchNorm1d(3)


@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_a_value_that_is_no_longer_finite_is_seen_next_to_those_that_never_were(poison):
    model = Masked()
    snapshots = Snapshots(model, CPU)

    def suspicious(snapshot):
        return not math.isfinite(snapshot.magnitude().item())

    with snapshots.taken() as snapshot:
        assert suspicious(snapshot)
        assert not snapshot.lost_finite()
        snapshot.expect_non_finite()
        assert not suspicious(snapshot)
    with snapshots.taken() as snapshot:
        assert not suspicious(snapshot), "from then on without a closer comparison"
        model.mask[0] = poison
        assert suspicious(snapshot)
        assert snapshot.lost_finite()
        snapshot.restore()
        assert not suspicious(snapshot)
        model.norm.running_var[2] = poison
        assert suspicious(snapshot)
        assert snapshot.lost_finite()


@pytest.mark.parametrize("layers", [1, 53])
def test_the_number_of_operations_does_not_depend_on_the_number_of_buffers(layers):
    snapshots = Snapshots(normalized(layers), CPU)
    with snapshots.taken():
        pass
    with Operations() as operations, snapshots.taken() as snapshot:
        snapshot.magnitude()
        snapshot.restore_buffers()
    assert operations.total <= 7, operations


def test_a_model_without_buffers_costs_no_operation():
    snapshots = Snapshots(nn.Linear(3, 3), CPU)
    with Operations() as operations, snapshots.taken() as snapshot:
        assert snapshot.magnitude() is None
        snapshot.restore_buffers()
    assert operations.total == 0
