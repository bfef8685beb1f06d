"""The mesh of ranks: coordinates, groups, and what it refuses."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import anabranch.learner.parallel.mesh
from anabranch.core.errors import SettingsError
from anabranch.learner.parallel.mesh import Mesh, num_row_groups
from anabranch.learner.parallel.process_group import leave_group
from anabranch.learner.settings.learner import RANK_TIMEOUT, LearnerSettings


def settings(replicas, **mesh):
    chosen: dict[str, Any] = {"mesh": mesh} if mesh else {}
    return LearnerSettings.model_validate({"replicas": replicas, "sharding": "fsdp", **chosen})


def test_ranks_without_a_mesh_are_all_data():
    mesh = Mesh(settings(4), 3, 4)
    assert (mesh.rows, mesh.row_group(), mesh.reports(), mesh.splits_model) == (4, 3, True, False)


def test_tensor_groups_are_neighbours_then_experts_then_stages():
    mesh = Mesh(settings(16, data=2, tensor=2, pipeline=2, expert=2), 11, 16)
    assert [mesh.coordinate(each) for each in ("data", "pipeline", "expert", "tensor")] == [1, 0, 1, 1]
    assert [mesh.coordinate("tensor", rank) for rank in range(4)] == [0, 1, 0, 1]
    assert [mesh.coordinate("expert", rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [mesh.coordinate("pipeline", rank) for rank in (0, 4, 8)] == [0, 1, 0]
    assert mesh.rows == 4
    assert [mesh.row_group(rank) for rank in range(16)] == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]
    assert [rank for rank in range(16) if mesh.reports(rank)] == [0, 2, 8, 10], "one of each row group, in order"


@pytest.mark.parametrize(
    ("dimensions", "ranks"),
    [
        (("tensor",), [10, 11]),
        (("pipeline",), [11, 15]),
        (("data",), [3, 11]),
        (("rows",), [1, 3, 9, 11]),
        (("data", "tensor"), [2, 3, 10, 11]),
        (("rows", "pipeline", "tensor"), list(range(16))),
    ],
)
def test_a_group_has_the_ranks_that_differ_along_its_dimensions_alone(dimensions, ranks):
    dist.init_process_group("fake", store=FakeStore(), rank=11, world_size=16)
    try:
        mesh = Mesh(settings(16, data=2, tensor=2, pipeline=2, expert=2), 11, 16)
        group = mesh.group(*dimensions)
        assert dist.get_process_group_ranks(group) == ranks
        assert mesh.group(*dimensions) is group
    finally:
        leave_group()


@pytest.mark.parametrize(
    ("replicas", "size", "mesh", "shard"),
    [
        (4, 4, {}, 4),
        (4, 8, {}, 4),  # of a host, with a copy on the other
        (1, 8, {}, 8),  # hosts of one rank
        (4, 8, {"data": 4, "tensor": 2}, 2),
        (2, 8, {"data": 4, "tensor": 2}, 4),
        (4, 8, {"data": 8, "shard": 8}, 8),
        (4, 4, {"data": 4, "shard": 2}, 2),
    ],
)
def test_weights_are_sharded_over_the_ranks_of_a_host(replicas, size, mesh, shard):
    found = Mesh(settings(replicas, **mesh), 0, size)
    assert (found.size("shard"), found.size("copy")) == (shard, found.size("data") // shard)


def test_torchs_mesh_has_the_dimensions_of_several_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    try:
        mesh = Mesh(settings(4, data=4, tensor=2), 5, 8)
        of_torch = mesh.device_mesh("cpu")
        assert of_torch.mesh_dim_names == ("copy", "shard", "tensor")
        assert mesh.device_mesh("cpu") is of_torch
        assert dist.get_process_group_ranks(mesh.group("tensor")) == [4, 5]
        assert mesh.group("tensor") is of_torch.get_group("tensor")
    finally:
        leave_group()


def test_all_groups_time_out_as_that_of_all_ranks_does(monkeypatch):
    timeouts, make = [], dist.new_subgroups_by_enumeration

    def enumerated(ranks, timeout=None):
        timeouts.append(timeout)
        return make(ranks, timeout=timeout)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", enumerated)
    monkeypatch.setattr(
        anabranch.learner.parallel.mesh, "_set_pg_timeout", lambda timeout, _group: timeouts.append(timeout)
    )
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    monkeypatch.setattr(dist, "get_backend", lambda _group: "gloo")
    try:
        mesh = Mesh(settings(4, data=4, tensor=2), 5, 8)
        mesh.device_mesh("cpu")
        mesh.group("data")
    finally:
        leave_group()
    assert timeouts == [RANK_TIMEOUT] * 4


def test_a_mesh_of_another_number_of_ranks_is_refused():
    with pytest.raises(SettingsError) as refused:
        num_row_groups(settings(4, data=2, tensor=4), 4)
    assert str(refused.value) == (
        "learner.mesh has 8 ranks (data 2 x tensor 4 x pipeline 1 x expert 1), but 4 start; change it, or start 8: by "
        "learner.replicas, or by torchrun --nnodes and --nproc-per-node"
    )
    assert num_row_groups(settings(8, data=2, tensor=4), 8) == 2


def test_a_tensor_group_on_two_hosts_is_refused():
    with pytest.raises(SettingsError) as refused:
        Mesh(settings(4, data=2, tensor=6), 0, 12)
    assert str(refused.value) == (
        "learner.mesh.tensor = 6 does not divide the 4 ranks of this host, and the ranks of a tensor group have to be "
        "on one host; change it, or torchrun --nproc-per-node"
    )


def test_shards_divide_the_data():
    with pytest.raises(ValueError, match=r"shard = 3 does not divide data = 4; take a divisor of it"):
        settings(4, data=4, shard=3)
