"""A version in memory: from its directory to a warm module that answers batches.

Legend: B rows of a batch. Arrays are numpy on the host; the module is on the deployment's device.
"""

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor, nn

from anabranch.core.failures import Failure, failure_of, panics_are_errors
from anabranch.core.users_code import in_one_line
from anabranch.learner.device.out_of_memory import free_cached_memory
from anabranch.learner.errors import ModelError, VersionError
from anabranch.learner.model.embedding import Embeddings
from anabranch.learner.model.factory import forward
from anabranch.learner.model.growing.pool import grown, parts_in, pool_of
from anabranch.learner.model.trained_set import bound_tensors
from anabranch.learner.stream.trained_through import format_offsets, format_trained_through
from anabranch.learner.versions.format import Manifest
from anabranch.serving.freed_memory import trim_freed_memory
from anabranch.serving.model.batch_copies import to_device, to_host
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.model.device import HALF, sentence_of, use_device
from anabranch.serving.model.graphs import Capture, Graphs
from anabranch.serving.model.pieces import BeforePiece, collecting_at_end, layers_as_pieces
from anabranch.serving.model.template import ModelTemplate
from anabranch.serving.model.tensor_slots import TensorSlot
from anabranch.serving.protocol.codec import EMBEDDING
from anabranch.serving.protocol.tensors import Array

log = logging.getLogger("anabranch.serving")

_MOST_SIZES = 256
_WARM_UP = timedelta(seconds=1)
_WORKS_FOR = timedelta(seconds=1)
_PRETRAINED = "anabranch.pretrained:"
"""Prefix of factories whose modules take a text of one id, where others may need more."""


def progress_of(manifest: Manifest) -> dict[str, str]:
    """Return how far a version is trained, as replies have it: with late labels also how far it has read; and what
    its answers follow from, where that is not the model alone."""
    progress = {"trained_through": format_trained_through(manifest.trained_through)}
    if manifest.seen_through is not None:
        progress["labelled_through"] = progress["trained_through"]
        progress["seen_through"] = format_offsets(manifest.seen_through)
    return progress if manifest.rule is None else {**progress, **manifest.rule.facts}


class ServedVersion:
    """A loaded version. Immutable: it answers the requests that hold it, also after a swap."""

    def __init__(
        self, manifest: Manifest, module: nn.Module, deployment: Deployment, embedding: Embeddings | None
    ) -> None:
        """Take what captures the module's embedding, if it has one."""
        self.manifest = manifest
        self.number = manifest.number
        self.name = str(manifest.number)
        self.trained_through = format_trained_through(manifest.trained_through)
        self.progress = progress_of(manifest)
        """The parameters of a reply."""
        self._module = module
        self._embedding = embedding
        self._deployment = deployment
        self._works, self._works_until = True, float("-inf")
        self._stream: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
        self._graphs: Graphs | None = None
        self.answers = None if manifest.rule is None else manifest.rule.applied(deployment.classes)
        """What changes the model's predictions in answers; None: nothing does."""
        self._padding = {feature.name: feature.filler for feature in deployment.schema.features}

    @property
    def module(self) -> nn.Module:
        """The module, in evaluation mode; nobody else may run it while the version answers requests."""
        return self._module

    def has_trained_through(self, offsets: Mapping[str, int]) -> bool:
        """Return whether it has learned at least up to `offsets`, on each of these partitions."""
        trained = self.manifest.trained_through
        return all(name in trained and trained[name].offset >= offset for name, offset in offsets.items())

    def run(self, features: Mapping[str, Array], embed: bool = False) -> dict[str, Array]:
        """Answer a batch: features `[B, *shape]` in, the task's outputs `[B, ...]` out, with the embedding if `embed`.

        Called by one thread at a time: the swap's until the version is served, then the batcher's. The embedding is
        float32 `[B, D]`; `Deployment.embeds` is whether there is one.
        """
        outputs = self._outputs(features, embed)
        # On the host: CUDA graphs of the model outlive the version.
        return outputs if self.answers is None else self.answers.answer_arrays(outputs)

    def _outputs(self, features: Mapping[str, Array], embed: bool) -> dict[str, Array]:
        """Return what the model predicts, as `run` does."""
        with panics_are_errors(), torch.inference_mode(), self._stream():
            if self._graphs is not None and not embed:
                outputs = self._graphs.run(features, self._padding)
                if outputs is not None:
                    return outputs
            tensors = to_device(features, self._deployment.device)
            return to_host(_predict(self._deployment, self._module, tensors, self._embedding if embed else None))

    def use_graphs(self, graphs: Graphs, capture: Capture, max_batch: int) -> None:
        """Answer with CUDA graphs from now on, except for embeddings; capture them unless the slot has them.

        Raises:
            RuntimeError: the model cannot be captured.
            ModelError: graphs answer otherwise than the model.
        """
        zeros = self.zeros(1)
        expected = self._outputs(zeros, embed=False)
        predict = functools.partial(_predict, self._deployment, self._module)  # holds no version: graphs outlive it
        bound = [tensor.data_ptr() for tensor in bound_tensors(self._module)]
        with torch.inference_mode():
            graphs.capture(capture, predict, self.zeros, max_batch, self._deployment.device)
            if [tensor.data_ptr() for tensor in bound_tensors(self._module)] != bound:
                raise RuntimeError("the model binds other tensors to its modules while it runs")
            found = graphs.run(zeros, self._padding) or {}
        for name, array in expected.items():
            if not np.allclose(found[name], array, rtol=1e-3, atol=1e-5, equal_nan=True):
                raise ModelError(f"for a row of zeros, a CUDA graph has another {name} than the model")
        self._graphs = graphs

    def use_request_stream(self) -> None:
        """Launch runs on the stream of requests from now on; until then they do not get ahead of requests."""
        self._stream = self._deployment.stream

    def zeros(self, rows: int, *, short: bool = False) -> dict[str, Array]:
        """Return features of zeros for `rows` rows, or of another allowed value; of texts with one id if `short`."""
        return {feature.name: feature.example(rows, short=short) for feature in self._deployment.schema.features}

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


def _predict(
    deployment: Deployment, module: nn.Module, features: Mapping[str, Tensor], embedding: Embeddings | None = None
) -> dict[str, Tensor]:
    if embedding is not None:
        embedding.capture_next()
    with deployment.autocast():
        output = forward(module, features)
        captured = None if embedding is None else embedding.captured()
    if deployment.precision in HALF and output.is_floating_point():
        output = output.float()  # tasks predict, and clients receive, as in full precision
    predictions = deployment.task.predict(output)
    return predictions if captured is None else {**predictions, EMBEDDING: captured}


def load_version(
    deployment: Deployment, manifest: Manifest, max_batch: int, before_piece: BeforePiece = bool
) -> ServedVersion:
    """Load a version of the configured schema and model, and warm it up on batches of 1 and of `max_batch` rows.

    The first versions are warmed up on all sizes between as well: torch keeps its plan for a shape for later versions.
    A large model's first version does not wait until all sizes are warm; on a device, the next versions continue.

    On a CPU nothing but plans remains of a larger batch: a version of as many parts as one before runs one row, which
    shows whether it works; where a base was tried before, a model of `_PRETRAINED` runs a short text. `before_piece` is
    called before each piece of that work.

    Raises:
        VersionError: a file does not have its digest, weights do not fit, or the module fails on zeros.
    """
    number = manifest.number
    before_piece()
    weights = deployment.versions.weights(manifest, before_piece)
    try:
        use_device(deployment.device)  # any thread may load: the swap's, the shadow's, that of a rollout command
        with panics_are_errors(), collecting_at_end(before_piece):
            version = _loaded(deployment, manifest, weights, max_batch, before_piece)
    except Exception as exc:  # the factory and the module are the user's code, which may raise anything
        raise VersionError(f"version {number}: {sentence_of(exc)}") from exc
    return version


def _loaded(
    deployment: Deployment,
    manifest: Manifest,
    weights: Mapping[str, Tensor],
    max_batch: int,
    before_piece: BeforePiece,
) -> ServedVersion:
    before_piece()
    template = deployment.template_on(manifest.base)
    if parts_in(weights) != manifest.parts:
        raise ModelError(f"its manifest names {manifest.parts} parts, and its weights have {parts_in(weights)}")
    slot = template.slots.take()
    try:
        module = _module(deployment, template, slot, weights, before_piece)
        if (pool := pool_of(module)) is not None:
            pool.prepare(module)
        version = ServedVersion(manifest, module, deployment, slot.embedding(module, deployment.embedding_of))
        if template.slots.taken == 1:  # no request runs yet; the allocator takes memory for their stream
            version.use_request_stream()
        warmed = template.warmed.setdefault(manifest.parts, set())
        if deployment.device.type == "cpu" and deployment.capture is None and max_batch in warmed:
            with layers_as_pieces(module, before_piece):
                _warm_up(version, 1, short=_is_pretrained(deployment) and manifest.base is not None)
        else:
            _warm_up(version, 1)
            _try_graphs(version, slot.graphs, deployment, template, max_batch)
            _warm_up_batches(version, max_batch, warmed)
    except BaseException:
        template.put(slot)
        raise
    version.use_request_stream()
    # Not in a cycle of references, which would keep the slot until the next garbage collection.
    weakref.finalize(version, template.put, slot).atexit = False
    return version


def _module(
    deployment: Deployment,
    template: ModelTemplate,
    slot: TensorSlot,
    weights: Mapping[str, Tensor],
    before_piece: BeforePiece,
) -> nn.Module:
    """Return the module of a version, in the tensors of a slot."""
    like = grown(template.module, weights)
    keep = _is_pretrained(deployment) and deployment.device.type == "cpu" and like is template.module
    return slot.load(
        like, weights, deployment.device, plainly=template.loads_plainly, keep=keep, before_piece=before_piece
    )


def _is_pretrained(deployment: Deployment) -> bool:
    """Whether the module is one of transformers, whose forward pass leaves nothing behind."""
    return deployment.model.factory.startswith(_PRETRAINED)


def _try_graphs(
    version: ServedVersion, graphs: Graphs, deployment: Deployment, template: ModelTemplate, max_batch: int
) -> None:
    """Let a version run as CUDA graphs, if they are configured and the model can be captured."""
    if deployment.capture is None or template.without_graphs:
        return
    try:
        if not template.loads_plainly:
            raise ModelError("the model's code takes part in loading weights")
        version.use_graphs(graphs, deployment.capture, max_batch)
    except Exception as exc:  # noqa: BLE001 - the module is the user's code, which may raise anything
        log.warning("serving.graphs has no effect: the model cannot run as CUDA graphs: %s", sentence_of(exc))
        if failure_of(exc) is not Failure.MEMORY:
            template.without_graphs.append(version.number)
    else:
        return
    free_cached_memory(deployment.device)  # after the except clause: its exception keeps tensors
    _warm_up(version, 1)  # shows whether the device is lost, which errors of a capture alone do not


def is_finite(array: Array) -> bool:
    """Return whether no element is NaN or infinite; true for arrays that are not floats."""
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _warm_up_batches(version: ServedVersion, max_batch: int, warmed: set[int]) -> None:
    """Warm up on larger batches, as far as memory suffices: a batch that does not fit is run in pieces."""
    is_first = max_batch not in warmed
    try:
        _warm_up(version, max_batch)
        warmed.add(max_batch)
        _warm_up_sizes(version, max_batch, warmed)
    except Exception as exc:
        if failure_of(exc) is not Failure.MEMORY:
            raise
        log.warning("version %d has too little memory for batches of %d rows: %s", version.number, max_batch, exc)
    if is_first:  # not for each version: meanwhile no thread can allocate
        trim_freed_memory()  # that of a large batch is hundreds of megabytes, which small ones would not need


def _warm_up_sizes(version: ServedVersion, max_batch: int, warmed: set[int]) -> None:
    """Warm up on batch sizes that no version was warmed up on, until the time limit."""
    end = time.monotonic() + _WARM_UP.total_seconds()
    for rows in range(2, min(max_batch, _MOST_SIZES)):
        if rows not in warmed:
            _warm_up(version, rows)
            warmed.add(rows)
            if time.monotonic() > end:
                return


def _warm_up(version: ServedVersion, rows: int, *, short: bool = False) -> None:
    try:
        outputs = version.run(version.zeros(rows, short=short))
    except Exception as exc:  # the module is the user's code, which may raise anything
        if failure_of(exc) is not None:
            raise
        raise ModelError(f"the model fails on {rows} row{'s'[: rows != 1]} of zeros: {in_one_line(exc)}") from exc
    for name, array in outputs.items():
        if len(array) != rows:
            raise ModelError(f"for {rows} rows of zeros, {name} has {len(array)}")
        if not is_finite(array):
            raise ModelError(f"for {rows} rows of zeros, {name} is not finite")
