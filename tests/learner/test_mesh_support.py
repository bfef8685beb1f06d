"""The tables of what goes with ranks and with each dimension of a mesh: each cell trains, or is refused."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from anabranch.config.loader import examine_config
from anabranch.learner.settings.compatibility import conflicts
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from tests.support.facts import facts_of
from tools.mesh_support import COLUMNS, PAIRS, ROWS, lines, refusal, settings

CELLS = [
    pytest.param(row, column, id=f"{row.name} {column.name}")
    for row in ROWS
    for column in COLUMNS
    if settings(row, column) is not None
]
ELSEWHERE = {"`compile`", '`precision = "fp16"`', '`precision = "fp8"`', "`[model.adapter]`", "`[model.teacher]`"}
"""Rows that other tests train with: they take a minute, a CUDA device, or another model."""
REFUSED = [cell for cell in CELLS if refusal(*cell.values) is not None]
BASE = """
    name = "base"
    [schema]
    features = {x = {dtype = "float32"}}
    key = {name = "id"}
    label = {name = "y", classes = 2}
    [model]
    factory = "my_model:build"
    stages = ["1"]
"""


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


@pytest.mark.parametrize(("row", "column"), REFUSED)
def test_what_is_refused_is_refused_by_the_configuration_with_its_sentence(row, column, tmp_path):
    sections = {
        "learner": settings(row, column),
        "replay": dict(row.replay),
        "stream": {"topics": ["events"], **row.stream},
        **{f"model.{name}": section for name, section in row.model.items()},
    }
    config = tmp_path / "pipeline.toml"
    config.write_text(
        BASE
        + "".join(
            f"[{name}]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in section.items())
            for name, section in sections.items()
        )
    )
    sentences = [fault.sentence for fault in examine_config(config, {}).faults]
    assert any(str(refusal(row, column)) in each for each in sentences), sentences


def scenario(row, column):
    """Two steps of a model that can be divided along each dimension."""
    learner = settings(row, column) or {}
    strategy = LearnerSettings.model_validate(learner).strategy.name
    kind, mesh = STRATEGIES[strategy], learner["mesh"]
    embeds = kind.kind.embeds or bool(row.replay)
    parallel = {"0": "column", "2": "row", "[46]": "expert"}
    common = {"strategy": strategy, "steps": [[8, *[4] * len(kind().samples(4))]] * 2, "width": 8, "double": False}
    common |= {
        "embeds": embeds,
        "embedding": "3",
        "parallel": parallel,
        "settings": {k: v for k, v in learner.items() if k != "strategy"},
    }
    return common | ({"stages": ["3"]} if "pipeline" in mesh else {}) | ({"experts": 4} if "expert" in mesh else {})


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_what_is_not_refused_trains(play, column):
    cells = [cell.values for cell in CELLS if cell.values[1] is column and cell.values[0].name not in ELSEWHERE]
    able = [row for row, _ in cells if refusal(row, column) is None]
    assert len(able) > 6
    for size, rows in ((2, [row for row in able if row not in PAIRS]), (4, [row for row in able if row in PAIRS])):
        if not rows:
            continue
        for row, found in zip(rows, play(size, [scenario(row, column) for row in rows], 300), strict=True):
            assert found["loss"].isfinite(), row.name


def test_the_table_of_the_page_is_that_of_the_rules():
    page = (Path(__file__).parents[2] / "docs/explanation/parallelism.md").read_text()
    assert "\n".join(lines()) in page, "write it again: python -m tools.mesh_support"


AXES: dict[str, list[Any]] = {
    "strategy": list(STRATEGIES),
    "precision": ["fp32", "bf16"],
    "micro_batch_size": [None, 4],
    "sync_every": [1, 3],
    "comm_hook": ["none", "fp16", "powersgd", "int8", "topk"],
    "sharding": ["none", "zero1"],
}


def cells():
    """Return every combination that the table does not refuse."""
    every = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    return [cell for cell in every if not list(conflicts(facts_of(learner=settings_of(cell))))]


def settings_of(cell):
    return LearnerSettings.model_validate({**cell, **few(cell), "replicas": 2})


def few(cell):
    """Return the fraction of top-k for a model of a few numbers, which would send one of them in a step."""
    return {"topk_fraction": 0.5} if cell["comm_hook"] == "topk" else {}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_whatever_ranks_may_do_learns(play):
    """Cells that have every pair of values that is not refused: one in seven, since all take a minute."""
    allowed, chosen = cells(), list[dict[str, Any]]()
    left = set().union(*map(pairs, allowed))
    while left:
        chosen.append(max(allowed, key=lambda cell: len(pairs(cell) & left)))
        left -= pairs(chosen[-1])
    assert len(chosen) < len(allowed) / 5
    assert all({cell[name] for cell in chosen} == set(values) for name, values in AXES.items())
    scenarios = []
    for cell in chosen:
        settings = few(cell) | {name: value for name, value in cell.items() if name != "strategy"}
        optimizer = {"name": "adam", "lr": 0.2}
        steps = [[9, *[6] * len(STRATEGIES[cell["strategy"]]().samples(6))]]
        whole = {"settings": {**settings, "replicas": 2, "optimizer": optimizer}, "steps": steps, "times": 5}
        scenarios.append({**whole, "strategy": cell["strategy"], "separable": True, "double": False})
    for cell, found in zip(chosen, play(2, scenarios, 250), strict=True):
        assert found["loss_new"] < 0.7 * found["begun"], cell


def pairs(cell):
    """Return each pair of values of a cell, with the names of their axes."""
    return set(itertools.combinations(cell.items(), 2))
