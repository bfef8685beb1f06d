"""Sharded weights: what one of eight ranks holds and exchanges, in a process group without other processes.

FSDP and DTensor take half a second to import, so each test that names them imports them.
"""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.task import Classification
from anabranch.learner.parallel.channel import Action, json_to_bytes
from anabranch.learner.parallel.data_parallel import DataParallelGroup
from anabranch.learner.parallel.follower import follow
from anabranch.learner.parallel.mesh import Mesh
from anabranch.learner.parallel.process_group import leave_group
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer

CPU = torch.device("cpu")
WIDTH, LAYERS = 64, 8
ALL_DATA = Mesh(LearnerSettings(), 3, 8)


@pytest.fixture(autouse=True)
def _one_of_eight():
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    yield
    leave_group()


def not_run():
    raise AssertionError("FSDP runs the model before it is split")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def make_trainer(schema, **settings):
    options = LearnerSettings.model_validate({"sharding": "fsdp", "device": "cpu", **settings})
    replicas = DataParallelGroup(options)
    parts = (make_model(), Classification(), STRATEGIES["none"](), schema, options, CPU)
    return Trainer(TrainingSetup(*parts, choose_precision(options.precision, CPU)), ranks=replicas), replicas


def step(trainer, schema):
    trainer.step(trainer.examples(fake_columns(schema, range(12), label=[0, 1, 2])))


class Exchanged(TorchDispatchMode):
    """Lists the exchanges with other ranks and their dtypes."""

    def __init__(self):
        super().__init__()
        self.found: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func.name().partition("::")
        if namespace == "c10d":
            tensor = args[0][0] if isinstance(args[0], list) else args[0]
            self.found.append((name, tensor.dtype))
        return func(*args, **(kwargs or {}))

    def count(self, name):
        return sum(found == name for found, _ in self.found)


class Script:
    """A channel over which these actions come, each once, with a message."""

    rank, size, device = 3, 8, CPU

    def __init__(self, actions):
        self._actions = iter([(Action.BEGIN, None), *actions, (Action.STOP, None)])
        self.alive = 0
        """Most broadcast tensors of more than a few numbers that were alive when another came."""
        self._broadcast: list[weakref.ref[Tensor]] = []

    def receive(self):
        action, message = next(self._actions)
        return action, [], message

    def reply(self, message):
        pass

    def broadcast(self, tensor):
        self.alive = max(self.alive, sum(each() is not None for each in self._broadcast))
        tensor.zero_()
        if tensor.numel() >= WIDTH:
            self._broadcast.append(weakref.ref(tensor))


def test_a_rank_that_helps_to_gather_holds_one_full_tensor_at_a_time_and_returns_nothing(schema, monkeypatch):
    from torch.distributed.tensor import DTensor

    gathered: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    full_tensor = DTensor.full_tensor

    def watched(self, **options):
        alive.append(sum(each() is not None for each in gathered))
        full = full_tensor(self, **options)
        gathered.append(weakref.ref(full))
        return full

    trainer, replicas = make_trainer(schema, optimizer={"name": "adamw", "lr": 0.01})
    step(trainer, schema)
    monkeypatch.setattr(DTensor, "full_tensor", watched)
    channel: Any = Script([(Action.SNAPSHOT, None), (Action.MOMENTS, None)])
    follow(channel, lambda: (trainer, replicas))
    assert len(alive) == 3 * 2 * (LAYERS + 1), "weights, and two moments of each"
    assert max(alive) == 0, "full tensors are alive when the next is gathered"
    assert all(each() is None for each in gathered)


def test_a_checkpoint_is_restored_tensor_by_tensor(schema):
    from torch.distributed.tensor import DTensor

    of, replicas = make_trainer(schema, optimizer={"name": "adamw", "lr": 0.01})
    step(of, schema)
    tensors = {"model": of.model.state_dict(), "optimizer": of.tensors()["optimizer"]}
    forms = [
        [part, name, str(value.dtype).removeprefix("torch."), list(value.shape)]
        for part, named in tensors.items()
        for name, value in named.items()
    ]
    message = json_to_bytes({"tensors": forms, "state": of.state()})
    channel: Any = Script([(Action.RESTORE, message)])
    follow(channel, lambda: (of, replicas))
    assert channel.alive == 0, "full tensors are alive when the next comes"
    weights, moments = of.model.state_dict().values(), of.update.optimizer.state.values()
    for value, of_weight in zip(weights, moments, strict=True):
        assert isinstance(value, DTensor)
        assert value.to_local().numel() <= -(-value.shape[0] // 8) * value[0].numel()
        assert of_weight["exp_avg"].shape == value.to_local().shape
        assert not value.to_local().any(), "it is not what came"
        assert not of_weight["exp_avg"].any(), "it is not what came"


def bytes_of_weights(precision):
    """Return the bytes of copies of weights that are alive between a forward and its backward pass under bf16."""
    from anabranch.learner.parallel.fsdp import ShardedWeights

    model = make_model()
    ShardedWeights(ALL_DATA, precision).split(model, not_run)
    saved: list[Tensor] = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(torch.rand(5, 3))
        output.float().sum()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in saved
        if set(each.shape) == {WIDTH}
    }
    return sum(storages.values())


def test_no_copies_of_weights_in_half_precision_are_kept_for_the_backward_pass():
    assert bytes_of_weights("bf16") == 0
    assert bytes_of_weights("fp32") >= (LAYERS - 1) * WIDTH * WIDTH * 2, "the test does not see what autocast keeps"


def test_weights_are_gathered_in_half_precision_and_gradients_averaged_in_full(schema):
    trainer, _ = make_trainer(schema, precision="bf16")
    with Exchanged() as exchanged:
        step(trainer, schema)
    assert {each for each in exchanged.found if each[0].endswith("base_")} == {
        ("_allgather_base_", torch.bfloat16),
        ("_reduce_scatter_base_", torch.float32),
    }
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float32}


def test_normalizing_modules_run_with_weights_in_full_precision():
    from anabranch.learner.parallel.fsdp import ShardedWeights

    model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 8), nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3)))
    ShardedWeights(ALL_DATA, "bf16").split(model, not_run)
    seen: list[torch.dtype] = []
    for module in (model[0], model[2][0], model[2][1]):
        module.register_forward_hook(lambda module, *_: seen.append(module.weight.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.rand(5, 3)).float().sum().backward()
    assert seen == [torch.float32, torch.float32, torch.bfloat16]


def test_gradients_are_exchanged_once_a_step_and_the_number_of_passes_is_not(schema):
    trainer, replicas = make_trainer(schema, micro_batch_size=3)
    step(trainer, schema)
    replicas.forwards = 4
    with Exchanged() as exchanged:
        step(trainer, schema)
    assert exchanged.count("_reduce_scatter_base_") == LAYERS + 1
    assert exchanged.count("_allgather_base_") == 4 * (2 * LAYERS + 1) + 4
    assert exchanged.count("allreduce_") == 3, "weights of events, norm, numbers"


def test_gradients_are_not_kept_whole_where_they_would_take_much_memory(schema, monkeypatch):
    monkeypatch.setattr("anabranch.learner.parallel.fsdp._memory", lambda _device: 100_000)
    trainer, _ = make_trainer(schema, micro_batch_size=3)
    with Exchanged() as exchanged:
        step(trainer, schema)
    assert exchanged.count("_reduce_scatter_base_") == 4 * (LAYERS + 1)
