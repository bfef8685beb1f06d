"""Copies of the model on the device, with the weights of the versions that are scored. All share one base."""

import logging
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from anabranch.core.failures import out_of_memory
from learner.device_memory.host_staging import CHUNK_BYTES, pieces
from learner.device_memory.ledger import SCORER_MODULES
from learner.evaluation.chunks import Chunks
from learner.model.growing.parts import grow
from learner.model.trained_set import copy_sharing_base, decide_trained_set, load_trained, trained_state

_Resident = tuple[nn.Module, Mapping[str, Tensor] | None]

log = logging.getLogger(__name__)


class ResidentModels:
    """Modules in evaluation mode, each with the weights that were scored with it last: two on CUDA, else one.

    Used by one thread. All other weights are on the host. Weights are recognized by the mapping that holds them, which
    must not change.
    """

    def __init__(self, model: nn.Module, chunks: Chunks) -> None:
        self._chunks = chunks
        decide_trained_set(model)
        # Without gradients autocast keeps no copy of the weights.
        module = copy_sharing_base(model).eval().requires_grad_(False)
        chunks.follow()
        self._resident: list[_Resident] = [(module, None)]
        """Each module with its weights, the one that was used last at the end. Other threads may read it."""
        self._most = SCORER_MODULES if chunks.device.type == "cuda" else 1
        self._module_bytes = sum(int(tensor.nbytes) for tensor in trained_state(module).values())
        self.kept: Mapping[str, Tensor] | None = None
        """Weights whose module is not taken for others while there is another: those of the served version."""

    @property
    def nbytes(self) -> int:
        """Bytes of all modules, without the base, which is that of the trained model. Any thread may ask."""
        return len(self._resident) * self._module_bytes

    def of(self, weights: Mapping[str, Tensor]) -> nn.Module:
        """Return a module with the weights, which are copied to the device unless they are there.

        Raises:
            RuntimeError: the weights are not of this model.
        """
        index = next((i for i, (_, loaded) in enumerate(self._resident) if loaded is weights), None)
        if index is None:
            index = self._free()
            module = self._resident[index][0]
            self._resident[index] = module, None
            self._load(module, weights)
        module = self._resident[index][0]
        self._resident = [*self._resident[:index], *self._resident[index + 1 :], (module, weights)]
        return module

    def _free(self) -> int:
        """Return the index of the module that takes the next weights."""
        module, loaded = self._resident[0]
        if loaded is not None and len(self._resident) < self._most:
            try:
                self._resident = [(copy_sharing_base(module), None), *self._resident]
            except RuntimeError as exc:
                if not out_of_memory(exc):
                    raise
                self._most = 1
                log.info("%s has no memory for a second model to score with: versions take turns", self._chunks.device)
        loaded = self._resident[0][1]
        return int(loaded is not None and loaded is self.kept and len(self._resident) > 1)

    def _load(self, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
        grow(module, weights)
        if self._chunks.device.type != "cuda":
            load_trained(module, weights)
            return
        there = trained_state(module)
        if weights.keys() != there.keys():
            raise RuntimeError(f"the weights are of another model: {sorted(weights.keys() ^ there.keys())}")
        large = {name for name, tensor in weights.items() if tensor.nbytes > CHUNK_BYTES}
        for name in large:
            if weights[name].shape != there[name].shape:
                raise RuntimeError(f"the weights are of another model: {name} has the shape {weights[name].shape}")
            for to, piece in pieces(there[name], weights[name]):
                with self._chunks.timed():
                    to.copy_(piece)
        for part in _parts({name: tensor for name, tensor in weights.items() if name not in large}):
            with self._chunks.timed():
                module.load_state_dict(part, strict=False)


def _parts(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in parts of about a chunk."""
    part, size = dict[str, Tensor](), 0
    for name, tensor in weights.items():
        part[name], size = tensor, size + tensor.nbytes
        if size >= CHUNK_BYTES:
            yield part
            part, size = {}, 0
    yield part
