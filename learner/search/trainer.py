"""A trainer with challengers: each trains on the events of a step after the model, from the same random numbers."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from anabranch.core.errors import SettingsError
from anabranch.core.failures import out_of_memory
from learner.config import LearnerSettings
from learner.errors import MemoryShortageError
from learner.model.factory import in_one_line
from learner.model.faulty_events import RaisingEventsError, may_be_of_events
from learner.model.rng import GeneratorStates
from learner.model.trained_set import copy_sharing_base, trained_state
from learner.search.evidence import relative_difference
from learner.search.pool import Challenger, ChallengerPool
from learner.sections.search import MAX_GRAD_NORM, SearchSettings
from learner.state_dir.search.control import ControlReader, Judged, SearchControl, SearchReport, shown
from learner.strategies.base import Strategy
from learner.strategies.examples import Examples
from learner.training.step_result import StepResult
from learner.training.trainer import Trainer

_OF_OPTIMIZER = "learner.optimizer."

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
        **arguments: Any,
    ) -> None:
        """Build the copies of the model for challengers; `arguments`: of `Trainer`; they use no embeddings."""
        # First: later the model may hold tensors that cannot be copied.
        models = [copy_sharing_base(arguments["model"]) for _ in range(search.challengers)]
        super().__init__(**arguments)
        self._settings: LearnerSettings = arguments["settings"]
        self._options = search
        self._bounded = arguments["schema"].label.classes is not None and search.measure == "score"
        self._trainers = [
            Trainer(**{**arguments, "model": model, "strategy": make_strategy(), "embedding": None}) for model in models
        ]
        group = self.update.optimizer.param_groups[0]
        given = {key: _value(key, self._settings, group) for key in search.space}
        self._pool = ChallengerPool(search, given, seed)
        self._control = ControlReader(state_dir)
        self._applied = ""
        """The last command of `search.json` whose values the model has taken."""
        self._is_behind: Callable[[], bool] = bool

    @property
    @override
    def found(self) -> Mapping[str, float]:
        return self._pool.values if self._pool.values != self._pool.given else {}

    @property
    @override
    def warning(self) -> str | None:
        return super().warning or self._control.problem or self._better

    @property
    def _better(self) -> str | None:
        """One sentence on a challenger that is better, and is not promoted."""
        if (alert := self._pool.alert) is None:
            return None
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
    def step(self, new: Examples, old: Sequence[Examples] = (), rows: int | None = None) -> StepResult:
        if (control := self._control.changed()) is not None:
            self._apply(control)
        self._pool.paused = self._is_behind()
        for challenger in self._pool.begin():
            self._begin_lease(challenger)
        if not self._pool.live:
            return super().step(new, old, rows)
        before = GeneratorStates(self.device)
        result = super().step(new, old, rows)
        if not result.finite:
            return result  # no model learns its events
        after = GeneratorStates(self.device, before)
        better = []
        for challenger in list(self._pool.live):
            before.restore()
            difference = self._challenge(challenger, new, old, rows, result)
            if difference is not None and self._pool.observe(challenger, difference):
                better.append(challenger)
        after.restore()
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
            its = trainer.step(new, old, rows)
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

    def _difference(self, own: StepResult, its: StepResult, rows: int) -> float:
        if self._bounded:
            return (its.score - own.score) / rows
        if self._options.measure == "score":
            return relative_difference(-own.score, -its.score)
        return relative_difference(own.loss_new, its.loss_new)

    def _trainer(self, challenger: Challenger) -> Trainer:
        assert challenger.slot is not None
        return self._trainers[challenger.slot]

    def _begin_lease(self, challenger: Challenger) -> None:
        """Copy the model, and give the copy the challenger's settings."""
        trainer = self._trainer(challenger)
        if self._copies(self, trainer, challenger):
            _configure(trainer, self._settings, challenger.values)
            trainer.set_micro_batch_size(self.micro_batch_size)

    def _decide(self, better: Sequence[Challenger]) -> None:
        """Report or promote the last of the challengers that are shown to be better, the best."""
        if self._options.promote == "alert":
            for challenger in better:
                self._pool.end(challenger, "better")
            return
        best = better[-1]
        if self._copies(self._trainer(best), self, best):
            self._pool.end(best, "promoted")
            self._take(best.values)

    def _copies(self, source: Trainer, target: Trainer, challenger: Challenger) -> bool:
        """Copy weights and optimizer; without memory end the challenger instead, and return False."""
        try:
            _copy(source, target)
        except RuntimeError as exc:
            if not out_of_memory(exc):
                raise
            self._pool.end(challenger, "no_memory")
            return False
        return True

    def _take(self, values: Mapping[str, float]) -> None:
        """Give the model other settings."""
        self._pool.take(values)
        _configure(self, self._settings, self._pool.values)

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
        for trainer in self._trainers:
            trainer.set_micro_batch_size(rows)

    @override
    def on_drift(self) -> None:
        super().on_drift()
        for challenger in self._pool.live:
            self._trainer(challenger).on_drift()

    @override
    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        tensors = super().tensors()
        for challenger in self._pool.live:
            its = self._trainer(challenger)
            parts = {"model": trained_state(its.model), "optimizer": its.update.tensors()[0]}
            tensors |= {_part(challenger, name): self.staging.copy(each.items()) for name, each in parts.items()}
        return tensors

    @override
    def state(self) -> dict[str, Any]:
        trainers = {str(each.slot): self._trainer(each).state() for each in self._pool.live}
        search = {**self._pool.state(), "trainers": trainers, "applied": self._applied}
        return {**super().state(), "search": search}

    @override
    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        super().restore(tensors, state)
        if (search := state.get("search")) is None:
            return
        self._applied = search["applied"]
        self._pool.restore(search)
        _configure(self, self._settings, self._pool.values)
        for challenger in self._pool.live:
            parts = {name: tensors[_part(challenger, name)] for name in ("model", "optimizer")}
            trainer = self._trainer(challenger)
            trainer.restore(parts, search["trainers"][str(challenger.slot)])
            _configure(trainer, self._settings, challenger.values)


def _copy(source: Trainer, target: Trainer) -> None:
    """Copy weights and optimizer from one trainer to another."""
    optimizer = {name: value.clone() for name, value in source.update.tensors()[0].items()}
    Trainer.restore(target, {"model": trained_state(source.model), "optimizer": optimizer}, Trainer.state(source))
    target.scale_learning_rate(source.update.schedule.scale)


def _configure(trainer: Trainer, settings: LearnerSettings, values: Mapping[str, float]) -> None:
    """Give a trainer values by the keys of the config."""
    arguments = {
        key.removeprefix(_OF_OPTIMIZER): value for key, value in values.items() if key.startswith(_OF_OPTIMIZER)
    }
    trainer.update.configure(arguments, values.get(MAX_GRAD_NORM, settings.max_grad_norm))


def _value(key: str, settings: LearnerSettings, group: Mapping[str, Any]) -> float:
    """Return the value of a key of the config, from a group of the optimizer where it has its defaults."""
    return settings.max_grad_norm if key == MAX_GRAD_NORM else float(group[key.removeprefix(_OF_OPTIMIZER)])


def _part(challenger: Challenger, name: str) -> str:
    """Return the part of a checkpoint with some tensors of a challenger."""
    return f"challenger-{challenger.slot}-{name}"
