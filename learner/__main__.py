"""`python -m learner -c pipeline.toml`: the learner by itself."""

import argparse
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from anabranch.config import Config, load_config
from anabranch.daemon import configure_logging, run, stop_on_signals, stop_with_parent
from ingest.config import HoldOut
from ingest.metrics import IngestMetrics
from ingest.schema import Schema
from ingest.source import Source
from learner.deadline import Deadline
from learner.guard import GuardSet
from learner.lock import hold_state_directory
from learner.loop import Loop, Metrics, Parts
from learner.metrics import LearnerMetrics
from learner.model import build_model, check_model, make_task
from learner.precision import choose_device, choose_precision
from learner.publisher import Publisher
from learner.reporter import Reporter
from learner.status import serve_status
from learner.strategy import STRATEGIES
from learner.trainer import Trainer
from learner.version import Versions
from replay.metrics import ReplayMetrics
from replay.store import build_store

_GUARD_SALT = 0x5F3759DF
"""Makes the choice of held-out events independent of the choice of what is kept."""

log = logging.getLogger("learner")


def main(argv: Sequence[str] | None = None) -> int:
    """Learn until SIGTERM; return an exit code of `anabranch.daemon.Exit`."""
    parser = argparse.ArgumentParser(
        prog="python -m learner", description="Learn from the stream and publish versions."
    )
    parser.add_argument("-c", "--config", type=Path, default=Path("pipeline.toml"), help="default: %(default)s")
    parser.add_argument("--supervised", action="store_true", help="stop when stdin ends")
    arguments = parser.parse_args(argv)
    configure_logging()

    def learn_until_stopped() -> None:
        with stop_on_signals() as stop:
            if arguments.supervised:
                stop_with_parent(stop)
            learn(load_config(arguments.config), stop)

    return run(learn_until_stopped)


def learn(config: Config, stop: threading.Event) -> None:
    """Compose the learner and run it until `stop` is set.

    Everything that can be wrong is found before the first step: settings, model, the lock, the address, the broker.
    When `stop` is set: 1. polling stops; 2. the step ends; 3. what was learned is published and positions are
    committed; 4. the ingest process ends, then the address closes, then the lock is let go.
    """
    pipeline = config.pipeline
    schema = Schema(pipeline.events)
    device = choose_device(pipeline.learner.device)
    precision = choose_precision(pipeline.learner.precision, device)
    torch.manual_seed(pipeline.seed)
    task = make_task(pipeline.model.task)
    model = build_model(pipeline.model.factory, pipeline.model.args, config.folder).to(device)
    check_model(model, task, schema, device)
    strategy = STRATEGIES[pipeline.learner.strategy]()
    trainer = Trainer(model, task, strategy, schema, pipeline.learner, device, precision)
    store = build_store(pipeline.replay, schema, device, pipeline.seed) if strategy.replays else None
    registry = CollectorRegistry()
    metrics = Metrics(IngestMetrics(registry), ReplayMetrics(registry), LearnerMetrics(registry))
    hold_out = HoldOut(fraction=pipeline.gate.guard_fraction, seed=pipeline.seed ^ _GUARD_SALT)
    with contextlib.ExitStack() as stack:
        epoch = stack.enter_context(hold_state_directory(config.state_dir))
        versions = Versions(config.state_dir / "versions")
        versions.clean()
        publisher = Publisher(
            *(versions, pipeline.versions, pipeline.model, schema, model, task, device, epoch, metrics.learner)
        )
        source = Source(pipeline.stream, pipeline.events, hold_out)
        guard = GuardSet(schema, pipeline.gate.guard_rows)
        loop = Loop(pipeline.learner, Parts(source, trainer, store, guard, publisher), metrics)
        reporter = Reporter(
            *(config.state_dir, epoch, loop, source, store, guard, publisher, metrics),
            classification=schema.label.classes is not None,
        )
        token = pipeline.serving.tokens.read.get_secret_value()
        port = stack.enter_context(serve_status(pipeline.learner.status, token, registry, reporter.ill))
        stack.callback(source.close)
        source.open()
        log.info(
            "learning %s on %s in %s; metrics on port %d",
            *(", ".join(pipeline.stream.topics), device, precision.name, port),
        )
        loop.run(stop, reporter.report_if_due)
        deadline = Deadline(pipeline.learner.stop_timeout)
        stack.enter_context(_bounded(deadline))
        loop.finish(deadline)
        reporter.report()
        log.info("stopped after %d steps, version %s", loop.steps, publisher.number)


@contextlib.contextmanager
def _bounded(deadline: Deadline) -> Iterator[None]:
    """End the process when a shutdown does not end by itself in time: a device or a disk may hang."""
    timer = threading.Timer(deadline.left, _give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up() -> None:
    sys.stderr.write("anabranch: learner.stop_timeout is over; leaving without a clean end\n")
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
