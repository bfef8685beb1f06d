"""One of N ranks that learn features: `RANK SIZE FOLDER`; each writes its tensors to `FOLDER/<rank>.safetensors`."""

import sys
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.features.learned import FeatureLearning, features_of
from anabranch.learner.model.task import Classification
from anabranch.learner.parallel.channel import Channel
from anabranch.learner.parallel.data_parallel import DataParallelGroup
from anabranch.learner.parallel.follower import follow
from anabranch.learner.parallel.leader import Leader
from anabranch.learner.parallel.process_group import RankAssignment, exiting_at_once, join_group
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer

FEATURES = {
    "x": {"dtype": "float32", "shape": [2], "scale": "standard", "missing": "mean"},
    "r": {"dtype": "float32", "scale": "robust"},
    "who": {"dtype": "int64", "encode": {"learn": 6, "min_count": 2}},
}
SCHEMA = Schema(SchemaSettings.model_validate({"features": FEATURES, "label": {"name": "y", "classes": 2}}))
CPU = torch.device("cpu")
STEPS = 12


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(6, 2), nn.Linear(5, 2)

    def forward(self, x, r, who):
        output: Tensor = self.linear(torch.cat([x, r[:, None], self.table(who)], dim=1))
        return output


def trainer(**ranks):
    torch.manual_seed(0)
    model = Model()
    FeatureLearning().convert(model, ModelContext(CPU, SCHEMA))
    settings = LearnerSettings.model_validate({"optimizer": {"name": "adam", "lr": 0.01}, "precision": "fp32"})
    precision = choose_precision("fp32", CPU)
    setup = TrainingSetup(model, Classification(), STRATEGIES["none"](), SCHEMA, settings, CPU, precision)
    return Trainer(setup, **ranks)


def play(leader):
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
            leader.features.erase(np.arange(2, dtype=np.uint64), seed=5)
        if step == STEPS // 2:
            leader.restore(leader.tensors(), leader.state())


def save(folder, rank, its):
    tensors = {name: value.contiguous() for name, value in its.snapshot().items()}
    tensors |= {f"optimizer.{name}": value.contiguous() for name, value in its.tensors()["optimizer"].items()}
    safetensors.torch.save_file(tensors, folder / f"{rank}.safetensors")


def main():
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    if size == 1:
        alone = trainer()
        play(alone)
        save(folder, rank, alone)
        return
    settings = LearnerSettings.model_validate({"device": "cpu", "replicas": size})
    with join_group(RankAssignment(rank, size, folder / "rendezvous"), settings) as device:
        replicas, channel = DataParallelGroup(settings), Channel(device)
        if rank == 0:
            with channel.leading():
                leader = trainer(ranks=replicas, wrappers=[Leader(channel, replicas)])
                play(leader)
                save(folder, rank, leader)
            return
        made = list[Trainer]()

        def make():
            made.append(trainer(ranks=replicas))
            return made[0], replicas

        follow(channel, make)
        save(folder, rank, made[0])


if __name__ == "__main__":
    with exiting_at_once():
        main()
