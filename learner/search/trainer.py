"""A trainer with challengers: each trains on the events of a step after the model, from the same random numbers."""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from anabranch.core.errors import DependencyError, SettingsError
from anabranch.core.failures import out_of_memory
from learner.config import LearnerSettings
from learner.errors import MemoryShortageError
from learner.model.faulty_events import RaisingEventsError
from learner.model.rng import generators_now
from learner.model.trained_set import copy_sharing_base, trained_state
from learner.search.evidence import relative_difference
from learner.search.pool import Challenger, ChallengerPool, shown
from learner.sections.search import MAX_GRAD_NORM, SearchSettings
from learner.state_dir.search.control import Judged, SearchControl, SearchReport, read_control, stamp_of_control
from learner.strategies.base import Strategy
from learner.strategies.examples import Examples
from learner.training.step_result import StepResult
from learner.training.trainer import Trainer

_OF_OPTIMIZER = "learner.optimizer."
_EVERY_SECONDS = 0.5
"""Time after which `search.json` is read again, if it has changed."""

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
        self._state_dir = state_dir
        self._stamp: object = None
        self._applied = 0
        """The last number of `search.json` whose values the model has taken."""
        self._control_due = 0.0
        self._unread: str | None = None
        """Why `search.json` cannot be used, as a sentence."""

    @property
    @override
    def found(self) -> Mapping[str, float]:
        return self._pool.values if self._pool.values != self._pool.given else {}

    @property
    @override
    def warning(self) -> str | None:
        return super().warning or self._unread or self._better

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
        self._read_control_if_due()
        for challenger in self._pool.begin():
            self._begin_lease(challenger)
        if not self._pool.live:
            return super().step(new, old, rows)
        restore = generators_now(self.device)
        result = super().step(new, old, rows)
        if not result.finite:
            return result  # no model learns its events
        goes_on = generators_now(self.device)
        better = []
        for challenger in list(self._pool.live):
            restore()
            difference = self._challenge(challenger, new, old, rows, result)
            if difference is not None and self._pool.observe(challenger, difference):
                better.append(challenger)
        goes_on()
        if better:
            self._decide(max(better, key=lambda each: each.better.log_wealth))
        return result

    def _challenge(
        self, challenger: Challenger, new: Examples, old: Sequence[Examples], rows: int | None, result: StepResult
    ) -> float | None:
        """Let a challenger score and train on a step's events; return how much better it was, None where it ended."""
        outcome: Judged
        try:
            its = self._trainer(challenger).step(new, old, rows)
        except RaisingEventsError:
            outcome = "raised"
        except MemoryShortageError:
            outcome = "no_memory"
        else:
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
        try:
            _copy(self, trainer)
        except RuntimeError as exc:
            if not out_of_memory(exc):
                raise
            self._pool.end(challenger, "no_memory")
            return
        _configure(trainer, self._settings, challenger.values)
        trainer.set_micro_batch_size(self.micro_batch_size)

    def _decide(self, challenger: Challenger) -> None:
        if self._options.promote == "alert":
            self._pool.end(challenger, "better")
            return
        _copy(self._trainer(challenger), self)
        self._pool.end(challenger, "promoted")
        self._take(challenger.values)

    def _take(self, values: Mapping[str, float]) -> None:
        """Give the model other settings."""
        self._pool.take(values)
        _configure(self, self._settings, self._pool.values)

    def _read_control_if_due(self) -> None:
        """Apply what a person has written, about twice a second."""
        if time.monotonic() < self._control_due:
            return
        self._control_due = time.monotonic() + _EVERY_SECONDS
        stamp = stamp_of_control(self._state_dir)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            control = read_control(self._state_dir)
        except (SettingsError, DependencyError) as exc:
            self._unread = str(exc)  # what was applied before still holds
            log.error("%s", exc)  # noqa: TRY400 the sentence says all
        else:
            self._unread = None
            self._apply(control)

    def _apply(self, control: SearchControl) -> None:
        if control.number > self._applied:
            self._applied = control.number
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
