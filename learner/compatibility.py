"""Which settings exclude each other: strategy, precision, replicas, compiler and others. Imports no torch.

`RULES` has all conflicts. The conformance suite runs each other combination.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ingest.config import StreamSettings
from learner.config import WITHOUT_REPLAY, DeviceSharingSettings, LearnerSettings
from replay.config import COMPARING, ReplaySettings

Point = Mapping[str, Any]
"""The values of one configuration, by the names of their keys."""


class Except:
    """All values of a key but these; a key without a value is in none."""

    def __init__(self, *values: Any) -> None:
        self._values = None, *values

    def __contains__(self, value: object) -> bool:
        return value not in self._values


@dataclass(frozen=True)
class Conflict:
    """Two keys and their values that exclude each other; the first key is the one to change."""

    key: str
    values: Container[Any]
    other: str
    others: Container[Any]
    why: str
    way_out: str


_ON, _MANY, _SET = Except(False, []), Except(1), Except("none")
_NEEDS_ALL = Except("none", "er", "er-ace", "der", "der++")
"""Strategies that work on all weights or gradients at once."""

_RECOMPUTED = "the compiler does not support modules that recompute their activations"
_UNCAPTURED = "embeddings are captured from a module while it runs, which compiled code does not support"
_LATE = "neighbours are found in a separate process, and arrive at no fixed step"
_COMPILED = "compiled code may differ from one start to the next"
_TWICE = "compiled code supports one gradient per pass, and this strategy takes two"
_ROUNDED = "sums over replicas are rounded differently than those of one process"
_NO_GRADIENTS = "replicas that average weights now and then exchange no gradients"
_UNPICKLES = "torch unpickles the data that replicas exchange for it, which must not come from another host"
_BY_CLOCK = "whether the learner is behind depends on a clock"
_NO_STORE = "that strategy has no store"
_NO_SCALE = "replicas agree on the loss scale when they exchange gradients"
_PARTS = "it needs full weights or gradients, and each replica has a shard of them"
_GATHERED = "the compiler does not support modules that are gathered from shards"
_GATHERED_WHOLE = "weights are gathered in more bits, and converted by each replica"
_OWN_EXCHANGE = "sharded modules exchange gradients in their own way"
_ONE_SCALE = "replicas with shards of the gradients would scale losses differently"
_ALL_RUN = "all replicas have to run a sharded model, and only the first scores old events with it"
_HALF_RUN = "a sharded model can only be run in full"
_MPS_DECIDES = "a percentage under MPS overrides how many multiprocessors a green context has"
_FUSED = "compiled code runs across the borders of layers"
_AT_ONCE = "a CUDA graph launches all layers at once"
_RECORDED = "only plain code is recorded as a CUDA graph"
_DECIDES = "this strategy decides in Python what a step computes, and a CUDA graph repeats one step"
_EXCHANGED = "replicas exchange gradients within the pass, which is not recorded as a CUDA graph"
_REGENERATED = "modules that recompute their activations set random generators, which a CUDA graph cannot"
_READ_OUT = "embeddings are captured in Python while a module runs, and a CUDA graph runs no Python"
_OWN_STREAM = "a CUDA graph is recorded for the whole device"
_ALONE = "a standby replaces one process"
_SHAPES = "it keeps averages over rows and columns, and each shard has a part of them"

RULES = (
    Conflict("learner.compile", _ON, "learner.activation_checkpointing", _ON, _RECOMPUTED, "set one of them to false"),
    Conflict("learner.compile", _ON, "learner.strategy", ("agem",), _TWICE, "set it to false"),
    Conflict("learner.compile", _ON, "replay.sampling", COMPARING, _UNCAPTURED, "set it to false"),
    Conflict("learner.compile", _ON, "replay.admission", COMPARING, _UNCAPTURED, "set it to false"),
    Conflict("replay.sampling", COMPARING, "learner.deterministic", _ON, _LATE, 'take "uniform"'),
    Conflict("replay.admission", COMPARING, "learner.deterministic", _ON, _LATE, 'take "reservoir"'),
    Conflict("learner.compile", _ON, "learner.deterministic", _ON, _COMPILED, "set it to false"),
    Conflict("learner.comm_hook", _SET, "learner.sync_every", _MANY, _NO_GRADIENTS, 'write "none"'),
    Conflict("learner.sharding", _SET, "learner.sync_every", _MANY, _NO_GRADIENTS, 'write "none"'),
    Conflict("learner.strategy", _NEEDS_ALL, "learner.sharding", ("fsdp",), _PARTS, 'take "er"'),
    Conflict("learner.optimizer", ("adafactor",), "learner.sharding", ("fsdp",), _SHAPES, 'take "adamw"'),
    Conflict("learner.compile", _ON, "learner.sharding", ("fsdp",), _GATHERED, "set it to false"),
    Conflict("learner.comm_hook", _SET, "learner.sharding", ("fsdp",), _OWN_EXCHANGE, 'write "none"'),
    Conflict("learner.precision", ("fp16",), "learner.sharding", ("fsdp",), _ONE_SCALE, 'write "bf16" or "fp32"'),
    Conflict("learner.precision", ("fp8",), "learner.sharding", ("fsdp",), _GATHERED_WHOLE, 'write "bf16"'),
    Conflict("learner.replay_ratio", ("auto",), "learner.sharding", ("fsdp",), _ALL_RUN, "write a number"),
    Conflict("replay.sampling", COMPARING, "learner.sharding", ("fsdp",), _HALF_RUN, 'take "uniform"'),
    Conflict("replay.admission", COMPARING, "learner.sharding", ("fsdp",), _HALF_RUN, 'take "reservoir"'),
    Conflict("learner.precision", ("fp16",), "learner.sync_every", _MANY, _NO_SCALE, 'write "bf16" or "fp32"'),
    Conflict("learner.replicas", _MANY, "learner.deterministic", _ON, _ROUNDED, "set it to 1"),
    Conflict("device_sharing.yield_at", ("layer",), "learner.compile", _ON, _FUSED, 'write "micro-batch"'),
    Conflict("device_sharing.sms", Except(), "device_sharing.mps_percentage", Except(), _MPS_DECIDES, "take one out"),
    Conflict("device_sharing.yield_at", ("layer",), "learner.graphs", _ON, _AT_ONCE, 'write "micro-batch"'),
    Conflict("device_sharing.sms", Except(), "learner.graphs", _ON, _OWN_STREAM, "take the key out"),
    Conflict("learner.graphs", _ON, "learner.compile", _ON, _RECORDED, "set one of them to false"),
    Conflict("learner.graphs", _ON, "learner.activation_checkpointing", _ON, _REGENERATED, "set one of them to false"),
    Conflict("learner.graphs", _ON, "learner.strategy", _NEEDS_ALL, _DECIDES, "set it to false"),
    Conflict("learner.graphs", _ON, "learner.replicas", _MANY, _EXCHANGED, "set it to false"),
    Conflict("learner.graphs", _ON, "learner.hosts", _MANY, _EXCHANGED, "set it to false"),
    Conflict("learner.graphs", _ON, "replay.sampling", COMPARING, _READ_OUT, "set it to false"),
    Conflict("learner.graphs", _ON, "replay.admission", COMPARING, _READ_OUT, "set it to false"),
    Conflict("learner.hosts", _MANY, "learner.deterministic", _ON, _ROUNDED, "set it to 1"),
    Conflict("learner.standby", _ON, "learner.replicas", _MANY, _ALONE, "set it to false"),
    Conflict("learner.standby", _ON, "learner.hosts", _MANY, _ALONE, "set it to false"),
    Conflict("learner.sharding", ("zero1",), "learner.hosts", _MANY, _UNPICKLES, 'write "none" or "fsdp"'),
    Conflict(
        "stream.lag_policy.action", Except("train-all"), "learner.deterministic", _ON, _BY_CLOCK, 'write "train-all"'
    ),
    Conflict(
        "stream.lag_policy.action", ("store-only",), "learner.strategy", WITHOUT_REPLAY, _NO_STORE, 'write "sample"'
    ),
)


def facts(
    learner: LearnerSettings,
    replay: ReplaySettings,
    stream: StreamSettings | None = None,
    sharing: DeviceSharingSettings | None = None,
) -> Point:
    """Return the values of the keys that the rules use."""
    named = {"strategy": learner.strategy.name, "optimizer": learner.optimizer.name}
    sections = {"learner": learner.model_dump() | named, "replay": replay.model_dump()}
    if sharing is not None:
        sections["device_sharing"] = sharing.model_dump()
    values_by_key = {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
    return values_by_key if stream is None else {**values_by_key, "stream.lag_policy.action": stream.lag_policy.action}


def conflicts(chosen: Point) -> Iterator[tuple[str, str]]:
    """Yield the conflicts: the key to change, and one sentence with the values and the way out."""
    for rule in RULES:
        value, other = chosen.get(rule.key), chosen.get(rule.other)
        if value in rule.values and other in rule.others:
            clash = f"{rule.key} = {_toml(value)} does not go with {rule.other} = {_toml(other)}"
            yield rule.key, f"{clash}: {rule.why}; {rule.way_out}"


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
