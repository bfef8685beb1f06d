"""How a daemon is entered: arguments, the check for intruders, settings, signals, exit code.

Imports nothing of the four packages before it has seen that they are this distribution's own.
"""

import argparse
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from anabranch.core.logs import LogSettings, add_log_options, configure_logging

if TYPE_CHECKING:
    from anabranch.config.loader import Config

_ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}

log = logging.getLogger(__name__)


def enter(
    name: str,
    description: str,
    work: "Callable[[Config, threading.Event], None]",
    arguments: Sequence[str] | None,
    prepare: Callable[[], None] | None = None,
    *,
    reports_start: bool = True,
) -> int:
    """Do `work` with the settings until a signal, or with `--supervised` the end of stdin, stops it.

    Args:
        name: the package, for `python -m name`.
        description: one line for `--help`.
        work: takes the settings and the event that stops it; it imports what takes seconds, since by then a signal is
            noticed.
        arguments: of the command line; by default `sys.argv[1:]`.
        prepare: does what `work` needs whatever the settings are. With it there is `--standby`, which prepares and then
            waits for a line on stdin before it reads the settings; the end of stdin or a signal ends it until then.
        reports_start: whether `status` shows the start of this process as that of the package.

    Returns:
        An exit code of `anabranch.runtime.lifecycle.Exit`.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    parser.add_argument("-c", "--config", type=Path, default=Path("pipeline.toml"), help="the pipeline's settings")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="use this value of a setting")
    parser.add_argument("--supervised", action="store_true", help="stop when stdin ends")
    parser.add_argument("-v", "--verbose", action="store_true", help="log at level debug")
    add_log_options(parser)
    if prepare is not None:
        parser.add_argument("--standby", action="store_true", help="begin when a line comes on stdin")
    options = parser.parse_args(arguments)
    set_allocator(os.environ)
    from anabranch.config.loader import load_config
    from anabranch.core.start_report import starting
    from anabranch.runtime.lifecycle import (
        raise_descriptor_limit,
        run,
        stop_on_signals,
        stop_with_parent,
        wait_for_parent,
    )
    from anabranch.runtime.private_state import private_state

    logs = LogSettings("debug" if options.verbose else options.log_level, options.log_format)

    def work_until_stopped() -> None:
        configure_logging(logs)
        raise_descriptor_limit()
        with stop_on_signals() as stop:
            if prepare is not None and options.standby:
                prepare()
                log.info("%s is ready as standby", name)
                if not wait_for_parent(stop):
                    return
            config = load_config(options.config, assignments=options.set)
            if options.supervised:
                stop_with_parent(stop)
            with private_state(config), starting(config.state_dir, name) if reports_start else nullcontext():
                work(config, stop)

    return run(work_until_stopped)


def set_allocator(environment: MutableMapping[str, str]) -> None:
    """Let torch's allocator on CUDA grow its segments, unless the environment configures it already.

    The sizes of batches vary, and segments that cannot grow keep free pieces that no later batch fits. Torch reads the
    variable once, at the latest when CUDA is initialized.
    """
    if not _ALLOCATOR & environment.keys():
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def exit_at_once(code: int) -> NoReturn:
    """End the process with `code`, and without a last garbage collection: with torch it takes 0.3 s of CPU."""
    gc.freeze()
    sys.exit(code)
