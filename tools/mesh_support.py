"""`python -m tools.mesh_support`: the table of what goes with which dimension of a mesh, computed from the rules.

A test trains in each cell that is not refused, and compares the table with `docs/explanation/parallelism.md`.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from anabranch.ingest.settings.stream import StreamSettings
from anabranch.learner.settings.compatibility import conflicts, facts
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.strategies.registry import STRATEGIES

RANKS = 2
_EVENTS = {"features": {"x": {"dtype": "float32"}}, "label": {"name": "y", "classes": 2}}


class Column(NamedTuple):
    """A way in which two ranks train one model."""

    name: str
    learner: Mapping[str, Any]


class Row(NamedTuple):
    """Settings that may not go with each of them."""

    name: str
    learner: Mapping[str, Any] = {}
    replay: Mapping[str, Any] = {}
    stream: Mapping[str, Any] = {}
    model: Mapping[str, Any] = {}


COLUMNS = (
    Column("`data`", {"mesh": {"data": RANKS}}),
    Column('`data`, `sharding = "fsdp"`', {"mesh": {"data": RANKS}, "sharding": "fsdp"}),
    Column("`tensor`", {"mesh": {"tensor": RANKS}}),
    Column("`pipeline`", {"mesh": {"pipeline": RANKS}}),
    Column("`expert`", {"mesh": {"expert": RANKS}}),
)

PAIRS = tuple(Row(f"with `{name}`", {"mesh": {name: RANKS}}) for name in ("data", "tensor", "pipeline", "expert"))
ROWS = (
    *PAIRS,
    *(Row(f'`strategy = "{name}"`', {"strategy": name}) for name in STRATEGIES),
    Row("`micro_batch_size`", {"micro_batch_size": 3}),
    Row("`activation_checkpointing`", {"activation_checkpointing": True}),
    Row("`compile`", {"compile": True}),
    Row("`graphs`", {"graphs": True}),
    Row('`precision = "bf16"`', {"precision": "bf16"}),
    Row('`precision = "fp16"`', {"precision": "fp16"}),
    Row('`precision = "fp8"`', {"precision": "fp8"}),
    Row('`optimizer = "adafactor"`', {"optimizer": {"name": "adafactor"}}),
    Row("`comm_hook`", {"comm_hook": "fp16"}),
    Row('`sharding = "zero1"`', {"sharding": "zero1"}),
    Row("`sync_every`", {"sync_every": 2}),
    Row('`replay_ratio = "auto"`', {"replay_ratio": "auto"}),
    Row('`replay.sampling = "similar"`', replay={"sampling": "similar"}),
    Row("`[stream.labels]`", stream={"labels": {"topics": ["labels"], "key": "id", "wait": "1h"}}),
    Row("`[model.adapter]`", model={"adapter": {}}),
    Row("`[model.teacher]`", model={"teacher": {"factory": "my_model:teacher"}}),
)


def settings(row: Row, column: Column) -> dict[str, Any] | None:
    """Return the settings of the learner in a cell; None for the same key, or the same dimension, twice."""
    mesh, other = column.learner["mesh"], row.learner.get("mesh", {})
    if mesh.keys() & other.keys() or (column.learner.keys() & row.learner.keys()) - {"mesh"}:
        return None
    both = {**mesh, **other}
    return {**column.learner, **row.learner, "mesh": both, "replicas": RANKS ** len(both)}


def refusal(row: Row, column: Column) -> str | None:
    """Return the sentence that refuses a row with a column; None where they go together."""
    learner = LearnerSettings.model_validate(settings(row, column))
    stream = StreamSettings.model_validate({"topics": ["events"], **row.stream})
    model = ModelSettings.model_validate({"factory": "my_model:build", **row.model})
    sections = {"learner": learner, "replay": dict(row.replay), "stream": stream, "model": model}
    chosen = facts(PipelineSettings.model_validate({"name": "mesh", "schema": _EVENTS, **sections}))
    sentences = [sentence for _, sentence in conflicts(chosen)]
    return sentences[0] if sentences else None


def lines() -> Iterator[str]:
    """Yield the lines of the table; settings that go with the same dimensions share one."""
    yield f"| | {' | '.join(column.name for column in COLUMNS)} |"
    yield f"| --- |{' --- |' * len(COLUMNS)}"
    names = dict[tuple[str, ...], list[str]]()
    for row in ROWS:
        names.setdefault(tuple(_cell(row, column) for column in COLUMNS), []).append(row.name)
    for cells, alike in names.items():
        yield f"| {', '.join(alike)} | {' | '.join(cells)} |"


def _cell(row: Row, column: Column) -> str:
    if settings(row, column) is None:
        return ""
    return "yes" if refusal(row, column) is None else "no"


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
