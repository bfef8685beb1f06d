"""The ledger of docs/explanation/parallelism.md is that of the code."""

import re
from pathlib import Path
from typing import Any

from anabranch.learner.device.memory_ledger import ledger
from anabranch.learner.settings.learner import MeshSettings

PAGE = (Path(__file__).parent.parent / "docs" / "explanation" / "parallelism.md").read_text(encoding="utf-8")
COLUMNS = ("weights", "gradients", "buckets", "optimizer", "autocast")
MESHES: dict[str, dict[str, Any]] = {
    "`{data = 8}`": {"data": 8},
    '`{data = 8}`, `sharding = "fsdp"`': {"data": 8, "sharding": "fsdp"},
    "`{tensor = 8}`": {"tensor": 8},
    "`{pipeline = 8}`": {"pipeline": 8},
    "`{data = 2, tensor = 2, pipeline = 2}`": {"data": 2, "tensor": 2, "pipeline": 2},
}


def row(name, parameters, ranks):
    of_mesh = dict(MESHES[name])
    sharding = of_mesh.pop("sharding", "none")
    mesh = MeshSettings(**of_mesh)
    assert mesh.ranks == ranks
    parts = mesh.tensor * mesh.pipeline
    sizes = ledger(parameters, precision="bf16", sharding=sharding, ranks=mesh.data, parts=parts, leads=False)
    shown = [sizes[column] for column in COLUMNS]
    return f"| {name} | {' | '.join(f'{size / 1e9:.1f} GB' for size in (*shown, sum(shown)))} |"


def test_the_worked_example_is_what_the_ledger_says():
    written = re.search(r"<!-- ledger: (\d+) parameters, (\d+) ranks -->", PAGE)
    assert written is not None
    parameters, ranks = map(int, written.groups())
    rows = [row(name, parameters, ranks) for name in MESHES]
    assert "\n".join(["| --- | --- | --- | --- | --- | --- | --- |", *rows]) in PAGE, "\n".join(rows)
    scorer = ledger(parameters, precision="bf16", parts=8)["scorer"]
    assert f"Rank 0 needs {scorer / 1e9:.1f} GB more" in PAGE
