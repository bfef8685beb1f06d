"""What goes together: strategy, precision, micro-batches, replicas, compiler and the rest. Imports no torch.

Everything does, but for what `RULES` names. The conformance suite runs each combination that is left.
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
    """Two keys, and which values of them do not go together; the first is the one to change."""

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


_ANEW = "the compiler does not follow modules that compute their activations again"
_UNHEARD = "embeddings are heard from a module while it runs, which compiled code does not do"
_LATE = "neighbours are found in a process of their own, and come when they come"
_COMPILED = "what the compiler makes may differ from one start to the next"
_TWICE = "compiled code is gone through once for a gradient, and this strategy takes two of one pass"
_APART = "sums over replicas are rounded in another way than those of one process"
_NO_GRADIENTS = "replicas that average weights now and then exchange no gradients"
_UNPICKLES = "torch unpickles what replicas send each other for it, which is not to come from another host"
_BY_CLOCK = "whether the learner is behind is told by a clock"
_NO_STORE = "that strategy has no store"
_NO_SCALE = "the scale of losses is agreed on where gradients are"
_PARTS = "it works on whole weights or gradients, of which each replica has a part"
_APART_PARTS = "the compiler does not follow modules that are brought together from their parts"
_OWN_EXCHANGE = "modules in parts exchange gradients in a way of their own"
_ONE_SCALE = "replicas with parts of the gradients would scale losses differently"
_ALL_RUN = "all replicas have to run a model in parts, and only the first tries it on old events"
_HALF_RUN = "a model in parts runs as a whole only"
_FUSED = "compiled code runs across the borders of layers"
_ALONE = "what stands by takes the place of one process"
_SHAPES = "it keeps averages over rows and columns, which lie in parts of a weight"

RULES = (
    Conflict("learner.compile", _on, "learner.activation_checkpointing", _on, _ANEW, "set one of them to false"),
    Conflict("learner.compile", _on, "learner.strategy", _is_agem, _TWICE, "set it to false"),
    Conflict("learner.compile", _on, "replay.sampling", _compares, _UNHEARD, "set it to false"),
    Conflict("learner.compile", _on, "replay.admission", _compares, _UNHEARD, "set it to false"),
    Conflict("replay.sampling", _compares, "learner.deterministic", _on, _LATE, 'take "uniform"'),
    Conflict("replay.admission", _compares, "learner.deterministic", _on, _LATE, 'take "reservoir"'),
    Conflict("learner.compile", _on, "learner.deterministic", _on, _COMPILED, "set it to false"),
    Conflict("learner.comm_hook", _given, "learner.sync_every", _many, _NO_GRADIENTS, 'write "none"'),
    Conflict("learner.sharding", _given, "learner.sync_every", _many, _NO_GRADIENTS, 'write "none"'),
    Conflict("learner.strategy", _needs_whole, "learner.sharding", _fsdp, _PARTS, 'take "er"'),
    Conflict("learner.optimizer", _is_adafactor, "learner.sharding", _fsdp, _SHAPES, 'take "adamw"'),
    Conflict("learner.compile", _on, "learner.sharding", _fsdp, _APART_PARTS, "set it to false"),
    Conflict("learner.comm_hook", _given, "learner.sharding", _fsdp, _OWN_EXCHANGE, 'write "none"'),
    Conflict("learner.precision", _fp16, "learner.sharding", _fsdp, _ONE_SCALE, 'write "bf16" or "fp32"'),
    Conflict("learner.replay_ratio", _is_auto, "learner.sharding", _fsdp, _ALL_RUN, "write a number"),
    Conflict("replay.sampling", _compares, "learner.sharding", _fsdp, _HALF_RUN, 'take "uniform"'),
    Conflict("replay.admission", _compares, "learner.sharding", _fsdp, _HALF_RUN, 'take "reservoir"'),
    Conflict("learner.precision", _fp16, "learner.sync_every", _many, _NO_SCALE, 'write "bf16" or "fp32"'),
    Conflict("learner.replicas", _many, "learner.deterministic", _on, _APART, "set it to 1"),
    Conflict("device_sharing.yield_at", _at_layers, "learner.compile", _on, _FUSED, 'write "micro-batch"'),
    Conflict("learner.hosts", _many, "learner.deterministic", _on, _APART, "set it to 1"),
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
    """Return what the rules look at."""
    named = {"strategy": learner.strategy.name, "optimizer": learner.optimizer.name}
    sections = {"learner": learner.model_dump() | named, "replay": replay.model_dump()}
    if sharing is not None:
        sections["device_sharing"] = sharing.model_dump()
    found = {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
    return found if stream is None else {**found, "stream.lag_policy.action": stream.lag_policy.action}


def conflicts(chosen: Point) -> Iterator[tuple[str, str]]:
    """Return what does not go together: the key to change, and one sentence that names values and the way out."""
    for rule in RULES:
        value, other = chosen.get(rule.key), chosen.get(rule.other)
        if rule.values(value) and rule.others(other):
            clash = f"{rule.key} = {_toml(value)} does not go with {rule.other} = {_toml(other)}"
            yield rule.key, f"{clash}: {rule.why}; {rule.way_out}"


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
