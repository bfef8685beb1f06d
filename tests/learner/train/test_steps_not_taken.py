"""A step that is not taken leaves model, optimizer and strategy as they were, whatever its events would have begun."""

import pytest
import torch
from torch import nn

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.model.device import Precision, choose_precision
from anabranch.learner.model.embedding import Embedding
from anabranch.learner.model.examples import Examples
from anabranch.learner.model.faulty_events import RaisingEventsError
from anabranch.learner.model.growing.pool import pool_of
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.testing.strategies import extended
from tests.support.strategies import small_strategy

CPU = torch.device("cpu")
SCHEMA = Schema(
    SchemaSettings.model_validate(
        {"features": {"x": {"dtype": "float32", "shape": [4]}}, "label": {"name": "y", "classes": 6}}
    )
)
RAISES, NOT_FINITE = 1e7, float("nan")


class Fragile(nn.Module):
    """Raises on large values, and runs out of memory at the pass `short_at`."""

    passes, short_at = 0, -1

    def forward(self, x):
        self.passes += 1
        if self.passes == self.short_at:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
        if (x > 1e6).any():
            raise ValueError("out of range")
        return x


def make(name):
    torch.manual_seed(0)
    model = nn.Sequential(Fragile(), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
    least = {"least": 20} if name in ("experts", "progressive") else {}
    strategy = extended(small_strategy(name, **least), model, SCHEMA, embedding="2")
    settings = LearnerSettings.model_validate({"optimizer": {"name": "adamw", "lr": 0.02}})
    embedding = Embedding(model, "2") if strategy.kind.embeds else None
    if embedding is not None:
        embedding.capture_next()
    precision = choose_precision("fp32", CPU)
    return Trainer(TrainingSetup(model, Classification(), strategy, SCHEMA, settings, CPU, precision, embedding))


@pytest.fixture
def events():
    generator = torch.Generator().manual_seed(1)

    def some(*classes, n=16):
        label_B = torch.tensor(classes)[torch.arange(n) % len(classes)]
        return Examples({"x": torch.randn(n, 4, generator=generator) + label_B[:, None]}, label_B, torch.ones(n))

    return some


def state_of(trainer):
    tensors = {
        f"{part}.{name}": value.tolist() for part, named in trainer.tensors().items() for name, value in named.items()
    }
    return tensors, (trainer.strategy.state(), trainer.warning)


@pytest.mark.parametrize("value", [RAISES, NOT_FINITE], ids=["raises", "not finite"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_events_of_a_new_class_change_nothing(name, value, events):
    trainer = make(name)
    for _ in range(4):
        assert trainer.step(events(0, 1)).finite
    before = state_of(trainer)
    for new_class in (2, 3, 4):
        bad = events(new_class, n=2)
        bad.features["x"][:] = value
        if value == RAISES:
            with pytest.raises(RaisingEventsError):
                trainer.step(bad)
        else:
            assert not trainer.step(bad).finite
        assert state_of(trainer) == before


@pytest.mark.parametrize("name", ["experts", "progressive"])
def test_good_events_of_a_new_class_open_one_part_with_the_others_left_out(name, events):
    trainer = make(name)
    for _ in range(4):
        assert trainer.step(events(0, 1)).finite
    mixed = events(2, n=8)
    mixed.features["x"][3] = RAISES
    with pytest.raises(RaisingEventsError) as caught:
        trainer.step(mixed)
    assert caught.value.indices == [3]
    pool = pool_of(trainer.model)
    assert pool is not None
    assert pool.size == 1
    assert trainer.step(events(2, n=8)).finite
    assert pool.size == 2


@pytest.mark.parametrize("name", ["experts", "progressive"])
def test_a_step_that_is_repeated_after_running_out_of_memory_opens_one_part(name, events):
    """The second of its micro-batches runs out of memory, after the first has opened the part."""
    trainer = make(name)
    for _ in range(4):
        assert trainer.step(events(0, 1)).finite
    fragile = trainer.model[0]  # type: ignore[index]
    assert isinstance(fragile, Fragile)
    trainer.runner.micro_batch_size = 8
    fragile.short_at = fragile.passes + 2
    assert trainer.step(events(2, 3, n=16)).finite
    pool = pool_of(trainer.model)
    assert pool is not None
    assert (pool.size, trainer.runner.micro_batch_size) == (2, 4)
    assert fragile.passes > fragile.short_at + 2
    assert trainer.strategy.state()["seen"] == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("value", [3e4, 1e6, 3e38])
def test_outliers_in_fp16_leave_a_loss_scale_by_which_others_are_trained_on(value):
    """Numbers at which a half-precision pass overflows, here on the CPU: one event of 16 in every 20th step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 6))
    settings = LearnerSettings.model_validate({"optimizer": {"name": "adamw", "lr": 0.01}, "max_grad_norm": 1.0})
    half = Precision("fp16", torch.float16)
    strategy = STRATEGIES["none"]()
    trainer = Trainer(TrainingSetup(model, Classification(), strategy, SCHEMA, settings, CPU, half))
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(4, 6, generator=generator)

    def some(n):
        x = torch.randn(n, 4, generator=generator)
        return Examples({"x": x}, (x @ target).argmax(dim=1), torch.ones(n))

    refused = 0
    for step in range(400):
        events = some(16)
        if step % 20 == 19:
            events.features["x"][0] = value
        refused += not trainer.step(events).finite
    assert refused <= 20, "only steps with an outlier are not taken"
    assert float(trainer.update.scaler.get_scale()) >= 32
    new = some(2000)
    trainer.model.eval()
    with torch.no_grad():
        right = (trainer.model(new.features["x"]).argmax(dim=1) == new.label_B).float().mean()
    assert right > 0.85
