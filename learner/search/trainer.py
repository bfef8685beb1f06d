"""A trainer with challengers: each trains on the events of a step after the model, from the same random numbers.

A challenger is a copy of the model, or has its own network where an argument of the factory is another one.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.core.failures import out_of_memory
from learner.config import LearnerSettings
from learner.errors import MemoryShortageError
from learner.model.factory import in_one_line
from learner.model.faulty_events import RaisingEventsError, may_be_of_events
from learner.model.rng import GeneratorStates
from learner.model.trained_set import copy_sharing_base, trained_state
from learner.search.challenger import Challenger
from learner.search.challenger_trainers import configure, copy_trainer, key_of, part_of, value_of
from learner.search.networks import Networks, NetworkSpec, taught
from learner.search.pool import ChallengerPool
from learner.sections.search import ARGS, TUNABLE, SearchSettings, arguments_of
from learner.state_dir.search.control import ControlReader, Judged, SearchControl, SearchReport, shown
from learner.strategies.base import Strategy
from learner.strategies.examples import Examples
from learner.training.step_result import StepResult
from learner.training.trainer import Trainer

log = logging.getLogger(__name__)


class SearchingTrainer(Trainer):
    """Trains the model, and challengers on the same events in the steps that `search.share` leaves.

    The model's own steps, and the random numbers that they use, are those without a search until a promotion.
    """

    def __init__(
        self,
        search: SearchSettings,
        seed: int,
        state_dir: Path,
        make_strategy: Callable[[], Strategy],
        networks: NetworkSpec | None = None,
        **arguments: Any,
    ) -> None:
        """Build the copies of the model for challengers, which use no embeddings.

        `networks`: of challengers with other arguments of the factory; None where `search.space` has no such key.
        `arguments`: of `Trainer`.
        """
        assert networks is None or search.promote == "alert"
        # First: later the model may hold tensors that cannot be copied.
        copied = search.challengers if any(key in TUNABLE for key in search.space) else 0
        models = [copy_sharing_base(arguments["model"]) for _ in range(copied)]
        super().__init__(**arguments)
        self._settings: LearnerSettings = arguments["settings"]
        self._options = search
        self._bounded = arguments["schema"].label.classes is not None and search.measure == "score"
        own = {"embedding": None, "teaching": None if networks is None else networks.teaching}

        def make_trainer(model: nn.Module) -> Trainer:
            return Trainer(**{**arguments, **own, "model": model, "strategy": make_strategy()})

        self._trainers = [make_trainer(model) for model in models]
        self._networks = None if networks is None else Networks(networks, seed, self.model, make_trainer)
        group = self.update.optimizer.param_groups[0]
        args = {} if networks is None else networks.args
        given = {key: value_of(key, self._settings, group, args) for key in search.space}
        self._pool = ChallengerPool(search, given, seed)
        self._control = ControlReader(state_dir)
        self._applied = ""
        """The last command of `search.json` whose values the model has taken."""
        self._is_behind: Callable[[], bool] = bool
        self._begun = False
        """Whether the pool has begun a step that is not taken yet: it is repeated without events that raise."""
        self._generators: GeneratorStates | None = None
        """After the newest step with challengers: if numpy's generator is as it was then, it need not be read again."""

    @property
    @override
    def found(self) -> Mapping[str, float]:
        pool = self._pool
        tuned = {key: value for key, value in pool.values.items() if not key.startswith(ARGS)}
        return tuned if pool.values != pool.given else {}

    @property
    @override
    def warning(self) -> str | None:
        return super().warning or self._control.problem or self._better

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
    @override
    def search_report(self) -> SearchReport:
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
    def step_without_features(self, new: Examples, old: Sequence[Examples] = (), rows: int | None = None) -> StepResult:
        if (control := self._control.changed()) is not None:
            self._apply(control)
        if self._networks is not None:
            self._networks.keep(self._pool.challengers)
        self._pool.paused = self._is_behind()
        if not self._begun:
            self._begun = True
            for challenger in self._pool.begin():
                self._begin_lease(challenger)
        before = GeneratorStates(self.device, self._generators) if self._pool.live else None
        result = super().step_without_features(new, old, rows)
        self._begun = False
        if before is None or not result.finite:
            return result  # no model learns its events
        self._generators = after = GeneratorStates(self.device, before)
        better = []
        for challenger in list(self._pool.live):
            before.restore()
            difference = self._challenge(challenger, new, old, rows, result)
            if difference is None:
                continue
            if challenger.teaching:
                self._pool.observe_taught(challenger, difference)
            elif self._pool.observe(challenger, difference):
                better.append(challenger)
        after.restore()
        self._pool.level.add(self._error(result))
        if better:
            self._decide(sorted(better, key=lambda each: each.better.log_wealth))
        return result

    def _challenge(
        self, challenger: Challenger, new: Examples, old: Sequence[Examples], rows: int | None, result: StepResult
    ) -> float | None:
        """Let a challenger score and train on a step's events; return how much better it was, None where it ended."""
        trainer = self._trainer(challenger)
        outcome: Judged
        try:
            if challenger.has_teacher:
                new, old = self._taught(new, old)
            its = trainer.step_without_features(new, old, rows)
        except Exception as exc:  # the user's own code may raise anything, and at weights of a challenger alone
            if out_of_memory(exc) or isinstance(exc, MemoryShortageError | SettingsError):
                outcome = "no_memory"
            elif isinstance(exc, RaisingEventsError) or may_be_of_events(exc):
                outcome = "raised"
            else:
                raise
            log.info("challenger %d: %s", challenger.number, in_one_line(exc))
        else:
            trainer.update.gradients.clear()  # their memory is for the next challenger
            difference = self._difference(result, its, len(new) if rows is None else rows)
            if its.finite and math.isfinite(difference):
                return difference
            outcome = "not_finite"
        self._pool.end(challenger, outcome)
        return None

    def _taught(self, new: Examples, old: Sequence[Examples]) -> tuple[Examples, Sequence[Examples]]:
        """Return the events of a step with the model's outputs, for those that a teacher's part of the loss is for."""
        with self._launch_context():
            if self.strategy.teaches_old:
                old = [taught(each, self.model, self._passes) for each in old]
            return taught(new, self.model, self._passes), old

    def _difference(self, own: StepResult, its: StepResult, rows: int) -> float:
        if self._bounded:
            return (its.score - own.score) / rows
        return self._pool.level.difference(self._error(own), self._error(its))

    def _error(self, result: StepResult) -> float:
        return -result.score if self._options.measure == "score" else result.loss_new

    def _trainer(self, challenger: Challenger) -> Trainer:
        if challenger.network:
            assert self._networks is not None
            return self._networks[challenger]
        assert challenger.slot is not None
        return self._trainers[challenger.slot]

    def _begin_lease(self, challenger: Challenger) -> None:
        """Copy the model, and give the copy the challenger's settings; build a network unless the challenger has it."""
        if not challenger.network:
            begins = self._copies(self, self._trainer(challenger), challenger)
        else:
            begins = self._is_built(challenger) or self._begins(challenger)
        if begins:
            trainer = self._trainer(challenger)
            trainer.scale_learning_rate(self.update.schedule.scale)
            configure(trainer, self._settings, challenger.values)
            trainer.set_micro_batch_size(self.micro_batch_size)

    def _begins(self, challenger: Challenger) -> bool:
        """Build a challenger's network; end the challenger instead where that is not possible, and return False."""
        assert self._networks is not None
        with self._launch_context():
            problem = self._networks.begin(challenger, self._passes.before_pass)
        if problem is not None:
            self._pool.end(challenger, problem)
        return problem is None

    def _decide(self, better: Sequence[Challenger]) -> None:
        """Report or promote the last of the challengers that are shown to be better, the best."""
        if self._options.promote == "alert":
            for challenger in better:
                self._pool.end(challenger, "better")
            return
        best = better[-1]
        if self._copies(self._trainer(best), self, best):
            self._pool.promote(best)
            configure(self, self._settings, self._pool.values)

    def _copies(self, source: Trainer, target: Trainer, challenger: Challenger) -> bool:
        """Copy weights and optimizer; without memory end the challenger instead, and return False."""
        try:
            copy_trainer(source, target)
        except RuntimeError as exc:
            if not out_of_memory(exc):
                raise
            self._pool.end(challenger, "no_memory")
            return False
        return True

    def _take(self, values: Mapping[str, float]) -> None:
        """Give the model other settings; it keeps its network."""
        self._pool.take({key: value for key, value in values.items() if not key.startswith(ARGS)})
        configure(self, self._settings, self._pool.values)

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
    def scale_learning_rate(self, factor: float) -> None:
        super().scale_learning_rate(factor)
        for challenger in self._pool.live:
            self._trainer(challenger).scale_learning_rate(factor)

    @override
    def set_is_behind(self, is_behind: Callable[[], bool]) -> None:
        self._is_behind = is_behind

    @override
    def set_micro_batch_size(self, rows: int | None) -> None:
        super().set_micro_batch_size(rows)
        for trainer in (*self._trainers, *(self._networks or ())):
            trainer.set_micro_batch_size(rows)

    @override
    def on_drift(self) -> None:
        super().on_drift()
        for challenger in self._pool.live:
            self._trainer(challenger).on_drift()

    @override
    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        tensors = super().tensors()
        for challenger in self._kept:
            its = self._trainer(challenger)
            parts = {"model": trained_state(its.model), "optimizer": its.update.tensors()[0]}
            tensors |= {part_of(challenger, name): self.staging.copy(each.items()) for name, each in parts.items()}
        return tensors

    @property
    def _kept(self) -> list[Challenger]:
        """The challengers whose weights are in a checkpoint: those that train, and those with a network."""
        return [
            each for each in self._pool.challengers if (self._is_built(each) if each.network else each.slot is not None)
        ]

    def _is_built(self, challenger: Challenger) -> bool:
        return self._networks is not None and self._networks.has(challenger)

    @override
    def state(self) -> dict[str, Any]:
        trainers = {key_of(each): self._trainer(each).state() for each in self._kept}
        search = {**self._pool.state(), "trainers": trainers, "applied": self._applied}
        return {**super().state(), "search": search}

    @override
    def restore_generators(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        super().restore_generators(tensors, values)
        self._generators = None

    @override
    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        super().restore(tensors, state)
        if (search := state.get("search")) is None:
            return
        self._applied = search["applied"]
        self._pool.restore(search)
        configure(self, self._settings, self._pool.values)
        for challenger in self._pool.challengers:
            if (its := search["trainers"].get(key_of(challenger))) is None:
                continue
            parts = {name: tensors[part_of(challenger, name)] for name in ("model", "optimizer")}
            if challenger.network:
                assert self._networks is not None
                if (problem := self._networks.restore(challenger, parts, its)) is not None:
                    self._pool.end(challenger, problem)
                    continue
            else:
                self._trainer(challenger).restore(parts, its)
            configure(self._trainer(challenger), self._settings, challenger.values)
