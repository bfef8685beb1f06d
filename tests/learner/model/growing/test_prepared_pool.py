"""A prepared pool of experts or columns: it predicts the same but for rounding, with fewer operations."""

import copy
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.examples import Examples
from anabranch.learner.model.growing.pool import Router, grown, pool_of
from anabranch.learner.model.task import Classification
from anabranch.learner.model.trained_set import trained_state
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.testing.strategies import extended
from tests.support.strategies import small_strategy

CPU = torch.device("cpu")
CLASSES = 6
TASKS = (0, 1), (2, 3), (4, 5)


class Fused(nn.Module):
    """Has a layer that torch computes without calling its parts, unless one of these has a hook."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    @override
    def forward(self, x):
        output: Tensor = self.head(self.encoder(self.embed(x)[:, None])[:, 0])
        return output


def body():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def images():
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(5, CLASSES))


MODELS: dict[str, Any] = {
    "embedding early": (body, "0", {}),
    "embedding late": (body, "3", {}),
    "base of bf16": (body, "0", {"base_precision": "bf16"}),
    "convolution": (images, "2", {}),
    "fused": (Fused, "embed", {}),
    "progressive": (body, "1", None),
}


def trained(name, tasks=3, precision="fp32"):
    """Return a trainer with a part for each of the tasks, and events of all classes."""
    factory, embedding, arguments = MODELS[name]
    torch.manual_seed(0)
    model = factory()
    schema = Schema(
        SchemaSettings.model_validate(
            {"features": {"x": {"dtype": "float32", "shape": [4]}}, "label": {"name": "y", "classes": CLASSES}}
        )
    )
    strategy = small_strategy("progressive" if arguments is None else "experts", least=16, **(arguments or {}))
    settings = LearnerSettings.model_validate({"optimizer": {"name": "sgd", "lr": 0.05}, "max_grad_norm": math.inf})
    chosen = choose_precision(precision, CPU)
    extended(strategy, model, schema, embedding=embedding)
    trainer = Trainer(TrainingSetup(model, Classification(), strategy, schema, settings, CPU, chosen))
    centres = torch.randn(CLASSES, 4) * 4
    for classes in TASKS[:tasks]:
        for _ in range(4):
            label_B = torch.tensor(classes).repeat(8)
            assert trainer.step(Examples({"x": centres[label_B] + torch.randn(16, 4)}, label_B, torch.ones(16))).finite
    return trainer, centres.repeat(4, 1) + torch.randn(24, 4) * 2


def versions(trainer, device=CPU):
    """Return the model of a version on a device as it is, and prepared."""
    weights = {name: value.clone() for name, value in trained_state(trainer.model).items()}
    both = []
    for _ in range(2):
        module = copy.deepcopy(grown(trainer.model, weights)).eval()
        module.load_state_dict(weights, strict=False)
        both.append(module.to(device))
    prepared = pool_of(both[1])
    assert prepared is not None
    prepared.prepare(both[1])
    return both[0], both[1]


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [1, 2, 3])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_prepared_module_predicts_the_same(name, autocast, tasks):
    trainer, x = trained(name, tasks)
    plain, prepared = versions(trainer)
    x[3] = math.nan
    x[4] = math.inf
    batches = [*x.split(1), x, x[5:], x[5:6].repeat(5, 1)]
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for batch in batches:
            torch.testing.assert_close(prepared(batch), plain(batch), rtol=1e-6, atol=1e-5, equal_nan=True)
    pool = pool_of(plain)
    assert pool is not None
    assert pool.size == tasks


@pytest.mark.gpu
@pytest.mark.parametrize("tasks", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_prepared_module_predicts_the_same_on_a_gpu(name, tasks):
    device = torch.device("cuda", 0)
    trainer, x = trained(name, tasks)
    plain, prepared = versions(trainer, device)
    on_cpu, _ = versions(trainer)
    with torch.inference_mode():
        for batch in (*x.split(1), x, x[5:6].repeat(5, 1)):
            output, expected = prepared(batch.to(device)), plain(batch.to(device))
            torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-5)
            torch.testing.assert_close(output.cpu(), on_cpu(batch), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", MODELS)
def test_with_gradients_it_predicts_the_same(name):
    trainer, x = trained(name)
    plain, prepared = versions(trainer)
    for batch in (x, x[:1]):
        assert torch.equal(prepared(batch), plain(batch))


def reference(router, embedding_BD, experts):
    """Return the probability of each expert, and of each class by all experts but each, prototype by prototype."""
    probability_BP = functional.linear(embedding_BD, router.weight, router.bias).softmax(dim=1)
    total_BE = torch.zeros(len(probability_BP), experts)
    others_BEC = torch.zeros(len(probability_BP), experts, router.classes)
    for owner, label, value_B in zip(router.owner.tolist(), router.label.tolist(), probability_BP.T, strict=True):
        total_BE[:, owner] += value_B
        for expert in range(experts):
            if expert != owner:
                others_BEC[:, expert, label] += value_B
    return total_BE, others_BEC


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 12), st.booleans())
def test_a_route_is_that_of_the_plain_reference(seed, experts, prototypes, tied):
    """Also where experts have the same prototypes, and the first of them is chosen, or none at all."""
    generator = torch.Generator().manual_seed(seed)
    weight_PD, bias_P = torch.randn(prototypes, 5, generator=generator), torch.randn(prototypes, generator=generator)
    if tied:
        weight_PD[:], bias_P[:] = weight_PD[:1], bias_P[:1]
    owner_P = torch.randint(experts, (prototypes,), generator=generator)
    label_P = torch.randint(4, (prototypes,), generator=generator)
    plain, prepared = Router(5, 4), Router(5, 4)
    for each in (plain, prepared):
        each.set(weight_PD, bias_P, owner_P, label_P)
    prepared.prepare(experts)
    embedding_BD = torch.randn(6, 5, generator=generator)
    with torch.inference_mode():
        for rows in (*embedding_BD.split(1), embedding_BD, embedding_BD[:1].repeat(3, 1)):
            total_BE, others_BEC = reference(plain, rows, experts)
            for each in (plain, prepared):
                route = each.route(rows, experts)
                chosen_B = (
                    torch.tensor(route.chosen).expand(len(rows)) if isinstance(route.chosen, int) else route.chosen
                )
                if each is plain:
                    first = [next(e for e, total in enumerate(row) if total == row.max()) for row in total_BE]
                    assert chosen_B.tolist() == first
                row_B = torch.arange(len(rows))
                torch.testing.assert_close(total_BE[row_B, chosen_B], total_BE.amax(dim=1), rtol=1e-6, atol=0)
                torch.testing.assert_close(route.own_B1[:, 0], total_BE[row_B, chosen_B], rtol=1e-6, atol=0)
                torch.testing.assert_close(route.others_BC, others_BEC[row_B, chosen_B], rtol=1e-6, atol=1e-37)


def test_a_router_of_many_classes_keeps_nothing_for_single_events():
    """Its matrices would be larger than all other weights."""
    router = Router(5, 1000)
    router.set(torch.randn(1000, 5), torch.zeros(1000), torch.arange(1000) // 100, torch.arange(1000))
    router.prepare(10)
    assert router._single is None


class Counted(TorchDispatchMode):
    """Counts operations."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    @override
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


def operations(module, x):
    with torch.no_grad(), Counted() as counted:
        module(x)
    return counted.operations


def test_a_single_row_takes_fewer_operations():
    trainer, x = trained("embedding early")
    plain, prepared = versions(trainer)
    assert operations(prepared, x[:1]) <= operations(plain, x[:1]) - 10


def test_the_base_does_not_run_a_head_that_experts_replace():
    trainer, x = trained("embedding early")
    _, prepared = versions(trainer)
    with torch.no_grad():
        before = prepared(x)
        prepared.get_parameter("4.weight").fill_(math.nan)
        assert torch.equal(prepared(x), before)


def test_layers_that_torch_would_fuse_keep_their_hooks():
    trainer, _ = trained("fused")
    _, prepared = versions(trainer)
    hooked = {name for name, module in prepared.named_modules() if module._forward_hooks}
    assert hooked == {"embed", "encoder.linear1", "encoder.linear2"}


def test_a_layer_whose_forward_pass_was_replaced_keeps_its_hook():
    trainer, x = trained("embedding early")
    plain, prepared = versions(trainer)
    both = [copy.deepcopy(plain) for _ in range(2)]
    for module in both:
        layer = module.get_submodule("2")
        layer.forward = lambda x_N, weight=layer.weight: 2 * functional.linear(x_N, weight)  # type: ignore[method-assign, misc]
    pool = pool_of(both[1])
    assert pool is not None
    pool.prepare(both[1])
    with torch.inference_mode():
        assert torch.equal(both[1](x), both[0](x))
        assert not torch.equal(both[1](x), prepared(x))


def test_weights_that_are_loaded_later_are_not_hidden_by_those_before():
    """A pool that is given another size starts as one that was not prepared."""
    trainer, x = trained("embedding early", 2)
    _, prepared = versions(trainer)
    for classes in TASKS[2:]:
        label_B = torch.tensor(classes).repeat(8)
        assert trainer.step(Examples({"x": torch.randn(16, 4)}, label_B, torch.ones(16))).finite
    weights = trained_state(trainer.model)
    later = grown(prepared, weights)
    later.load_state_dict(weights, strict=False)
    with torch.inference_mode():
        assert torch.equal(later.eval()(x), trainer.model.eval()(x))


def test_it_is_freed_without_a_garbage_collection():
    trainer, x = trained("embedding early")
    plain, prepared = versions(trainer)
    with torch.inference_mode():
        prepared(x[:1])
        prepared(x)
    left = [weakref.ref(module) for module in prepared.modules()]
    gc.collect()
    gc.disable()
    try:
        del prepared
        assert not any(module() is not None for module in left)
    finally:
        gc.enable()
    assert plain is not None
