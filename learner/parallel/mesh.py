"""The mesh of ranks: the coordinates of each rank, and the process groups along each dimension.

Ranks are numbered with the dimension `tensor` innermost, then `expert`, `pipeline` and `data`: the ranks of a tensor
group, which exchange activations in each module, are neighbours on one host. The ranks along `data` and `expert` train
on different events: each combination is a row group, whose ranks, along `pipeline` and `tensor`, get the same events.

Along `data`, weights may be sharded (`learner.sharding = "fsdp"`): over all of its ranks, or over those of a host, with
copies across hosts. `copy` and `shard` are the two dimensions that `data` consists of.
"""

from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from anabranch.core.errors import SettingsError
from anabranch.learner.settings.learner import RANK_TIMEOUT, LearnerSettings, MeshSettings

_WITH_TIMEOUT = ("gloo", "nccl")
"""Backends whose groups have a timeout, which a device mesh does not take."""
_DIMENSIONS = ("copy", "shard", "pipeline", "expert", "tensor")
"""From the outermost to the innermost."""
_PARTS = {"data": ("copy", "shard"), "rows": ("copy", "shard", "expert")}
"""Names for several dimensions together."""


def mesh_settings(settings: LearnerSettings, size: int) -> MeshSettings:
    """Return `learner.mesh`, or a mesh whose `size` ranks are all data; `replicas` are the ranks of this host.

    Raises:
        SettingsError: its product is not `size`, or a tensor group would span hosts.
    """
    mesh, of_host = settings.mesh, settings.replicas
    if mesh is None:
        return MeshSettings(data=size)
    if mesh.ranks != size:
        raise SettingsError(
            f"learner.mesh has {mesh.ranks} ranks (data {mesh.data} x tensor {mesh.tensor} x pipeline {mesh.pipeline} "
            f"x expert {mesh.expert}), but {size} start; change it, or start {mesh.ranks}: by learner.replicas, or by "
            "torchrun --nnodes and --nproc-per-node"
        )
    if size > of_host and of_host % mesh.tensor:
        raise SettingsError(
            f"learner.mesh.tensor = {mesh.tensor} does not divide the {of_host} ranks of this host, and the ranks of a "
            "tensor group have to be on one host; change it, or torchrun --nproc-per-node"
        )
    return mesh


def num_row_groups(settings: LearnerSettings, size: int) -> int:
    """Return how many of `size` ranks get different events; raises SettingsError as `mesh_settings` does."""
    mesh = mesh_settings(settings, size)
    return mesh.data * mesh.expert


class Mesh:
    """The mesh of all ranks, as one of them sees it. All ranks make the same calls in the same order."""

    def __init__(self, settings: LearnerSettings, rank: int, size: int) -> None:
        """Take `learner`, with the ranks of this host as `replicas`; raises SettingsError as `mesh_settings` does."""
        mesh = mesh_settings(settings, size)
        shard = mesh.shard or _ranks_of_host(mesh, settings.replicas)
        sizes = (mesh.data // shard, shard, mesh.pipeline, mesh.expert, mesh.tensor)
        self.rank = rank
        self.ranks = size
        """Number of all ranks."""
        self.rows = mesh.data * mesh.expert
        """Number of row groups."""
        self._sizes = dict(zip(_DIMENSIONS, sizes, strict=True))
        self._device_mesh: DeviceMesh | None = None
        self._groups: dict[tuple[str, ...], dist.ProcessGroup] = {}

    @property
    def splits_model(self) -> bool:
        """Whether ranks have different parts of the model, apart from shards along `data`."""
        return self.size("data") < self.ranks

    def size(self, dimension: str) -> int:
        """Return the number of ranks along a dimension."""
        return prod(self._sizes[part] for part in _PARTS.get(dimension, (dimension,)))

    def coordinate(self, dimension: str, rank: int | None = None) -> int:
        """Return the index of a rank along a dimension, and of this rank for None."""
        index, of_rank = 0, self._coordinates(self.rank if rank is None else rank)
        for part in _PARTS.get(dimension, (dimension,)):
            index = index * self._sizes[part] + of_rank[part]
        return index

    def row_group(self, rank: int | None = None) -> int:
        """Return the number of a rank's row group, from 0; None: of this rank."""
        return self.coordinate("rows", rank)

    def reports(self, rank: int | None = None) -> bool:
        """Return whether a rank sends the results of its row group to rank 0; None: this rank."""
        return self.coordinate("pipeline", rank) == self.coordinate("tensor", rank) == 0

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """Return torch's mesh of all ranks; it has the dimensions of more than one rank, or `shard` alone.

        The first call makes the process groups of the dimensions.
        """
        if self._device_mesh is None:
            sizes = {name: size for name, size in self._sizes.items() if size > 1} or {"shard": 1}
            self._device_mesh = init_device_mesh(device_type, (*sizes.values(),), mesh_dim_names=(*sizes,))
            for group in self._device_mesh.get_all_groups():
                if dist.get_backend(group) in _WITH_TIMEOUT:
                    _set_pg_timeout(RANK_TIMEOUT, group)
        return self._device_mesh

    def group(self, *dimensions: str) -> dist.ProcessGroup:
        """Return the group of the ranks that differ from this one along these dimensions alone, this one included.

        The first call for some dimensions makes the groups of all ranks.
        """
        parts = {part for each in dimensions for part in _PARTS.get(each, (each,))}
        along = tuple(part for part in _DIMENSIONS if part in parts and self._sizes[part] > 1)
        if along not in self._groups:
            if prod(self._sizes[part] for part in along) == self.ranks:
                assert dist.group.WORLD is not None
                self._groups[along] = dist.group.WORLD
            elif self._device_mesh is not None and len(along) == 1:
                self._groups[along] = self._device_mesh.get_group(along[0])
            else:
                self._groups[along], _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
                    self._enumerated(along), timeout=RANK_TIMEOUT
                )
        return self._groups[along]

    def _coordinates(self, rank: int) -> dict[str, int]:
        found = {}
        for name in reversed(_DIMENSIONS):
            rank, found[name] = divmod(rank, self._sizes[name])
        return found

    def _enumerated(self, along: tuple[str, ...]) -> list[list[int]]:
        """Return the ranks of each group along some dimensions, in ascending order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.ranks):
            of_rank = self._coordinates(rank)
            groups.setdefault(tuple(of_rank[name] for name in _DIMENSIONS if name not in along), []).append(rank)
        return [*groups.values()]


def _ranks_of_host(mesh: MeshSettings, of_host: int) -> int:
    """Return over how many ranks along `data` weights are sharded: those of a host where it has several, else all."""
    here = of_host // (mesh.tensor * mesh.pipeline * mesh.expert)
    return here if here > 1 and mesh.data % here == 0 else mesh.data
