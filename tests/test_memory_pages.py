"""The numbers of docs/deploy/gpu.md and of docs/explanation/parallelism.md are those that the code computes."""

import re
from pathlib import Path
from typing import Any

from anabranch.learner.device.memory_ledger import learner_ledger, ledger, serving_ledger
from anabranch.learner.settings.learner import CONTEXTS_MEMORY, DeviceSharingSettings, LearnerSettings, MeshSettings

PAGE = (Path(__file__).parent.parent / "docs" / "deploy" / "gpu.md").read_text(encoding="utf-8")
SHARING = DeviceSharingSettings()


def gigabytes(size):
    return f"{size / 1e9:.1f} GB"


def table(first):
    """Return the rows of the table whose first heading this is, by their first cell."""
    rows = re.search(rf"^\| {first} \|.*\n\| ---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert rows is not None
    cells = [[cell.strip(" `") for cell in line.strip("|\n").split(" |")] for line in rows[1].splitlines()]
    return {row[0]: row[1:] for row in cells}


def test_the_worked_example_is_what_doctor_computes():
    written = re.search(r"<!-- ledger: (\d+) parameters, (\d+) bytes of replay, (\d+) bytes -->", PAGE)
    assert written is not None
    parameters, replay, total = map(int, written.groups())
    ledgers = {
        "learner": learner_ledger(parameters, LearnerSettings(), replay),
        "serving": serving_ledger(parameters),
    }
    left = {}
    for who, items in ledgers.items():
        shown = {name: cells[0] for name, cells in table(who).items()}
        assert shown.pop("sum") == gigabytes(sum(items.values()))
        assert shown == {name: gigabytes(size) for name, size in items.items() if size}
        fraction = SHARING.learner_memory if who == "learner" else SHARING.server_memory(1)
        assert fraction is not None
        left[who] = [gigabytes(fraction * total), gigabytes(fraction * total - sum(items.values()) + items["contexts"])]
    parts = re.search(
        r"^\| process \| part of (\d+) GB \|.*\n\| ---.*\n\| learner \| (.*) \|\n\| serving \| (.*) \|", PAGE, re.M
    )
    assert parts is not None
    assert int(parts[1]) == total // 10**9
    assert {who: parts[index].split(" | ") for index, who in ((2, "learner"), (3, "serving"))} == left


def test_the_parts_of_the_memory_are_those_of_the_settings():
    parts = table("process")
    assert parts["each process of the learner"][0] == f"{SHARING.learner_memory:g}"
    assert parts["CUDA's contexts and libraries"][0] == f"{CONTEXTS_MEMORY:g}"
    assert parts["all processes of serving together"][0] == f"what is left, less {CONTEXTS_MEMORY:g}"
    assert DeviceSharingSettings(policy="exclusive").learner_memory is None


PARALLELISM = (Path(__file__).parent.parent / "docs" / "explanation" / "parallelism.md").read_text(encoding="utf-8")
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
    written = re.search(r"<!-- ledger: (\d+) parameters, (\d+) ranks -->", PARALLELISM)
    assert written is not None
    parameters, ranks = map(int, written.groups())
    rows = [row(name, parameters, ranks) for name in MESHES]
    assert "\n".join(["| --- | --- | --- | --- | --- | --- | --- |", *rows]) in PARALLELISM, "\n".join(rows)
    scorer = ledger(parameters, precision="bf16", parts=8)["scorer"]
    assert f"Rank 0 needs {scorer / 1e9:.1f} GB more" in PARALLELISM
