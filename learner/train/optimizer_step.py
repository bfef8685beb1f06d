"""From gradients to weights: norm, loss scale, learning rate and optimizer."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from anabranch.core.failures import out_of_memory
from anabranch.learner.device.out_of_memory import memory_error
from anabranch.learner.model.device import Precision
from anabranch.learner.settings.learner import LearnerSettings, ScheduleSettings
from anabranch.learner.train.optimizers import (
    FusedAdam,
    build_optimizer,
    load_optimizer,
    param_of,
    state_scalars,
    state_tensors,
)
from anabranch.learner.train.parallelism import Ranks, Weights

_ONE = torch.ones(())


class LossScaler(torch.amp.GradScaler):
    """Torch's scaler, whose passes may be given up."""

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        super().__init__(device.type, enabled=enabled)
        self._one = torch.ones((), device=device)
        self._unscaled = False

    def value(self) -> Tensor | float:
        """Return the loss scale: a scalar on the device with fp16, since to read it would be to wait; otherwise 1."""
        return self.scale(self._one) if self.is_enabled() else 1.0

    @override
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        self._unscaled = self.is_enabled()

    @override
    def update(self, new_scale: float | Tensor | None = None) -> None:
        super().update(new_scale)
        self._unscaled = False

    def give_up(self) -> None:
        """Discard the gradients of a pass that are unscaled; the scale stays the same."""
        if self._unscaled:
            self.update(self.value())  # the only call that resets the scaler's unscaled state


class OptimizerStep:
    """Updates the weights of a step from their gradients. Used by one thread."""

    def __init__(
        self, settings: LearnerSettings, model: nn.Module, precision: Precision, device: torch.device, ranks: Ranks
    ) -> None:
        self._trained = [weight for weight in model.parameters() if weight.requires_grad]
        self.gradients = Gradients(self._trained, settings.max_grad_norm, ranks.weights)
        self.optimizer = ranks.shard(build_optimizer(settings.optimizer, self.gradients.leaves))
        self._fused = FusedAdam.of(self.optimizer)
        self.schedule = Schedule(settings.schedule)
        self.scaler = LossScaler(device, enabled=precision.scaled)
        self.decides_on_device = (
            device.type == "cuda"
            and not ranks.weights.sharded
            and getattr(self.optimizer, "_step_supports_amp_scaling", False)
        )
        """Whether `apply` takes `skip` once the optimizer has its state: at its first step SGD sets its momentum, also
        where the device skips the update."""
        self._ranks = ranks
        self._device = device
        self._name = settings.optimizer.name
        self.has_state = False
        """Whether the optimizer has allocated its state."""

    def end_backward(self) -> None:
        """Take the gradients of all micro-batches, and average them over the ranks where no backward pass does."""
        self.gradients.take()
        self._ranks.average_gradients(self.gradients.leaves)

    def give_up(self) -> None:
        """Clear the gradients of a pass that ran out of memory; another may follow."""
        self.gradients.clear()
        self.scaler.give_up()

    def apply(self, skip: Tensor | None = None) -> None:
        """Change the weights by the gradients, unless `skip`, a scalar on the device, is 1 instead of 0.

        Raises:
            SettingsError: there is no memory for the optimizer's state, which it allocates at its first step.
            MemoryShortageError: there is none now, since other processes use the device; some weights may have changed.
        """
        optimizer: Any = self.optimizer
        try:
            if self._fused is not None and self.has_state and self._fused.step(skip):
                return
            # Not by `GradScaler.step`, which waits for the device to see what the caller has seen.
            if skip is not None:
                optimizer.found_inf = skip  # as GradScaler passes it to fused optimizers
            optimizer.step()
        except RuntimeError as exc:
            if self.has_state or not out_of_memory(exc):
                raise
            message = " ".join(str(exc).split())
            advice = (
                f"learner.optimizer: {self._device} runs out of memory with what {self._name} keeps of each weight; "
                'take one that keeps less, such as "adafactor" or "sgd", learner.sharding where there are ranks, or a '
                "smaller model"
            )
            raise memory_error(self._device, message, advice, undone=False) from exc
        finally:
            if hasattr(optimizer, "found_inf"):
                del optimizer.found_inf
        self.has_state = True

    def reset(self) -> Callable[[], None]:
        """Discard what the optimizer keeps of each weight, such as momentum; return what restores it."""
        kept, had_state = dict(self.optimizer.state), self.has_state

        def restore() -> None:
            self.optimizer.state.clear()
            self.optimizer.state.update(kept)
            self.has_state = had_state

        self.optimizer.state.clear()
        self.has_state = False
        return restore

    def restart_rows(self, weight: Tensor, rows: Tensor, like: Tensor) -> None:
        """Let rows of a weight `[N, ...]` begin again: with the values of other rows, and without optimizer state."""
        with torch.no_grad():
            weight[rows] = weight[like]
            first = {"sum": self.optimizer.defaults.get("initial_accumulator_value", 0.0)}  # of Adagrad
            for name, value in self.optimizer.state.get(weight, {}).items():
                if isinstance(value, Tensor) and value.ndim and len(value) == len(weight):
                    value[rows] = first.get(name, 0.0)

    def begin(self, step: int) -> None:
        """Clear the gradients, and set the learning rate for a step."""
        self.gradients.clear()
        self.schedule.apply(step, self.optimizer.param_groups)

    def configure(self, values: Mapping[str, float], max_norm: float) -> None:
        """Set numbers of the optimizer by name, such as `lr`, and the largest gradient norm, from the next step on."""
        self.gradients.max_norm = max_norm
        for group in self.optimizer.param_groups:
            group.update(values)
        if "lr" in values:
            self.schedule.restart_rates()

    def rate(self) -> float:
        """Return the learning rate of the step that was begun last."""
        return float(self.optimizer.param_groups[0]["lr"])

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of optimizer, scaler and schedule before `step`, besides tensors, as JSON values."""
        return {
            **state_scalars(self.optimizer),
            "scaler": self.scaler.state_dict(),
            "schedule": {"step": step, **self.schedule.state()},
        }

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the optimizer's tensors of this rank by name, and the weight that each belongs to."""
        tensors = state_tensors(self.optimizer)
        return tensors, self.weights_of(tensors)

    def weights_of(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the weight that each of the optimizer's tensors belongs to, where there is one."""
        return param_of(self._trained, names)

    def restore(self, kept: Mapping[str, Tensor], state: Mapping[str, Any]) -> int:
        """Restore the state of a checkpoint and return its step; settings of the optimizer stay those of the config.

        Raises:
            RuntimeError, KeyError, ValueError: the state is of another model or optimizer.
        """
        self.schedule.scale = 1.0
        weights = self._ranks.weights
        shards = weights.shard_like(kept, self.weights_of(kept))
        load_optimizer(self.optimizer, dict(zip(shards, weights.local_shards([*shards.values()]), strict=True)), state)
        self.has_state = bool(kept)
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        self.schedule.restore(state["schedule"])
        return int(state["schedule"]["step"])


class Schedule:
    """The factor for the configured learning rate, for a stream without an end: warm-up, constant, warm-up after drift.

    It depends on steps and drifts alone, not on time.
    """

    def __init__(self, settings: ScheduleSettings) -> None:
        self._settings = settings
        self._since = 0
        self._rates: list[float] | None = None
        self._factor = 1.0
        self.scale = 1.0
        """A further factor, such as for some steps after a drift; not kept in a checkpoint."""

    def rate(self, step: int) -> float:
        """Return the factor for a step; the first step is 0.

        A warm-up rises evenly, and ends with the factor 1 at its last step.
        """
        warm = self._settings.warmup_steps
        return self.scale * (min(1.0, (step - self._since + 1) / warm) if warm else 1.0)

    def apply(self, step: int, groups: Sequence[dict[str, Any]]) -> None:
        """Set the learning rates of an optimizer's groups, which have the configured rates at the first call."""
        if self._rates is None:
            self._rates = [group["lr"] for group in groups]
        factor = self.rate(step)
        if factor != self._factor:
            self._factor = factor
            for group, rate in zip(groups, self._rates, strict=True):
                group["lr"] = rate * factor

    def restart_rates(self) -> None:
        """Take the rates that the groups have at the next `apply` for the configured ones."""
        self._rates, self._factor = None, 1.0

    def on_drift(self, step: int) -> None:
        """Restart the warm-up at `step` if `learner.schedule.restart` is "drift"."""
        if self._settings.restart == "drift":
            self._since = step

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON values."""
        return {"since": self._since}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        self._since = int(state["since"])


class Gradients:
    """Zeroes, measures and clips the gradients of a step. Faster than torch's own functions, with equal results.

    With a small model on a CPU, most of a step's time is in the calls around the arithmetic. `get_total_norm` and
    `clip_grads_with_norm_` would save no line, and take 4 to 7 times as long there (four tensors, 100 to 160 us): they
    sort tensors by device and type, and multiply by 1 too.
    """

    def __init__(self, weights: Sequence[nn.Parameter], max_norm: float, shards: Weights | None = None) -> None:
        self._shards = shards or Weights()
        self._weights = weights
        self.max_norm = max_norm
        """Gradients with a larger norm are scaled down to it."""
        with torch.no_grad():
            self.leaves = [
                weight if shard is weight else nn.Parameter(shard)
                for weight, shard in zip(weights, self._shards.local_shards(weights), strict=True)
            ]
        """What the optimizer updates: the weights, or plain tensors that share the memory of this rank's shards."""
        self._counted = [self._shards.counts(weight) for weight in weights]

    def clear(self) -> None:
        """Set all gradients to None."""
        for weight in self._weights:
            weight.grad = None
        if self._shards.sharded:
            for leaf in self.leaves:
                leaf.grad = None

    def take(self) -> None:
        """Take this rank's shards of the gradients, where the weights are sharded."""
        if not self._shards.sharded:
            return
        for weight, leaf in zip(self._weights, self.leaves, strict=True):
            leaf.grad = self._shards.gradient(weight)

    def clip(self) -> Tensor:
        """Scale the gradients down to the largest allowed norm, bit for bit as `clip_grad_norm_` does; called without a
        graph.

        Returns:
            Their norm before, a scalar on the device; on a CPU where any norm is allowed, 0 if it is finite, else
            infinite.
        """
        gradients = [gradient for leaf in self.leaves if (gradient := leaf.grad) is not None]
        counted = gradients
        if self._shards.sharded:
            pairs = zip(self.leaves, self._counted, strict=True)
            counted = [leaf.grad for leaf, is_counted in pairs if is_counted and leaf.grad is not None]
        if not counted:
            norm = self.leaves[0].detach().new_zeros(())
        elif math.isinf(self.max_norm) and counted[0].is_cpu:
            # A call in a tenth of the time of a norm: it sets `found` to 1, and multiplies by 1. atanh(1) is infinite.
            torch._amp_foreach_non_finite_check_and_unscale_(counted, found := torch.zeros(()), _ONE)
            norm = found.atanh_()
        else:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(counted)))
        if self._shards.sharded:
            # Ranks add up numbers of one dtype, also where one has no gradient, or has weights of other dtypes.
            norm = self._shards.norm(norm.to(reduce(torch.promote_types, {leaf.dtype for leaf in self.leaves})))
        if math.isinf(self.max_norm) or not gradients or (norm.is_cpu and not norm.item() + 1e-6 > self.max_norm):
            return norm  # times 1 changes nothing; on a device, to compare would be to wait
        torch._foreach_mul_(gradients, (self.max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm
