"""A group of one rank: what only ranks do, on the CPU and, where there is one, on a GPU.

Ranks of several processes are in `test_ranks.py`.
"""

import math
import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.examples import Examples
from anabranch.learner.model.faulty_events import RaisingEventsError
from anabranch.learner.model.task import Classification
from anabranch.learner.parallel import process_group
from anabranch.learner.parallel.data_parallel import DataParallelGroup
from anabranch.learner.parallel.process_group import RankAssignment, join_group, leave_group
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from tests.support.gpu import rtol


@pytest.fixture(autouse=True)
def _no_group_is_left():
    """A test that fails within its group fails no other."""
    yield
    if dist.is_initialized():
        leave_group()


KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def trained(schema, rendezvous, strategy="er", **settings):
    """Return the weights after 14 steps: of a group of one with this rendezvous, or of a process without a group."""
    plain = {"optimizer": {"name": "sgd", "lr": 0.1}, "precision": "fp32"}
    options = LearnerSettings.model_validate(plain | settings)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

    def run(device, ranks):
        parts = (model.to(device), Classification(), STRATEGIES[strategy](), schema, options, device)
        trainer = Trainer(TrainingSetup(*parts, choose_precision(options.precision, device)), **ranks)
        for step in range(14):
            new, old = (
                trainer.examples(fake_columns(schema, range(begin, begin + 12), label=[0, 1, 2]))
                for begin in (step, 100 + step)
            )
            assert trainer.step(new, [old] if trainer.strategy.kind.replays else []).finite
        return {name: value.cpu() for name, value in trainer.snapshot().items()}

    if rendezvous is None:
        return run(torch.device(options.device), {})
    with join_group(RankAssignment(0, 1, rendezvous), options) as device:
        return run(device, {"ranks": DataParallelGroup(options)})


def distance(one, other):
    """Return the distance of two models, relative to the largest possible one."""
    distance = math.hypot(*(float((one[name] - other[name]).norm()) for name in one))
    return distance / math.hypot(*(float(each.norm()) for each in one.values()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    [
        ("none", {"name": "sgd", "lr": 0.1}),
        ("er", {"name": "sgd", "lr": 0.1, "momentum": 0.9}),
        ("er", {"name": "sgd", "lr": 0.1, "fused": True}),
        ("der++", {"name": "adamw", "lr": 0.01}),
    ],
)
def test_weights_in_parts_learn_what_whole_ones_do(schema, tmp_path, kind, strategy, optimizer):
    whole = trained(schema, None, strategy, device=kind, optimizer=optimizer)
    split = trained(schema, tmp_path / "rendezvous", strategy, device=kind, optimizer=optimizer, sharding="fsdp")
    assert whole.keys() == split.keys()
    assert distance(whole, split) < (1e-5 if kind == "cpu" else rtol(torch.float32, 14))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_in_parts_learn_in_bf16_what_whole_ones_do(schema, tmp_path, kind):
    """About: whole weights are cast by each operation, those in parts when they are gathered."""
    settings: dict[str, Any] = {"device": kind, "precision": "bf16", "micro_batch_size": 8}
    full = trained(schema, None, **settings | {"precision": "fp32"})
    whole = trained(schema, None, **settings)
    split = trained(schema, tmp_path / "rendezvous", **settings, sharding="fsdp")
    assert distance(whole, full) > 0
    assert distance(whole, split) < 0.01


def hooks():
    for name in ("fp16", "powersgd", "int8", "topk"):
        yield pytest.param("cpu", name)
    for name in ("bf16", "fp16", "powersgd", "int8", "topk"):
        yield pytest.param("cuda", name, marks=pytest.mark.gpu)


@pytest.mark.parametrize(("kind", "name"), list(hooks()))
def test_what_a_hook_makes_smaller_is_nearly_what_was_meant(schema, tmp_path, kind, name):
    exact = trained(schema, tmp_path / "exact", device=kind, comm_hook="none")
    fraction = {"topk_fraction": 0.1} if name == "topk" else {}
    hooked = trained(schema, tmp_path / "hooked", device=kind, comm_hook=name, **fraction)
    assert 0 < distance(exact, hooked) < 0.05


@pytest.mark.parametrize("hook", ["powersgd", "int8", "topk"])
def test_a_step_that_is_not_finite_leaves_nothing_in_error_feedback(schema, tmp_path, hook):
    """In a group of one, past the steps that PowerSGD leaves as they are."""
    settings = LearnerSettings.model_validate(
        {"comm_hook": hook, "device": "cpu", "optimizer": {"name": "sgd", "lr": 0.01}}
    )
    with join_group(RankAssignment(0, 1, tmp_path / "rendezvous"), settings) as device:
        model = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
        parts = (model, Classification(), STRATEGIES["none"](), schema, settings, device)
        trainer = Trainer(TrainingSetup(*parts, choose_precision("fp32", device)), ranks=DataParallelGroup(settings))
        good = trainer.examples(fake_columns(schema, range(12), label=[0, 1, 2]))
        poison = Examples({"x": torch.full_like(good.features["x"], math.nan)}, good.label_B, good.weight_B)
        assert [trainer.step(good).finite for _ in range(14)] == [True] * 14
        assert not trainer.step(poison).finite
        assert trainer.step(good).finite


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")  # what torch imports for ZeRO
@pytest.mark.parametrize("kind", KINDS)
def test_zero1_keeps_restored_state_once_on_its_rank_and_continues_and_checkpoints_as_before(schema, tmp_path, kind):
    """In a group of one, with the fused optimizer, which on CUDA requires its step counts on the device too."""
    settings = LearnerSettings.model_validate(
        {"sharding": "zero1", "device": kind, "optimizer": {"name": "adamw", "lr": 0.01}}
    )
    with join_group(RankAssignment(0, 1, tmp_path / "rendezvous"), settings) as device:

        def make():
            torch.manual_seed(0)
            parts = (nn.Linear(3, 3).to(device), Classification(), STRATEGIES["none"](), schema, settings, device)
            replicas = DataParallelGroup(settings)
            return Trainer(TrainingSetup(*parts, choose_precision("fp32", device)), ranks=replicas), replicas

        def checkpoint(trainer, replicas):
            replicas.gather()
            return trainer.tensors(), trainer.state()

        before, after = make(), make()
        examples = before[0].examples(fake_columns(schema, range(12), label=[0, 1, 2]))
        for _ in range(3):
            before[0].step(examples)
        after[0].restore(*checkpoint(*before))
        optimizer: Any = after[0].update.optimizer
        assert not optimizer.state, "a second copy next to the inner optimizer's"
        moments = [value for values in optimizer.optim.state.values() for value in values.values()]
        assert len(moments) == 2 * 3
        assert {each.device.type for each in moments} == {kind}
        assert checkpoint(*after)[1] == checkpoint(*before)[1]
        for _ in range(2):
            for part in ("model", "optimizer"):
                kept, again = (checkpoint(*each)[0][part] for each in (before, after))
                assert kept.keys() == again.keys()
                assert all(torch.equal(value, again[name]) for name, value in kept.items()), part
            assert before[0].step(examples).loss == after[0].step(examples).loss


def test_a_sharded_model_that_raises_on_an_event_goes_on_without_its_batch(schema, tmp_path):
    settings = LearnerSettings.model_validate({"sharding": "fsdp", "device": "cpu"})

    def refuse(_module, _given, output):
        if (output[:, 0].detach() > 900).any():
            raise IndexError("index out of range in self")

    with join_group(RankAssignment(0, 1, tmp_path / "rendezvous"), settings) as device:
        model = nn.Sequential(nn.Identity(), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
        model[0].register_forward_hook(refuse)
        parts = (model, Classification(), STRATEGIES["none"](), schema, settings, device)
        trainer = Trainer(TrainingSetup(*parts, choose_precision("fp32", device)), ranks=DataParallelGroup(settings))
        good = trainer.examples(fake_columns(schema, range(12), label=[0, 1, 2]))
        x = good.features["x"].clone()
        x[[2, 7], 0] = 1000.0
        for _ in range(2):
            assert trainer.step(good).finite
            with pytest.raises(RaisingEventsError) as raised:
                trainer.step(Examples({"x": x}, good.label_B, good.weight_B))
            assert raised.value.indices == range(12)


def test_ranks_of_one_host_use_loopback_alone_and_all_ranks_one_communicator(monkeypatch, tmp_path):
    """NCCL takes a name as a prefix unless `=` is before it, and connects each pair unless it has the device."""
    calls: list[dict[str, Any]] = []
    environment: dict[str, str] = {}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    rendezvous: list[Any] = [tmp_path / "rendezvous", HashStore()]
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: calls.append(options))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    for device in (torch.device("cuda", 1), torch.device("cpu")):
        monkeypatch.setattr(process_group.RankAssignment, "device", lambda *_, device=device: device)
        with join_group(RankAssignment(1, 2, rendezvous.pop()), LearnerSettings()):
            # Those of torchrun, which come first, keep what the environment names.
            names = {} if rendezvous else {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
            assert environment == names
    assert [call["device_id"] for call in calls] == [torch.device("cuda", 1), None]
