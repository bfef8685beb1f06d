"""Meshes of four ranks learn what one process learns, and go on from each other's checkpoints."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.learner.checkpoints.format import Checkpoints

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
