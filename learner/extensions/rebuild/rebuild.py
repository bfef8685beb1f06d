"""Learns again to the point at which a version was published."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import msgspec
from torch import Tensor

from anabranch.core.failures import state_errors
from anabranch.core.temporary_files import temporary_folder
from anabranch.ingest.errors import GapError
from anabranch.ingest.events.block import SkipReason
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.reader.bounded_reader import BoundedReader
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.extensions.rebuild.distance import compared
from anabranch.learner.extensions.rebuild.start import (
    RebuildError,
    changes_since,
    check_settings,
    copy_start,
    in_scratch,
    targets,
)
from anabranch.learner.loop.loop_state import LoopComponents
from anabranch.learner.loop.training_loop import TrainingLoop
from anabranch.learner.object_storage.erasure_upload import fetch_erasures
from anabranch.learner.object_storage.opening import fetch_secret
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.state_dir.folders import REBUILD
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.learner.versions.format import Manifest, Verdict, Versions
from anabranch.learner.versions.rebuilt import RebuildStart, Rebuilt

_PROGRESS = timedelta(seconds=5)

log = logging.getLogger(__name__)


class BuiltLearner(Protocol):
    """What `learner.assembly` builds up to the loop: a rebuild reports nothing, and opens the stream itself."""

    spec: PipelineSettings
    loop: TrainingLoop
    parts: LoopComponents
    setup: TrainingSetup
    trainer: Trainer
    base: str | None
    """SHA-256 of the frozen weights of the model; None where it has none."""
    removed: int
    """Erased events of the checkpoint, which are left out."""

    def build_loop(self, source: BoundedReader) -> bool:
        """Build all up to the loop, and restore the checkpoint; return False when stopped meanwhile."""
        ...


MakeLearner = Callable[[PipelineSettings, threading.Event, contextlib.ExitStack], BuiltLearner]
"""Returns a learner of which nothing is built yet; the stack closes what it opens."""


def rebuild_version(
    make: MakeLearner,
    deployment: PipelineSettings,
    versions: Versions,
    checkpoints: Callable[[str], Checkpoints],
    number: int,
    stop: threading.Event,
    keep: Callable[[Path, Path | None], object] | None = None,
) -> Rebuilt | None:
    """Rebuild a version, and compare it; return None when `stop` was set meanwhile.

    Args:
        make: returns the learner.
        deployment: the settings of the pipeline as they are now.
        versions: of the pipeline.
        checkpoints: returns those of the pipeline, given the schema's digest.
        number: of the version.
        stop: ends the rebuild.
        keep: called with the folder of the rebuilt version and with the file of its base, which are removed afterwards.

    Raises:
        RebuildError: settings, checkpoints or the stream are not those of the version any more.
        VersionError: the manifest of the version cannot be read.
        DependencyError: the broker or a disk cannot be reached.
    """
    manifest = versions.manifest(number)
    schema = Schema(deployment.events, deployment.stream.labels).digest
    warnings = check_settings(deployment, schema, manifest)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(temporary_folder(REBUILD))
        has_files = deployment.stream.backfill is not None
        start = copy_start(checkpoints(schema), deployment.state_dir, manifest, scratch, has_files=has_files)
        if deployment.storage is not None and deployment.storage.mode == "only":
            with state_errors(f"the erasures of {deployment.storage.url} cannot be written to {scratch}"):
                fetch_erasures(deployment.storage.bucket, scratch)  # this host may have no log, or an older one
            fetch_secret(deployment.storage.bucket, scratch)
        _check_beginning(deployment, manifest, start)
        rebuilder = Rebuilder(make(in_scratch(deployment, scratch), stop, stack), manifest, stop)
        with _gaps_as_errors(manifest, start):
            if not rebuilder.prepare(start, stack) or not rebuilder.learn_again():
                return None
        weights = rebuilder.weights()
        rebuilt = Versions(scratch / "rebuilt")
        with state_errors(f"the rebuilt version cannot be written to {scratch}"):
            base = rebuilder.learner.base
            written = msgspec.structs.replace(manifest, base=base)
            rebuilt.write(weights, written, Verdict("inconclusive", ["it was rebuilt"]))
        result = rebuilder.compare(versions, rebuilt.manifest(number), weights, start, warnings)
        if keep is not None:
            keep(rebuilt.directory(number), None if base is None else bases_in(scratch).file(base))
        return result


def _check_beginning(deployment: PipelineSettings, manifest: Manifest, start: RebuildStart) -> None:
    """Raise RebuildError where no checkpoint precedes the version, and the start of the stream is not known."""
    if start.checkpoint is None and not manifest.learned_from and deployment.stream.start != "earliest":
        raise RebuildError(
            f"version {manifest.number} cannot be rebuilt: no checkpoint precedes it, and its manifest does not say at "
            f'which offsets the stream began, with stream.start = "{deployment.stream.start}"'
        )


@contextlib.contextmanager
def _gaps_as_errors(manifest: Manifest, start: RebuildStart) -> Iterator[None]:
    try:
        yield
    except GapError as exc:
        since = "the start of the stream" if start.checkpoint is None else f"checkpoint {start.checkpoint}"
        raise RebuildError(
            f"version {manifest.number} cannot be rebuilt: what it has learned since {since} is not all in the stream "
            f"any more ({str(exc).partition(';')[0]}); keep more of the topic, or more checkpoints, to rebuild "
            "versions of that age"
        ) from exc


class Rebuilder:
    """Trains a learner to where a version was published; it publishes, serves and reports nothing."""

    def __init__(self, learner: BuiltLearner, manifest: Manifest, stop: threading.Event) -> None:
        self.learner = learner
        self._manifest = manifest
        self._stop = stop
        self._through = targets(manifest)
        self._ends = threading.Event()
        """Ends the loop: at the version, at the end of the stream, or when the command is stopped."""
        self._fell_short = self._begins = False
        self._last: object = None
        self._next_progress = time.monotonic()
        self._first_step = self._erased_before = 0

    def prepare(self, start: RebuildStart, stack: contextlib.ExitStack) -> bool:
        """Build all parts, which `stack` closes; return False when the command was stopped meanwhile."""
        deployment = self.learner.spec
        # The rest of a message of several rows, which a step took in part, is read too, and not learned.
        torn = 1 if deployment.learner.deterministic else 0
        through = {name: offset + torn for name, offset in self._through.items()}
        reader = BoundedReader(deployment.stream, deployment.events, None, through)
        self._reader = reader
        if not self.learner.build_loop(reader):
            return False
        stack.callback(reader.close)
        ledger = self.learner.loop.ledger
        reader.open(ledger.positions, self._stop, marks=ledger.marks)
        if self._stop.is_set():
            return False
        self._begins, self._first_step = start.checkpoint is None, self.learner.loop.state.steps
        self._erased_before = self._erased()
        log.info(
            "rebuilding version %d from %s: %d steps",
            self._manifest.number,
            "the start of the stream" if start.checkpoint is None else f"checkpoint {start.checkpoint}",
            self._manifest.step - self._first_step,
        )
        return True

    def learn_again(self) -> bool:
        """Learn to the point at which the version was published; return False when the command was stopped."""
        loop = self.learner.loop
        if self.learner.spec.learner.deterministic:
            loop.last_step = self._manifest.step
        loop.begin(self._stop, ())
        if self._begins:
            self._check_starts()
        self._end_if_reached()
        if not self._ends.is_set():
            loop.run(
                self._ends,
                (
                    loop.erase_if_due,
                    loop.clean_holdout,
                    loop.checkpoint_if_due,
                    self._end_if_reached,
                ),
            )
        return not self._stop.is_set()

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights as they are now, on the CPU."""
        return {name: tensor.cpu() for name, tensor in self.learner.trainer.snapshot().items()}

    def compare(
        self,
        versions: Versions,
        rebuilt: Manifest,
        weights: Mapping[str, Tensor],
        start: RebuildStart,
        warnings: list[str],
    ) -> Rebuilt:
        """Return how the rebuilt version differs from the published one, and why it may.

        Args:
            versions: of the pipeline.
            rebuilt: the manifest of the rebuilt version.
            weights: of the rebuilt version.
            start: where the rebuild started.
            warnings: what is not known of the version's settings.
        """
        manifest = self._manifest
        differs = (rebuilt.files, rebuilt.base) != (manifest.files, manifest.base)
        reasons = [*warnings, *start.damaged]
        reasons += changes_since(self.learner.spec, manifest.origin, self.learner.setup.device)
        if differs:
            reasons += self._reasons()
        holdout = self.learner.parts.holdout.held
        columns = holdout.columns if len(holdout) else {}
        model = self.learner.trainer.model
        found, more = compared(versions, manifest, rebuilt.base, weights, model, self.learner.setup, columns)
        return Rebuilt(
            manifest=rebuilt,
            equal=not differs,
            deterministic=self.learner.spec.learner.deterministic,
            start=start,
            steps=self.learner.loop.state.steps - self._first_step,
            reasons=[*reasons, *more],
            distance=found,
        )

    def _check_starts(self) -> None:
        """Raise RebuildError where a partition begins after the first offset that the version has learned."""
        for partition in self._reader.partitions:
            first = (self._manifest.learned_from or {}).get(str(partition.name))
            if first is not None and not partition.name.history and partition.start > first:
                raise RebuildError(
                    f"version {self._manifest.number} cannot be rebuilt: it has learned {partition.name} from offset "
                    f"{first} on, and the stream begins at {partition.start} now"
                )

    def _end_if_reached(self) -> None:
        """End the loop at the version, and where no event is left that could lead there; called between steps."""
        steps = self.learner.loop.state.steps
        if time.monotonic() >= self._next_progress:
            self._next_progress = time.monotonic() + _PROGRESS.total_seconds()
            log.info("step %d of %d", steps, self._manifest.step)
        if self._stop.is_set() or self._is_reached():
            self._ends.set()
            return
        if not self._reader.exhausted:
            return
        positions = self.learner.loop.ledger.positions
        progress = steps, tuple(positions.values())
        # Without deterministic, events wait for `max_delay` before their step, and change nothing meanwhile.
        if progress == self._last and (self.learner.spec.learner.deterministic or self._reader.ends_at(positions)):
            self._fell_short = True
            self._ends.set()
        self._last = progress

    def _is_reached(self) -> bool:
        steps, needed = self.learner.loop.state.steps, self._manifest.step
        if self.learner.spec.learner.deterministic:
            return steps >= needed
        if self._reader.reads_history and steps < needed:
            return False
        positions = self.learner.loop.ledger.positions
        return all(name in positions and positions[name].offset > offset for name, offset in self._through.items())

    def _erased(self) -> int:
        return self.learner.loop.ledger.totals.skipped.get(SkipReason.ERASED.label, 0)

    def _reasons(self) -> list[str]:
        """Return why the weights may be others, as far as the rebuild has seen."""
        manifest, reasons = self._manifest, list[str]()
        records = self.learner.parts.erasure.records
        erased = self.learner.removed + self._erased() - self._erased_before
        if erased or (manifest.erasures is not None and records > manifest.erasures):
            since = "" if manifest.erasures is None else f", of which the version had {manifest.erasures}"
            reasons.append(
                f"events were erased, and are not learned again: {erased} of those that were read again, by "
                f"{records} records of erasures{since}"
            )
        if self._fell_short:
            reasons.append(
                f"the stream has too few events: it ends at step {self.learner.loop.state.steps} of {manifest.step}, "
                "so that some were compacted away, erased, or are other ones"
            )
        if not self.learner.spec.learner.deterministic:
            reasons.append("learner.deterministic is false: batches follow what arrives, and are others each time")
        elif not self._fell_short and (behind := self._behind()):
            reasons.append(
                f"batches took turns in another way, as where a partition had no events for a while: {behind}"
            )
        return reasons

    def _behind(self) -> str:
        """Return the partitions that were read less far than for the version, as text."""
        positions = self.learner.loop.ledger.positions
        each = ((name, positions[name].offset - 1, offset) for name, offset in self._through.items())
        return ", ".join(f"{name} is read to {read}, not {offset}" for name, read, offset in each if read < offset)
