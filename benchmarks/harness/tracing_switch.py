"""Tracing that is switched off and on in one process: two processes of one program differ by more than tracing costs.

The process runs with tracing. SIGUSR1 takes its tracer away, which leaves what it does without `[tracing]`, and the
next one gives it back. Spans are created and exported in turns with tracing alone: those without it bear no part of
what it costs. Turns with and without it alternate; a round compares the sums of many short ones.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.harness.interleave import Spread
from benchmarks.harness.results import ROOT

_PROGRAM = f"""
import runpy, signal, sys, threading
sys.path.append({str(ROOT)!r})
from anabranch.core.tracing import spans
from anabranch.core.tracing.provider import BackgroundExport
from anabranch.core.tracing.recorder import Recorder
taken, on = [], threading.Event()
on.set()
def in_turns_with_tracing(method):
    def wait_and_call(self):
        on.wait()
        method(self)
    return wait_and_call
Recorder._create = in_turns_with_tracing(Recorder._create)
BackgroundExport._export = in_turns_with_tracing(BackgroundExport._export)
def switch(*_):
    if taken:
        spans._tracers.append(taken.pop())
        on.set()
    else:
        on.clear()
        taken.append(spans._tracers.pop())
signal.signal(signal.SIGUSR1, switch)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
_ORDER = (False, True, True, False)
"""Whether turns are traced: so that neither arm is the later one."""


@dataclass(frozen=True)
class Turn:
    """What was done in a turn, its length, and the CPU time of the process in it."""

    done: int
    seconds: float
    busy: float


@dataclass(frozen=True)
class Ratios:
    """With tracing over without: what is done a second, and the CPU time of each; the spread is that of rounds."""

    rate: Spread
    busy: Spread


def switchable(module: str) -> tuple[str, ...]:
    """Return the arguments of a Python that runs a module, whose tracing SIGUSR1 switches."""
    return ("-c", _PROGRAM, module)


def alternate(pid: int, turn: Callable[[], Turn], rounds: int, *, turns: int, switch: bool = True) -> Ratios:
    """Compare turns with tracing and without.

    Args:
        pid: the process, which traces now, and at the end again.
        turn: lets the process work.
        rounds: how many ratios are measured.
        turns: of each kind in a round; even.
        switch: False: tracing stays on, which shows what this measurement can resolve.
    """
    rates, busy = [], []
    traced = True
    for _ in range(rounds):
        done: dict[bool, list[Turn]] = {True: [], False: []}
        for number in range(2 * turns):
            arm = _ORDER[number % len(_ORDER)]
            if arm is not traced and switch:
                os.kill(pid, signal.SIGUSR1)
            traced = arm
            done[arm].append(turn())
        on, off = _total(done[True]), _total(done[False])
        rates.append(on.done / on.seconds / (off.done / off.seconds))
        busy.append(on.busy / on.done / (off.busy / off.done))
    if not traced and switch:
        os.kill(pid, signal.SIGUSR1)
    return Ratios(Spread.of(rates), Spread.of(busy))


def _total(turns: list[Turn]) -> Turn:
    return Turn(sum(each.done for each in turns), sum(each.seconds for each in turns), sum(each.busy for each in turns))
