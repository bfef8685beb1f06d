"""One of N ranks that play through what `test_ranks.py` compares: `RANK SIZE FOLDER SCENARIO...`, each as JSON.

Alone it trains as one rank does. What came out is written to `FOLDER/<number of the scenario>.safetensors`.
"""

import json
import random
import sys
import time
from copy import deepcopy
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints
from anabranch.learner.extensions.search import trainers
from anabranch.learner.extensions.search.extension import ChallengerSearch
from anabranch.learner.extensions.search.trainers import copy_trainer
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.embedding import Embedding
from anabranch.learner.model.examples import Examples
from anabranch.learner.model.faulty_events import RaisingEventsError
from anabranch.learner.model.mixture import MixtureOfExperts
from anabranch.learner.model.task import Classification
from anabranch.learner.model.trained_set import base_state, decide_trained_set, trained_state
from anabranch.learner.parallel.channel import Channel
from anabranch.learner.parallel.data_parallel import DataParallelGroup, FurtherModels
from anabranch.learner.parallel.follower import follow
from anabranch.learner.parallel.leader import Leader
from anabranch.learner.parallel.process_group import RankAssignment, exiting_at_once, join_group
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.search import LR, SearchSettings
from anabranch.learner.state_dir import search_control
from anabranch.learner.state_dir.search_control import write_control
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.testing.strategies import extended
from tests.support.strategies import small_strategy

SCHEMA = Schema(
    SchemaSettings.model_validate(
        {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": {"name": "y", "classes": 3}}
    )
)
CPU = torch.device("cpu")
BAD = 900.0


def settings_of(scenario):
    return LearnerSettings.model_validate(
        {"optimizer": {"name": "sgd", "lr": 0.1}, "max_grad_norm": float("inf"), "device": "cpu"}
        | scenario.get("settings", {})
    )


class Noise(nn.Module):
    """Multiplies by a number of Python's and one of numpy's generator."""

    def forward(self, x_BH):
        return x_BH * (1 + random.random()) * (1 + np.random.random())


class Choosy(Classification):
    """Raises in its loss or its score where a label is the one that it refuses."""

    def __init__(self, method, refused):
        self._method, self._refused = method, refused

    def loss(self, output_B, label_B):
        self._refuse("loss", label_B)
        return super().loss(output_B, label_B)

    def score(self, output_B, label_B):
        self._refuse("score", label_B)
        return super().score(output_B, label_B)

    def _refuse(self, method, label_B):
        if method == self._method and (label_B == self._refused).any():
            raise ValueError(f"no {self._refused}")


def refuse(_model, given):
    if (given[0][:, 0] == BAD).any():
        raise IndexError("index out of range in self")


def refuse_within(model):
    """Make the last module of a model raise when the events that come in are such that it does."""
    bad = False

    def read(_model, given):
        nonlocal bad
        bad = bool((given[0][:, 0] == BAD).any())

    def refuse(_module, _given):
        if bad:
            raise IndexError("index out of range in self")

    model.register_forward_pre_hook(read)
    model[-1].register_forward_pre_hook(refuse)


class Marked(nn.Linear):
    """Returns the first feature in place of its last output, so that the next stage sees which events are bad."""

    def forward(self, x):
        return torch.cat([super().forward(x)[:, :-1], x[:, :1]], dim=1)


def refuse_in_stage(model, kind, stage):
    """Make the first module of a stage, of which the second begins at `1`, raise on bad events."""
    marked = Marked(model[0].in_features, model[0].out_features).to(model[0].weight)
    marked.load_state_dict(model[0].state_dict())
    model[0] = marked

    def refuse(_module, given):
        if (given[0][:, -1 if stage else 0] == BAD).any():
            raise IndexError("index out of range in self")

    def refuse_gradient(_module, given, output):
        if output.requires_grad and (given[0][:, -1 if stage else 0] == BAD).any():
            output.register_hook(no_gradient)

    if kind == "stage":
        model[stage].register_forward_pre_hook(refuse)
    else:
        model[stage].register_forward_hook(refuse_gradient)


class Narrow:
    """A hook that runs out of memory with more than so many events at once, as often as it is asked to."""

    def __init__(self, most):
        self._most = most

    def __call__(self, _model, given):
        if len(given[0]) > self._most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Counter:
    """Counts the messages and exchanges of this process, and those of nothing."""

    NAMES = ("send", "isend", "recv", "scatter", "gather", "broadcast")

    def __init__(self):
        self.counts = dict.fromkeys((*self.NAMES, "empty"), 0)
        for name in self.NAMES:
            setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name, function):
        def call(tensor, *arguments, **options):
            self.counts[name] += 1
            self.counts["empty"] += not tensor.numel()
            return function(tensor, *arguments, **options)

        return call


def refuse_gradient(_model, given, output):
    if output.requires_grad and (given[0][:, 0] == BAD).any():
        output.register_hook(no_gradient)


def no_gradient(_gradient):
    raise ValueError("no gradient of this")


def setup_of(scenario, rank=0, device=CPU):
    torch.manual_seed(0)
    width = scenario.get("width", 8)
    inner = [nn.Linear(width, width), nn.Tanh()] if "width" in scenario else []
    inner += [nn.BatchNorm1d(width)] * scenario.get("norm", False)
    if "experts" in scenario:
        kinds = range(scenario["experts"])
        experts = [nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, width)) for _ in kinds]
        balance = 0.0 if scenario.get("unbalanced") else 1e-3
        inner += [MixtureOfExperts(width, experts, k=2, balance=balance), nn.Tanh()]
        inner += [MixtureOfExperts(width, deepcopy(experts), k=1, balance=balance)]
    inner += [nn.Dropout(0.5), Noise()] * scenario.get("noisy", False)
    model = nn.Sequential(nn.Linear(3, width), nn.Tanh(), *inner, nn.Linear(width, 3))
    if scenario.get("frozen"):
        model[0].requires_grad_(False)
        decide_trained_set(model)
    if scenario.get("double", True):
        model = model.double()
    if scenario.get("double", True) and "stages" not in scenario:
        model.register_forward_pre_hook(lambda _, given: (given[0].double(),))
    settings = settings_of(scenario)
    if scenario.get("raises") == "forward":
        model.register_forward_pre_hook(refuse)
    if scenario.get("raises") == "within":
        refuse_within(model)
    kind, _, stage = scenario.get("raises", "").partition(" ")
    if stage:
        refuse_in_stage(model, kind, int(stage))
    if scenario.get("raises") == "backward":
        model.register_forward_hook(refuse_gradient)
    if rank == scenario.get("narrow_rank"):
        model.register_forward_pre_hook(Narrow(scenario["narrow"]))
    model.to(device)
    strategy = extended(
        small_strategy(scenario.get("strategy", "er"), **scenario.get("arguments", {})), model, SCHEMA, device
    )
    seed(rank)
    embeds = scenario.get("embeds", "stages" not in scenario)
    return TrainingSetup(
        model=model,
        task=Choosy(scenario.get("raises", ""), scenario.get("refused", 2)),
        strategy=strategy,
        schema=SCHEMA,
        settings=settings,
        device=device,
        precision=choose_precision(settings.precision, device),
        embedding=Embedding(model, scenario.get("embedding", "1")) if embeds else None,
    )


def seed(rank):
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)


def examples(trainer, begin, n, double):
    columns = fake_columns(SCHEMA, range(begin, begin + n), label=[0, 1, 2])
    columns["weight"][::3] = 2.5
    found = trainer.examples(columns)
    if not double:
        return found
    return Examples({"x": found.features["x"].double()}, found.label_B, found.weight_B.double())


def seen(trainer, begin, n, double):
    """Return old events, with what the model said of them where that is kept, of one of them nothing."""
    found = examples(trainer, begin, n, double)
    if not trainer.strategy.kind.keeps_output:
        return found
    output_B = torch.arange(3.0 * n).reshape(n, 3).sin()
    output_B[0] = torch.nan
    return replace(found, output_B=output_B.to(found.label_B.device))


def bent(examples, times=1):
    """Return events whose features vary, and whose weights fall, so many times one after the other."""
    x, weight_B = examples.features["x"].sin(), torch.linspace(9.0, 1.0, len(examples)).to(examples.weight_B)
    return Examples({"x": x.repeat(times, 1)}, examples.label_B.repeat(times), weight_B.repeat(times))


def separable(examples):
    """Return events whose features say what their label is."""
    return replace(examples, features={"x": nn.functional.one_hot(examples.label_B, 3).to(examples.features["x"])})


def spoiled(examples, every):
    """Return events of which some, from the second on, are such that the model raises on them."""
    x = examples.features["x"].clone()
    x[1::every, 0] = BAD
    return replace(examples, features={"x": x})


def step_without(trainer, given, raised, messages, *, batch):
    """Step without the events on which the model raises, and record which and why; None: no new one is left.

    `batch`: leave out all new events where the model raises on any, as ranks do that split a model.
    """
    while len(given[0]):
        try:
            return trainer.step(given[0], given[1:])
        except RaisingEventsError as exc:
            indices = range(len(given[0])) if batch else exc.indices
            raised += indices
            messages.append(exc.message)
            stays = torch.ones(sum(map(len, given)), dtype=torch.bool)
            stays[list(indices)] = False
        left = [each[part] for each, part in zip(given, torch.split(stays, [*map(len, given)]), strict=True)]
        given = left if sum(map(len, left[1:])) else left[:1]
    return None


def play(trainer, scenario):
    """Step as the scenario says: [new, old...] a step; return the weights, and what the last step found out."""
    begun: float | None = None
    raised: list[int] = []
    messages: list[str] = []
    found = {}
    restored, first_step = go_on(trainer, scenario["go_on_from"]) if "go_on_from" in scenario else ({}, 0)
    for step in range(first_step, scenario.get("times", 1) * len(scenario["steps"])):
        new, *sampled = scenario["steps"][step % len(scenario["steps"])]
        double = scenario.get("double", True)
        old = [seen(trainer, 50 * index, n, double) for index, n in enumerate(sampled, 1) if n]
        first = examples(trainer, step, new, double)
        if "candidates" in scenario:  # the same for each of so many ranks
            first, old = bent(first), [bent(each, scenario["candidates"]) for each in old]
        if scenario.get("separable"):
            first, old = separable(first), [separable(each) for each in old]
        if scenario.get("raises", "").partition(" ")[0] in ("forward", "within", "backward", "stage"):
            first, old = spoiled(first, 5), [spoiled(each, 7) for each in old]
        spoilt = step == scenario.get("spoilt_at")
        if spoilt:
            first = replace(first, features={"x": first.features["x"] * torch.inf})
        given = [first, *(old if trainer.strategy.kind.replays else [])]
        result = step_without(trainer, given, raised, messages, batch=scenario.get("skips_batches", False))
        if result is None:
            continue
        assert result.finite != spoilt
        if spoilt:
            continue
        begun = result.loss_new if begun is None else begun
        found = {"score": torch.tensor(result.score), "loss": torch.tensor(result.loss)}
        found |= {"loss_new": torch.tensor(result.loss_new), "begun": torch.tensor(begun)}
        for name in ("old_R", "embedding_N", "output_B"):
            value = getattr(result, name)
            if value is not None and (name != "output_B" or trainer.strategy.kind.keeps_output):
                found[name] = value.float().contiguous()
        if step == scenario.get("command_at"):
            write_control(Path(scenario["folder"]), values={LR: 0.05})
        if step == scenario.get("drift_at"):
            trainer.update.schedule.scale = 0.5
            trainer.on_drift()
        if step == scenario.get("checkpoint_at"):
            trainer.restore(trainer.tensors(), trainer.state())
        if scenario.get("time_devices"):
            found |= {
                f"seconds.{name}": torch.tensor(seconds) for name, seconds in trainer.wrappers[0].time_devices().items()
            }
        if step + 1 == scenario.get("write_at"):
            write(trainer, step + 1, scenario["write_to"])
    tensors, state = trainer.tensors(), trainer.state()
    trainer.restore(tensors, state)
    found |= found_by_search(trainer) if trainer.wrappers else {}
    restored |= {f"optimizer.{name}": value for name, value in tensors["optimizer"].items()}
    if scenario.get("reports_drift"):
        found |= {f"strategy.{name}": value.contiguous() for name, value in tensors["strategy"].items()}
    if scenario.get("counts_bytes"):
        found["sent_bytes"] = torch.tensor(-1 if trainer.runner.sent_bytes is None else trainer.runner.sent_bytes)
    if scenario.get("frozen") and scenario["settings"].get("sharding") != "fsdp":
        found |= {f"base.{name}": value.clone() for name, value in base_state(trainer.model).items()}
    if "raises" in scenario:
        found["raised"] = torch.tensor(raised)
    if scenario.get("reports_why"):
        found["why"] = torch.tensor(list("\n".join(messages).encode()), dtype=torch.uint8)
    return found | restored | {f"model.{name}": value.contiguous() for name, value in trainer.snapshot().items()}


class Starved:
    """Has no memory for the second copy of a model."""

    def __init__(self):
        self._whole, self._calls = trainers.copy_trainer, 0

    def __call__(self, source, target):
        self._calls += 1
        if self._calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self._whole(source, target)


def searches(scenario, setup, folder, ranks=None, rank=0):
    """Return the search of a scenario, if it has one; rank 0 follows `search.json`, without waiting."""
    if "search" not in scenario:
        return []
    search_control._EVERY_SECONDS = 0.0
    trainers.copy_trainer = Starved() if rank == scenario.get("starved") else copy_trainer
    settings = SearchSettings.model_validate(scenario["search"])
    strategy = type(setup.strategy)
    return [ChallengerSearch(settings, 0, None if rank else folder, setup, strategy, ranks=ranks)]


def found_by_search(trainer):
    """Return the state of a search, and the weights of its challengers."""
    search = trainer.wrappers[-1]
    if not isinstance(search, ChallengerSearch):
        return {}
    parts = search.tensors()
    tensors = {f"{part}.{name}": value for part, its in parts.items() for name, value in its.items()}
    return tensors | {"search": torch.tensor(list(json.dumps(search.state()).encode()), dtype=torch.uint8)}


def digests(trainer):
    """Return a digest of the weights, the optimizer and the search of each rank."""
    digest = sha256()
    tensors = {**trained_state(trainer.model), **trainer.update.tensors()[0], **found_by_search(trainer)}
    for name in sorted(tensors):
        digest.update(tensors[name].contiguous().numpy().tobytes())
    own = torch.tensor(list(digest.digest()), dtype=torch.uint8)
    of_all = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, own)
    return torch.stack(of_all)


def checkpoints_at(path):
    return Checkpoints(Path(path), "schema", 1)


def write(trainer, step, path):
    """Write a checkpoint of what is the trainer's."""
    tensors, (tensors["rng"], values) = trainer.tensors(), trainer.generators()
    checkpoints_at(path).write(1, Checkpoint(step, tensors, {"trainer": trainer.state(), "rng": values}), 0.0)


def go_on(trainer, path):
    """Restore a checkpoint, and return the generators of all ranks after that, and the step."""
    found = checkpoints_at(path).newest()
    assert found is not None
    _, checkpoint = found
    trainer.restore(checkpoint.tensors, checkpoint.state["trainer"])
    trainer.restore_generators(checkpoint.tensors["rng"], checkpoint.state["rng"])
    return {f"rng.{name}": value for name, value in trainer.generators()[0].items()}, checkpoint.step


def main():
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    scenarios = [json.loads(text) for text in sys.argv[4:]]
    torch.set_num_threads(1)
    if size == 1:
        for number, scenario in enumerate(scenarios):
            setup = setup_of(scenario)
            scenario["folder"] = folder
            save(folder, number, play(Trainer(setup, wrappers=searches(scenario, setup, folder)), scenario))
        return
    with join_group(RankAssignment(rank, size, folder / "rendezvous"), settings_of(scenarios[0])) as device:
        for number, scenario in enumerate(scenarios):
            replicas = DataParallelGroup(settings_of(scenario), parallel=scenario.get("parallel"))
            channel, setup = Channel(device), setup_of(scenario, replicas.mesh.row_group(), device)
            dtype = next(setup.model.parameters()).dtype
            stages, features = scenario.get("stages", []), {"x": torch.zeros(2, 3, dtype=dtype, device=device)}
            replicas.divide(setup.model, stages, features, setup.precision)
            scenario["folder"] = folder
            search = searches(scenario, setup, folder, FurtherModels(replicas), rank)
            if rank == 0:
                with channel.leading():
                    begin = time.monotonic()
                    leader = Trainer(setup, ranks=replicas, wrappers=[Leader(channel, replicas), *search])
                    counter = Counter() if scenario.get("counts") else None
                    found = play(leader, scenario) | {"seconds": torch.tensor(time.monotonic() - begin)}
                    if counter is not None:
                        found |= {f"count.{name}": torch.tensor(n) for name, n in counter.counts.items()}
                save(folder, number, found | ({"digests": digests(leader)} if search else {}))
            else:
                its = []

                def make(given=setup, ranks=replicas, wrappers=search, its=its):
                    its.append(Trainer(given, ranks=ranks, wrappers=wrappers))
                    return its[0], ranks

                follow(channel, make)
                if search:
                    digests(its[0])


def save(folder, number, found):
    safetensors.torch.save_file(found, folder / f"{number}.safetensors")


if __name__ == "__main__":
    with exiting_at_once():
        main()
