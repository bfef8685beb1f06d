"""The learner as a whole: what it is made of, and in which order it starts and stops."""

import contextlib
import functools
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from torch import nn

from ingest.config import HoldOut, SchemaSettings, StreamSettings
from ingest.errors import GapError, SettingsError
from ingest.metrics import IngestMetrics
from ingest.schema import Schema
from ingest.source import Source
from ingest.sources import Sources
from learner.config import CutsSettings, GateSettings, LearnerSettings, ModelSettings, VersionsSettings
from learner.confinement import confined, limit_threads
from learner.cut import RANK, Cut, Cuts
from learner.cutter import Cutter
from learner.deadline import Deadline
from learner.determinism import compute_deterministically
from learner.embedding import Embedding, Embeddings, TaskEmbedding
from learner.forgetting import Forgetting
from learner.forgotten_cut import remembered
from learner.guard import GuardSet
from learner.jury import Jury
from learner.lag import LagPolicy
from learner.lock import check_epoch, hold_state_directory
from learner.loop import Loop, Metrics, Parts
from learner.memory import note
from learner.metrics import LearnerMetrics
from learner.model import build_model, check_model, make_task, sample
from learner.precision import Precision, choose_device, choose_precision
from learner.publisher import Publisher, reference_to
from learner.replay_cut import unpack
from learner.replicas import Place, Replicas, leaves_some_out
from learner.reporter import Reporter
from learner.room import most_offered
from learner.scorer import Scorer
from learner.sharing import Terms, share
from learner.status import serve_status
from learner.strategies.build import build_strategy
from learner.strategy import OUTPUT, Strategy, kept
from learner.task import Embeds, Task
from learner.team import Channel, Leader, lead
from learner.tracing import Tracing
from learner.trainer import Trainer
from learner.version import Versions
from replay.build import build_store, discard_files
from replay.config import COMPARING, ReplaySettings
from replay.contents import Contents
from replay.forgotten import Forgotten
from replay.forgotten_log import NAME as LOG
from replay.forgotten_log import ForgottenLog
from replay.metrics import ReplayMetrics
from replay.rows import Fields
from replay.store import Store

_GUARD_SALT = 0x5F3759DF
"""Makes the choice of held-out events independent of the choice of what is kept."""

_SEARCH_ROWS = 2
_FINISHING_SHARE = 0.8

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Deployment:
    """The sections that the learner takes its settings from, and where things lie."""

    name: str
    """The pipeline's, which its keys in Redis begin with."""
    stream: StreamSettings
    events: SchemaSettings
    model: ModelSettings
    learner: LearnerSettings
    replay: ReplaySettings
    versions: VersionsSettings
    cuts: CutsSettings
    gate: GateSettings
    seed: int
    folder: Path
    """Where the model factory may lie: on the Python path, last."""
    state_dir: Path
    read_token: str
    """Wanted by `/metrics`, unless it is empty."""
    share: Terms


@dataclass(frozen=True)
class Workbench:
    """What every rank trains with."""

    schema: Schema
    task: Task
    model: nn.Module
    embedding: Embeddings | None
    precision: Precision
    device: torch.device
    strategy: Strategy
    settings: LearnerSettings
    output_shape: tuple[int, ...]
    """Of the model's output for one event."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of a trainer."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "output_shape"}

    @property
    def leaves_some_out(self) -> bool:
        """Whether some weights get no gradient."""
        return leaves_some_out(self.model, sample(self.schema, _SEARCH_ROWS, self.device))


def prepare(deployment: Deployment, device: torch.device, rank: int = 0) -> Workbench:
    """Build and check what a rank trains with; ranks draw other random numbers from then on."""
    schema = Schema(deployment.events)
    if deployment.learner.deterministic:
        compute_deterministically()
    precision = choose_precision(deployment.learner.precision, device)
    torch.manual_seed(deployment.seed + rank)
    task = make_task(deployment.model.task, deployment.folder)
    model = build_model(deployment.model.factory, deployment.model.args, deployment.folder).to(device)
    embedding = _embedding(deployment, model, task, [feature.name for feature in schema.features])
    output_shape = check_model(model, task, schema, device)
    strategy = build_strategy(deployment.learner.strategy, deployment.model, task)
    return Workbench(
        *(schema, task, model, embedding, precision, device, strategy, deployment.learner), output_shape=output_shape
    )


def learn(deployment: Deployment, stop: threading.Event, place: Place | None = None) -> None:
    """Compose the learner and run it until `stop` is set; with a place among other ranks, as the one that leads them.

    Everything that can be wrong is found before the first step: settings, model, the lock, the address, the broker.
    When `stop` is set: 1. polling stops; 2. the step ends; 3. what was learned is published and positions are
    committed; 4. the ingest process ends, then the address closes, then the lock is let go.
    """
    registry = CollectorRegistry()
    metrics = Metrics(IngestMetrics(registry), ReplayMetrics(registry), LearnerMetrics(registry))
    hold_out = HoldOut(fraction=deployment.gate.guard_fraction, seed=deployment.seed ^ _GUARD_SALT)
    with contextlib.ExitStack() as stack:
        stack.enter_context(bounded(stop, deployment.learner.stop_timeout))
        limit_threads(deployment.share.settings)
        channel = stack.enter_context(lead(place, deployment.learner)) if place is not None else None
        bench = prepare(deployment, channel.device if channel is not None else choose_device(deployment.learner.device))
        schema, model, task, strategy = bench.schema, bench.model, bench.task, bench.strategy
        device, embedding = bench.device, bench.embedding
        epoch = stack.enter_context(hold_state_directory(deployment.state_dir, stop, deployment.learner.stop_timeout))
        alone = functools.partial(check_epoch, deployment.state_dir, epoch)
        versions = Versions(deployment.state_dir / "versions")
        versions.clean()
        reference, scorer = reference_to(deployment.model), Scorer(model, task, schema, device)
        jury = Jury(versions, deployment.gate, scorer, reference)
        publisher = Publisher(
            *(versions, deployment.versions, reference, schema, scorer, jury, epoch, metrics.learner, alone)
        )
        # After the scorer has copied the model, which cannot be done once ranks have parts of it.
        trainer = _trainer(bench, channel, place.rows if place is not None else None)
        trainer.lane = stack.enter_context(confined(deployment.share.settings, device))
        sharing = stack.enter_context(
            share(deployment.share, deployment.state_dir, device, stop, metrics.learner.share_wait)
        )
        if sharing is not None:
            sharing.attend(trainer)
        source = _source(deployment, hold_out, place)
        guard = GuardSet(schema, deployment.gate.guard_rows)
        cuts = Cuts(deployment.state_dir / "cuts", schema.digest, epoch)
        cuts.clean()
        written = ForgottenLog(deployment.state_dir / LOG)
        written.refresh()
        found, less = cuts.newest(), (0, 0)
        if found is not None:
            cut, less = remembered(found[1], Forgotten(written.records))
            found = found[0], cut
        replayed = unpack(found[1]) if found is not None else None
        contents, segments = replayed if replayed is not None else (None, ())
        dim = embedding.heard().shape[1] if embedding is not None else None
        columns = kept(bench.output_shape) if strategy.keeps_output else {}
        if found is not None and contents is not None and strategy.replays:
            _check_columns(*found, list(bench.output_shape) if columns else None, deployment.learner.strategy.name)
        ranks = place.size if place is not None else 1
        store = _store(deployment, schema, device, cuts, contents, columns, dim, ranks) if strategy.replays else None
        if store is not None:
            stack.callback(store.close)
        if isinstance(trainer, Leader):
            trainer.listens = store is not None and store.listens
        cutter = Cutter(cuts, deployment.cuts, store, metrics.learner, segments, alone)
        forgetting = Forgetting(written, cuts, deployment.state_dir / "replay" / RANK, store, guard, cutter)
        forgetting.take_note(*less)
        lag = LagPolicy(deployment.stream.lag_policy, deployment.seed, source, reads=deployment.events.key is not None)
        parts = Parts(source, trainer, store, guard, publisher, cutter, forgetting, lag)
        bounded_scores = schema.label.classes is not None
        loop = Loop(deployment.learner, parts, metrics, bounded=bounded_scores, ranks=ranks)
        _resume(loop, cuts, found)
        reporter = Reporter(
            *(deployment.state_dir, epoch, loop, source, store, guard, publisher, cutter, forgetting, lag, metrics),
            strategy=deployment.learner.strategy.name,
            classification=bounded_scores,
            launched=place is not None,
            absent=place.absent if place is not None else (),
            sharing=sharing,
        )
        port = stack.enter_context(
            serve_status(deployment.learner.status, deployment.read_token, registry, reporter.ill, reporter.notes)
        )
        stack.callback(source.close)
        if isinstance(source, Sources):
            source.rates = loop.rates.now
        source.open(loop.ledger.positions, stop, marks=loop.ledger.marks)
        if stop.is_set():
            return
        log.info(
            "learning %s on %s in %s; metrics on port %d",
            *(", ".join(deployment.stream.topics), device, bench.precision.name, port),
        )
        tracing = Tracing(deployment.learner.profile, deployment.state_dir)
        stack.callback(tracing.close)

        if sharing is not None:
            sharing.while_waiting = reporter.report_if_due

        def at_boundary() -> None:
            reporter.report_if_due()
            if isinstance(source, Sources):
                source.look(loop.rates.now)
            tracing.look(loop.steps)
            if sharing is not None:
                sharing.steer(trainer, loop.rows_of_step)
            if isinstance(trainer, Leader):
                trainer.beat()

        try:
            loop.run(stop, at_boundary)
        except GapError:
            _finish(loop, reporter, deployment.learner.stop_timeout)
            raise
        _finish(loop, reporter, deployment.learner.stop_timeout)
        log.info("stopped after %d steps, version %s", loop.steps, publisher.number)


def _check_columns(number: int, cut: Cut, wanted: list[int] | None, strategy: str) -> None:
    """Raise SettingsError unless the events that a cut has stored have the output that the strategy wants, or none."""
    before = cut.state.get(OUTPUT)
    if before != wanted:
        raise SettingsError(
            f'learner.strategy = "{strategy}" wants {_output(wanted)} kept with each stored event, and cut {number} '
            f"has {_output(before)}; put back the strategy and model of the cut, or begin anew by moving the cuts away"
        )


def _output(shape: list[int] | None) -> str:
    return "no output of the model" if shape is None else f"an output of shape {shape}"


def _source(deployment: Deployment, hold_out: HoldOut, place: Place | None) -> Source | Sources:
    """Make what reads the stream, on other hosts too where they do."""
    settings = deployment.stream, deployment.events, hold_out
    return Sources(*settings, place.readers) if place is not None and place.readers else Source(*settings)


def _trainer(bench: Workbench, channel: Channel | None, rows: int | None) -> Trainer:
    """Make the trainer, of all ranks when there are more; `rows`: what a micro-batch has since memory ran out."""
    if channel is None:
        return Trainer(**bench.arguments)
    if bench.precision.scaled and bench.settings.sharding == "fsdp":
        raise SettingsError(
            'learner.precision = "auto" is fp16 here, which does not go with learner.sharding = "fsdp"; write "fp32"'
        )
    trainer = Leader(channel, Replicas(bench.settings, search=bench.leaves_some_out), **bench.arguments)
    trainer.note = note(bench.device, rows) if rows is not None else None
    return trainer


def _store(
    deployment: Deployment,
    schema: Schema,
    device: torch.device,
    cuts: Cuts,
    contents: Contents | None,
    columns: Fields,
    dim: int | None,
    ranks: int,
) -> Store:
    """Compose the store, with what the newest cut has of it."""
    folder = deployment.state_dir / "replay" / RANK
    first = not cuts.numbers()
    if first:
        discard_files(folder)
    return build_store(
        *(deployment.replay, schema, device, deployment.seed, folder, contents),
        extra=columns,
        dim=dim,
        keys=f"{deployment.name}:{RANK}",
        first=first,
        step=most_offered(deployment.learner, deployment.stream, ranks),
    )


def _embedding(deployment: Deployment, model: nn.Module, task: Task, features: Sequence[str]) -> Embeddings | None:
    """Listen to the module that `model.embedding` names, else ask the task, where a strategy or policy wants it."""
    strategy = deployment.learner.strategy
    compared = {deployment.replay.admission, deployment.replay.sampling} & COMPARING
    embedding: Embeddings | None = None
    if not (strategy.embeds or (strategy.replays and compared)):
        return None
    if deployment.model.embedding:
        embedding = Embedding(model, deployment.model.embedding)
    elif isinstance(task, Embeds):
        embedding = TaskEmbedding(model, task, features)
    if embedding is not None:
        embedding.listen()
    return embedding


def _resume(loop: Loop, cuts: Cuts, found: tuple[int, Cut] | None) -> None:
    """Go on from the newest cut that is whole, if there is one."""
    if found is None:
        log.info("there is no cut in %s: learning begins anew", cuts.path)
        return
    number, cut = found
    loop.restore(cut)
    log.info("going on from cut %d at step %d", number, cut.step)


def _finish(loop: Loop, reporter: Reporter, stop_timeout: timedelta) -> None:
    """Publish, cut and tell what was learned; a part of the time is left for the parts to close."""
    loop.finish(Deadline(stop_timeout * _FINISHING_SHARE))
    reporter.report()


@contextlib.contextmanager
def bounded(stop: threading.Event, stop_timeout: timedelta) -> Iterator[None]:
    """End the process when `stop_timeout` has passed since `stop` was set: a step, a device or a disk may hang."""
    done = threading.Event()

    def watch() -> None:
        stop.wait()
        if not done.wait(stop_timeout.total_seconds()):
            sys.stderr.write("anabranch: learner.stop_timeout is over; leaving without a clean end\n")
            os._exit(1)

    threading.Thread(target=watch, name="stop-timeout", daemon=True).start()
    try:
        yield
    finally:
        done.set()
