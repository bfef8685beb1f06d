"""One of N ranks that play through what `test_ranks.py` compares: `RANK SIZE FOLDER SCENARIO...`, each as JSON.

Alone it trains as one rank does. What came out is written to `FOLDER/<number of the scenario>.safetensors`.
"""

import json
import random
import sys
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ingest.config import SchemaSettings
from ingest.events.schema import Schema
from ingest.kafka.fake import fake_columns
from learner.config import LearnerSettings
from learner.distributed.channel import Channel
from learner.distributed.data_parallel import DataParallelGroup
from learner.distributed.follower import follow
from learner.distributed.leader import Leader
from learner.distributed.process_group import RankAssignment, exiting_at_once, join_group
from learner.model.device import choose_precision
from learner.model.embedding import Embedding
from learner.model.faulty_events import RaisingEventsError
from learner.model.layers.mixture import MixtureOfExperts
from learner.model.task import Classification
from learner.model.trained_set import base_state, decide_trained_set
from learner.state_dir.checkpoint import Checkpoint, Checkpoints
from learner.strategies.examples import Examples
from learner.training.step_result import StepResult
from learner.training.trainer import Trainer
from tests.support.strategies import extended, small_strategy

SCHEMA = Schema(
    SchemaSettings.model_validate(
        {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": {"name": "y", "classes": 3}}
    )
)
CPU = torch.device("cpu")
BAD = 900.0


def settings_of(scenario: dict[str, Any]) -> LearnerSettings:
    return LearnerSettings.model_validate(
        {"optimizer": {"name": "sgd", "lr": 0.1}, "max_grad_norm": float("inf"), "device": "cpu"}
        | scenario.get("settings", {})
    )


class Noise(nn.Module):
    """Multiplies by a number of Python's and one of numpy's generator."""

    def forward(self, x_BH: Tensor) -> Tensor:
        return x_BH * (1 + random.random()) * (1 + np.random.random())


class Choosy(Classification):
    """Raises in its loss or its score where a label is the one that it refuses."""

    def __init__(self, method: str, refused: int) -> None:
        self._method, self._refused = method, refused

    def loss(self, output_B: Tensor, label_B: Tensor) -> Tensor:
        self._refuse("loss", label_B)
        return super().loss(output_B, label_B)

    def score(self, output_B: Tensor, label_B: Tensor) -> Tensor:
        self._refuse("score", label_B)
        return super().score(output_B, label_B)

    def _refuse(self, method: str, label_B: Tensor) -> None:
        if method == self._method and (label_B == self._refused).any():
            raise ValueError(f"no {self._refused}")


def refuse(_model: nn.Module, given: tuple[Tensor]) -> None:
    if (given[0][:, 0] == BAD).any():
        raise IndexError("index out of range in self")


def refuse_within(model: nn.Sequential) -> None:
    """Make the last module of a model raise when the events that come in are such that it does."""
    bad = False

    def read(_model: nn.Module, given: tuple[Tensor]) -> None:
        nonlocal bad
        bad = bool((given[0][:, 0] == BAD).any())

    def refuse(_module: nn.Module, _given: tuple[Tensor]) -> None:
        if bad:
            raise IndexError("index out of range in self")

    model.register_forward_pre_hook(read)
    model[-1].register_forward_pre_hook(refuse)


class Marked(nn.Linear):
    """Returns the first feature in place of its last output, so that the next stage sees which events are bad."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x)[:, :-1], x[:, :1]], dim=1)


def refuse_in_stage(model: nn.Sequential, kind: str, stage: int) -> None:
    """Make the first module of a stage, of which the second begins at `1`, raise on bad events."""
    marked = Marked(model[0].in_features, model[0].out_features).to(model[0].weight)
    marked.load_state_dict(model[0].state_dict())
    model[0] = marked

    def refuse(_module: nn.Module, given: tuple[Tensor]) -> None:
        if (given[0][:, -1 if stage else 0] == BAD).any():
            raise IndexError("index out of range in self")

    def refuse_gradient(_module: nn.Module, given: tuple[Tensor], output: Tensor) -> None:
        if output.requires_grad and (given[0][:, -1 if stage else 0] == BAD).any():
            output.register_hook(no_gradient)

    if kind == "stage":
        model[stage].register_forward_pre_hook(refuse)
    else:
        model[stage].register_forward_hook(refuse_gradient)


class Narrow:
    """A hook that runs out of memory with more than so many events at once, as often as it is asked to."""

    def __init__(self, most: int) -> None:
        self._most = most

    def __call__(self, _model: nn.Module, given: tuple[Tensor]) -> None:
        if len(given[0]) > self._most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Counter:
    """Counts the messages and exchanges of this process, and those of nothing."""

    NAMES = ("send", "isend", "recv", "scatter", "gather", "broadcast")

    def __init__(self) -> None:
        self.counts = dict.fromkeys((*self.NAMES, "empty"), 0)
        for name in self.NAMES:
            setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name: str, function: Any) -> Any:
        def call(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            self.counts[name] += 1
            self.counts["empty"] += not tensor.numel()
            return function(tensor, *arguments, **options)

        return call


def refuse_gradient(_model: nn.Module, given: tuple[Tensor], output: Tensor) -> None:
    if output.requires_grad and (given[0][:, 0] == BAD).any():
        output.register_hook(no_gradient)


def no_gradient(_gradient: Tensor) -> None:
    raise ValueError("no gradient of this")


def without_reset() -> None:
    """Take the call that resets a sharded module away, which torch has from 2.13 on."""
    from torch.distributed.fsdp import FSDPModule

    del FSDPModule.reset_iter_state


def arguments_of(scenario: dict[str, Any], rank: int = 0, device: torch.device = CPU) -> dict[str, Any]:
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
    return {
        "model": model,
        "task": Choosy(scenario.get("raises", ""), scenario.get("refused", 2)),
        "strategy": strategy,
        "schema": SCHEMA,
        "settings": settings,
        "device": device,
        "precision": choose_precision(settings.precision, device),
        "embedding": Embedding(model, scenario.get("embedding", "1"))
        if scenario.get("embeds", "stages" not in scenario)
        else None,
    }


def seed(rank: int) -> None:
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)


def examples(trainer: Trainer, begin: int, n: int, double: bool) -> Examples:
    columns = fake_columns(SCHEMA, range(begin, begin + n), label=[0, 1, 2])
    columns["weight"][::3] = 2.5
    found = trainer.examples(columns)
    if not double:
        return found
    return Examples({"x": found.features["x"].double()}, found.label_B, found.weight_B.double())


def seen(trainer: Trainer, begin: int, n: int, double: bool) -> Examples:
    """Return old events, with what the model said of them where that is kept, of one of them nothing."""
    found = examples(trainer, begin, n, double)
    if not trainer.strategy.keeps_output:
        return found
    output_B = torch.arange(3.0 * n).reshape(n, 3).sin()
    output_B[0] = torch.nan
    return replace(found, output_B=output_B.to(found.label_B.device))


def bent(examples: Examples, times: int = 1) -> Examples:
    """Return events whose features vary, and whose weights fall, so many times one after the other."""
    x, weight_B = examples.features["x"].sin(), torch.linspace(9.0, 1.0, len(examples)).to(examples.weight_B)
    return Examples({"x": x.repeat(times, 1)}, examples.label_B.repeat(times), weight_B.repeat(times))


def separable(examples: Examples) -> Examples:
    """Return events whose features say what their label is."""
    return replace(examples, features={"x": nn.functional.one_hot(examples.label_B, 3).to(examples.features["x"])})


def spoiled(examples: Examples, every: int) -> Examples:
    """Return events of which some, from the second on, are such that the model raises on them."""
    x = examples.features["x"].clone()
    x[1::every, 0] = BAD
    return replace(examples, features={"x": x})


def step_without(trainer: Trainer, given: list[Examples], raised: list[int], messages: list[str]) -> StepResult | None:
    """Step without the events on which the model raises, and record which and why; None: no new one is left."""
    while len(given[0]):
        try:
            return trainer.step(given[0], given[1:])
        except RaisingEventsError as exc:
            raised += exc.indices
            messages.append(exc.message)
            stays = torch.ones(sum(map(len, given)), dtype=torch.bool)
            stays[list(exc.indices)] = False
        left = [each[part] for each, part in zip(given, torch.split(stays, [*map(len, given)]), strict=True)]
        given = left if sum(map(len, left[1:])) else left[:1]
    return None


def play(trainer: Trainer, scenario: dict[str, Any]) -> dict[str, torch.Tensor]:
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
        result = step_without(trainer, [first, *(old if trainer.strategy.replays else [])], raised, messages)
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
            if value is not None and (name != "output_B" or trainer.strategy.keeps_output):
                found[name] = value.float().contiguous()
        if step == scenario.get("drift_at"):
            trainer.scale_learning_rate(0.5)
            trainer.on_drift()
        if step == scenario.get("checkpoint_at"):
            trainer.restore(trainer.tensors(), trainer.state())
        if scenario.get("sniff"):
            found |= {f"sniff.{name}": torch.tensor(seconds) for name, seconds in trainer.sniff().items()}
        if step + 1 == scenario.get("write_at"):
            write(trainer, step + 1, scenario["write_to"])
    tensors, state = trainer.tensors(), trainer.state()
    trainer.restore(tensors, state)
    restored |= {f"optimizer.{name}": value for name, value in tensors["optimizer"].items()}
    if scenario.get("reports_drift"):
        found |= {f"strategy.{name}": value.contiguous() for name, value in tensors["strategy"].items()}
    if scenario.get("counts_bytes"):
        found["sent_bytes"] = torch.tensor(-1 if trainer.sent_bytes is None else trainer.sent_bytes)
    if scenario.get("frozen") and scenario["settings"].get("sharding") != "fsdp":
        found |= {f"base.{name}": value.clone() for name, value in base_state(trainer.model).items()}
    if "raises" in scenario:
        found["raised"] = torch.tensor(raised)
    if scenario.get("reports_why"):
        found["why"] = torch.tensor(list("\n".join(messages).encode()), dtype=torch.uint8)
    return found | restored | {f"model.{name}": value.contiguous() for name, value in trainer.snapshot().items()}


def checkpoints_at(path: str) -> Checkpoints:
    return Checkpoints(Path(path), "schema", 1)


def write(trainer: Trainer, step: int, path: str) -> None:
    """Write a checkpoint of what is the trainer's."""
    tensors, (tensors["rng"], values) = trainer.tensors(), trainer.generators()
    checkpoints_at(path).write(1, Checkpoint(step, tensors, {"trainer": trainer.state(), "rng": values}), 0.0)


def go_on(trainer: Trainer, path: str) -> tuple[dict[str, Tensor], int]:
    """Restore a checkpoint, and return the generators of all ranks after that, and the step."""
    found = checkpoints_at(path).newest()
    assert found is not None
    _, checkpoint = found
    trainer.restore(checkpoint.tensors, checkpoint.state["trainer"])
    trainer.restore_generators(checkpoint.tensors["rng"], checkpoint.state["rng"])
    return {f"rng.{name}": value for name, value in trainer.generators()[0].items()}, checkpoint.step


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    scenarios = [json.loads(text) for text in sys.argv[4:]]
    torch.set_num_threads(1)
    if size == 1:
        for number, scenario in enumerate(scenarios):
            save(folder, number, play(Trainer(**arguments_of(scenario)), scenario))
        return
    with join_group(RankAssignment(rank, size, folder / "rendezvous"), settings_of(scenarios[0])) as device:
        for number, scenario in enumerate(scenarios):
            if scenario.get("without_reset"):
                without_reset()
            replicas = DataParallelGroup(settings_of(scenario), parallel=scenario.get("parallel"))
            channel, arguments = Channel(device), arguments_of(scenario, replicas.mesh.row_group(), device)
            dtype = next(arguments["model"].parameters()).dtype
            stages, features = scenario.get("stages", []), {"x": torch.zeros(2, 3, dtype=dtype, device=device)}
            replicas.divide(arguments["model"], stages, features, arguments["precision"])
            if rank == 0:
                with channel.leading():
                    begin = time.monotonic()
                    leader = Leader(channel, replicas, **arguments)
                    counter = Counter() if scenario.get("counts") else None
                    found = play(leader, scenario) | {"seconds": torch.tensor(time.monotonic() - begin)}
                    if counter is not None:
                        found |= {f"count.{name}": torch.tensor(n) for name, n in counter.counts.items()}
                    save(folder, number, found)
            else:
                follow(channel, lambda given=arguments, its=replicas: (Trainer(**given, ranks=its), its))


def save(folder: Path, number: int, found: dict[str, torch.Tensor]) -> None:
    safetensors.torch.save_file(found, folder / f"{number}.safetensors")


if __name__ == "__main__":
    with exiting_at_once():
        main()
