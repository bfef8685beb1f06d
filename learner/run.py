"""Builds the learner from its parts, runs it, and stops it in order."""

import contextlib
import functools
import gc
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from anabranch.core.failures import away_is_dependency, state_errors
from anabranch.core.stream_secret import StreamSecret
from anabranch.core.tracing.spans import tracing
from ingest.errors import GapError
from ingest.metrics import IngestMetrics
from ingest.reader.reader import BlockReader
from learner.adaptation.stream_monitor import StreamMonitor
from learner.build import (
    LearnerSpec,
    build_late_labels,
    build_publisher,
    build_registrar,
    build_trainer,
    build_training_setup,
    watch_health,
)
from learner.checkpointing.checkpointer import Checkpointer
from learner.checkpointing.erasure import Erasure
from learner.device_health.start import leave_out_unusable
from learner.device_sharing.background_yield import background_yield
from learner.device_sharing.cuda_limits import confined, prepare_cuda, using_device
from learner.device_sharing.sharing import device_sharing, step_hooks
from learner.distributed.channel import lead
from learner.distributed.mesh import num_row_groups
from learner.distributed.process_group import RankAssignment
from learner.errors import StoppedEarlyError
from learner.evaluation.held_out_share import HeldOutShare
from learner.evaluation.holdout import HoldoutSet
from learner.late_labels import LateLabels
from learner.loop import Task, TrainingLoop
from learner.loop_parts.loop_state import LoopComponents, LoopMetrics
from learner.metrics import LearnerMetrics
from learner.model.base_file import write_base
from learner.model.device import UnusedDevice, choose_device, without_denormals
from learner.model.features.learned import features_of
from learner.object_storage.erasure_upload import fetch_erasures
from learner.object_storage.fleet import FleetWatch
from learner.object_storage.holder import check_state_is_here, record_mode
from learner.object_storage.lease import PrefixOwner
from learner.object_storage.mirror import Mirror, open_mirror
from learner.object_storage.opening import HeldStorage, hold_storage, stored_checkpoints, stored_versions
from learner.object_storage.secret import fetch_secret, upload_secret
from learner.replay_feed import make_feed
from learner.reporter import Reporter
from learner.resume import ResumePoint, check_history_is_read, resume_point
from learner.runtime.profiler import ProfilerWindow
from learner.runtime.shutdown import Deadline, hard_stop_after
from learner.runtime.status_server import serve_status
from learner.state_dir.bases import bases_in
from learner.state_dir.checkpoint import RANK, Checkpoints
from learner.state_dir.lock import check_generation, hold_state_directory
from learner.state_dir.named_bases import prune_bases
from learner.state_dir.version import Versions
from learner.stream.lag import LagPolicy
from learner.teacher.feed import TeacherFeed
from learner.teacher.opening import open_teacher
from learner.training.out_of_memory import MemoryRetry
from learner.undo.going_back import go_back, undone_with_storage
from learner.undo.tainted import TORN
from learner.undo.undone_events import UndoneEvents
from learner.undo.watch import UndoWatch
from replay.background_store import BackgroundStore
from replay.erasure.erasure_log import NAME as LOG
from replay.erasure.erasure_log import ErasureLog
from replay.metrics import ReplayMetrics

_FINISHING_SHARE = 0.8
_AWAY = (
    "the checkpoints in {} cannot be read for now, and no older one takes the place of the newest; start again once "
    "its disk answers, or move the folder of a checkpoint away that it has lost"
)

log = logging.getLogger(__name__)


def learn(
    deployment: LearnerSpec,
    stop: threading.Event,
    assignment: RankAssignment | None = None,
    source: BlockReader | None = None,
) -> None:
    """Build the learner and run it until `stop` is set.

    Args:
        deployment: all of its settings.
        stop: ends it.
        assignment: of this rank, which leads others; None: there are no others.
        source: reads the stream, and may have been started already.
    """
    with contextlib.ExitStack() as stack:
        learner = Learner(deployment, stop, assignment, stack)
        if learner.build(source):
            learner.run()


def between_steps(loop: TrainingLoop, while_waiting: Sequence[Task]) -> tuple[Task, ...]:
    """Return all work between steps, in the order of its side effects: the log of erasures first, offsets last.

    `while_waiting` comes last: work that also runs while the loop waits for the disk.
    """
    return (
        loop.erase_if_due,
        loop.clean_holdout,
        loop.publish_if_due,
        loop.monitor_served_if_due,
        loop.checkpoint_if_due,
        loop.commit_if_due,
        *while_waiting,
    )


class Learner:
    """A process that trains: built, run, and stopped in order. Used by one thread.

    Errors of settings, model, lock, address and broker are raised by `build`, before the first step.
    """

    def __init__(
        self,
        deployment: LearnerSpec,
        stop: threading.Event,
        assignment: RankAssignment | None,
        stack: contextlib.ExitStack,
    ) -> None:
        """Build nothing yet; `stack` closes what `build` opens."""
        self._deployment = deployment
        self._stop = stop
        self._assignment = assignment
        self._stack = stack
        self._ranks = assignment.size if assignment is not None else 1
        self._row_groups = num_row_groups(deployment.learner, self._ranks)
        self._mirror: Mirror | None = None
        self._registry = CollectorRegistry()
        self._log_fetched = False
        """Whether the log of erasures is from another host."""
        self._metrics = LoopMetrics(
            IngestMetrics(self._registry), ReplayMetrics(self._registry), LearnerMetrics(self._registry)
        )

    def build(self, source: BlockReader | None) -> bool:
        """Build all parts; return False when the learner was stopped meanwhile.

        1. The device, and the other ranks.
        2. The model, then the lock of the state directory, then the lease of the object store, then the base's file.
        3. The publisher, then the trainer: the publisher copies the model, which is split among ranks after that.
        4. The newest checkpoint, and the store with what it has.
        5. The loop, which the checkpoint restores.
        6. The watch of the devices, the address of the status server, and the reader of the stream.
        """
        deployment, stack = self._deployment, self._stack
        stack.enter_context(hard_stop_after(self._stop, deployment.learner.stop_timeout))
        left_out = self._metrics.learner.tracing_left_out
        stack.enter_context(
            tracing(deployment.tracing, "learner", deployment.folder, lambda why, n: left_out.labels(why).inc(n))
        )
        try:
            self._build_training()
            self._source = source or BlockReader(
                deployment.stream, deployment.events, None, traced=deployment.tracing is not None
            )
            self._source.hold_out = deployment.gate.hold_out(self._secret)
            self._build_loop(*self._build_store())
        except StoppedEarlyError:
            return False
        self._build_reporter()
        return self._open_source()

    def run(self) -> None:
        """Train until `stop` is set, or the stream has a gap that the config does not allow, then stop in order."""
        if self._registrar is not None:
            self._stack.enter_context(self._registrar)
        gc.freeze()  # a collection of all imported modules takes as long as ten steps
        gc.enable()
        self._profiler = ProfilerWindow(self._deployment.learner.profile, self._deployment.state_dir)
        self._stack.callback(self._profiler.close)
        while_waiting = self._while_waiting()
        self._loop.begin(self._stop, while_waiting)
        if self._stop.is_set():
            return
        try:
            # First: after a fatal symptom no checkpoint is made.
            first = () if self._health is None else (self._health.act_if_needed,)
            self._loop.run(self._stop, (*first, *between_steps(self._loop, while_waiting)))
        except GapError:
            self.stop()
            raise
        self.stop()
        log.info("stopped after %d steps, version %s", self._loop.state.steps, self._parts.publisher.number)

    def stop(self) -> None:
        """Stop in order. The step has ended, and nothing is polled any more.

        1. The loop checkpoints and publishes what was learned, and commits positions.
        2. The last checkpoint and version are uploaded.
        3. The reporter writes the last report.
        4. The stack closes the reader, the address, the store, and releases the lease and the lock last: time is left
           for that.
        """
        deadline = Deadline(self._deployment.learner.stop_timeout * _FINISHING_SHARE)
        self._loop.finish(deadline)
        if self._mirror is not None:
            self._mirror.finish(deadline)
        self._reporter.report()

    def _build_training(self) -> None:
        """Build what trains and what publishes, on the device, and lock the state directory."""
        deployment, assignment, stack = self._deployment, self._assignment, self._stack
        if assignment is None:
            leave_out_unusable(deployment.device, deployment.learner.device)
        prepare_cuda(deployment.learner.device, deployment.device_sharing.settings)
        channel = stack.enter_context(lead(assignment, deployment.learner)) if assignment is not None else None
        device = channel.device if channel is not None else choose_device(deployment.learner.device)
        reserve = deployment.learner.deterministic
        stack.enter_context(using_device(deployment.device_sharing.settings, device, reserve=reserve))
        stack.enter_context(without_denormals(device))
        retry = MemoryRetry(device, self._stop)
        self._setup = retry(lambda: build_training_setup(deployment, device))
        known = functools.partial(_latest_generation, deployment.state_dir)
        self._generation = stack.enter_context(
            hold_state_directory(deployment.state_dir, self._stop, deployment.learner.stop_timeout, known)
        )
        self._storage = self._hold_storage()
        fixed = deployment.seed if deployment.learner.deterministic else None
        self._secret = StreamSecret.open(deployment.state_dir, fixed)
        if self._storage is not None:
            upload_secret(self._storage.versions.bucket, self._secret)
        self._sharing = stack.enter_context(
            device_sharing(
                deployment.device_sharing,
                deployment.state_dir,
                device,
                self._stop,
                self._metrics.learner.device_sharing_wait,
            )
        )
        launch_context = stack.enter_context(confined(deployment.device_sharing.settings, device))
        before_chunk = self._before_chunk = stack.enter_context(
            background_yield(deployment.device_sharing, deployment.state_dir, device, self._stop)
        )
        hooks = step_hooks(self._sharing, launch_context, before_chunk)
        with state_errors(f"the frozen weights of the model cannot be written to {deployment.state_dir}"):
            self._base = write_base(bases_in(deployment.state_dir), self._setup.model)
        versions = stored_versions(deployment.state_dir, self._storage, self._raise_if_stopped, self._base)
        self._undone = self._go_back(versions)
        self._undo_watch = UndoWatch(deployment.state_dir, self._undone.number)
        self._fleet = None
        if (storage := deployment.storage) is not None:
            self._fleet = stack.enter_context(FleetWatch(storage, deployment.canary > 0, check=self._check))
        self._publisher = retry(
            lambda: build_publisher(
                *(deployment, versions, self._setup, self._generation),
                *(self._metrics.learner, self._check, before_chunk, self._fleet),
                self._undone.number,
                self._undo_watch.excluded if self._storage is None else contextlib.nullcontext,
            )
        )
        self._registrar = build_registrar(deployment, versions, self._metrics.learner, self._fleet)
        rows = assignment.rows if assignment is not None else None
        self._trainer = build_trainer(self._setup, channel, hooks, rows, deployment)
        if self._sharing is not None:
            self._sharing.attach(self._trainer.model, self._ranks)

    def _hold_storage(self) -> HeldStorage | None:
        """Take the lease of `[storage]`, and fetch what is newer there; None without that section."""
        settings, state_dir = self._deployment.storage, self._deployment.state_dir
        if settings is None:
            check_state_is_here(state_dir)
            return None
        owner = PrefixOwner(self._deployment.name, self._deployment.stream.topics)
        held = self._stack.enter_context(hold_storage(settings, state_dir, self._generation, self._stop, owner))
        self._generation = held.lease.generation
        with state_errors(f"the erasures of {settings.url} cannot be written to {state_dir}"):
            self._log_fetched = fetch_erasures(held.versions.bucket, state_dir)
        fetch_secret(held.versions.bucket, state_dir)
        return held

    def _go_back(self, versions: Versions) -> UndoneEvents:
        """Return to a checkpoint from before the events that were undone, if a newer one is there."""
        deployment = self._deployment
        if deployment.storage is not None:
            return undone_with_storage(deployment.state_dir)
        checkpoints = Checkpoints(deployment.state_dir / "checkpoints", self._setup.schema.digest, self._generation)
        checkpoints.base = self._base
        return go_back(deployment.state_dir, checkpoints, versions, torn=deployment.stream.format in TORN)

    def _raise_if_stopped(self) -> None:
        if self._stop.is_set():
            raise StoppedEarlyError

    def _while_fetching(self) -> None:
        self._raise_if_stopped()
        self._trainer.send_keepalive()

    def _serve_status_while_fetching(self) -> contextlib.AbstractContextManager[object]:
        """Answer on the status address, with a problem, while a checkpoint of `[storage]` is fetched."""
        deployment, storage = self._deployment, self._deployment.storage
        if storage is None:
            return contextlib.nullcontext()
        problems = [f"starting: fetching and restoring the newest checkpoint of {storage.url}"]
        address, tokens = deployment.learner.status, (deployment.read_token, deployment.admin_token)
        return serve_status(address, tokens[0], self._registry, lambda: problems, admin_token=tokens[1])

    def _check(self) -> None:
        """Raise SecondLearnerError once another learner has the state directory or lease, or UndoRequestedError."""
        if self._storage is not None:
            self._storage.lease.check()
        check_generation(self._deployment.state_dir, self._generation)
        self._undo_watch.check()

    def _build_store(self) -> tuple[ResumePoint, BackgroundStore | None, Checkpoints, ErasureLog]:
        """Read the newest checkpoint, and build the store with what it has."""
        deployment = self._deployment
        written = ErasureLog(deployment.state_dir / LOG)
        written.refresh()
        checkpoints = stored_checkpoints(
            deployment.state_dir, self._setup.schema.digest, self._generation, self._storage, self._base
        )
        with self._serve_status_while_fetching():
            with away_is_dependency(_AWAY.format(checkpoints.location)):
                resumed = resume_point(checkpoints, written, self._storage, self._while_fetching)
            check_history_is_read(deployment.stream, resumed.found)
            retry = MemoryRetry(self._setup.device, self._stop, (self._trainer.send_keepalive,))
            store = retry(lambda: resumed.store(deployment, self._setup, self._row_groups, self._secret))
        # Two threads must not launch work on Metal at once.
        background = (
            BackgroundStore(store, in_background=self._setup.device.type != "mps") if store is not None else None
        )
        if background is not None:
            self._stack.callback(background.close)
        self._trainer.set_losses_needed(needed=background is not None and background.listens)
        return resumed, background, checkpoints, written

    def _build_loop(
        self, resumed: ResumePoint, store: BackgroundStore | None, checkpoints: Checkpoints, written: ErasureLog
    ) -> None:
        """Build the loop, and restore the checkpoint."""
        deployment, metrics, settings = self._deployment, self._metrics, self._deployment.learner
        self._store = store
        secret = self._secret
        holdout = HoldoutSet(self._setup.schema, deployment.gate.holdout_rows, secret.number("held-out events"))
        keyed = deployment.events.key is not None
        unlabelled = deployment.stream.unlabelled == "distil"
        lag = LagPolicy(
            *(deployment.stream.lag_policy, secret.number("lag policy"), self._source),
            reads=keyed,
            unlabelled=unlabelled,
            only_full=deployment.learner.deterministic,
        )
        if not deployment.learner.deterministic:  # a search would then depend on clocks
            self._trainer.set_is_behind(lambda: lag.behind)
        late = build_late_labels(
            *(deployment, self._setup, self._trainer, lag, resumed.found),
            hold_out=deployment.gate.hold_out(secret),
            first=resumed.first,
            ranks=self._row_groups,
        )
        if late is not None:
            self._stack.callback(late.join.close)
        checkpointer = self._build_checkpointer(resumed, store, checkpoints, late)
        self._open_mirror(written)
        erasure = Erasure(
            *(written, checkpoints, deployment.state_dir / "replay" / RANK, store, holdout, checkpointer, late),
            keyed=keyed,
            has_history=deployment.stream.backfill is not None,
            mirror=self._mirror,
            learns=self._trainer,
            seed=lambda record: secret.number(f"blur {record}") >> 66,
            at_once=deployment.learner.deterministic,
        )
        erasure.record_erased(*resumed.erased_counts)
        if self._log_fetched:
            erasure.start_over()
        monitor = StreamMonitor(settings, bounded=self._setup.schema.label.classes is not None)
        timer = metrics.replay.sample
        replay = make_feed(store, settings, self._row_groups, monitor, holdout, self._trainer, timer)
        self._parts = LoopComponents(
            source=self._source,
            trainer=self._trainer,
            monitor=monitor,
            replay=replay,
            holdout=holdout,
            publisher=self._publisher,
            checkpointer=checkpointer,
            erasure=erasure,
            lag=lag,
            late=late,
            teacher=self._open_teacher(unlabelled=unlabelled),
            undone=self._undone,
            secret=secret.digest,
        )
        self._loop = TrainingLoop(settings, self._parts, metrics, ranks=self._row_groups)
        if keyed and (learned := features_of(self._trainer.model)) is not None:
            learned.secret = secret.number("learned features")
        resumed.restore(self._loop)
        erasure.restored(resumed.applied)
        self._publisher.set_resumed_from(resumed.origin)
        if self._storage is not None:
            self._storage.checkpoints.drop_copies()
            record_mode(deployment.state_dir, self._storage.checkpoints.bucket.url if self._storage.only else None)

    def _build_checkpointer(
        self, resumed: ResumePoint, store: BackgroundStore | None, checkpoints: Checkpoints, late: LateLabels | None
    ) -> Checkpointer:
        with away_is_dependency(_AWAY.format(checkpoints.location)):
            return Checkpointer(
                *(checkpoints, self._deployment.checkpoints, store, self._metrics.learner),
                segments=resumed.segments,
                check=self._check,
                label_join=None if late is None else late.join,
                after_prune=self._prune_bases,
                deleting=self._undo_watch.excluded,
            )

    def _prune_bases(self) -> None:
        """Delete the bases that nothing names; the uploads of a mirror do that in the object store."""
        prune_bases(self._deployment.state_dir, self._base)
        if self._storage is not None and self._storage.only:
            self._storage.bases.prune()

    def _open_teacher(self, *, unlabelled: bool) -> TeacherFeed | None:
        """Build the teacher, which this rank asks for the events of all ranks; None without `[model.teacher]`."""
        deployment, setup = self._deployment, self._setup
        if (settings := deployment.model.teacher) is None:
            return None
        teacher = MemoryRetry(setup.device, self._stop, (self._trainer.send_keepalive,))(
            lambda: open_teacher(
                *(settings, deployment.model, setup.schema, setup.task, setup.output_shape, setup.device),
                folder=deployment.folder,
                state_dir=deployment.state_dir,
                before_chunk=self._before_chunk,
                deterministic=deployment.learner.deterministic,
            )
        )
        duration = self._metrics.learner.teacher_duration
        feed = TeacherFeed(teacher, setup.output_shape, duration, unlabelled=unlabelled)
        self._stack.callback(feed.close)
        return feed

    def _open_mirror(self, written: ErasureLog) -> None:
        """Begin to upload what the learner writes, where there is an object store."""
        if self._storage is None or self._fleet is None:
            return
        deployment, fleet = self._deployment, self._fleet
        sections = deployment.versions, deployment.checkpoints
        mirror = open_mirror(self._storage, deployment.state_dir, *sections, written.through, lambda: fleet.needed)
        self._mirror = self._stack.enter_context(mirror)

    def _build_reporter(self) -> None:
        """Watch the devices, build the reporter, and serve its status."""
        deployment, request, metrics = self._deployment, self._parts.checkpointer.request, self._metrics.learner
        watch = watch_health(deployment, self._trainer, self._sharing, request, metrics, self._ranks)
        self._health = self._stack.enter_context(watch)
        self._reporter = Reporter(
            deployment.state_dir,
            self._generation,
            self._loop,
            self._parts,
            self._metrics,
            strategy=deployment.learner.strategy.name,
            classification=self._setup.schema.label.classes is not None,
            store=self._store,
            launched=self._assignment is not None,
            unused_device=UnusedDevice.of("learner.device", deployment.learner.device, self._setup.device),
            sharing=self._sharing,
            health=self._health,
            mirror=self._mirror,
            fleet=self._fleet,
            registrar=self._registrar,
            held_out=HeldOutShare(deployment.gate.holdout_fraction),
        )
        if self._sharing is not None:
            self._sharing.set_waiting_task(self._reporter.report_if_due)
        token, reporter = deployment.read_token, self._reporter
        self._port = self._stack.enter_context(
            serve_status(
                deployment.learner.status,
                token,
                self._registry,
                problems=reporter.problems,
                warnings=reporter.warnings,
                hang=reporter.hang,
                admin_token=deployment.admin_token,
            )
        )

    def _open_source(self) -> bool:
        """Read the stream from the positions of the ledger; return False when the learner was stopped meanwhile."""
        source, loop = self._source, self._loop
        self._stack.callback(source.close)
        source.open(loop.ledger.positions, self._stop, marks=loop.ledger.marks)
        if self._stop.is_set():
            return False
        log.info(
            "learning %s on %s in %s; metrics on port %d",
            *(", ".join(self._deployment.stream.topics), self._setup.device, self._setup.precision.name, self._port),
        )
        return True

    def _while_waiting(self) -> tuple[Task, ...]:
        """Return the work between steps that also runs while the loop waits for the disk."""
        tasks: list[Task] = [self._undo_watch.check_if_due]
        if self._storage is not None:
            tasks.append(self._storage.lease.check)
        if self._mirror is not None:
            tasks.append(self._mirror.raise_bug)
        tasks.append(self._reporter.report_if_due)
        if self._deployment.learner.profile is not None:
            tasks.append(self._advance_profiler)
        if (sharing := self._sharing) is not None:
            tasks.append(lambda: sharing.adjust(self._trainer, self._loop.rows_of_step))
        if self._assignment is not None:
            tasks.append(self._trainer.send_keepalive)
        return tuple(tasks)

    def _advance_profiler(self) -> None:
        self._profiler.step(self._loop.state.steps)


def _latest_generation(state_dir: Path) -> int:
    """Return the latest generation of a learner that wrote a version or a checkpoint; 0 when there is none."""
    with away_is_dependency(f"the state in {state_dir} cannot be read"):
        return max(
            Versions(state_dir / "versions").generation(),
            Checkpoints(state_dir / "checkpoints", schema="", generation=0).generation(),
        )
