"""One of two ranks that split models: `RANK FOLDER`; `FOLDER/RANK.json` has what each is refused with, or None."""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from anabranch.core.errors import SettingsError
from learner.config import LearnerSettings
from learner.distributed.data_parallel import DataParallelGroup
from learner.distributed.process_group import RankAssignment, exiting_at_once, join_group

SETTINGS = LearnerSettings.model_validate({"device": "cpu", "replicas": 2, "mesh": {"tensor": 2}})


class ZeroHead(nn.Module):
    """Layers below a head of zeros, after which nothing of them shows in the output."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.up, self.between, self.down, self.head = nn.Linear(3, 16), between, nn.Linear(16, 8), nn.Linear(8, 3)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.down(self.between(self.up(x))))
        return output


def refusal(between: nn.Module) -> str | None:
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


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    with join_group(RankAssignment(rank, 2, folder / "rendezvous"), SETTINGS):
        found = [refusal(between) for between in (nn.Tanh(), nn.PReLU(), nn.Softmax(-1))]
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    with exiting_at_once():
        main()
