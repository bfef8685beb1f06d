"""Which settings exclude each other: strategy, precision, replicas, compiler and others. Imports no torch.

`RULES` has all conflicts. The conformance suite runs each other combination.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ingest.config import StreamSettings
from learner.config import DeviceSharingSettings, LearnerSettings, StrategySettings
from replay.config import COMPARING, ReplaySettings

Point = Mapping[str, Any]
"""The values of one configuration, by the names of their keys."""
Test = Callable[[Any], bool]


@dataclass(frozen=True)
class Conflict:
    """Two keys and their values that exclude each other; the first key is the one to change."""

    key: str
    values: Test
    other: str
    others: Test
    why: str
    way_out: str


def _on(value: Any) -> bool:
    return bool(value)


def _many(value: Any) -> bool:
    return value is not None and value > 1


def _is_agem(value: Any) -> bool:
    return bool(value == "agem")


def _given(value: Any) -> bool:
    return bool(value != "none")


def _fsdp(value: Any) -> bool:
    return bool(value == "fsdp")


def _zero1(value: Any) -> bool:
    return bool(value == "zero1")


def _needs_whole(value: Any) -> bool:
    return value not in {"none", "er", "er-ace", "der", "der++"}


def _is_auto(value: Any) -> bool:
    return bool(value == "auto")


def _is_adafactor(value: Any) -> bool:
    return bool(value == "adafactor")


def _fp16(value: Any) -> bool:
    return bool(value == "fp16")


def _compares(value: Any) -> bool:
    return value in COMPARING


def _thins(value: Any) -> bool:
    return value not in (None, "train-all")


def _stores_only(value: Any) -> bool:
    return bool(value == "store-only")


def _at_layers(value: Any) -> bool:
    return bool(value == "layer")


def _samples_nothing(value: Any) -> bool:
    return not StrategySettings(name=value).replays


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
_PARTS = "it needs full weights or gradients, of which each replica has a shard"
_GATHERED = "the compiler does not support modules that are gathered from shards"
_OWN_EXCHANGE = "sharded modules exchange gradients in their own way"
_ONE_SCALE = "replicas with shards of the gradients would scale losses differently"
_ALL_RUN = "all replicas have to run a sharded model, and only the first scores old events with it"
_HALF_RUN = "a sharded model can only be run in full"
_FUSED = "compiled code runs across the borders of layers"
_ALONE = "a standby replaces one process"
_SHAPES = "it keeps averages over rows and columns, of which each shard has a part"

RULES = (
    Conflict("learner.compile", _on, "learner.activation_checkpointing", _on, _RECOMPUTED, "set one of them to false"),
    Conflict("learner.compile", _on, "learner.strategy", _is_agem, _TWICE, "set it to false"),
    Conflict("learner.compile", _on, "replay.sampling", _compares, _UNCAPTURED, "set it to false"),
    Conflict("learner.compile", _on, "replay.admission", _compares, _UNCAPTURED, "set it to false"),
    Conflict("replay.sampling", _compares, "learner.deterministic", _on, _LATE, 'take "uniform"'),
    Conflict("replay.admission", _compares, "learner.deterministic", _on, _LATE, 'take "reservoir"'),
    Conflict("learner.compile", _on, "learner.deterministic", _on, _COMPILED, "set it to false"),
    Conflict("learner.comm_hook", _given, "learner.sync_every", _many, _NO_GRADIENTS, 'write "none"'),
    Conflict("learner.sharding", _given, "learner.sync_every", _many, _NO_GRADIENTS, 'write "none"'),
    Conflict("learner.strategy", _needs_whole, "learner.sharding", _fsdp, _PARTS, 'take "er"'),
    Conflict("learner.optimizer", _is_adafactor, "learner.sharding", _fsdp, _SHAPES, 'take "adamw"'),
    Conflict("learner.compile", _on, "learner.sharding", _fsdp, _GATHERED, "set it to false"),
    Conflict("learner.comm_hook", _given, "learner.sharding", _fsdp, _OWN_EXCHANGE, 'write "none"'),
    Conflict("learner.precision", _fp16, "learner.sharding", _fsdp, _ONE_SCALE, 'write "bf16" or "fp32"'),
    Conflict("learner.replay_ratio", _is_auto, "learner.sharding", _fsdp, _ALL_RUN, "write a number"),
    Conflict("replay.sampling", _compares, "learner.sharding", _fsdp, _HALF_RUN, 'take "uniform"'),
    Conflict("replay.admission", _compares, "learner.sharding", _fsdp, _HALF_RUN, 'take "reservoir"'),
    Conflict("learner.precision", _fp16, "learner.sync_every", _many, _NO_SCALE, 'write "bf16" or "fp32"'),
    Conflict("learner.replicas", _many, "learner.deterministic", _on, _ROUNDED, "set it to 1"),
    Conflict("device_sharing.yield_at", _at_layers, "learner.compile", _on, _FUSED, 'write "micro-batch"'),
    Conflict("learner.hosts", _many, "learner.deterministic", _on, _ROUNDED, "set it to 1"),
    Conflict("learner.standby", _on, "learner.replicas", _many, _ALONE, "set it to false"),
    Conflict("learner.standby", _on, "learner.hosts", _many, _ALONE, "set it to false"),
    Conflict("learner.sharding", _zero1, "learner.hosts", _many, _UNPICKLES, 'write "none" or "fsdp"'),
    Conflict("stream.lag_policy.action", _thins, "learner.deterministic", _on, _BY_CLOCK, 'write "train-all"'),
    Conflict(
        "stream.lag_policy.action", _stores_only, "learner.strategy", _samples_nothing, _NO_STORE, 'write "sample"'
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
        if rule.values(value) and rule.others(other):
            clash = f"{rule.key} = {_toml(value)} does not go with {rule.other} = {_toml(other)}"
            yield rule.key, f"{clash}: {rule.why}; {rule.way_out}"


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
