"""Learning rates along a stream without an end."""

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings, ScheduleSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.optimizer_step import Schedule
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer

CPU = torch.device("cpu")


def rates(schedule, steps):
    return [round(schedule.rate(step), 6) for step in steps]


def test_without_settings_the_rate_is_constant():
    schedule = Schedule(ScheduleSettings())
    schedule.on_drift(3)
    assert rates(schedule, range(5)) == [1] * 5


def test_a_warm_up_rises_to_the_rate_of_the_config_and_stays():
    assert rates(Schedule(ScheduleSettings(warmup_steps=4)), range(6)) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_after_a_drift_it_warms_up_again():
    schedule = Schedule(ScheduleSettings(warmup_steps=2, restart="drift"))
    assert rates(schedule, range(3)) == [0.5, 1, 1]
    schedule.on_drift(10)
    assert rates(schedule, range(10, 13)) == [0.5, 1, 1]


def test_a_scale_multiplies_the_rate():
    schedule = Schedule(ScheduleSettings(warmup_steps=2))
    schedule.scale = 3.0
    assert rates(schedule, range(3)) == [1.5, 3, 3]


def test_a_restart_that_would_do_nothing_is_refused():
    with pytest.raises(ValidationError, match="has nothing to do again"):
        ScheduleSettings(restart="drift")


def test_a_checkpoint_keeps_where_the_schedule_is_and_the_config_sets_the_rate(schema):
    def make(lr):
        options = {"schedule": {"warmup_steps": 10, "restart": "drift"}, "optimizer": {"name": "sgd", "lr": lr}}
        settings = LearnerSettings.model_validate(options)
        torch.manual_seed(0)
        precision = choose_precision("fp32", CPU)
        return Trainer(
            TrainingSetup(nn.Linear(3, 3), Classification(), STRATEGIES["none"](), schema, settings, CPU, precision)
        )

    first = make(1.0)
    examples = first.examples(fake_columns(schema, range(8)))
    for _ in range(3):
        first.step(examples)
    first.on_drift()
    for _ in range(4):
        first.step(examples)
    second = make(0.5)
    second.restore(first.tensors(), first.state())
    for trainer, expected in ((first, 0.5), (second, 0.25)):
        trainer.step(examples)
        assert trainer.update.optimizer.param_groups[0]["lr"] == pytest.approx(expected)


def test_a_restart_on_drift_requires_drift_actions():
    schedule = {"warmup_steps": 10, "restart": "drift"}
    LearnerSettings.model_validate({"schedule": schedule})
    with pytest.raises(ValidationError, match=r"drift\.actions is empty"):
        LearnerSettings.model_validate({"schedule": schedule, "drift": {"actions": []}})
