"""One of N ranks that learn features: `RANK SIZE FOLDER`; each writes its tensors to `FOLDER/<rank>.safetensors`."""

import sys
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from ingest.config import SchemaSettings
from ingest.events.schema import Schema
from learner.config import LearnerSettings
from learner.distributed.channel import Channel
from learner.distributed.data_parallel import DataParallelGroup
from learner.distributed.follower import follow
from learner.distributed.leader import Leader
from learner.distributed.process_group import RankAssignment, exiting_at_once, join_group
from learner.model.device import choose_precision
from learner.model.features.learned import attach_features, features_of
from learner.model.task import Classification
from learner.strategies.registry import STRATEGIES
from learner.training.trainer import Trainer

FEATURES = {
    "x": {"dtype": "float32", "shape": [2], "scale": "standard", "missing": "mean"},
    "r": {"dtype": "float32", "scale": "robust"},
    "who": {"dtype": "int64", "encode": {"learn": 6, "min_count": 2}},
}
SCHEMA = Schema(SchemaSettings.model_validate({"features": FEATURES, "label": {"name": "y", "classes": 2}}))
CPU = torch.device("cpu")
STEPS = 12


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(6, 2), nn.Linear(5, 2)

    def forward(self, x: Tensor, r: Tensor, who: Tensor) -> Tensor:
        output: Tensor = self.linear(torch.cat([x, r[:, None], self.table(who)], dim=1))
        return output


def trainer(kind: type[Trainer], *given: object, **ranks: object) -> Trainer:
    torch.manual_seed(0)
    model = Model()
    attach_features(model, SCHEMA, CPU)
    settings = LearnerSettings.model_validate({"optimizer": {"name": "adam", "lr": 0.01}, "precision": "fp32"})
    named = {"model": model, "task": Classification(), "strategy": STRATEGIES["none"](), "schema": SCHEMA}
    return kind(*given, **named, settings=settings, device=CPU, precision=choose_precision("fp32", CPU), **ranks)  # type: ignore[arg-type]


def play(leader: Trainer) -> None:
    """Step on batches of several sizes, and restore what was captured on the way."""
    generator = np.random.default_rng(0)
    learned = features_of(leader.model)
    assert learned is not None
    learned.secret = 7
    for step in range(STEPS):
        rows = 9 + step % 3
        x = generator.normal(100, 5, (rows, 2)).astype(np.float32)
        x[generator.random(x.shape) < 0.2] = np.nan
        columns = {
            "feature.x": x,
            "feature.r": generator.lognormal(0, 1, rows).astype(np.float32),
            "feature.who": step // 4 + generator.integers(0, 4, rows),
            "label": generator.integers(0, 2, rows),
            "weight": np.ones(rows, np.float32),
            "time_ms": np.full(rows, step),
            "key_hash": generator.integers(0, 5, rows).astype(np.uint64),
        }
        assert leader.step(leader.examples(columns), columns=columns).finite
        if step == STEPS - 2:
            leader.erase_features(np.arange(2, dtype=np.uint64), seed=5)
        if step == STEPS // 2:
            leader.restore(leader.tensors(), leader.state())


def save(folder: Path, rank: int, its: Trainer) -> None:
    tensors = {name: value.contiguous() for name, value in its.snapshot().items()}
    tensors |= {f"optimizer.{name}": value.contiguous() for name, value in its.optimizer_state().items()}
    safetensors.torch.save_file(tensors, folder / f"{rank}.safetensors")


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    if size == 1:
        alone = trainer(Trainer)
        play(alone)
        save(folder, rank, alone)
        return
    settings = LearnerSettings.model_validate({"device": "cpu", "replicas": size})
    with join_group(RankAssignment(rank, size, folder / "rendezvous"), settings) as device:
        replicas, channel = DataParallelGroup(settings), Channel(device)
        if rank == 0:
            with channel.leading():
                leader = trainer(Leader, channel, replicas)
                play(leader)
                save(folder, rank, leader)
            return
        made = list[Trainer]()

        def make() -> tuple[Trainer, DataParallelGroup]:
            made.append(trainer(Trainer, ranks=replicas))
            return made[0], replicas

        follow(channel, make)
        save(folder, rank, made[0])


if __name__ == "__main__":
    with exiting_at_once():
        main()
