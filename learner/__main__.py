"""`python -m anabranch.learner -c pipeline.toml`: the learner by itself.

Exit codes are those of `anabranch.runtime.lifecycle.Exit`. With `learner.replicas` it launches ranks of itself, and
passes each a folder with its assignment. Under torchrun, `torchrun ... -m anabranch.learner -c pipeline.toml`, it is
one rank.
"""

import argparse
import contextlib
import functools
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.runtime.daemon import enter, exit_at_once

if TYPE_CHECKING:
    from anabranch.config.loader import Config
    from anabranch.learner.parallel.process_group import RankAssignment
    from anabranch.learner.settings.pipeline import PipelineSettings

log = logging.getLogger("anabranch.learner")


def main(arguments: list[str] | None = None) -> int:
    """Learn until SIGTERM or SIGINT, and return the exit code."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--group", type=Path)
    options, others = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    if options.group is not None:
        return _rank(options.group, others)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _rank_of_torchrun(others)
    launcher_code: int | None = 0

    def learn_or_launch(config: "Config", stop: threading.Event) -> None:
        nonlocal launcher_code
        if config.pipeline.learner.replicas == 1:
            learn_config(config, stop)
        else:
            launcher_code = _launch(config, stop)

    code = enter("learner", "Learn from the stream, and publish versions.", learn_or_launch, others, prepare)
    return code or (launcher_code if launcher_code is not None else 1)


def prepare() -> None:
    """Import the modules of the learner and of torch's first optimizer; touches no device and no file."""
    gc.disable()  # imports make no garbage
    try:
        import torch

        import anabranch.learner.assembly  # noqa: F401 takes seconds

        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    finally:
        gc.enable()


def learn_config(config: "Config", stop: threading.Event) -> None:
    """Run the learner of a config until `stop` is set."""
    from anabranch.ingest.reader.reader import BlockReader

    pipeline = config.pipeline
    source = BlockReader(pipeline.stream, pipeline.events, None, traced=pipeline.tracing is not None)
    source.start()  # its process gets ready while torch is imported in this one
    gc.disable()  # until all is built: that makes no garbage
    try:
        from anabranch.learner.assembly import learn

        with _shortage_ends(stop):
            learn(config.pipeline, stop, source=source)
    finally:
        source.close()


def _launch(config: "Config", stop: threading.Event) -> int | None:
    """Run all ranks of this host; return the exit code that rank 0 wrote."""
    _log_no_frames()
    from anabranch.core.logs import log_arguments
    from anabranch.core.start_report import start_does
    from anabranch.learner.parallel.launcher import launch
    from anabranch.learner.parallel.process_group import record_collectives

    settings = config.pipeline.learner
    if settings.device != "cpu":
        record_collectives(config.state_dir)
    command = (sys.executable, "-P", "-m", "anabranch.learner", *config.arguments(), *log_arguments())
    start_does("starts its ranks")
    return launch(settings, command, stop)


def _log_no_frames() -> None:
    """Let torch log no page of C++ frames when a rank is gone; we log one sentence."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _alike(config: "Config") -> "dict[str, object]":
    """Return the settings that ranks of all hosts need alike, except those of `[learner]`."""
    pipeline = config.pipeline
    replay = pipeline.replay.model_dump(mode="json", include={"admission", "sampling"})
    sections = {"[schema]": pipeline.events, "[model]": pipeline.model}
    dumped = {name: section.model_dump(mode="json") for name, section in sections.items()}
    # Only rank 0 reads the stream; paths of files differ with the folder of the config.
    stream = pipeline.stream.model_dump(
        mode="json", exclude={"bootstrap_servers", "properties", "token", "registry", "backfill"}
    )
    return {"name": pipeline.name, "seed": pipeline.seed, "[stream]": stream, "[replay]": replay, **dumped}


def _rank(group: Path, arguments: list[str]) -> int:
    """Run one of the launcher's ranks, and return its exit code; 0 means that it must not be restarted."""
    from anabranch.learner.parallel.launcher import (
        REFUSED,
        leave_rows,
        read_assignment,
        stop_with_launcher,
        write_outcome,
    )
    from anabranch.learner.parallel.process_group import exiting_at_once

    def learn_in_group(config: "Config", stop: threading.Event) -> None:
        gc.disable()  # as `learn_config` does
        stop_with_launcher(stop)
        assignment = read_assignment(group, config.pipeline.learner)
        changes = {} if assignment.rows is None else {"micro_batch_size": assignment.rows}
        settings = config.pipeline.learner.model_copy(update=changes)
        with _lost_ranks_end(stop, functools.partial(leave_rows, group)):
            _lead_or_follow(config.pipeline.with_changes(learner=settings), stop, assignment)

    with exiting_at_once():
        leads = os.environ["RANK"] == "0"
        code = enter("learner", "One rank of a learner.", learn_in_group, arguments, reports_start=leads)
        if leads or code in REFUSED:
            write_outcome(group, code)
        if code:
            sys.exit(0 if code in REFUSED else code)
    return 0


def _rank_of_torchrun(arguments: list[str]) -> int:
    """Run one of torchrun's ranks, and return its exit code."""
    _log_no_frames()
    from anabranch.core.errors import DependencyError, SettingsError
    from anabranch.learner.parallel.process_group import RankAssignment, exiting_at_once, record_collectives

    def learn_in_group(config: "Config", stop: threading.Event) -> None:
        from anabranch.learner.parallel import torchrun
        from anabranch.learner.settings.compatibility import facts

        gc.disable()  # as `learn_config` does
        torchrun.ignore_further_signals()
        pipeline, started = config.pipeline, torchrun.TorchrunRank.of(os.environ)
        chosen = facts(pipeline)
        heartbeat, refusal = torchrun.RankHeartbeat(stop), None
        with _lost_ranks_end(stop):
            store = started.connect()
            assignment = RankAssignment(started.rank, started.size, store, started.first, heartbeat=heartbeat)
            settings, alike = pipeline.learner, dict[str, str]()
            try:
                settings = started.settings(settings, chosen)
                assignment.device(settings)
                torchrun.use_interface_to(started.master, os.environ, started.hosts)
                alike = torchrun.values_to_agree_on(settings, _alike(config))
            except (SettingsError, DependencyError) as exc:
                refusal = exc
            torchrun.agree(store, started.rank, started.size, refusal or alike)
            if settings.device != "cpu" and started.is_on_host_0:
                record_collectives(config.state_dir)
            _lead_or_follow(config.pipeline.with_changes(learner=settings), stop, assignment)
        if heartbeat.stopped_by_another:
            # With exit code 0 torchrun would wait five minutes for the other hosts, and then report success.
            log.error("rank %d ends: another host was stopped", started.rank)
            sys.exit(1)

    with exiting_at_once():
        leads = os.environ.get("RANK") == "0"
        code = enter("learner", "One rank of a learner.", learn_in_group, arguments, reports_start=leads)
        if code:
            sys.exit(code)
    return 0


def _lead_or_follow(spec: "PipelineSettings", stop: threading.Event, assignment: "RankAssignment") -> None:
    """Run a rank until `stop` is set."""
    from anabranch.learner.assembly import follow_leader, learn

    run = learn if assignment.rank == 0 else follow_leader
    run(spec, stop, assignment)


@contextlib.contextmanager
def _lost_ranks_end(stop: threading.Event, leave_rows: Callable[[int], None] = lambda _rows: None) -> Iterator[None]:
    """End the process with exit code 1 where all ranks have to start again.

    `leave_rows` takes the number of events that may fit, after this rank ran out of memory.
    """
    from anabranch.learner.errors import RankLostError, RankTooLargeError, is_of_a_lost_rank

    rank = os.environ["RANK"]
    try:
        with _shortage_ends(stop):
            yield
    except RankTooLargeError as exc:
        log.error("%s", exc)  # noqa: TRY400 the sentence says all
        leave_rows(exc.rows)
        sys.exit(1)
    except RankLostError as exc:
        log.error("rank %s ends: %s", rank, exc)  # noqa: TRY400 the sentence says all
        sys.exit(1)
    except RuntimeError as exc:
        if not is_of_a_lost_rank(exc):
            raise
        log.error("rank %s ends: another rank is gone: %s", rank, str(exc).splitlines()[0])  # noqa: TRY400
        sys.exit(1)


@contextlib.contextmanager
def _shortage_ends(stop: threading.Event) -> Iterator[None]:
    """Let a device that has too little memory for now end the process with exit code 1, after which it may start again.

    So does an order to undo events. Unless `stop` was set meanwhile: then the block just ends.
    """
    from anabranch.learner.errors import MemoryShortageError, UndoRequestedError

    try:
        yield
    except (MemoryShortageError, UndoRequestedError) as exc:
        if not stop.is_set():
            log.error("%s", exc)  # noqa: TRY400 the sentence says all
            sys.exit(1)


if __name__ == "__main__":
    exit_at_once(main())
