"""Learns again to the point at which a version was published."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
from torch import Tensor
from typing_extensions import override

from anabranch.core.failures import state_errors
from anabranch.core.temporary_files import temporary_folder
from ingest.errors import GapError
from ingest.events.block import SkipReason
from ingest.events.schema import Schema
from ingest.reader.bounded_reader import BoundedReader
from learner.build import LearnerSpec
from learner.checkpointing.checkpoint_copy import REBUILD
from learner.errors import StoppedEarlyError, VersionError
from learner.evaluation.event_time import EventTimePredictor
from learner.object_storage.erasure_upload import fetch_erasures
from learner.object_storage.secret import fetch_secret
from learner.rebuilding.distance import Distance, distance, have_same_shapes
from learner.rebuilding.errors import RebuildError
from learner.rebuilding.requirements import changes_since, check_settings
from learner.rebuilding.start import RebuildStart, copy_start, in_scratch, targets
from learner.resume import ResumePoint
from learner.run import Learner
from learner.state_dir.bases import bases_in
from learner.state_dir.checkpoint import Checkpoints
from learner.state_dir.manifest_directory import other_base
from learner.state_dir.version import Manifest, Verdict, Versions
from replay.background_store import BackgroundStore
from replay.erasure.erasure_log import ErasureLog

_PROGRESS = timedelta(seconds=5)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rebuilt:
    """A version that was rebuilt.

    Attributes:
        manifest: that of the version, with the digests of the rebuilt files.
        equal: whether the digests of all files, and of the frozen weights, are those of the version.
        deterministic: whether they have to be.
        start: where it was begun.
        steps: number of steps that were learned again.
        reasons: why the digests may differ, one sentence each.
        distance: from the version's weights; None where these are damaged or gone, or have other tensors.
    """

    manifest: Manifest
    equal: bool
    deterministic: bool
    start: RebuildStart
    steps: int
    reasons: list[str]
    distance: Distance | None


def rebuild_version(
    deployment: LearnerSpec,
    versions: Versions,
    checkpoints: Callable[[str], Checkpoints],
    number: int,
    stop: threading.Event,
    keep: Callable[[Path, Path | None], object] | None = None,
) -> Rebuilt | None:
    """Rebuild a version, and compare it; return None when `stop` was set meanwhile.

    Args:
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
        rebuilder = Rebuilder(in_scratch(deployment, scratch), manifest, stop, stack)
        with _gaps_as_errors(manifest, start):
            try:
                if not rebuilder.prepare(start) or not rebuilder.learn_again():
                    return None
            except StoppedEarlyError:
                return None
        weights = rebuilder.weights()
        rebuilt = Versions(scratch / "rebuilt")
        with state_errors(f"the rebuilt version cannot be written to {scratch}"):
            written = msgspec.structs.replace(manifest, base=rebuilder.base)
            rebuilt.write(weights, written, Verdict("inconclusive", ["it was rebuilt"]))
        result = rebuilder.compare(versions, rebuilt.manifest(number), weights, start, warnings)
        if keep is not None:
            base = rebuilder.base
            keep(rebuilt.directory(number), None if base is None else bases_in(scratch).file(base))
        return result


def _check_beginning(deployment: LearnerSpec, manifest: Manifest, start: RebuildStart) -> None:
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


class Rebuilder(Learner):
    """A learner that ends where a version was published, and publishes, serves and reports nothing."""

    def __init__(
        self, deployment: LearnerSpec, manifest: Manifest, stop: threading.Event, stack: contextlib.ExitStack
    ) -> None:
        """Build nothing yet; `stack` closes what `prepare` opens."""
        super().__init__(deployment, stop, None, stack)
        self._manifest = manifest
        self._through = targets(manifest)
        self._ends = threading.Event()
        """Ends the loop: at the version, at the end of the stream, or when the command is stopped."""
        self._fell_short = self._begins = False
        self._last: object = None
        self._next_progress = time.monotonic()
        self._first_step = self._removed = self._erased_before = 0

    def prepare(self, start: RebuildStart) -> bool:
        """Build all parts; return False when the command was stopped meanwhile."""
        deployment = self._deployment
        # The rest of a message of several rows, which a step took in part, is read too, and not learned.
        torn = 1 if deployment.learner.deterministic else 0
        through = {name: offset + torn for name, offset in self._through.items()}
        reader = BoundedReader(deployment.stream, deployment.events, None, through)
        self._reader = reader
        if not self.build(reader):
            return False
        self._begins, self._first_step = start.checkpoint is None, self._loop.state.steps
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
        loop = self._loop
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

    @property
    def base(self) -> str | None:
        """SHA-256 of the frozen weights of the model; None where it has none."""
        return self._base

    def weights(self) -> Mapping[str, Tensor]:
        """Return the weights as they are now, on the CPU."""
        return {name: tensor.cpu() for name, tensor in self._trainer.snapshot().items()}

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
        reasons, found = [*warnings, *start.damaged], None
        reasons += changes_since(self._deployment, manifest.origin, self._setup.device)
        if differs:
            reasons += self._reasons()
        if (other := other_base(manifest.base, self.base)) is not None:
            reasons.append(f"it {other}")
        try:
            published = versions.weights(manifest)
        except (VersionError, OSError) as exc:
            reasons.append(f"its weights cannot be compared: {exc}")
        else:
            if have_same_shapes(published, weights):
                found = self._distance(published, weights)
            else:
                reasons.append("its weights cannot be compared: they are tensors of other names or shapes")
        return Rebuilt(
            manifest=rebuilt,
            equal=not differs,
            deterministic=self._deployment.learner.deterministic,
            start=start,
            steps=self._loop.state.steps - self._first_step,
            reasons=reasons,
            distance=found,
        )

    @override
    def _build_store(self) -> tuple[ResumePoint, BackgroundStore | None, Checkpoints, ErasureLog]:
        built = super()._build_store()
        self._removed = sum(built[0].erased_counts)
        return built

    @override
    def _build_reporter(self) -> None:
        """Report nothing: the address and the files of reports are the pipeline's."""

    @override
    def _open_source(self) -> bool:
        self._stack.callback(self._source.close)
        ledger = self._loop.ledger
        self._source.open(ledger.positions, self._stop, marks=ledger.marks)
        return not self._stop.is_set()

    def _check_starts(self) -> None:
        """Raise RebuildError where a partition begins after the first offset that the version has learned."""
        for partition in self._source.partitions:
            first = (self._manifest.learned_from or {}).get(str(partition.name))
            if first is not None and not partition.name.history and partition.start > first:
                raise RebuildError(
                    f"version {self._manifest.number} cannot be rebuilt: it has learned {partition.name} from offset "
                    f"{first} on, and the stream begins at {partition.start} now"
                )

    def _end_if_reached(self) -> None:
        """End the loop at the version, and where no event is left that could lead there; called between steps."""
        steps = self._loop.state.steps
        if time.monotonic() >= self._next_progress:
            self._next_progress = time.monotonic() + _PROGRESS.total_seconds()
            log.info("step %d of %d", steps, self._manifest.step)
        if self._stop.is_set() or self._is_reached():
            self._ends.set()
            return
        if not self._reader.exhausted:
            return
        positions = self._loop.ledger.positions
        progress = steps, tuple(positions.values())
        # Without deterministic, events wait for `max_delay` before their step, and change nothing meanwhile.
        if progress == self._last and (self._deployment.learner.deterministic or self._reader.ends_at(positions)):
            self._fell_short = True
            self._ends.set()
        self._last = progress

    def _is_reached(self) -> bool:
        steps, needed = self._loop.state.steps, self._manifest.step
        if self._deployment.learner.deterministic:
            return steps >= needed
        if self._source.reads_history and steps < needed:
            return False
        positions = self._loop.ledger.positions
        return all(name in positions and positions[name].offset > offset for name, offset in self._through.items())

    def _erased(self) -> int:
        return self._loop.ledger.skipped.get(SkipReason.ERASED.label, 0)

    def _reasons(self) -> list[str]:
        """Return why the weights may be others, as far as the rebuild has seen."""
        manifest, reasons = self._manifest, list[str]()
        records = self._parts.erasure.records
        erased = self._removed + self._erased() - self._erased_before
        if erased or (manifest.erasures is not None and records > manifest.erasures):
            since = "" if manifest.erasures is None else f", of which the version had {manifest.erasures}"
            reasons.append(
                f"events were erased, and are not learned again: {erased} of those that were read again, by "
                f"{records} records of erasures{since}"
            )
        if self._fell_short:
            reasons.append(
                f"the stream has too few events: it ends at step {self._loop.state.steps} of {manifest.step}, so that "
                "some were compacted away, erased, or are other ones"
            )
        if not self._deployment.learner.deterministic:
            reasons.append("learner.deterministic is false: batches follow what arrives, and are others each time")
        elif not self._fell_short and (behind := self._behind()):
            reasons.append(
                f"batches took turns in another way, as where a partition had no events for a while: {behind}"
            )
        return reasons

    def _behind(self) -> str:
        """Return the partitions that were read less far than for the version, as text."""
        positions = self._loop.ledger.positions
        each = ((name, positions[name].offset - 1, offset) for name, offset in self._through.items())
        return ", ".join(f"{name} is read to {read}, not {offset}" for name, read, offset in each if read < offset)

    def _distance(self, published: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Distance:
        setup = self._setup
        predictor = EventTimePredictor(
            *(self._trainer.model, setup.task, setup.schema, setup.device, setup.precision, setup.output_shape)
        )
        holdout = self._parts.holdout.held
        columns = holdout.columns if len(holdout) else {}
        return distance(published, weights, self._trainer.model, setup.task, predictor.predict, columns)
