"""Tensor parallelism: plans and what they refuse, in a process group without other processes.

DTensor takes half a second to import, so each test that names it, or what imports it, imports it.
"""

import gc
import json
import math
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from anabranch.core.errors import SettingsError
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.task import Classification
from anabranch.learner.parallel.data_parallel import DataParallelGroup
from anabranch.learner.parallel.mesh import Mesh
from anabranch.learner.parallel.process_group import leave_group
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from tests import forkserver
from tests.learner.parallel.split.models import mlp
from tests.support.waiting import PATIENCE_SECONDS

CPU = torch.device("cpu")
SETTINGS = LearnerSettings.model_validate({"device": "cpu", "replicas": 4, "mesh": {"data": 2, "tensor": 2}})
PAIR = {"0": "column", "2": "row"}


@pytest.fixture(autouse=True)
def _one_of_four():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    leave_group()


class Block(nn.Module):
    """An embedding, a layer with a norm, and a head that shares the weights of the embedding."""

    def __init__(self, *, tied=False):
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.LayerNorm(8), nn.Linear(16, 8)
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.words.weight


def refusal(model, parallel, size=4):
    from anabranch.learner.parallel.split.tensor import plan

    with pytest.raises(SettingsError) as refused:
        plan(model, parallel, size)
    return str(refused.value)


def test_patterns_name_modules_of_all_layers():
    from anabranch.learner.parallel.split.tensor import plan

    model = nn.Sequential(Block(), Block())
    found = plan(model, {"*.up": "column", "*.down": "row", "0.words": "row"}, 4)
    assert found == {"0.up": "column", "1.up": "column", "0.down": "row", "1.down": "row", "0.words": "row"}


def test_a_pattern_that_matches_nothing_is_refused_with_the_modules_that_can_be_split():
    assert refusal(Block(), {"body.*": "column"}) == (
        'model.parallel: "body.*" matches no module; those that can be split are words, up, down, head'
    )


def test_a_module_of_another_kind_is_refused():
    assert refusal(Block(), {"n*": "column"}) == (
        'model.parallel."norm (by n*)": it is a LayerNorm; name an nn.Linear or nn.Embedding'
    )


def test_a_module_with_weights_in_fewer_bits_is_refused():
    model = Block()
    model.up.weight = nn.Parameter(torch.zeros(64, 1, dtype=torch.uint8), requires_grad=False)
    assert refusal(model, {"up": "column"}) == (
        'model.parallel."up": it is a Linear with weights in uint8; name an nn.Linear or nn.Embedding'
    )


@pytest.mark.parametrize(
    ("parallel", "size", "what"),
    [
        ({"up": "column"}, 3, '"up" = "column": its 16 outputs'),
        ({"up": "row"}, 3, '"up" = "row": its 8 inputs'),
        ({"words": "row"}, 5, '"words" = "row": its 12 inputs'),
        ({"words": "column"}, 3, '"words" = "column": its 8 outputs'),
    ],
)
def test_a_dimension_that_does_not_divide_is_refused(parallel, size, what):
    assert refusal(Block(), parallel, size) == (
        f"model.parallel.{what} are not divisible by learner.mesh.tensor = {size}; change the model or the mesh, or "
        "leave the module out"
    )


def test_a_module_that_two_keys_match_is_refused():
    assert refusal(Block(), {"up": "column", "u*": "row"}) == (
        'model.parallel: "u*" matches up, as another key does; leave one out'
    )


def test_tied_weights_are_refused():
    assert refusal(Block(tied=True), {"head": "row"}) == (
        "model.parallel: words.weight and head.weight are one parameter, which cannot be split; leave head out"
    )


def test_a_tensor_group_without_a_plan_is_refused():
    assert refusal(Block(), {}, 2) == (
        'learner.mesh.tensor = 2, but model.parallel names no module to split; write such as {"body.0" = "column", '
        '"body.2" = "row"}, or set learner.mesh.tensor to 1'
    )


def split(model, parallel, outputs=None):
    # By the group, as all other tests: DTensor caches meshes with the names of their groups, which tests make again.
    given = iter(outputs) if outputs is not None else None
    x = torch.rand(5, 3)
    weights = DataParallelGroup(SETTINGS, parallel=parallel).weights
    weights.split(model, lambda: model(x) if given is None else next(given))


def test_a_module_that_gets_a_part_of_its_numbers_is_refused():
    with pytest.raises(SettingsError) as refused:
        split(mlp(), {"0": "column"})
    assert str(refused.value).startswith(
        "model.parallel: the split model fails; the modules between a column and a row module have to work on a part "
        "of its numbers, and other modules need full ones: RuntimeError: "
    )


@pytest.mark.parametrize(
    ("found", "differs"),
    [
        (torch.tensor([1.0, 2.5]), "off by 0.5"),
        (torch.tensor([1.0, math.nan]), "off by nan"),
        (torch.zeros(1), "[1], not [2]"),
    ],
)
def test_a_plan_that_changes_the_output_is_refused(found, differs):
    with pytest.raises(SettingsError) as refused:
        split(mlp(), PAIR, [torch.tensor([1.0, 2.0]), found])
    assert str(refused.value) == (
        f"model.parallel: the output of the split model is {differs}; each column module needs a row module after it, "
        "and between them only modules without trained parameters that work on each number alone, or on each head of "
        "attention"
    )


@pytest.mark.process
def test_two_ranks_refuse_plans_that_change_gradients_or_outputs_and_an_error_of_one_of_them(tmp_path):
    """A plan that fits leaves the weights as they were, also those that are zero."""
    program = str(Path(__file__).parent / "split_program.py")
    processes = [forkserver.start([program, str(rank), str(tmp_path)]) for rank in range(2)]
    assert [process.wait(PATIENCE_SECONDS) for process in processes] == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    (fits, learned, wide, both, _), alone = first, second[-1]
    assert first[:4] == second[:4]
    assert both.startswith("[0, 1, 2, 3, 4] IndexError: a number is too large")
    assert both.endswith("; ranks that split a model leave out all of the step")
    assert first[-1] == "lost"
    assert alone.startswith("model.parallel: the model raises on rank 1, and not on all ranks of its tensor group: bet")
    assert "IndexError: a number is too large" in alone
    assert fits is None
    assert learned.startswith("model.parallel: the gradient of between.weight in the split model is off by ")
    assert wide.startswith("model.parallel: the output of the split model is off by ")


@pytest.fixture
def trainer_of(schema, monkeypatch):
    """Makes a trainer of a split model. A group without other processes sums nothing, so that its output is wrong."""
    for check in ("_check_output", "_check_gradients"):
        monkeypatch.setattr(f"anabranch.learner.parallel.split.tensor.{check}", lambda *_: None)

    def make():
        return make_trainer(schema, mlp(), DataParallelGroup(SETTINGS, parallel=PAIR))

    return make


def make_trainer(schema, model, replicas):
    parts = (model, Classification(), STRATEGIES["none"](), schema, SETTINGS, CPU)
    return Trainer(TrainingSetup(*parts, choose_precision(SETTINGS.precision, CPU)), ranks=replicas)


@pytest.mark.parametrize("index", [-1, 12])
def test_an_id_that_an_embedding_by_rows_lacks_raises_as_in_one_process(monkeypatch, index):
    from anabranch.learner.parallel.split import tensor

    for check in ("_check_output", "_check_gradients"):
        monkeypatch.setattr(tensor, check, lambda *_: None)
    model, ids = nn.Sequential(nn.Embedding(12, 4)), torch.arange(12)
    tensor.split_modules(model, {"0": "row"}, Mesh(SETTINGS, 1, 4).device_mesh("cpu")["tensor"], lambda: model(ids))
    ids[5] = index
    with pytest.raises(IndexError, match="index out of range"):
        model(ids)


@pytest.mark.parametrize("number", [1.0, math.inf, math.nan])
def test_numbers_that_are_not_finite_are_compared_too(number):
    output = torch.tensor([number, 2.0, -math.inf])
    from anabranch.learner.parallel.split.tensor import _check_output

    _check_output(output + 1e-3, output)


def test_each_rank_keeps_half_of_what_a_plan_names_and_all_names_stay(trainer_of):
    from torch.distributed.tensor import DTensor

    names = list(mlp().state_dict())
    trainer = trainer_of()
    state = trainer.model.state_dict()
    assert list(state) == names
    sizes = {name: value.to_local().shape for name, value in state.items() if isinstance(value, DTensor)}
    assert sizes == {"0.weight": (8, 3), "0.bias": (8,), "2.weight": (3, 8), "2.bias": (3,)}
    assert [tuple(leaf.shape) for leaf in trainer.update.gradients.leaves] == [(8, 3), (8,), (3, 8), (3,)]


def test_the_optimizer_keeps_state_of_this_ranks_parts_as_plain_tensors(trainer_of):
    trainer = trainer_of()
    for leaf in trainer.update.gradients.leaves:  # not by a step: this group exchanges arbitrary numbers
        leaf.grad = torch.ones_like(leaf)
    trainer.update.optimizer.step()
    moments = [values["exp_avg"] for values in trainer.update.optimizer.state.values()]
    assert [type(each) for each in moments] == [Tensor] * 4
    assert [tuple(each.shape) for each in moments] == [(8, 3), (8,), (3, 8), (3,)]
    assert {name: tuple(value.shape) for name, value in trainer.tensors()["optimizer"].items() if "avg" in name} == {
        f"{index}.{name}": shape
        for index, shape in enumerate([(16, 3), (16,), (3, 16), (3,)])
        for name in ("exp_avg", "exp_avg_sq")
    }


def test_a_weight_that_ranks_have_alike_counts_once_in_the_norm(trainer_of):
    """The bias of a row module is on both ranks of a tensor group, and all weights are in both row groups."""
    trainer = trainer_of()
    weights: Any = trainer._ranks.weights
    counted = []
    for rank in range(4):
        weights._mesh = Mesh(SETTINGS, rank, 4)
        counted.append([weights.counts(weight) for weight in trainer.model.parameters()])
    assert counted == [[True] * 4, [True, True, True, False], [False] * 4, [False] * 4]


def peak_bytes(schema, replicas):
    """Return the most bytes that were allocated at once while a model was built, split and trained for two steps."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model = mlp(256, 256, 256)
        trainer = make_trainer(schema, model, replicas)
        for _ in range(2):
            trainer.step(trainer.examples(fake_columns(schema, range(8), label=[0, 1, 2])))
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    del model
    return max(accumulate(change for _, change in changes))


@pytest.mark.slow
@pytest.mark.usefixtures("trainer_of")
def test_a_rank_of_two_needs_half_the_memory_of_one_process(schema):
    settings = LearnerSettings.model_validate({"device": "cpu", "replicas": 4, "mesh": {"data": 2, "tensor": 2}})
    plan = {"0": "column", "2": "row", "4": "column", "6": "row"}
    peak_bytes(schema, None)  # the first run allocates what stays
    alone, split = peak_bytes(schema, None), peak_bytes(schema, DataParallelGroup(settings, parallel=plan))
    weights = sum(weight.nbytes for weight in mlp(256, 256, 256).parameters())
    assert alone == pytest.approx(4 * weights, rel=0.05), "weights, gradients and two moments"
    assert split / alone <= 0.55
