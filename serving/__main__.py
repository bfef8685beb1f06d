"""`python -m anabranch.serving -c pipeline.toml`: the serving daemon.

Exit codes are those of `anabranch.runtime.lifecycle.Exit`. With `serving.workers` above 1 it starts that many processes
of itself, each with its number as an argument.
"""

import argparse
import gc
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.learner.device.cpu_priority import shorten_slice
from anabranch.runtime.daemon import enter, exit_at_once
from anabranch.serving.freed_memory import return_freed_memory

if TYPE_CHECKING:
    from anabranch.config.loader import Config
    from anabranch.serving.model.deployment import Deployment


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit code."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--worker", type=int)
    parser.add_argument("--pool", type=Path)
    parser.add_argument("--listener", type=int)
    options, others = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    codes: list[int] = []

    def serve_config(config: "Config", stop: threading.Event) -> None:
        return_freed_memory()
        shorten_slice()
        if options.worker is not None:
            _work(config, stop, options)
        elif config.pipeline.serving.workers > 1:
            from anabranch.runtime.serving_workers import serve_by_workers

            codes.append(serve_by_workers(config, stop))
        else:
            gc.disable()  # until the imports are done: they leave no garbage
            from anabranch.serving.http.listening_socket import UNTIL_GONE
            from anabranch.serving.server import serve

            patience = UNTIL_GONE if "--supervised" in others else timedelta(0)
            serve(deployment_of(config), config.pipeline.serving, stop, patience=patience)

    description, alone = "Answer requests over HTTP from the newest version.", options.worker is None
    code = enter("serving", description, serve_config, others, reports_start=alone)
    return code or (codes[0] if codes else 0)


def _work(config: "Config", stop: threading.Event, options: argparse.Namespace) -> None:
    """Serve as one of several workers."""
    gc.disable()  # as above
    from anabranch.serving.http.listening_socket import inherited
    from anabranch.serving.reporting.worker_pool import PoolWorker, WorkerPool
    from anabranch.serving.server import serve

    settings = config.pipeline.serving
    worker = PoolWorker(WorkerPool(options.pool, settings.workers), options.worker, config.state_dir)
    serve(deployment_of(config), settings, stop, worker, inherited(options.listener))


def deployment_of(config: "Config") -> "Deployment":
    """Return what a server of a config serves, on its device."""
    from anabranch.core.settings import uuids_in
    from anabranch.ingest.events.schema import Schema
    from anabranch.learner.device.cuda_limits import limit_server_memory
    from anabranch.learner.model.device import UnusedDevice, choose_device
    from anabranch.serving.model.deployment import Deployment
    from anabranch.serving.model.device import pick_device
    from anabranch.serving.model.graphs import capture_on
    from anabranch.serving.settings import check_versions_from

    check_versions_from(config.pipeline.serving, config.pipeline.storage)
    pipeline, sharing, name = config.pipeline, config.pipeline.device_sharing, config.pipeline.serving.device
    # An error names the UUID, and CUDA sees that device as its first.
    device = pick_device(choose_device(name, "serving.device").type if uuids_in(name) else name)
    device = limit_server_memory(sharing, device, pipeline.serving.workers)
    return Deployment(
        name=pipeline.name,
        schema=Schema(pipeline.events),
        model=pipeline.model,
        strategy=pipeline.learner.strategy,
        folder=config.folder,
        state_dir=config.state_dir,
        device=device,
        stream_priority=sharing.stream_priority,
        device_problem=UnusedDevice.of("serving.device", name, device).problem,
        precision=pipeline.serving.precision,
        capture=capture_on(device) if pipeline.serving.graphs else None,
        storage=pipeline.storage if pipeline.serving.versions_from == "storage" else None,
        fleet=pipeline.storage,
        tracing=pipeline.tracing,
        source=pipeline.stream,
    )


if __name__ == "__main__":
    exit_at_once(main())
