"""What makes a step fastest on this CPU, by trials at start: the number of torch's threads, and channels last.

More threads are not faster where a step is small, or where other programs have the cores: each operation waits for its
slowest thread. Torch takes one for each core that it sees, also in a container that may use fewer.
"""

import contextlib
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from anabranch.core.users_code import in_one_line
from anabranch.ingest.events.schema import Schema
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.device import Precision
from anabranch.learner.model.factory import ChannelsLast, forward, sample
from anabranch.learner.model.trained_set import deep_copy
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.train.setup import TrainingSetup

_SECONDS = 1.0
_CLEARLY = 0.95
"""Another choice than the present one takes at most this part of the time."""
_CPU = torch.device("cpu")

log = logging.getLogger(__name__)


class CpuChoice(NamedTuple):
    """How steps run."""

    threads: int
    channels_last: bool = False

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{threads}, channels last" if self.channels_last else threads


@contextlib.contextmanager
def fastest_steps(setup: TrainingSetup) -> Iterator[None]:
    """With `learner.compile = "auto"` and on a CPU: choose how steps run within the context, for this process alone."""
    before = torch.get_num_threads()
    if setup.settings.compile == "auto" and setup.device == _CPU:
        choose(setup.model, setup.schema, setup.precision, _rows(setup.settings))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _rows(settings: LearnerSettings) -> int:
    """Return how many events a pass of a full step has."""
    ratio = 1.0 if settings.replay_ratio == "auto" else settings.replay_ratio
    rows = int(settings.batch_size * (1 + ratio))
    return rows if settings.micro_batch_size is None else min(rows, settings.micro_batch_size)


def choose(model: nn.Module, schema: Schema, precision: Precision, rows: int) -> CpuChoice:
    """Set what is fastest in this process and for the model, and log why; return it.

    A trial is both passes of a copy of the model on `rows` made-up events. The model's values and torch's generators
    are as before. Where torch had n threads, it has at most n. A memory format with which the model raises, as `view`
    may, is no choice. Where it raises with its own, nothing is changed.
    """
    most, features = torch.get_num_threads(), sample(schema, rows, _CPU)
    copies = {False: deep_copy(model, {}).train()}
    if any(weight.ndim == 4 and not _is_channels_last(weight) for weight in model.parameters()):
        copies[True] = ChannelsLast().convert(deep_copy(model, {}).train(), ModelContext(_CPU, schema))

    def trial(choice: CpuChoice) -> None:
        torch.set_num_threads(choice.threads)
        with precision.autocast(_CPU):
            output = forward(copies[choice.channels_last], features)
        if output.requires_grad:
            output.float().sum().backward()  # type: ignore[no-untyped-call]

    counts = [most, *(1 << power for power in range(most.bit_length()) if 1 << power < most)]
    try:
        with torch.random.fork_rng(devices=[]):
            for channels_last in [*copies]:
                try:
                    trial(CpuChoice(most, channels_last))
                except Exception as exc:  # noqa: BLE001 the user's model may raise anything
                    log.info("learner.compile: not %s: %s", CpuChoice(most, channels_last), in_one_line(exc))
                    del copies[channels_last]
            if False not in copies:
                return CpuChoice(most)
            choices = list(itertools.starmap(CpuChoice, itertools.product(counts, copies)))
            taken = trial_seconds(choices, trial)
    finally:
        torch.set_num_threads(most)
    chosen = fastest(taken, choices[0])
    torch.set_num_threads(chosen.threads)
    if chosen.channels_last:
        ChannelsLast().convert(model, ModelContext(_CPU, schema))
    times = ", ".join(f"{1000 * seconds:.3g} ms with {choice}" for choice, seconds in taken.items())
    log.info("learner.compile: steps run with %s; both passes of one take %s", chosen, times)
    return chosen


def _is_channels_last(weight: torch.Tensor) -> bool:
    return weight.is_contiguous(memory_format=torch.channels_last)


def trial_seconds(
    choices: Sequence[CpuChoice], trial: Callable[[CpuChoice], object], clock: Callable[[], float] = time.perf_counter
) -> dict[CpuChoice, float]:
    """Return the median duration of a trial of each choice: one of each, which warms up, and more until a second is
    over, in turns."""
    end = clock() + _SECONDS
    taken: dict[CpuChoice, list[float]] = {choice: [] for choice in choices}
    for number, choice in enumerate(itertools.cycle(choices)):
        begin = clock()
        if number >= len(choices) and begin >= end:
            break
        trial(choice)
        taken[choice].append(clock() - begin)
    return {choice: statistics.median(each[1:] or each) for choice, each in taken.items()}


def fastest(taken: Mapping[CpuChoice, float], present: CpuChoice) -> CpuChoice:
    """Return the choice that is clearly faster than the present one, or else that."""
    best = min(taken, key=lambda choice: (taken[choice], choice))
    return best if taken[best] <= _CLEARLY * taken[present] else present
