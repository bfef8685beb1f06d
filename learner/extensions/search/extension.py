"""Challengers of a trainer: each trains on the events of a step after the model, from the same random numbers.

A challenger is a copy of the model, or has its own network where an argument of the factory is another one.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from typing_extensions import override

from anabranch.learner.extension import Extension
from anabranch.learner.extensions.search.networks import NetworkSpec, network_spec
from anabranch.learner.extensions.search.pool import Challenger, ChallengerPool
from anabranch.learner.extensions.search.trainers import COPY, NETWORK, ChallengerTrainers
from anabranch.learner.model.examples import Examples
from anabranch.learner.model.rng import GeneratorStates
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.settings.search import ARGS, SearchSettings, arguments_of, shown
from anabranch.learner.state_dir.search_control import ControlReader, SearchControl
from anabranch.learner.status.report import SearchReport
from anabranch.learner.strategies.base import Strategy
from anabranch.learner.strategies.registry import build_strategy
from anabranch.learner.train.micro_batches import StepHooks
from anabranch.learner.train.parallelism import Ranks
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.step_result import StepResult
from anabranch.learner.train.step_wrapper import StepWrapper, TakeStep
from anabranch.learner.train.trainer import Trainer

log = logging.getLogger(__name__)


class ChallengerSearch(StepWrapper):
    """Trains challengers on the events of a trainer's steps, in the time that `search.share` leaves.

    The model's own steps, and the random numbers that they use, are those without a search until a promotion.

    Each rank trains all challengers on its own events, and averages their gradients with the other ranks. What the pool
    decides depends on numbers that all ranks have in common, so that all decide alike.
    """

    prefixes = COPY, NETWORK

    def __init__(
        self,
        search: SearchSettings,
        seed: int,
        state_dir: Path | None,
        setup: TrainingSetup,
        make_strategy: Callable[[], Strategy],
        networks: NetworkSpec | None = None,
        hooks: StepHooks | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Copy the model, which the trainer takes next, for challengers, which use no embeddings.

        Args:
            search: `[search]`.
            seed: of what challengers try.
            state_dir: has the file by which a person controls the search; None: rank 0 reads it.
            setup: of the model.
            make_strategy: returns the strategy of a challenger.
            networks: of challengers with other arguments of the factory; None where `search.space` has no such key.
            hooks: where device sharing takes part in a step.
            ranks: those that train together; None: this one alone.
        """
        assert networks is None or search.promote == "alert"
        self._ranks = ranks or Ranks()
        self._trainers = ChallengerTrainers(search, seed, setup, make_strategy, networks, hooks, self._ranks)
        self._options, self._seed = search, seed
        self._bounded = setup.schema.label.classes is not None and search.measure == "score"
        self._control = None if state_dir is None else ControlReader(state_dir)
        self._applied = ""
        """The last command of `search.json` whose values the model has taken."""
        self.is_behind: Callable[[], bool] = bool
        """Returns whether the learner is behind the stream; no leases begin then."""
        self._begun = False
        """Whether the pool has begun a step that is not taken yet: it is repeated without events that raise."""
        self._generators: GeneratorStates | None = None
        """After the newest step with challengers: if numpy's generator is as it was then, it need not be read again."""

    @override
    def attach(self, trainer: Trainer) -> None:
        self._model = trainer
        self._trainers.attach(trainer)
        given = {key: self._trainers.value_of(key) for key in self._options.space}
        self._pool = ChallengerPool(self._options, given, self._seed)

    @property
    @override
    def found(self) -> Mapping[str, float]:
        pool = self._pool
        tuned = {key: value for key, value in pool.values.items() if not key.startswith(ARGS)}
        return tuned if pool.values != pool.given else {}

    @property
    def warning(self) -> str | None:
        """One sentence where a command cannot be read, or a challenger is better and is not promoted."""
        return (self._control.problem if self._control is not None else None) or self._better

    @property
    def _better(self) -> str | None:
        """One sentence on a challenger that is better, and is not promoted."""
        if (alert := self._pool.alert) is None:
            return None
        own = {key: value for key, value in alert.values.items() if value != self._pool.values.get(key)}
        if arguments_of(own):
            args = ", ".join(f"{name} = {value:.0f}" for name, value in arguments_of(own).items())
            return (
                f"challenger {alert.number} is better than the model, with {shown(alert.values)}; a learner keeps its "
                f"network: set {args} in [model].args of a new pipeline, which the versions of this one can teach"
            )
        return (
            f"challenger {alert.number} is better than the model, with {shown(alert.values)}; "
            f'"anabranch search promote {alert.number}" takes its settings'
        )

    @property
    def report(self) -> SearchReport:
        """The state of the search."""
        pool = self._pool
        older = [] if pool.alert is None or pool.alert in pool.history else [pool.alert]
        return SearchReport(
            values=pool.values,
            given=pool.given,
            pinned=pool.pinned,
            challengers=[each.report() for each in pool.challengers],
            history=[*older, *pool.history],
            outcomes=dict(pool.outcomes),
            steps=pool.trained,
        )

    @override
    def step(self, take: TakeStep, new: Examples, old: Sequence[Examples], rows: int | None) -> StepResult:
        rows_of_all = self._agree(len(new) if rows is None else rows)
        self._trainers.keep(self._pool.challengers)
        if not self._begun:
            self._begun = True
            for challenger in self._pool.begin():
                if (failure := self._trainers.begin(challenger)) is not None:
                    self._pool.end(challenger, failure)
        before = GeneratorStates(self._model.device, self._generators) if self._pool.live else None
        result = take(new, old, rows)
        self._begun = False
        if before is None or not result.finite:
            return result  # no model learns its events
        self._generators = after = GeneratorStates(self._model.device, before)
        better = []
        for challenger in list(self._pool.live):
            before.restore()
            its = self._trainers.step(challenger, new, old, rows)
            if not isinstance(its, StepResult):
                self._pool.end(challenger, its)
                continue
            difference = self._difference(result, its, rows_of_all)
            if not (its.finite and math.isfinite(difference)):
                self._pool.end(challenger, "not_finite")
            elif challenger.teaching:
                self._pool.observe_taught(challenger, difference)
            elif self._pool.observe(challenger, difference):
                better.append(challenger)
        after.restore()
        self._pool.level.add(self._error(result))
        if better:
            self._decide(sorted(better, key=lambda each: each.better.log_wealth))
        return result

    def _agree(self, rows: int) -> int:
        """Apply on all ranks what a person has written, and whether the learner is behind, as rank 0 has found them.

        Returns:
            The new events of the step, of all ranks.
        """
        control = None if self._control is None else self._control.changed()
        written = b"" if control is None else msgspec.json.encode(control)
        together = torch.tensor([rows, self.is_behind(), len(written)], dtype=torch.float64)
        self._ranks.average_all(together)
        rows, behind, size = (round(mean * self._ranks.world) for mean in together.tolist())
        if size:
            text = torch.tensor([*(written or bytes(size))], dtype=torch.float64)
            self._ranks.average_all(text)  # those of the other ranks are zeros
            content = bytes(round(mean * self._ranks.world) for mean in text.tolist())
            self._apply(msgspec.json.decode(content, type=SearchControl))
        self._pool.paused = bool(behind)
        return rows

    def _difference(self, own: StepResult, its: StepResult, rows: int) -> float:
        if self._bounded:
            return (its.score - own.score) / rows
        return self._pool.level.difference(self._error(own), self._error(its))

    def _error(self, result: StepResult) -> float:
        return -result.score if self._options.measure == "score" else result.loss_new

    def _decide(self, better: Sequence[Challenger]) -> None:
        """Report or promote the last of the challengers that are shown to be better, the best."""
        if self._options.promote == "alert":
            for challenger in better:
                self._pool.end(challenger, "better")
            return
        best = better[-1]
        if (failure := self._trainers.promote(best)) is not None:
            self._pool.end(best, failure)
            return
        self._pool.promote(best)
        self._trainers.configure(self._model, self._pool.values)

    def _take(self, values: Mapping[str, float]) -> None:
        """Give the model other settings; it keeps its network."""
        self._pool.take({key: value for key, value in values.items() if not key.startswith(ARGS)})
        self._trainers.configure(self._model, self._pool.values)

    def _apply(self, control: SearchControl) -> None:
        """Do what a person has written."""
        if control.command not in ("", self._applied):
            self._applied = control.command
            self._take(control.values)
            log.info("the model takes the settings of search.json: %s", shown(self._pool.values))
        if control.pinned and not self._pool.pinned:
            self._pool.stop()
        self._pool.pinned = control.pinned

    @override
    def on_drift(self) -> None:
        for challenger in self._pool.live:
            self._trainers[challenger].on_drift()

    @override
    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        return self._trainers.tensors(self._pool.challengers)

    @override
    def state(self) -> dict[str, Any]:
        trainers = self._trainers.state(self._pool.challengers)
        return {"search": {**self._pool.state(), "trainers": trainers, "applied": self._applied}}

    @override
    def restore_generators(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        self._generators = None

    @override
    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        if (search := state.get("search")) is None:
            return
        self._applied = search["applied"]
        self._pool.restore(search)
        self._trainers.configure(self._model, self._pool.values)
        for challenger in self._pool.challengers:
            if (failure := self._trainers.restore(challenger, tensors, search["trainers"])) is not None:
                self._pool.end(challenger, failure)


class SearchExtension(Extension):
    """Reports on a search, which is part of the trainer's steps and checkpoints."""

    name = "search"

    def __init__(self, search: ChallengerSearch) -> None:
        self._search = search

    @property
    @override
    def warning(self) -> str | None:
        return self._search.warning

    @override
    def report(self) -> Mapping[str, Any]:
        return {"search": self._search.report}


def open_search(
    spec: PipelineSettings,
    setup: TrainingSetup,
    hooks: StepHooks | None,
    ranks: Ranks | None = None,
    *,
    leads: bool = True,
) -> ChallengerSearch | None:
    """Return the search of `[search]`, for a trainer of this setup; None without that section.

    `ranks`: those that train together; `leads`: whether this one is the first of them.
    """
    if spec.search is None:
        return None
    make_strategy = partial(build_strategy, setup.settings.strategy, spec.model, setup.task)
    networks = network_spec(spec, setup) if arguments_of(spec.search.space) else None
    state_dir = spec.state_dir if leads else None
    return ChallengerSearch(spec.search, spec.seed, state_dir, setup, make_strategy, networks, hooks, ranks)
