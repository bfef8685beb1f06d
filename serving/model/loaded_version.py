"""A version in memory: from its directory to a warm module that answers batches.

Legend: B rows of a batch. Arrays are numpy on the host; the module is on the deployment's device.
"""

import copy
import time
from collections.abc import Mapping
from datetime import timedelta

import numpy as np
import torch
from torch import nn

from anabranch.core.failures import Failure, failure_of
from learner.errors import ModelError, VersionError
from learner.model.factory import forward
from learner.state_dir.trained_through import format_trained_through
from learner.state_dir.version import Manifest
from serving.model.deployment import Deployment, _sentence
from serving.model.device import use_device
from serving.protocol.codec import EMBEDDING
from serving.protocol.tensors import Array

_MOST_SIZES = 256
_WARM_UP = timedelta(seconds=1)
_WORKS_FOR = timedelta(seconds=1)


class ServedVersion:
    """A loaded version. Immutable: it answers the requests that hold it, also after a swap."""

    def __init__(self, manifest: Manifest, module: nn.Module, deployment: Deployment) -> None:
        self.manifest = manifest
        self.number = manifest.number
        self.name = str(manifest.number)
        self.trained_through = format_trained_through(manifest.trained_through)
        self._module = module
        self._embedding = deployment.embedding_of(module)
        self._deployment = deployment
        self._works, self._works_until = True, float("-inf")

    def has_trained_through(self, offsets: Mapping[str, int]) -> bool:
        """Return whether it has learned at least up to `offsets`, on each of these partitions."""
        trained = self.manifest.trained_through
        return all(name in trained and trained[name].offset >= offset for name, offset in offsets.items())

    def run(self, features: Mapping[str, Array], embed: bool = False) -> dict[str, Array]:
        """Answer a batch: features `[B, *shape]` in, the task's outputs `[B, ...]` out, with the embedding if `embed`.

        Called by one thread at a time: the swap's until the version is served, then the batcher's. The embedding is
        float32 `[B, D]`; `Deployment.embeds` is whether there is one.
        """
        device = self._deployment.device
        with torch.inference_mode(), self._deployment.stream():
            tensors = {name: torch.from_numpy(array).to(device) for name, array in features.items()}
            if embed and self._embedding is not None:
                self._embedding.capture_next()
            predictions = self._deployment.task.predict(forward(self._module, tensors))
            if embed and self._embedding is not None:
                predictions = {**predictions, EMBEDDING: self._embedding.captured()}
            return {name: value.cpu().numpy() for name, value in predictions.items()}

    def zeros(self, rows: int) -> dict[str, Array]:
        """Return features of zeros for `rows` rows, or of the allowed value nearest to zero."""
        return {
            feature.name: np.full((rows, *feature.shape), feature.filler, feature.dtype)
            for feature in self._deployment.schema.features
        }

    def works(self) -> bool:
        """Return whether it answers a row of zeros: distinguishes a bad input from a broken model after a failure.

        Tried once a second at most: bad inputs may be frequent.

        Raises:
            Exception: memory does not suffice, or the device is lost; neither is the model's failure.
        """
        now = time.monotonic()
        if now >= self._works_until:
            self._works = self._answers_zeros()
            self._works_until = now + _WORKS_FOR.total_seconds()
        return self._works

    def _answers_zeros(self) -> bool:
        try:
            return all(is_finite(array) for array in self.run(self.zeros(1)).values())
        except Exception as exc:  # the module is the user's code, which may raise anything
            if failure_of(exc) in (Failure.MEMORY, Failure.DEVICE):
                raise
            return False


def load_version(deployment: Deployment, manifest: Manifest, max_batch: int) -> ServedVersion:
    """Load a version of the configured schema and model, and warm it up on batches of 1 and of `max_batch` rows.

    The first versions are warmed up on all sizes between as well: torch keeps its plan for a shape for later versions.
    A large model's first version does not wait until all sizes are warm; the next versions continue.

    Raises:
        VersionError: a file does not have its digest, weights do not fit, or the module fails on zeros.
    """
    number = manifest.number
    weights = deployment.versions.weights(manifest)
    try:
        use_device(deployment.device)  # any thread may load: the swap's, the shadow's, that of a rollout command
        template = deployment.template
        module = copy.deepcopy(template.module)
        module.load_state_dict(weights, strict=True)
        version = ServedVersion(manifest, module.to(deployment.device), deployment)
        _warm_up(version, 1)
        _warm_up(version, max_batch)
        _warm_up_sizes(version, max_batch, template.warmed)
    except Exception as exc:  # the factory and the module are the user's code, which may raise anything
        raise VersionError(f"version {number}: {_sentence(exc)}") from exc
    return version


def is_finite(array: Array) -> bool:
    """Return whether no element is NaN or infinite; true for arrays that are not floats."""
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _warm_up_sizes(version: ServedVersion, max_batch: int, warmed: set[int]) -> None:
    """Warm up on batch sizes that no version was warmed up on, until the time limit."""
    end = time.monotonic() + _WARM_UP.total_seconds()
    for rows in range(2, min(max_batch, _MOST_SIZES)):
        if rows not in warmed:
            _warm_up(version, rows)
            warmed.add(rows)
            if time.monotonic() > end:
                return


def _warm_up(version: ServedVersion, rows: int) -> None:
    for name, array in version.run(version.zeros(rows)).items():
        if len(array) != rows:
            raise ModelError(f"for {rows} rows of zeros, {name} has {len(array)}")
        if not is_finite(array):
            raise ModelError(f"for {rows} rows of zeros, {name} is not finite")
