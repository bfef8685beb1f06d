"""What versions and checkpoints copy from a trainer, and how a checkpoint is restored."""

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from anabranch.core.failures import out_of_memory
from learner.device_memory.host_staging import HostStaging
from learner.errors import CheckpointError
from learner.model.adapter import adapter_scale
from learner.model.growing.parts import grow
from learner.model.rng import restore_rng, rng_tensors, rng_values
from learner.model.trained_set import load_trained, trained_state
from learner.state_dir.search.control import SearchReport
from learner.strategies.base import Strategy
from learner.strategies.examples import Tensors
from learner.training.optimizer_step import OptimizerStep
from learner.training.parallelism import Weights

log = logging.getLogger(__name__)


class TrainerState:
    """The model, the state of its optimizer, and the strategy. Used by one thread, between steps."""

    def __init__(
        self, model: nn.Module, strategy: Strategy, update: OptimizerStep, weights: Weights, staging: HostStaging
    ) -> None:
        """Start at step 0; `weights`: how the weights are split over the ranks."""
        self.model = model
        self.strategy = strategy
        self.update = update
        self.device = staging.device
        self.staging = staging
        """Makes the copies that versions and checkpoints are written from."""
        self._weights = weights
        self._steps = 0

    @property
    def found(self) -> Mapping[str, float]:
        """The settings that a search has found, by key, which replace those of the config; empty without a search."""
        return {}

    @property
    def search_report(self) -> SearchReport | None:
        """The state of the search; None without one."""
        return None

    def snapshot(self) -> Mapping[str, Tensor]:
        """Copy the trained set as it is now; later steps do not change the copy. See `HostStaging`."""
        return self._copied(trained_state(self.model))

    def optimizer_state(self) -> Mapping[str, Tensor]:
        """Copy the optimizer's tensors; later steps do not change the copy."""
        return self._copied(*self.update.tensors())

    def tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Copy the tensors of model, optimizer and strategy, for a checkpoint."""
        tensors = {"model": self.snapshot(), "optimizer": self.optimizer_state()}
        strategy = self.strategy.tensors()
        return tensors | ({"strategy": self.staging.copy(strategy.items())} if strategy else {})

    def _copied(self, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        return self.staging.copy(self._weights.full_tensors(tensors, like), gathered=self._weights.sharded)

    def state(self) -> dict[str, Any]:
        """Return the state of optimizer, scaler and strategy besides tensors, as JSON values, for a checkpoint."""
        strategy = {"class": type(self.strategy).__name__, **self.strategy.state()}
        return {**self.update.state(self._steps), "strategy": strategy, "adapter_scale": adapter_scale(self.model)}

    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Restore the weights and the optimizer of a checkpoint.

        Settings of the optimizer, such as the learning rate, stay those of the config, so that the user's changes
        between two starts apply.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer.
        """
        scale = adapter_scale(self.model)
        if state.get("adapter_scale") != scale:
            raise CheckpointError(
                f"the newest checkpoint has adapters with alpha / rank = {state.get('adapter_scale')}, and "
                f"[model.adapter] has {scale}; put model.adapter.alpha back, or begin again by moving the checkpoints "
                "away"
            )
        try:
            grow(self.model, tensors["model"])
            load_trained(self.model, self._weights.shard_like(tensors["model"], trained_state(self.model)))
            self._steps = self.update.restore(tensors["optimizer"], state)
            self._restore_strategy(tensors.get("strategy", {}), state.get("strategy", {}))
        except (RuntimeError, KeyError, ValueError) as exc:
            if isinstance(exc, RuntimeError) and out_of_memory(exc):
                raise
            raise CheckpointError(
                "the newest checkpoint does not fit the model or optimizer of the config; put those back, or begin "
                f"again by moving the checkpoints away: {_first_clause(exc)}"
            ) from exc

    def generators(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the states of all random generators, as tensors and as JSON values, for a checkpoint."""
        return rng_tensors(self.device), rng_values()

    def restore_generators(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore the states of all random generators; called after `restore`."""
        restore_rng(tensors, values, self.device)

    def _restore_strategy(self, tensors: Tensors, state: Mapping[str, Any]) -> None:
        """Restore the strategy, unless the checkpoint is of another strategy."""
        now, before = type(self.strategy).__name__, state.get("class")
        if before == now:
            self.strategy.restore(tensors, state)
        elif before is not None:
            log.info("the checkpoint was made under the strategy %s: %s starts without state", before, now)


def _first_clause(error: Exception) -> str:
    """Return the first item of torch's error message, which lists one per line below a headline."""
    headline, *clauses = str(error).splitlines() or [""]
    return (clauses[0] if clauses else headline).strip()
