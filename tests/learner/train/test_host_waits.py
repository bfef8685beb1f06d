"""On a device, the host waits for it once in a step: where this list says so, and nowhere else."""

import ast
import math
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.model.device import Precision, choose_precision
from anabranch.learner.model.embedding import Embedding
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.growing import RoutedParts
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.testing.strategies import extended
from tests.support.operations import Operations
from tests.support.strategies import small_strategy

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]
WAITING = {"item", "tolist", "cpu", "numpy", "to", "get_scale", "synchronize", "nonzero"}
"""Methods that read a tensor's values on the host, or may copy it there."""
STEP_PATH = [
    *(ROOT / "learner" / "train").glob("*.py"),
    *(ROOT / "learner" / "strategies").glob("*.py"),
    ROOT / "learner" / "model" / "examples.py",
    ROOT / "learner" / "device" / "lease.py",
    ROOT / "learner" / "extensions" / "device_sharing" / "launches.py",
]
ALLOWED = {
    "learner/train/graph_trial.py": {"_distance: item": "before the first step"},
    "learner/train/step_graphs.py": {"_replay: tolist": "the one wait of a round"},
    "learner/train/step_snapshot.py": {"expect_non_finite: tolist": "once for a model with such buffers"},
    "learner/train/optimizer_step.py": {"clip: item": "on a CPU alone", "clip: to": "another dtype"},
    "learner/train/pipelined_runner.py": {"_share: to": "another dtype"},
    "learner/train/step_runner.py": {
        "_apply_if_finite: tolist": "the one wait of a step",
        "_apply_if_finite: item": "after a step whose buffers are not all finite",
        "probe: tolist": "of steps that score old events",
    },
    "learner/train/step_wrapper.py": {
        "learn: to": "labels, where intercepts learn: host memory to the device, in order",
        "_restart_rows: to": "where rows of a learned vocabulary start again: host memory to the device, in order",
    },
    "learner/train/converters.py": {"convert: item": "before the first step"},
    "learner/model/examples.py": {
        "copy: to": "from pinned memory, without waiting",
        "all_examples_of: numpy": "on a CPU alone",
    },
    "learner/strategies/base.py": {"shortened: to": "another dtype"},
    "learner/strategies/early_negatives.py": {
        "run: to": "another dtype",
        "trained_first: to": "where a label took an earlier one back: host memory to the device, in order",
    },
    "learner/strategies/ewc.py": {"_add: to": "another dtype", "_numbered: to": "before the first step"},
    "learner/strategies/lwf.py": {"restore: to": "before the first step"},
    "learner/strategies/ncm.py": {"_logits: to": "another dtype"},
    "learner/strategies/growing.py": {
        "convert: to": "before the first step",
        "_classes_in: tolist": "a class that is new decides which weights are trained",
        "_grow: item": "when another part may be opened",
        "restore: to": "before the first step",
    },
    "learner/strategies/experts.py": {
        "convert: to": "before the first step",
        "_keep_in: to": "before the first step",
        "_to_weights: to": "another dtype",
    },
    "learner/device/lease.py": {"set_level: tolist": "words of a mapped file, no tensor"},
    "learner/extensions/device_sharing/launches.py": {"_reach: synchronize": "device sharing: queued work"},
}


def calls(path):
    """Yield each call of a method that may wait, as `function: method`."""

    def visit(node, function):
        for child in ast.iter_child_nodes(node):
            name = child.name if isinstance(child, ast.FunctionDef) else function
            if isinstance(child, ast.Attribute) and child.attr in WAITING:
                yield f"{function}: {child.attr}"
            yield from visit(child, name)

    yield from visit(ast.parse(path.read_text()), "")


def test_only_the_listed_functions_of_the_step_path_call_what_may_wait():
    found = {str(path.relative_to(ROOT)): set(calls(path)) for path in STEP_PATH}
    assert {path: names for path, names in found.items() if names} == {
        path: set(reasons) for path, reasons in ALLOWED.items()
    }


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def make_trainer(schema, strategy, precision=None, **settings):
    """Return a trainer that decides as on a device."""
    options = LearnerSettings.model_validate({"max_grad_norm": math.inf, **settings})
    arguments = {"every": 2} if strategy in {"ewc", "lwf"} else {}
    built, kind = model(), small_strategy(strategy, **arguments)
    extended(kind, built, schema)
    embedding = Embedding(built, "2") if kind.kind.embeds else None
    precision = precision or choose_precision("fp32", CPU)
    trainer = Trainer(TrainingSetup(built, Classification(), kind, schema, options, CPU, precision, embedding))
    trainer.update.decides_on_device = True
    return trainer


def take(trainer, schema, step, *, poison=None):
    new, *old = (
        trainer.examples(fake_columns(schema, range(begin, begin + n), label=[0, 1, 2]))
        for begin, n in ((16 * step, 16), *((1000, n) for n in trainer.strategy.samples(16)))
    )
    if poison is not None:
        new.features["x"][0] = poison
    return trainer.step(new, old).finite


# Without those whose model grows, which read the classes of a step.
FIXED = [name for name, kind in STRATEGIES.items() if kind.kind.learns_gradient and not issubclass(kind, RoutedParts)]


@pytest.mark.parametrize("strategy", FIXED)
@pytest.mark.parametrize("micro_batch_size", [None, 8])
def test_a_step_reads_no_value_but_its_numbers(schema, strategy, micro_batch_size):
    trainer = make_trainer(schema, strategy, micro_batch_size=micro_batch_size)
    assert take(trainer, schema, 0)
    for step in range(1, 5):
        with (
            Operations() as operations,
            mock.patch.object(torch.Tensor, "tolist", counting(torch.Tensor.tolist)) as read,
        ):
            assert take(trainer, schema, step)
        if strategy != "er-ace":  # whose one_hot reads its labels on a CPU, and not on a CUDA device
            assert not operations.counts["_local_scalar_dense"], operations
        assert not operations.counts["nonzero"], operations
        assert read.calls == 1


def test_slda_solves_without_a_check_on_the_host(schema):
    trainer = make_trainer(schema, "slda")
    with Operations() as operations:
        assert take(trainer, schema, 0)
    assert operations.counts["_linalg_solve_ex"] == 1
    assert not operations.counts["_linalg_check_errors"]


def counting(function):
    """Return the function, which counts its calls."""

    def counted(*args):
        counted.calls += 1  # type: ignore[attr-defined]
        return function(*args)

    counted.calls = 0  # type: ignore[attr-defined]
    return counted


@pytest.mark.parametrize("strategy", ["er", "agem", "ewc"])
@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop"])
def test_the_loss_scale_is_not_read(schema, strategy, optimizer):
    """Nor whether gradients overflow, which `GradScaler.step` reads for optimizers that are not fused."""
    half = Precision("fp16", torch.float16)
    trainer = make_trainer(schema, strategy, half, optimizer={"name": optimizer, "lr": 0.01, "momentum": 0.9})
    trainer.update.decides_on_device = optimizer == "sgd"
    trainer.update.scaler.load_state_dict({**trainer.update.scaler.state_dict(), "scale": 64.0})
    with (
        mock.patch.object(torch.amp.GradScaler, "get_scale", side_effect=AssertionError),
        mock.patch.object(torch.amp.GradScaler, "step", side_effect=AssertionError),
    ):
        assert [take(trainer, schema, step) for step in range(4)] == [True] * 4


OPTIMIZERS: list[dict[str, Any]] = [
    {"name": "adamw", "lr": 0.01},
    {"name": "adam", "lr": 0.01, "amsgrad": True},
    {"name": "sgd", "lr": 0.1, "momentum": 0.9},
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each["name"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_device_that_decides_learns_bit_for_bit_what_a_host_that_decides_does(schema, optimizer, precision):
    found: list[tuple[list[bool], dict[str, Any], dict[str, Any]]] = []
    for on_device in (False, True):
        chosen = Precision("fp16", torch.float16) if precision == "fp16" else None
        trainer = make_trainer(schema, "er", chosen, optimizer=optimizer, max_grad_norm=1.0)
        assert trainer.update.optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]
        trainer.update.decides_on_device = on_device
        poisons = [math.nan, None, math.nan, None, math.inf, None, None]
        finite = [take(trainer, schema, step, poison=poison) for step, poison in enumerate(poisons)]
        found.append((finite, trainer.state(), trainer.tensors()))
    host, device = found
    assert host[0] == device[0] == [False, True, False, True, False, True, True]
    assert host[1] == device[1]
    torch.testing.assert_close(device[2], host[2], rtol=0, atol=0)


class Masked(nn.Module):
    """Has values that are not finite in a buffer, and binds another tensor to another buffer in each pass."""

    def __init__(self):
        super().__init__()
        self.body = model()
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        output: torch.Tensor = self.body(x)
        return output


def test_a_step_with_a_mask_of_infinity_updates_the_weights_once(schema):
    found, reads = [], Counter[bool]()
    for on_device in (False, True):
        options = LearnerSettings.model_validate({"optimizer": {"name": "adamw", "lr": 0.01}})
        trainer = Trainer(
            TrainingSetup(
                Masked(), Classification(), STRATEGIES["er"](), schema, options, CPU, choose_precision("fp32", CPU)
            )
        )
        trainer.update.decides_on_device = on_device
        for step in range(3):
            with mock.patch.object(torch.Tensor, "tolist", counting(torch.Tensor.tolist)) as read:
                assert take(trainer, schema, step)
            reads[on_device] += read.calls
        found.append(trainer.tensors())
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert reads == {False: 1, True: 2 + 1}, (
        "the closer comparison is of the first step alone, as is the host's decision"
    )
