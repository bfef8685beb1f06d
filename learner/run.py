"""The learner as a whole: what it is made of, and in which order it starts and stops."""

import contextlib
import functools
import gc
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from prometheus_client import CollectorRegistry

from anabranch.core.failures import away_is_dependency
from ingest.errors import GapError
from ingest.metrics import IngestMetrics
from ingest.reader.multi_host import MultiHostReader
from ingest.reader.reader import BlockReader
from learner.build import LearnerSpec, TrainingSetup, build_training_setup
from learner.checkpointing.checkpointer import Checkpointer
from learner.checkpointing.erasure import Erasure
from learner.device_sharing.cuda_limits import confined, limit_threads
from learner.device_sharing.sharing import device_sharing
from learner.distributed.channel import Channel, lead
from learner.distributed.data_parallel import DataParallelGroup
from learner.distributed.leader import Leader
from learner.distributed.process_group import RankAssignment
from learner.evaluation.holdout import HoldoutSet
from learner.evaluation.scoring import Scorer
from learner.loop import LoopComponents, LoopMetrics, TrainingLoop
from learner.metrics import LearnerMetrics
from learner.model.device import check_scaling, choose_device, without_denormals
from learner.publishing.gatekeeper import QualityGate
from learner.publishing.publisher import Publisher
from learner.reporter import Reporter
from learner.resume import ResumePoint
from learner.runtime.profiler import ProfilerWindow
from learner.runtime.shutdown import Deadline, hard_stop_after
from learner.runtime.status_server import serve_status
from learner.state_dir.checkpoint import RANK, Checkpoints
from learner.state_dir.lock import check_generation, hold_state_directory
from learner.state_dir.version import Versions, reference_to
from learner.stream.lag import LagPolicy
from learner.training.out_of_memory import oom_warning
from learner.training.trainer import Trainer
from replay.background_store import BackgroundStore
from replay.erasure.erasure_log import NAME as LOG
from replay.erasure.erasure_log import ErasureLog
from replay.metrics import ReplayMetrics

_FINISHING_SHARE = 0.8
_AWAY = (
    "the checkpoints in {} cannot be read for now, and no older one takes the place of the newest; start again once "
    "its disk "
    "answers, or move the folder of a checkpoint away that it has lost"
)

log = logging.getLogger(__name__)


def learn(
    deployment: LearnerSpec,
    stop: threading.Event,
    place: RankAssignment | None = None,
    source: BlockReader | MultiHostReader | None = None,
) -> None:
    """Compose the learner and run it until `stop` is set; with a place among other ranks, as the one that leads them.

    What it reads from may have been started already.

    Everything that can be wrong is found before the first step: settings, model, the lock, the address, the broker.
    When `stop` is set: 1. polling stops; 2. the step ends; 3. what was learned is published and positions are
    committed; 4. the ingest process ends, then the address closes, then the lock is let go.
    """
    registry = CollectorRegistry()
    metrics = LoopMetrics(IngestMetrics(registry), ReplayMetrics(registry), LearnerMetrics(registry))
    with contextlib.ExitStack() as stack:
        stack.enter_context(hard_stop_after(stop, deployment.learner.stop_timeout))
        limit_threads(deployment.device_sharing.settings)
        channel = stack.enter_context(lead(place, deployment.learner)) if place is not None else None
        device = channel.device if channel is not None else choose_device(deployment.learner.device)
        stack.enter_context(without_denormals(device))
        bench = build_training_setup(deployment, device)
        schema = bench.schema
        known = functools.partial(_latest_generation, deployment.state_dir)
        generation = stack.enter_context(
            hold_state_directory(deployment.state_dir, stop, deployment.learner.stop_timeout, known)
        )
        alone = functools.partial(check_generation, deployment.state_dir, generation)
        publisher = _publisher(deployment, bench, generation, metrics, alone)
        # After the publisher has copied the model, which cannot be done once ranks have parts of it.
        trainer = _trainer(bench, channel, place.rows if place is not None else None)
        trainer.lane = stack.enter_context(confined(deployment.device_sharing.settings, device))
        sharing = stack.enter_context(
            device_sharing(
                deployment.device_sharing, deployment.state_dir, device, stop, metrics.learner.device_sharing_wait
            )
        )
        source = source or _source(deployment, place)
        holdout = HoldoutSet(schema, deployment.gate.holdout_rows)
        written = ErasureLog(deployment.state_dir / LOG)
        written.refresh()
        checkpoints, ranks = (
            Checkpoints(deployment.state_dir / "checkpoints", schema.digest, generation),
            place.size if place is not None else 1,
        )
        with away_is_dependency(_AWAY.format(checkpoints.path)):
            resumed = ResumePoint.newest(checkpoints, written)
        store = resumed.store(deployment, bench, ranks)
        # Metal does not bear that two threads give it work at once.
        clerk = BackgroundStore(store, beside=device.type != "mps") if store is not None else None
        if clerk is not None:
            stack.callback(clerk.close)
        if isinstance(trainer, Leader):
            trainer.listens = clerk is not None and clerk.listens
        with away_is_dependency(_AWAY.format(checkpoints.path)):
            checkpointer = Checkpointer(
                checkpoints, deployment.checkpoints, clerk, metrics.learner, resumed.segments, alone
            )
        erasure = Erasure(written, checkpoints, deployment.state_dir / "replay" / RANK, clerk, holdout, checkpointer)
        erasure.take_note(*resumed.less)
        lag = LagPolicy(deployment.stream.lag_policy, deployment.seed, source, reads=deployment.events.key is not None)
        parts = LoopComponents(source, trainer, clerk, holdout, publisher, checkpointer, erasure, lag)
        bounded_scores = schema.label.classes is not None
        loop = TrainingLoop(deployment.learner, parts, metrics, bounded=bounded_scores, ranks=ranks)
        resumed.restore(loop)
        reporter = Reporter(
            *(
                deployment.state_dir,
                generation,
                loop,
                source,
                clerk,
                holdout,
                publisher,
                checkpointer,
                erasure,
                lag,
                metrics,
            ),
            strategy=deployment.learner.strategy.name,
            classification=bounded_scores,
            launched=place is not None,
            absent=place.absent if place is not None else (),
            sharing=sharing,
        )
        if sharing is not None:
            sharing.attach(trainer, ranks)
            sharing.while_waiting = reporter.report_if_due
        port = stack.enter_context(
            serve_status(
                *(deployment.learner.status, deployment.read_token, registry, reporter.problems, reporter.warnings),
                admin_token=deployment.admin_token,
            )
        )
        stack.callback(source.close)
        if isinstance(source, MultiHostReader):
            source.rates = loop.rates.now
        source.open(loop.ledger.positions, stop, marks=loop.ledger.marks)
        if stop.is_set():
            return
        log.info(
            "learning %s on %s in %s; metrics on port %d",
            *(", ".join(deployment.stream.topics), device, bench.precision.name, port),
        )
        gc.freeze()  # a look at all that is imported takes as long as ten steps
        gc.enable()
        tracing = ProfilerWindow(deployment.learner.profile, deployment.state_dir)
        stack.callback(tracing.close)

        def at_boundary() -> None:
            reporter.report_if_due()
            if isinstance(source, MultiHostReader):
                source.rebalance(loop.rates.now)
            tracing.step(loop.steps)
            if sharing is not None:
                sharing.adjust(trainer, loop.rows_of_step)
            if isinstance(trainer, Leader):
                trainer.beat()

        loop.begin(stop, at_boundary)
        if stop.is_set():
            return
        try:
            loop.run(stop, at_boundary)
        except GapError:
            _finish(loop, reporter, deployment.learner.stop_timeout)
            raise
        _finish(loop, reporter, deployment.learner.stop_timeout)
        log.info("stopped after %d steps, version %s", loop.steps, publisher.number)


def _latest_generation(state_dir: Path) -> int:
    """Return the latest generation of a learner that wrote a version or a checkpoint; 0 when there is none."""
    with away_is_dependency(f"what lies in {state_dir} cannot be read"):
        return max(
            Versions(state_dir / "versions").generation(),
            Checkpoints(state_dir / "checkpoints", schema="", generation=0).generation(),
        )


def _publisher(
    deployment: LearnerSpec, bench: TrainingSetup, generation: int, metrics: LoopMetrics, alone: Callable[[], None]
) -> Publisher:
    """Make what publishes, with the gate that judges what it publishes."""
    versions = Versions(deployment.state_dir / "versions")
    versions.clean()
    reference = reference_to(deployment.model)
    scorer = Scorer(bench.model, bench.task, bench.schema, bench.device)
    gate = QualityGate(versions, deployment.gate, scorer, reference)
    settings = deployment.versions
    return Publisher(*(versions, settings, reference, bench.schema, scorer, gate, generation, metrics.learner, alone))


def _source(deployment: LearnerSpec, place: RankAssignment | None) -> BlockReader | MultiHostReader:
    """Make what reads the stream, on other hosts too where they do."""
    settings = deployment.stream, deployment.events, deployment.gate.hold_out(deployment.seed)
    return MultiHostReader(*settings, place.readers) if place is not None and place.readers else BlockReader(*settings)


def _trainer(bench: TrainingSetup, channel: Channel | None, rows: int | None) -> Trainer:
    """Make the trainer, of all ranks when there are more; `rows`: what a micro-batch has since memory ran out."""
    if channel is None:
        return Trainer(**bench.arguments)
    check_scaling(bench.precision, bench.settings.sharding, bench.settings.sync_every)
    trainer = Leader(channel, DataParallelGroup(bench.settings, search=bench.leaves_some_out), **bench.arguments)
    trainer.warning = oom_warning(bench.device, rows) if rows is not None else None
    return trainer


def _finish(loop: TrainingLoop, reporter: Reporter, stop_timeout: timedelta) -> None:
    """Publish, checkpoint and tell what was learned; a part of the time is left for the parts to close."""
    loop.finish(Deadline(stop_timeout * _FINISHING_SHARE))
    reporter.report()
