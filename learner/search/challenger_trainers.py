"""What a search does with trainers: copies one, gives one its settings, and names the parts that a checkpoint has."""

from collections.abc import Mapping
from typing import Any

from learner.config import LearnerSettings
from learner.model.trained_set import trained_state
from learner.search.challenger import Challenger
from learner.sections.search import ARGS, MAX_GRAD_NORM
from learner.training.trainer import Trainer

_OF_OPTIMIZER = "learner.optimizer."


def copy_trainer(source: Trainer, target: Trainer) -> None:
    """Copy weights and optimizer from one trainer to another."""
    optimizer = {name: value.clone() for name, value in source.update.tensors()[0].items()}
    Trainer.restore(target, {"model": trained_state(source.model), "optimizer": optimizer}, Trainer.state(source))
    target.scale_learning_rate(source.update.schedule.scale)


def configure(trainer: Trainer, settings: LearnerSettings, values: Mapping[str, float]) -> None:
    """Give a trainer values by the keys of the config."""
    arguments = {
        key.removeprefix(_OF_OPTIMIZER): value for key, value in values.items() if key.startswith(_OF_OPTIMIZER)
    }
    trainer.update.configure(arguments, values.get(MAX_GRAD_NORM, settings.max_grad_norm))


def value_of(key: str, settings: LearnerSettings, group: Mapping[str, Any], args: Mapping[str, Any]) -> float:
    """Return the value of a key of the config, from a group of the optimizer where it has its defaults."""
    if key.startswith(ARGS):
        return float(args[key.removeprefix(ARGS)])
    return settings.max_grad_norm if key == MAX_GRAD_NORM else float(group[key.removeprefix(_OF_OPTIMIZER)])


def part_of(challenger: Challenger, name: str) -> str:
    """Return the part of a checkpoint with some tensors of a challenger."""
    return f"{key_of(challenger) if challenger.network else f'challenger-{challenger.slot}'}-{name}"


def key_of(challenger: Challenger) -> str:
    """Return what a checkpoint has the state of a challenger's trainer under."""
    return f"network-{challenger.number}" if challenger.network else str(challenger.slot)
