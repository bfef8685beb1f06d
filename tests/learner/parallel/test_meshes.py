"""Meshes: coordinates, groups, refusals; four ranks learn what one does, and go on from each other's checkpoints."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import anabranch.learner.parallel.mesh
from anabranch.core.errors import SettingsError
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.parallel.mesh import Mesh, num_row_groups
from anabranch.learner.parallel.process_group import leave_group
from anabranch.learner.settings.learner import RANK_TIMEOUT, LearnerSettings

LONG = "ANABRANCH_TEST_STEPS"
PARALLEL = {"0": "column", "2": "row"}
UNEVEN = [[11, 9], [1, 0], [1, 1], [2, 0], [1, 5], [3, 1], [7, 0]]
"""New and old events of steps: some leave a row group with nothing new, or with nothing at all."""
MESHES: dict[str, dict[str, Any]] = {
    "data": {"mesh": {"data": 4}},
    "tensor": {"mesh": {"tensor": 4}},
    "tensor x data": {"mesh": {"data": 2, "tensor": 2}},
    "fsdp x tensor": {"mesh": {"data": 2, "tensor": 2}, "sharding": "fsdp"},
    "hsdp": {"mesh": {"data": 4, "shard": 2}, "sharding": "fsdp"},
}
ADAMW = {"optimizer": {"name": "adamw", "lr": 0.01}, "max_grad_norm": 0.5}


def scenario(**changes):
    # Embeddings do not go with split models.
    return {"strategy": "er", "steps": UNEVEN, "embeds": False, "settings": ADAMW, "parallel": PARALLEL, **changes}


def on(mesh, given):
    return given | {"settings": given["settings"] | {"replicas": 4} | MESHES[mesh]}


def assert_close(one, other, what, atol=1e-9):
    assert one.keys() == other.keys() - {"seconds"}, what
    for name, value in one.items():
        bound = atol if value.dtype is torch.float64 else 1e-5
        assert torch.allclose(value, other[name], rtol=0, atol=bound, equal_nan=True), (what, name)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_meshes_learn_what_one_process_learns(play):
    """With clipping, micro-batches, a drift, and batches on which the model raises, which are skipped."""
    scenarios = [
        scenario(strategy="der++", steps=[[new, old, old] for new, old in UNEVEN], checkpoint_at=3),
        scenario(settings={"micro_batch_size": 3, "schedule": {"warmup_steps": 4, "restart": "drift"}}, drift_at=2),
        scenario(
            settings=ADAMW | {"micro_batch_size": 3, "activation_checkpointing": True},
            raises="forward",
            skips_batches=True,
        ),
        # In float32, with features and a learning rate at which rounding does not grow.
        scenario(settings={"optimizer": {"name": "adamw", "lr": 0.001}}, double=False, separable=True),
    ]
    alone = play(1, scenarios)
    given = [(mesh, each) for mesh in MESHES if mesh != "data" for each in range(len(scenarios))]
    together = play(4, [on(mesh, scenarios[index]) for mesh, index in given], 270)
    for (mesh, index), found in zip(given, together, strict=True):
        assert_close(alone[index], found, (mesh, scenarios[index]))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_copies_of_shards_go_on_after_passes_whose_gradients_they_have_exchanged(play):
    """The score raises after the backward pass, whose repetition must not add gradients to the copies again."""
    given = scenario(raises="score", skips_batches=True)
    (expected,), (found,) = play(1, [given]), play(4, [on("hsdp", given)], 270)
    assert len(expected["raised"]) >= 8
    assert_close(expected, found, given)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_checkpoint_of_any_mesh_goes_on_in_any_other(play, tmp_path):
    """Weights and optimizer have the same bits after a restore.

    Each mesh restores what one process and two other meshes have written, and one process what all have.
    """
    sources, steps = ["one process", *MESHES], UNEVEN[-3:]
    folders = {source: str(tmp_path / source.replace(" ", "-")) for source in sources}
    writes = {name: scenario(steps=steps, write_at=2, write_to=folder) for name, folder in folders.items()}
    play(1, [writes["one process"]])
    play(4, [on(mesh, writes[mesh]) for mesh in MESHES], 270)
    restores = {source: scenario(go_on_from=folder, steps=[]) for source, folder in folders.items()}
    meshes = [*MESHES]
    pairs = [(s, m) for at, m in enumerate(meshes) for s in ("one process", meshes[at - 1], meshes[at - 2])]
    found = play(1, [*restores.values()]) + play(4, [on(mesh, restores[source]) for source, mesh in pairs], 270)
    for (source, mesh), restored in zip([*((s, "one process") for s in sources), *pairs], found, strict=True):
        assert_same(written(folders[source]), restored, (source, mesh))


def assert_same(kept, restored, what):
    for name, value in kept.items():
        assert torch.equal(restored[name], value), (what, name)


def written(folder):
    newest = Checkpoints(Path(folder), "schema", 1).newest()
    assert newest is not None
    return {
        f"{part}.{name}": value for part in ("model", "optimizer") for name, value in newest[1].tensors[part].items()
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(LONG not in os.environ, reason=f"{LONG} is not set")
def test_meshes_learn_for_many_steps_what_one_process_learns(play):
    steps, settings = int(os.environ[LONG]), {"optimizer": {"name": "adamw", "lr": 0.001}}
    given = scenario(times=-(-steps // len(UNEVEN)), settings=settings, double=False, separable=True)
    (alone,) = play(1, [given])
    names = [mesh for mesh in MESHES if mesh != "data"]
    for mesh, found in zip(names, play(4, [on(mesh, given) for mesh in names], 570), strict=True):
        for name, value in alone.items():
            if name.startswith("model."):
                assert torch.allclose(value, found[name], rtol=0, atol=1e-4), (mesh, name)


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
