"""One of two ranks that split models: `RANK FOLDER`; `FOLDER/RANK.json` has what each is refused with, or None.

Then the model raises between its column and its row module: on both ranks, and at last on rank 1 alone. The last two of
the list are the error of that step, and how the last one ended.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.errors import is_of_a_lost_rank
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.examples import Examples
from anabranch.learner.model.faulty_events import RaisingEventsError
from anabranch.learner.model.task import Classification
from anabranch.learner.parallel import fsdp
from anabranch.learner.parallel.data_parallel import DataParallelGroup
from anabranch.learner.parallel.process_group import RankAssignment, exiting_at_once, join_group
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer

SETTINGS = LearnerSettings.model_validate({"device": "cpu", "replicas": 2, "mesh": {"tensor": 2}})
SCHEMA = Schema(
    SchemaSettings.model_validate(
        {"features": {"x": {"dtype": "float32", "shape": [3]}}, "label": {"name": "y", "classes": 3}}
    )
)


class ZeroHead(nn.Module):
    """Layers below a head of zeros, after which nothing of them shows in the output."""

    def __init__(self, between):
        super().__init__()
        self.up, self.between, self.down, self.head = nn.Linear(3, 16), between, nn.Linear(16, 8), nn.Linear(8, 3)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        nn.init.zeros_(self.up.bias)

    def forward(self, x):
        output: Tensor = self.head(self.down(self.between(self.up(x))))
        return output


def refusal(between):
    torch.manual_seed(0)
    model, x = ZeroHead(between), torch.randn(5, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights = DataParallelGroup(SETTINGS, parallel={"up": "column", "down": "row"}).weights
    try:
        weights.split(model, lambda: model(x))
    except SettingsError as exc:
        return str(exc)
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())
    return None


class Limited(nn.Module):
    """Raises in training where a number is too large; each rank has other numbers."""

    most = float("inf")

    def forward(self, x):
        if float(x.detach().abs().max()) > self.most:
            raise IndexError("a number is too large")
        return x


def raised(rank):
    """Return how steps end in which both ranks raise, and one of them."""
    torch.manual_seed(0)
    between = Limited()
    model = nn.Sequential(nn.Linear(3, 16), between, nn.Linear(16, 3))
    group = DataParallelGroup(SETTINGS, parallel={"0": "column", "2": "row"})
    parts = (model, Classification(), STRATEGIES["none"](), SCHEMA, SETTINGS, torch.device("cpu"))
    trainer = Trainer(TrainingSetup(*parts, choose_precision(SETTINGS.precision, torch.device("cpu"))), ranks=group)
    x = torch.randn(5, 3)
    x[2] *= 1e6
    new, ends = Examples({"x": x}, torch.zeros(5, dtype=torch.int64), torch.ones(5)), []
    for most, patience in ((1e4, 600), (1e4 if rank else float("inf"), 0.1)):
        between.most, fsdp.PATIENCE = most, timedelta(seconds=patience)
        try:
            trainer.step(new)
        except RaisingEventsError as exc:
            ends.append(f"{list(exc.indices)} {exc.message}")
        except Exception as exc:  # noqa: BLE001 any may end it
            ends.append("lost" if isinstance(exc, RuntimeError) and is_of_a_lost_rank(exc) else str(exc))
    return ends


def main():
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    with join_group(RankAssignment(rank, 2, folder / "rendezvous"), SETTINGS):
        found = [refusal(between) for between in (nn.Tanh(), nn.PReLU(), nn.Softmax(-1))]
        (folder / f"{rank}.json").write_text(json.dumps([*found, *raised(rank)]))
        sys.exit()  # a group whose ranks have failed cannot be left


if __name__ == "__main__":
    with exiting_at_once():
        main()
