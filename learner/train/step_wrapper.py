"""What wraps the steps of a trainer: features that are learned after them, other ranks, and challengers.

Legend: B events.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anabranch.learner.model.examples import EARLY, Early, Examples
from anabranch.learner.model.factory import sample
from anabranch.learner.model.features.intercept import GroupIntercept, residual_of
from anabranch.learner.model.features.learned import Columns, features_of
from anabranch.learner.model.features.row_tables import row_tables
from anabranch.learner.model.features.vocabulary import Restarted
from anabranch.learner.strategies.early_negatives import trained_first
from anabranch.learner.train.optimizer_step import OptimizerStep
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.step_result import StepResult

if TYPE_CHECKING:
    from anabranch.learner.train.trainer import Trainer

TakeStep = Callable[[Examples, Sequence[Examples], int | None], StepResult]
"""Takes a step on new and old events, of whose new ones only the first so many count, or all for None."""


class StepWrapper:
    """Wraps each step of a trainer, and takes part in its checkpoints. Called by the trainer's thread."""

    prefixes: tuple[str, ...] = ()
    """What the names of its parts of a checkpoint begin with; all ranks restore them."""

    def attach(self, trainer: "Trainer") -> None:
        """Take the trainer, which is built; called once, before its first step."""

    def step(self, take: TakeStep, new: Examples, old: Sequence[Examples], rows: int | None) -> StepResult:
        """Take a step, of which `take` is the part within this wrapper; return its result, or raise as `take` does."""
        return take(new, old, rows)

    def learn_features(self, columns: Mapping[str, NDArray[Any]], /) -> None:
        """Learn that the trainer will learn features from these columns."""

    def erase_owners(self, owners: NDArray[np.int64], seed: int, /) -> None:
        """Learn that the trainer will erase what features have learned of owners alone."""

    def on_drift(self) -> None:
        """Apply a change of the stream, which the trainer applies next."""

    @property
    def found(self) -> Mapping[str, float]:
        """The settings that a search has found, by key."""
        return {}

    # Versions and checkpoints.

    def before_copy(self, *, optimizer: bool) -> None:
        """Prepare for copies of the weights and buffers, or of the optimizer's tensors."""

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Prepare for copies of all and for the state, which comes next, and return further parts of a checkpoint."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return further JSON values; called after `tensors`."""
        return {}

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], /) -> None:
        """Restore a checkpoint, which the trainer has restored."""

    def generators(self) -> dict[str, Tensor]:
        """Return the states of further random generators."""
        return {}

    def restore_generators(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any], /) -> None:
        """Restore the random generators of a checkpoint, as the trainer has its own."""


class FeatureTraining:
    """Learns features of a model from new events, where it has learned features. Used by the trainer's thread."""

    update: OptimizerStep
    """Of the model; set by the trainer."""

    def __init__(self, setup: TrainingSetup, wrappers: Sequence[StepWrapper]) -> None:
        model, self._task, self._device = setup.model, setup.task, setup.device
        self._wrappers = wrappers
        self.learned = features_of(model.train())
        self._row_tables = (
            {} if self.learned is None else row_tables(model, self.learned, sample(setup.schema, 2, self._device))
        )

    def learn_step(self, columns: Columns, output_B: Tensor | None) -> None:
        """Learn features from the new events of a step, but from none twice; take back what a label says was wrong."""
        self.learn(*trained_first(columns, output_B))
        if EARLY in columns and (taken_back := columns[EARLY] == Early.TAKEN_BACK).any():
            assert self.learned is not None
            self.learned.take_back({name: column[taken_back] for name, column in columns.items()})

    def learn(self, columns: Columns, output_B: Tensor | None = None) -> None:
        """Learn features from new events; `learn_step` calls it, and a follower does when its leader has.

        Rows of embeddings begin again whose value is another one now. `columns` are those of all ranks; `output_B`, the
        step's output for the same events, is what intercepts learn from.
        """
        if self.learned is None:
            return
        for wrapper in self._wrappers:
            wrapper.learn_features(self.learned.needed(columns))
        if not len(columns["label"]):
            return
        residual = None
        if self.learned.of(GroupIntercept):
            assert output_B is not None
            residual = residual_of(self._task, output_B, torch.from_numpy(columns["label"]).to(self._device))
        self._restart_rows(self.learned.observe(columns, residual))

    def erase(self, keys: NDArray[np.uint64], seed: int) -> None:
        """Erase what features have learned of the events of these keys alone, by their hashes; `seed` is secret."""
        if self.learned is not None:
            self.erase_owners(self.learned.owners_of(keys), seed)

    def erase_owners(self, owners: NDArray[np.int64], seed: int) -> None:
        """Erase what features have learned of owners alone; `erase` calls it, and a follower does."""
        assert self.learned is not None
        for wrapper in self._wrappers:
            wrapper.erase_owners(owners, seed)
        self._restart_rows(self.learned.erase(owners, seed))

    def _restart_rows(self, restarted_by_name: Mapping[str, Restarted]) -> None:
        for name, restarted in restarted_by_name.items():
            rows, like = (torch.from_numpy(each).to(self._device) for each in restarted)
            for table in self._row_tables[name]:
                self.update.restart_rows(table.weight, rows, like)
