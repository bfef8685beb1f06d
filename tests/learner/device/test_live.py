"""Device memory as it is counted from tensors."""

import torch
from torch import nn

from anabranch.learner.loop.reporter import live_bytes
from anabranch.learner.model.features.host_state import HostState

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_tensors_are_counted_by_purpose():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    assert live_bytes(CPU, model, optimizer, {}) == {"weights": 4 * (12 + 6 + 6) + 8}
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    found = live_bytes(CPU, model, optimizer, {"scorer": 5, "replay": 0})
    assert found == {"weights": 104, "gradients": 72, "optimizer": 72, "scorer": 5}


def test_frozen_weights_are_counted_separately():
    model = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    assert live_bytes(CPU, model, optimizer, {}) == {"weights": 16, "base": 48}


def test_buffers_that_stay_on_the_host_are_not_counted():
    model = nn.Sequential(nn.Linear(3, 1), HostState(sketch=torch.zeros(1000))).to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert live_bytes(torch.device("meta"), model, optimizer, {}) == {"weights": 16}


def test_on_cuda_the_rest_of_what_is_allocated_and_reserved_is_reported(monkeypatch):
    stats = {"allocated_bytes.all.current": 100, "reserved_bytes.all.current": 250}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: stats)
    model = nn.Linear(3, 3)
    found = live_bytes(CUDA, model, torch.optim.SGD(model.parameters(), lr=0.1), {"replay": 30})
    assert found == {"weights": 48, "replay": 30, "other": 22, "cached": 150}
    assert sum(found.values()) == 250


def test_the_tier_of_the_store_is_counted_where_the_device_has_it(make_bench):
    bench = make_bench(3)
    tier = bench.store.tiers.all[0]
    assert bench.store.tiers.memory.device_bytes == tier.slots * tier.slot_bytes > 0
