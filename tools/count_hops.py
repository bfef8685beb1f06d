"""Count the hops of one training step: how often its main thread goes from one module of ours to another.

    python tools/count_hops.py [--steps N] [--round N] [--route]

A hop is a call of a function of another module than the one before; the route is the modules in that order. `--route`
prints that of a median step. The count with returns includes each return to a caller of ours, so that a call and its
return are two hops.

With `--round N` the learner takes N steps at most as one round, as it does in a backlog, and the figures of a step are
those of its round by its steps. Without, each round has one step.

The step is one of the real loop, after a warm-up: strategy ER, a store with a disk tier, events without keys, one rank,
no device sharing; no version and no checkpoint is due. Blocks of events are made ahead, so that the reader takes no
part, and other threads are not counted. Which step the background threads are in moves the median by one or two; and
from Python 3.12 on a list comprehension is no call.
"""

import argparse
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 40
"""Steps that are not counted: the store is full after ten of them."""


@dataclass
class Step:
    """The modules of one step, or of the steps of a round, in order."""

    called: list[str] = field(default_factory=list)
    """One entry a call."""
    entered: list[str] = field(default_factory=list)
    """One entry a call, and one a return to a function of ours."""
    steps: int = 1

    @property
    def route(self) -> list[str]:
        """The modules that are called, without repetitions."""
        return [name for name, _ in groupby(self.called)]

    @property
    def hops(self) -> int:
        """Changes of module from one call to the next."""
        return len(self.route) - 1

    @property
    def hops_with_returns(self) -> int:
        """Changes of module, where a return to a caller counts as a call does."""
        return len(list(groupby(self.entered))) - 1

    @property
    def modules(self) -> int:
        """Different modules that are called."""
        return len(set(self.called))


class HopCounter:
    """Records the calls of this thread into modules below some folders while it is entered."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.steps: list[Step] = []
        """Those that have ended, by `end_step`."""
        self._folders = folders
        self._names: dict[str, str | None] = {}
        self._step = Step()

    def __enter__(self) -> "HopCounter":
        sys.setprofile(self._record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setprofile(None)

    def end_step(self, steps: int = 1) -> None:
        """Begin a new step, or round, after one of so many steps."""
        self._step.steps = steps
        self.steps.append(self._step)
        self._step = Step()

    def _record(self, frame: FrameType, event: str, _argument: object) -> None:
        """Called by the interpreter at each call and return; those of C functions are not counted."""
        if event == "call":
            if (name := self._module(frame)) is not None:
                self._step.called.append(name)
                self._step.entered.append(name)
        elif event == "return" and frame.f_back is not None and (name := self._module(frame.f_back)) is not None:
            self._step.entered.append(name)

    def _module(self, frame: FrameType) -> str | None:
        """Return a frame's module, as a path without suffix; None when it is below none of the folders."""
        file = frame.f_code.co_filename
        if file not in self._names:
            above = [folder.parent for folder in self._folders if Path(file).is_relative_to(folder)]
            self._names[file] = Path(file).relative_to(above[0]).with_suffix("").as_posix() if above else None
        return self._names[file]


def short_names(modules: Sequence[str]) -> Mapping[str, str]:
    """Return the last part of each module's path, and as many more as distinguish it from the others."""
    parts = {name: name.split("/") for name in modules}

    def shortest(name: str) -> str:
        ends = (parts[name][-n:] for n in range(1, len(parts[name])))
        alone = (end for end in ends if sum(other[-len(end) :] == end for other in parts.values()) == 1)
        return "/".join(next(alone, parts[name]))

    return {name: shortest(name) for name in parts}


class MadeAhead:
    """A stream whose blocks are there before it is read; sets `stop` after the last one."""

    def __init__(self, poll: Callable[[timedelta], Any], blocks: int, stop: Callable[[], None]) -> None:
        self._blocks = [poll(timedelta()) for _ in range(blocks)][::-1]
        self._stop = stop

    def poll(self, timeout: timedelta) -> Any:
        """Return the next block."""
        if self._blocks:
            return self._blocks.pop()
        if timeout:
            self._stop()
        return None


def training_steps(steps: int, folder: Path, of_round: int = 1) -> list[Step]:
    """Train in a folder, and return the `steps` rounds after the warm-up, of up to `of_round` steps each."""
    # Only once the checkout comes first on the path, in which the tests are as well.
    from anabranch.ingest.events.schema import Schema
    from anabranch.ingest.settings.stream import SchemaSettings

    wiring = import_module("tests.learner.learner_bench")  # the loop is put together in one module for both
    features = {"x": {"dtype": "float32", "shape": [3]}}
    schema = Schema(SchemaSettings.model_validate({"features": features, "label": {"name": "y", "classes": 3}}))
    blocks = WARM_UP + steps
    tiers = {"disk": {"bytes": "1MB"}}
    learner = {"batch_size": (wiring.ROWS - 1) // of_round, "round": "10s"}
    bench = wiring.LearnerBench(
        folder, schema, wiring.small_model(), blocks, replay=tiers, keyed=False, learner=learner
    )
    taken = 0

    def end_round() -> None:
        nonlocal taken
        counter.end_step(bench.loop.state.steps - taken)
        taken = bench.loop.state.steps

    try:
        most = bench.loop._steps_of_round
        bench.loop._steps_of_round = lambda: min(of_round, most())
        ahead = MadeAhead(bench.stream.poll, blocks, bench.stop.set)
        bench.stream.poll = ahead.poll
        with HopCounter([ROOT / "anabranch"]) as counter:
            bench.run(end_round)
    finally:
        bench.close()
    return counter.steps[WARM_UP : WARM_UP + steps]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=33, help="steps that are counted")
    parser.add_argument("--round", type=int, default=1, metavar="N", help="steps of a round at most, up to 31")
    parser.add_argument("--route", action="store_true", help="print the route of a step with the median of hops")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        steps = training_steps(options.steps, Path(folder), options.round)
    steps = [step for step in steps if step.steps]  # a round may only settle what is held out
    median = statistics.median_low(step.hops for step in steps)
    if options.route:
        route = next(step.route for step in steps if step.hops == median)
        names = short_names(route)
        print(" > ".join(names[name] for name in route))
    for key in ("hops", "hops_with_returns", "modules"):
        _print(key, [getattr(step, key) // step.steps for step in steps])
    _print("calls", [len(step.called) // step.steps for step in steps])
    of_round = statistics.median_low(step.steps for step in steps)
    print(f"medians of {len(steps)} rounds of {of_round} steps, main thread, Python {platform.python_version()}")
    return 0


def _print(key: str, counts: Sequence[int]) -> None:
    print(f"{key:18} {statistics.median_low(counts):5}   [{min(counts)} .. {max(counts)}]")


if __name__ == "__main__":
    sys.exit(main())
