"""Builds a learner from the settings, runs it until it is stopped, and stops it in order.

No other module imports an extension.
"""

import contextlib
import functools
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name

from prometheus_client import CollectorRegistry

from anabranch.core.failures import away_is_dependency, state_errors
from anabranch.core.shutdown import Deadline, hard_stop_after
from anabranch.core.start_report import start_does
from anabranch.core.stream_secret import StreamSecret
from anabranch.core.tracing.spans import tracing
from anabranch.ingest.errors import GapError
from anabranch.ingest.metrics import IngestMetrics
from anabranch.ingest.reader.reader import BlockReader
from anabranch.learner.checkpoints.background_erasure import BackgroundErasure
from anabranch.learner.checkpoints.checkpointer import Checkpointer
from anabranch.learner.checkpoints.format import Checkpoints
from anabranch.learner.checkpoints.part_formats import WAITING_EVENTS
from anabranch.learner.checkpoints.parts import StorePart
from anabranch.learner.device.cuda_limits import confined, prepare_cuda, using_device
from anabranch.learner.device.out_of_memory import MemoryRetry, oom_warning
from anabranch.learner.device.visible_devices import leave_out_unusable
from anabranch.learner.evaluate.baselines import Baselines
from anabranch.learner.evaluate.calibration import AnswerLearner
from anabranch.learner.evaluate.event_time import EventTimePredictor
from anabranch.learner.evaluate.holdout import HoldoutSet
from anabranch.learner.evaluate.scoring import Scorer
from anabranch.learner.evaluate.stream_monitor import StreamMonitor
from anabranch.learner.extension import Extension, overriding
from anabranch.learner.extensions.device_health.extension import DeviceHealth, SpeedCheck, watch_devices
from anabranch.learner.extensions.device_sharing.extension import background_yield, device_sharing, step_hooks
from anabranch.learner.extensions.fleet.extension import FleetWatch, fleet_extension
from anabranch.learner.extensions.input_drift.extension import InputDrift, remove_reference
from anabranch.learner.extensions.late_labels.extension import LateLabels
from anabranch.learner.extensions.late_labels.join_part import open_join
from anabranch.learner.extensions.search.extension import ChallengerSearch, SearchExtension, open_search
from anabranch.learner.extensions.served_answers.extension import ServedAnswers
from anabranch.learner.extensions.storage.extension import Mirror, open_mirror
from anabranch.learner.extensions.teacher.extension import TeacherFeed
from anabranch.learner.extensions.teacher.opening import open_teacher
from anabranch.learner.extensions.track.extension import open_track
from anabranch.learner.extensions.undo.extension import Undo, UndoneEvents, go_back, undone_with_storage
from anabranch.learner.loop.erasure import Erasure
from anabranch.learner.loop.loop_state import LoopComponents, LoopMetrics
from anabranch.learner.loop.profiler import ProfilerWindow
from anabranch.learner.loop.replay_feed import make_feed
from anabranch.learner.loop.reporter import Reporter
from anabranch.learner.loop.resume import ResumePoint, check_stream, resume_point
from anabranch.learner.loop.training_loop import Task, TrainingLoop
from anabranch.learner.model.device import (
    UnusedDevice,
    check_scaling,
    choose_device,
    without_denormals,
)
from anabranch.learner.model.features.learned import features_of
from anabranch.learner.model.trained_set import write_base
from anabranch.learner.object_storage.erasure_upload import fetch_erasures
from anabranch.learner.object_storage.lease import PrefixOwner
from anabranch.learner.object_storage.opening import (
    LeasedStorage,
    check_state_is_here,
    fetch_secret,
    fetching_checkpoints,
    lease_storage,
    record_mode,
    stored_checkpoints,
    stored_versions,
    upload_secret,
)
from anabranch.learner.parallel.channel import Channel
from anabranch.learner.parallel.data_parallel import DataParallelGroup, FurtherModels, group_of
from anabranch.learner.parallel.follower import follow
from anabranch.learner.parallel.leader import Leader, lead
from anabranch.learner.parallel.mesh import Mesh, num_row_groups
from anabranch.learner.parallel.process_group import RankAssignment, devices_of_host, join_group
from anabranch.learner.parallel.speed_check import time_product
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.state_dir.lock import check_generation, lock_state_directory
from anabranch.learner.status.metrics import LearnerMetrics
from anabranch.learner.status.report import LearnerReport
from anabranch.learner.status.status_server import serve_status
from anabranch.learner.stream.lag import LagPolicy
from anabranch.learner.train.build import build_training_setup
from anabranch.learner.train.cpu_choice import fastest_steps
from anabranch.learner.train.micro_batches import StepHooks
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.learner.versions.format import RegistryState, Versions, reference_to
from anabranch.learner.versions.gate import QualityGate
from anabranch.learner.versions.named_bases import prune_bases
from anabranch.learner.versions.origin import origin_of, settings_of_weights
from anabranch.learner.versions.publisher import Publisher, VersionWriter
from anabranch.learner.versions.rebuilt import Rebuilt
from anabranch.replay.background_store import BackgroundStore
from anabranch.replay.erasure.erasure_log import NAME as LOG
from anabranch.replay.erasure.erasure_log import ErasureLog
from anabranch.replay.metrics import ReplayMetrics

_AWAY = (
    "the checkpoints in {} cannot be read for now, and no older one takes the place of the newest; start again once "
    "its disk answers, or move the folder of a checkpoint away that it has lost"
)

_SWITCH_SECONDS = 0.0005
_FINISHING_SHARE = 0.8

ALWAYS: Sequence[str] = ()
"""Extensions that need nothing but the loop, as `module:class`."""

log = logging.getLogger(__name__)


class StoppedEarlyError(Exception):
    """The learner was stopped while it was being built."""


class Assembly:
    """A learner, built in order. Used by one thread.

    Errors of settings, model, lock, address and broker are raised by `build`, before the first step.
    """

    def __init__(
        self,
        spec: PipelineSettings,
        stop: threading.Event,
        assignment: RankAssignment | None,
        stack: contextlib.ExitStack,
        more: Sequence[Extension] = (),
        *,
        in_memory: bool = False,
    ) -> None:
        """Build nothing yet; `stack` closes what `build` opens.

        `more`: extensions that come last; one that returns the batches takes the place of late labels. `in_memory`:
        whether the store has no tiers but memory.
        """
        self.spec = spec
        self.stop = stop
        self.stack = stack
        self._more, self._in_memory = more, in_memory
        self._assignment = assignment
        self._ranks = assignment.size if assignment is not None else 1
        self._row_groups = num_row_groups(spec.learner, self._ranks)
        self._registry = CollectorRegistry()
        self._log_fetched = False
        """Whether the log of erasures is from another host."""
        self.removed = 0
        """Erased events that the restored checkpoint is without."""
        self._metrics = LoopMetrics(
            IngestMetrics(self._registry), ReplayMetrics(self._registry), LearnerMetrics(self._registry)
        )

    def build(self, source: BlockReader | None) -> bool:
        """Build all parts; return False when the learner was stopped meanwhile.

        1. The device, and the other ranks.
        2. The model, then the lock of the state directory, then the lease of the object store, then the base's file.
        3. The gate, then the trainer: the gate copies the model, which is split among ranks after that.
        4. The newest checkpoint, and the store with what it has.
        5. The loop, which the checkpoint restores.
        6. The address of the status server, and the reader of the stream.
        """
        if not self.build_loop(source):
            return False
        self._build_reporter()
        return self._open_source()

    def build_loop(self, source: BlockReader | None) -> bool:
        """Build all up to the loop, which the checkpoint restores; return False when the learner was stopped."""
        spec, stack = self.spec, self.stack
        stack.enter_context(hard_stop_after(self.stop, spec.learner.stop_timeout))
        left_out = self._metrics.learner.tracing_left_out
        stack.enter_context(tracing(spec.tracing, "learner", spec.folder, lambda why, n: left_out.labels(why).inc(n)))
        try:
            self._build_training()
            self.source = source or BlockReader(spec.stream, spec.events, None, traced=spec.tracing is not None)
            self.source.hold_out = spec.gate.hold_out(self._secret)
            self._build_loop(*self._build_store())
        except StoppedEarlyError:
            return False
        return True

    def _build_training(self) -> None:
        """Build what trains and what publishes, on the device, and lock the state directory."""
        spec, assignment, stack = self.spec, self._assignment, self.stack
        if assignment is None:
            leave_out_unusable(spec.device, spec.learner.device)
        prepare_cuda(spec.learner.device, spec.device_sharing)
        start_does("builds the model" if assignment is None else "waits for the other ranks, and builds the model")
        channel = stack.enter_context(lead(assignment, spec.learner)) if assignment is not None else None
        device = channel.device if channel is not None else choose_device(spec.learner.device)
        reserve = spec.learner.deterministic
        stack.enter_context(using_device(spec.device_sharing, device, reserve=reserve))
        stack.enter_context(without_denormals(device))
        retry = MemoryRetry(device, self.stop)
        self.setup = retry(lambda: build_training_setup(spec, device))
        if channel is None:
            stack.enter_context(fastest_steps(self.setup))
        known = functools.partial(_latest_generation, spec.state_dir)
        self._generation = stack.enter_context(
            lock_state_directory(spec.state_dir, self.stop, spec.learner.stop_timeout, known)
        )
        self._storage = self._lease_storage()
        fixed = spec.seed if spec.learner.deterministic else None
        self._secret = StreamSecret.open(spec.state_dir, fixed)
        if self._storage is not None:
            upload_secret(self._storage.versions.bucket, self._secret)
        self._sharing = stack.enter_context(
            device_sharing(
                spec.device_sharing,
                spec.serving,
                spec.state_dir,
                device,
                self.stop,
                self._metrics.learner.device_sharing_wait,
                fixed=spec.learner.deterministic,
            )
        )
        launch_context = stack.enter_context(confined(spec.device_sharing, device))
        before_chunk = self._before_chunk = stack.enter_context(
            background_yield(spec.device_sharing, spec.serving, spec.state_dir, device, self.stop)
        )
        hooks = step_hooks(self._sharing, launch_context, before_chunk)
        with state_errors(f"the frozen weights of the model cannot be written to {spec.state_dir}"):
            self.base = write_base(bases_in(spec.state_dir), self.setup.model)
        versions = stored_versions(spec.state_dir, self._storage, self._raise_if_stopped, self.base)
        self._undo = Undo(spec.state_dir, self._go_back(versions))
        self._fleet = None
        if (storage := spec.storage) is not None:
            self._fleet = FleetWatch(storage, spec.serving.canary > 0, check=self._check)
            stack.enter_context(self._fleet.thread)
        versions.storage.clean()
        self._versions, self._judges = versions, list[Extension]()
        self._gate = gate = retry(lambda: build_gate(spec, versions, self.setup, before_chunk, self._fleet))
        if self._fleet is not None and storage is not None:
            self._judges.append(fleet_extension(self._fleet, gate, versions, spec, storage, self._metrics.learner))
        if spec.track is not None:
            served = _own if self._fleet is None else self._fleet.served
            track = open_track(spec, spec.track, self._generation, versions, served, self._metrics.learner)
            stack.callback(track.close)
            self._judges.append(track)
        rows = assignment.rows if assignment is not None else None
        self.trainer = build_trainer(self.setup, channel, hooks, rows, spec)
        self._leader = next((each for each in self.trainer.wrappers if isinstance(each, Leader)), None)
        self._search = next((each for each in self.trainer.wrappers if isinstance(each, ChallengerSearch)), None)
        if self._sharing is not None:
            self._sharing.prepare(self.trainer.model, self._ranks)

    def _lease_storage(self) -> LeasedStorage | None:
        """Take the lease of `[storage]`, and fetch what is newer there; None without that section."""
        settings, state_dir = self.spec.storage, self.spec.state_dir
        if settings is None:
            check_state_is_here(state_dir)
            return None
        start_does(f"takes the lease of {settings.url}, for which it waits while another learner renews it")
        owner = PrefixOwner(self.spec.name, self.spec.stream.topics)
        held = self.stack.enter_context(lease_storage(settings, state_dir, self._generation, self.stop, owner))
        self._generation = held.lease.generation
        with state_errors(f"the erasures of {settings.url} cannot be written to {state_dir}"):
            self._log_fetched = fetch_erasures(held.versions.bucket, state_dir)
        fetch_secret(held.versions.bucket, state_dir)
        return held

    def _go_back(self, versions: Versions) -> UndoneEvents:
        """Return to a checkpoint from before the events that were undone, if a newer one is there."""
        spec = self.spec
        if spec.storage is not None:
            return undone_with_storage(spec.state_dir)
        checkpoints = Checkpoints(spec.state_dir / "checkpoints", self.setup.schema.digest, self._generation)
        checkpoints.base = self.base
        return go_back(spec.state_dir, checkpoints, versions, torn=spec.stream.format_kind.several)

    def _raise_if_stopped(self) -> None:
        if self.stop.is_set():
            raise StoppedEarlyError

    def _while_fetching(self) -> None:
        self._raise_if_stopped()
        self._send_keepalive()

    def _send_keepalive(self) -> None:
        """Show other ranks that this one is alive, where there are any."""
        if self._leader is not None:
            self._leader.send_keepalive()

    def _serve_status_while_fetching(self) -> contextlib.AbstractContextManager[object]:
        """Answer on the status address, with a problem, while a checkpoint of `[storage]` is fetched."""
        spec, storage = self.spec, self.spec.storage
        if storage is None:
            return contextlib.nullcontext()
        problems = [f"starting: fetching and restoring the newest checkpoint of {storage.url}"]
        read, admin = spec.serving.tokens.values
        return serve_status(spec.learner.status, read, self._registry, lambda: problems, admin_token=admin)

    def _check(self) -> None:
        """Raise SecondLearnerError once another learner has the state directory or lease, or UndoRequestedError."""
        if self._storage is not None:
            self._storage.lease.check()
        check_generation(self.spec.state_dir, self._generation)
        self._undo.check()

    def _build_store(self) -> tuple[ResumePoint, BackgroundStore | None, Checkpoints, ErasureLog]:
        """Read the newest checkpoint, and build the store with what it has."""
        spec = self.spec
        start_does("restores the newest checkpoint")
        written = ErasureLog(spec.state_dir / LOG)
        written.refresh()
        checkpoints = stored_checkpoints(
            spec.state_dir, self.setup.schema.digest, self._generation, self._storage, self.base
        )
        with self._serve_status_while_fetching():
            fetching = fetching_checkpoints(self._storage, checkpoints, self._while_fetching)
            with away_is_dependency(_AWAY.format(checkpoints.location)), fetching as fetch_newer:
                resumed = resume_point(checkpoints, written, fetch_newer)
            check_stream(spec.stream, resumed.found)
            retry = MemoryRetry(self.setup.device, self.stop, (self._send_keepalive,))
            make_store = functools.partial(resumed.store, in_memory=self._in_memory)
            store = retry(lambda: make_store(spec, self.setup, self._row_groups, self._secret))
        # Two threads must not launch work on Metal at once.
        background = (
            BackgroundStore(store, in_background=self.setup.device.type != "mps") if store is not None else None
        )
        if background is not None:
            self.stack.callback(background.close)
        if self._leader is not None:
            self._leader.losses_needed = background is not None and background.listens
        return resumed, background, checkpoints, written

    def _build_loop(
        self, resumed: ResumePoint, store: BackgroundStore | None, checkpoints: Checkpoints, written: ErasureLog
    ) -> None:
        """Build the loop, and restore the checkpoint."""
        spec, metrics, settings = self.spec, self._metrics, self.spec.learner
        self._store = store
        secret = self._secret
        holdout = HoldoutSet(self.setup.schema, spec.gate.holdout_rows, secret.number("held-out events"))
        keyed = spec.events.key is not None
        unlabelled = spec.stream.unlabelled == "distil"
        lag = LagPolicy(
            spec.stream.lag_policy,
            secret.number("lag policy"),
            self.source,
            reads=keyed,
            unlabelled=unlabelled,
            only_full=spec.learner.deterministic,
        )
        if self._search is not None and not spec.learner.deterministic:  # it would then depend on clocks
            self._search.is_behind = lambda: lag.behind
        monitor = StreamMonitor(settings, self.setup.schema, keep_outputs=spec.task.learns)
        late, mirror = self._open_late_labels(lag, resumed, monitor.baselines), self._open_mirror(written)
        self.extensions = tuple(each for each in (*self._extensions(late), mirror) if each is not None)
        checkpointer = self._build_checkpointer(resumed, store, checkpoints)
        has_history = spec.stream.backfill is not None
        files = BackgroundErasure(written, checkpoints, checkpointer, mirror, has_history=has_history)
        erasure = Erasure(
            written,
            files,
            holdout,
            overriding(self.extensions, "erase"),
            lambda keys, record: self.trainer.features.erase(keys, secret.number(f"blur {record}") >> 66),
            keyed=keyed,
            at_once=spec.learner.deterministic,
        )
        self.removed = sum(resumed.erased_counts)
        erasure.record_erased(*resumed.erased_counts)
        if self._log_fetched:
            erasure.start_over()
        timer = metrics.replay.sample
        replay = make_feed(store, settings, self._row_groups, monitor, holdout, self.trainer, timer)
        publisher = self._build_publisher(resumed)
        self.parts = LoopComponents(
            source=self.source,
            trainer=self.trainer,
            monitor=monitor,
            replay=replay,
            holdout=holdout,
            publisher=publisher,
            checkpointer=checkpointer,
            erasure=erasure,
            lag=lag,
            extensions=self.extensions,
            unlabelled=unlabelled,
            secret=secret.digest,
        )
        self.loop = TrainingLoop(settings, self.parts, metrics, ranks=self._row_groups)
        if keyed and (learned := features_of(self.trainer.model)) is not None:
            learned.secret = secret.number("learned features")
        resumed.restore(self.loop.restore)
        erasure.restored(resumed.applied)
        if self._storage is not None:
            self._storage.checkpoints.drop_copies()
            record_mode(spec.state_dir, self._storage.checkpoints.bucket.url if self._storage.only else None)

    def _extensions(self, late: LateLabels | None) -> Iterator[Extension | None]:
        """Yield what attaches to the loop, in the order in which each hook is called."""
        yield self._watch_devices()
        yield self._undo
        yield self._open_teacher()
        yield from () if late is None else (late, late.arrivals)
        if (served := self._measure_answers()) is not None:
            yield from (served, served.watch)
        yield from self._judges
        yield self._sharing
        yield None if self._search is None else SearchExtension(self._search)
        yield self._watch_inputs()
        for each in ALWAYS:
            extension: Extension = resolve_name(each)()
            self.stack.callback(extension.close)
            yield extension
        yield from self._more

    def _measure_answers(self) -> ServedAnswers | None:
        """Measure versions by what they have answered; None where no answers come through Kafka, or labels with them.

        None also where the task has no measure.
        """
        if self.spec.measured_answers is None or self._gate.scorer.measures.kind is None:
            return None
        served = ServedAnswers(self.spec, self.setup.schema, self._gate)
        self.stack.callback(served.close)
        return served

    def _watch_inputs(self) -> InputDrift | None:
        """Compare new events with those before; None without `learner.drift.inputs`."""
        spec, setup = self.spec, self.setup
        if not (settings := spec.learner.drift).inputs:
            with state_errors(f"the reference of inputs cannot be deleted from {spec.state_dir}"):
                remove_reference(spec.state_dir)
            return None
        return InputDrift(settings, setup.schema, setup.task, spec.state_dir, rests=not spec.learner.deterministic)

    def _build_publisher(self, resumed: ResumePoint) -> Publisher:
        spec, setup = self.spec, self.setup
        origin = origin_of(settings_of_weights(spec), spec, setup.device, resumed.origin)
        writer = VersionWriter(
            self._versions,
            reference_to(spec.model),
            setup.schema,
            self._generation,
            origin,
            self._undo.number,
            self._undo.excluded if self._storage is None else contextlib.nullcontext,
        )
        verdicts, answering = self._metrics.learner.gate_verdicts, AnswerLearner(spec.task, setup.schema.label.one_of)
        return Publisher(writer, self._gate, spec.versions, verdicts, self._check, self.extensions, answering)

    def _build_checkpointer(
        self, resumed: ResumePoint, store: BackgroundStore | None, checkpoints: Checkpoints
    ) -> Checkpointer:
        with away_is_dependency(_AWAY.format(checkpoints.location)):
            return Checkpointer(
                checkpoints,
                self.spec.checkpoints,
                self._metrics.learner.checkpoint,
                self._metrics.learner.checkpoint_stall,
                [
                    *([] if store is None else [StorePart(store, resumed.segments)]),
                    *(each.part for each in self.extensions if each.part is not None),
                ],
                self._check,
                after_prune=self._prune_bases,
                deleting=self._undo.excluded,
            )

    def _prune_bases(self) -> None:
        """Delete the bases that nothing names; the uploads of a mirror do that in the object store."""
        prune_bases(self.spec.state_dir, self.base)
        if self._storage is not None and self._storage.only:
            self._storage.bases.prune()

    def _open_late_labels(self, lag: LagPolicy, resumed: ResumePoint, baselines: Baselines) -> LateLabels | None:
        """Return the join of events and late labels, with the events of the checkpoint; None without
        `[stream.labels]`."""
        spec, setup, settings = self.spec, self.setup, self.spec.stream.labels
        if settings is None or overriding(self._more, "next"):
            return None
        predictor = EventTimePredictor(
            setup.model,
            setup.task,
            setup.schema,
            setup.device,
            setup.precision,
            setup.output_shape,
            self.trainer.staging.before_chunk,
            baselines,
        )
        part = open_join(
            settings,
            setup.schema,
            (predictor.width,),
            WAITING_EVENTS.folder(spec.state_dir),
            resumed.found,
            first=resumed.first,
            complete=spec.complete,
        )
        hold_out, step_size = spec.gate.hold_out(self._secret), spec.learner.batch_size * self._row_groups
        late = LateLabels(part, settings, hold_out, predictor, lag, step_size, spec.learner.max_delay)
        self.stack.callback(late.close)
        return late

    def _open_teacher(self) -> TeacherFeed | None:
        """Build the teacher, which this rank asks for the events of all ranks; None without `[model.teacher]`."""
        spec, setup = self.spec, self.setup
        if (settings := spec.model.teacher) is None:
            return None
        step_size = spec.learner.batch_size * self._row_groups
        teacher = MemoryRetry(setup.device, self.stop, (self._send_keepalive,))(
            lambda: open_teacher(
                settings,
                spec.model,
                setup.schema,
                setup.task,
                setup.output_shape,
                setup.device,
                step_size,
                folder=spec.folder,
                state_dir=spec.state_dir,
                before_chunk=self._before_chunk,
                deterministic=spec.learner.deterministic,
            )
        )
        duration = self._metrics.learner.teacher_duration
        distil = spec.stream.unlabelled == "distil"
        feed = TeacherFeed(teacher, setup.output_shape, duration, step_size, unlabelled=distil)
        self.stack.callback(feed.close)
        return feed

    def _open_mirror(self, written: ErasureLog) -> Mirror | None:
        """Begin to upload what the learner writes; None without an object store."""
        if self._storage is None or self._fleet is None:
            return None
        spec, fleet = self.spec, self._fleet
        sections = spec.versions, spec.checkpoints
        mirror = open_mirror(self._storage, spec.state_dir, *sections, written.through, fleet.needed_versions)
        self.stack.callback(mirror.close)
        return mirror

    def _watch_devices(self) -> DeviceHealth | None:
        """Watch the devices of the ranks of this host; return None where none can be watched."""
        spec, trainer, sharing, leader = self.spec, self.trainer, self._sharing, self._leader

        def measure() -> Mapping[str, float]:
            if sharing is not None:  # the sniff test yields as a micro-batch does
                sharing.yield_to_serving(0)
                sharing.pause()
            return {str(trainer.device): time_product(trainer.device)} if leader is None else leader.time_devices()

        devices = [trainer.device] if self._ranks == 1 else devices_of_host(trainer.device, spec.learner)
        speed, metrics = SpeedCheck(measure, spec.device.sniff_deviation), self._metrics.learner.device
        request = lambda: self.parts.checkpointer.request()  # noqa: E731 the checkpointer asks the extensions for parts
        health = watch_devices(spec.device, devices, request, metrics, ranks=self._ranks, speed=speed)
        if health is not None:
            self.stack.callback(health.close)
        return health

    def _build_reporter(self) -> None:
        """Build the reporter, and serve its status."""
        spec, unused = self.spec, UnusedDevice.of("learner.device", self.spec.learner.device, self.setup.device)
        constant = LearnerReport(
            pid=os.getpid(),
            launcher=None if self._assignment is None else os.getppid(),
            generation=self._generation,
            started=time.time(),
            time=time.time(),
            strategy=spec.learner.strategy.name,
            steps=0,
        )
        self.reporter = Reporter(spec.state_dir, constant, self.loop, self.parts, self._metrics, self._store, [unused])
        if self._sharing is not None:
            self._sharing.begin(self.trainer.runner, lambda: self.loop.rows_of_step, self.reporter.report_if_due)
        (read, admin), reporter = spec.serving.tokens.values, self.reporter
        self._port = self.stack.enter_context(
            serve_status(
                spec.learner.status,
                read,
                self._registry,
                problems=reporter.problems,
                warnings=reporter.warnings,
                hang=reporter.hang,
                admin_token=admin,
            )
        )

    def _open_source(self) -> bool:
        """Read the stream from the positions of the ledger; return False when the learner was stopped meanwhile."""
        source, loop = self.source, self.loop
        self.stack.callback(source.close)
        stream = self.spec.stream
        start_does(f"waits for {stream.bootstrap_servers} to list the partitions of {', '.join(stream.topics)}")
        source.open(loop.ledger.positions, self.stop, marks=loop.ledger.marks)
        if self.stop.is_set():
            return False
        log.info(
            "learning %s on %s in %s; metrics on port %d",
            ", ".join(self.spec.stream.topics),
            self.setup.device,
            self.setup.precision.name,
            self._port,
        )
        return True

    def tasks(self) -> tuple[Task, ...]:
        """Return the work between steps that also runs while the loop waits for the disk."""
        tasks: list[Task] = [self.reporter.report_if_due]
        profiler = ProfilerWindow(self.spec.learner.profile, self.spec.state_dir)
        self.stack.callback(profiler.close)
        if self.spec.learner.profile is not None:
            tasks.append(lambda: profiler.step(self.loop.state.steps))
        if self._assignment is not None:
            tasks.append(self._send_keepalive)
        return tuple(tasks)


def learn(
    spec: PipelineSettings,
    stop: threading.Event,
    assignment: RankAssignment | None = None,
    source: BlockReader | None = None,
) -> None:
    """Build the learner and run it until `stop` is set.

    Args:
        spec: all of its settings.
        stop: ends it.
        assignment: of this rank, which leads others; None: there are no others.
        source: reads the stream, and may have been started already.

    Raises:
        GapError: the stream has a gap that the config does not allow.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(switching_often())
        learner = Assembly(spec, stop, assignment, stack)
        if not learner.build(source):
            return
        gc.freeze()  # a collection of all imported modules takes as long as ten steps
        gc.enable()
        loop, tasks = learner.loop, learner.tasks()
        # First: after a fatal symptom of a device no checkpoint is made.
        first: list[Task] = overriding(learner.extensions, "run_if_due")
        loop.begin(stop, (*first, *tasks))
        if stop.is_set():
            return
        try:
            loop.run(stop, (*first, *between_steps(loop, tasks)))
        except GapError:
            _finish(learner)
            raise
        _finish(learner)
        log.info("stopped after %d steps, version %s", loop.state.steps, learner.parts.publisher.number)


@contextlib.contextmanager
def switching_often() -> Iterator[None]:
    """Let no thread keep the interpreter's lock for more than half a millisecond while another waits for it.

    The thread of the steps waits for it after each operation of torch: Python's own 5 ms are longer than many a step.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


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


def _finish(learner: Assembly) -> None:
    """Stop in order. The step has ended, and nothing is polled any more.

    1. The loop checkpoints and publishes what was learned, and commits positions.
    2. The extensions complete what is under way: the last checkpoint and version are uploaded.
    3. The reporter writes the last report.
    4. The stack closes the reader, the address, the store, and releases the lease and the lock last: time is left for
       that.
    """
    deadline = Deadline(learner.spec.learner.stop_timeout * _FINISHING_SHARE)
    learner.loop.finish(deadline)
    for extension in learner.extensions:
        extension.finish(deadline)
    learner.reporter.report()


def rebuild_version(
    spec: PipelineSettings,
    versions: Versions,
    checkpoints: Callable[[str], Checkpoints],
    number: int,
    stop: threading.Event,
    keep: Callable[[Path, Path | None], object] | None = None,
) -> Rebuilt | None:
    """Rebuild a version, and compare it; see `learner.extensions.rebuild.rebuild`, which no learner imports."""
    from anabranch.learner.extensions.rebuild import rebuild

    def make(spec: PipelineSettings, stop: threading.Event, stack: contextlib.ExitStack) -> Assembly:
        return Assembly(spec, stop, None, stack)

    return rebuild.rebuild_version(make, spec, versions, checkpoints, number, stop, keep)


def _latest_generation(state_dir: Path) -> int:
    """Return the latest generation of a learner that wrote a version or a checkpoint; 0 when there is none."""
    with away_is_dependency(f"the state in {state_dir} cannot be read"):
        return max(
            Versions(state_dir / "versions").generation(),
            Checkpoints(state_dir / "checkpoints", schema="", generation=0).generation(),
        )


def build_trainer(
    setup: TrainingSetup,
    channel: Channel | None,
    hooks: StepHooks | None = None,
    rows: int | None = None,
    spec: PipelineSettings | None = None,
) -> Trainer:
    """Return the trainer, of all ranks if there are others.

    `rows`: size to which micro-batches were reduced before this start, after memory ran out. `spec`: whose
    `[search]` is carried out, if it has one.
    """
    if channel is None:
        search = None if spec is None else open_search(spec, setup, hooks)
        return Trainer(setup, hooks=hooks, wrappers=[] if search is None else [search])
    check_scaling(setup.precision, setup.settings)
    replicas = group_of(setup)
    search = None if spec is None else open_search(spec, setup, hooks, FurtherModels(replicas))
    warning = oom_warning(setup.device, rows) if rows is not None else None
    wrappers = [Leader(channel, replicas), *([] if search is None else [search])]
    return Trainer(setup, ranks=replicas, hooks=hooks, warning=warning, wrappers=wrappers)


def build_gate(
    spec: PipelineSettings,
    versions: Versions,
    setup: TrainingSetup,
    before_chunk: Callable[[], object],
    fleet: FleetWatch | None,
) -> QualityGate:
    """Return the quality gate, which copies the model: it must not be split among ranks yet.

    `before_chunk` is called before each chunk of scoring; it waits while requests need the device.
    """
    named = () if spec.gate.measures == "auto" else spec.gate.measures
    scorer = Scorer(setup.model, setup.task, setup.schema, setup.device, setup.precision, before_chunk, named)
    served = _own if fleet is None else fleet.served
    return QualityGate(versions, spec.gate, scorer, reference_to(spec.model), served)


def _own(state: RegistryState) -> RegistryState:
    """Return what the servers of this host serve: there are no others."""
    return state


def follow_leader(deployment: PipelineSettings, stop: threading.Event, assignment: RankAssignment) -> None:
    """Step with the leader until it sends STOP; `stop` alone ends nothing before `learner.stop_timeout` is over.

    Raises:
        RankLostError: the leader is gone.
    """
    if assignment.first:
        deployment = _unshared(deployment)
    settings, fixed = deployment.device_sharing, deployment.learner.deterministic
    prepare_cuda(deployment.learner.device, settings)
    with (
        hard_stop_after(stop, deployment.learner.stop_timeout),
        switching_often(),
        join_group(assignment, deployment.learner) as device,
        using_device(settings, device),
        without_denormals(device),
        confined(settings, device) as launch_context,
        device_sharing(settings, deployment.serving, deployment.state_dir, device, stop, fixed=fixed) as sharing,
    ):
        if assignment.first and assignment.rank == assignment.first:  # host 0 watches the devices of its ranks
            devices = devices_of_host(device, deployment.learner)
            watch_devices(deployment.device, devices, lambda: None, ranks=assignment.size)
        channel = Channel(device)

        def make() -> tuple[Trainer, DataParallelGroup]:
            group = Mesh(deployment.learner, assignment.rank, assignment.size).row_group()
            setup = MemoryRetry(device, stop)(lambda: build_training_setup(deployment, device, group))
            replicas = group_of(setup)
            hooks = step_hooks(sharing, launch_context)
            search = open_search(deployment, setup, hooks, FurtherModels(replicas), leads=False)
            wrappers = [] if search is None else [search]
            trainer = Trainer(setup, ranks=replicas, hooks=hooks, wrappers=wrappers)
            if sharing is not None:
                sharing.prepare(trainer.model, assignment.size)
            gc.freeze()  # as rank 0 does
            gc.enable()
            return trainer, replicas

        follow(channel, make)


def _unshared(deployment: PipelineSettings) -> PipelineSettings:
    """Return the sections for a host without servers: the lease of device sharing needs one host's memory and locks."""
    settings = deployment.device_sharing.model_copy(update={"policy": "exclusive"})
    return deployment.with_changes(device_sharing=settings)
