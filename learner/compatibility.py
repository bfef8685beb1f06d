"""Which settings exclude each other: strategy, precision, replicas, compiler and others. Imports no torch.

The number of hosts is no setting: torchrun passes it to the ranks, and they check it.

`RULES` has all conflicts. The conformance suite runs each other combination.
"""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ingest.config import SchemaSettings, StreamSettings
from learner.config import WITHOUT_REPLAY, DeviceSharingSettings, LearnerSettings, ModelSettings
from learner.sections.mesh import MeshSettings
from replay.config import COMPARING, INDEXED, ReplaySettings

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

_GROWS = ("experts", "progressive")
"""Strategies whose model grows."""

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
_NOT_KEPT = "embeddings of recent events are in no checkpoint, and a restart begins without them"
_READ_OUT = "embeddings are captured in Python while a module runs, and a CUDA graph runs no Python"
_OWN_STREAM = "a CUDA graph is recorded for the whole device"
_ALONE = "a standby replaces one process"
_NOW = "events time out by the clock where no labels come"
_BY_FILE = "files may have one partition after the other, and deterministic batches take turns between partitions"
_PREDICTS = "all replicas have to run a sharded model, and only the first predicts events when they come"
_CLOSED_FORM = "this strategy computes weights from labels, and takes no gradient of a loss"
_OF_SOME_CLASSES = "this strategy trains a part for some classes alone, and a teacher's outputs are of all"
_ANSWERS = "whether a server's outputs come in time depends on a clock"
_WEIGHED = "weights of events whose label comes late apply to the output, and so to the teacher's part of the loss"
_WEIGHED_EARLY = "a label that comes later takes back what an early one taught, and challengers began in between"
_SHAPES = "it keeps averages over rows and columns, and each shard has a part of them"
_PACKED = "weights of 4 bits are packed bytes, which cannot be gathered in another precision"
_WRAPPED = "an adapter wraps the linear layers, and its own matrices would be multiplied in 8 bits too"
_OWN_PART = "it needs the whole model or its gradient, and each rank has a part"
_STAGES_RUN = "stages run by a schedule in Python, which exchanges activations"
_EXPERTS_RUN = "ranks exchange vectors for their experts within the pass, by sizes that Python reads"
_TWICE_SENT = "modules that recompute their activations would exchange vectors for experts again"
_GATHER_ORDER = "modules are gathered in the order of the whole model, and each rank has some of them"
_AVERAGED_AT_THE_END = "ranks with parts of a model average gradients once a step, without hooks"
_WHOLE_STATE = "it divides the optimizer's state of a whole model"
_WAITS = "ranks that exchange vectors for experts would wait for ranks that run another stage"

_ACTIVATIONS = "the ranks of a tensor group exchange activations within the pass, and each has parts of the weights"
_LINEAR_8 = "its linear layers in 8 bits have weights that cannot be split"
_ADAPTED = "an adapter wraps the modules that are divided by their names"
_UNTRIED = "a teacher's part of the loss has not been tried where ranks have parts of the model"
_TWO_SPLITS = "only modules that all ranks have are split"

_TENSOR, _PIPELINE, _EXPERT = "learner.mesh.tensor", "learner.mesh.pipeline", "learner.mesh.expert"
_UNCOMPILED = {_TENSOR: _ACTIVATIONS, _PIPELINE: _STAGES_RUN, _EXPERT: _EXPERTS_RUN}
_DIVIDED = tuple(
    Conflict(key, values, dimension, _MANY, why, way_out)
    for dimension, uncompiled in _UNCOMPILED.items()
    for key, values, why, way_out in (
        ("learner.strategy", _NEEDS_ALL, _OWN_PART, 'take "er"'),
        ("replay.sampling", COMPARING, _HALF_RUN, 'take "uniform"'),
        ("replay.admission", COMPARING, _HALF_RUN, 'take "reservoir"'),
        ("learner.replay_ratio", ("auto",), _ALL_RUN, "write a number"),
        ("stream.labels", _ON, _PREDICTS, "take the section out"),
        ("learner.sharding", ("zero1",), _WHOLE_STATE, 'write "none"'),
        ("learner.sync_every", _MANY, _AVERAGED_AT_THE_END, "set it to 1"),
        ("learner.comm_hook", _SET, _AVERAGED_AT_THE_END, 'write "none"'),
        ("learner.precision", ("fp16",), _ONE_SCALE, 'write "bf16" or "fp32"'),
        ("learner.precision", ("fp8",), _LINEAR_8, 'write "bf16"'),
        ("learner.compile", _ON, uncompiled, "set it to false"),
        ("model.adapter.kind", ("lora",), _ADAPTED, "take the section out"),
        ("model.teacher", Except(), _UNTRIED, "take the section out"),
    )
)
"""What no rank can do that has a part of the model."""
_GROWN = "this strategy adds layers while it trains, and a compiled module has the layers that it was compiled with"
_ROUTED = "this strategy chooses an expert in each pass, and activations are recomputed outside of it"
_GROWS_ALIKE = "replicas freeze an expert in the same step, and then their weights have to be the same"
_RESETS = "this strategy discards the optimizer's state with each expert, and each replica has a shard of it"
_PLAIN_LAYERS = "this strategy adds to linear layers, and those in 8 bits are of another class"

_STATISTICS = "ranks that train alone for some steps, or have parts of the model, do not agree on what is learned"
_ROWS = "rows of embeddings start again when their value is another one"
_ROW_STATE = f"{_ROWS}, and each replica has a part of the optimizer's state"
_ROW_ANCHORS = f"{_ROWS}, and this strategy pulls weights towards those they had before"
_ROW_FROZEN = f"{_ROWS}, and this strategy does not train them"
_COLUMNS = "this strategy connects the columns of layers, and learned features are no layer"
_RAW = "a teacher gets the features as they are in events, and has not learned what the model has"

_NO_RESIDUAL = "intercepts are for outputs whose distance from the label is known"
_OUTPUTS_OF_ALL = "intercepts learn from the outputs of all events, and each replica has a part of them"
_TAKEN_BACK = "each event would count as a negative in its group until its label comes, which has no weight there"

_LEARNED, _VOCABULARY = "a learned input of [schema]", "an input of [schema] with encode.learn"
_INTERCEPT = "a feature of [schema] with intercept"
_OF_FEATURES = (
    *(
        Conflict(key, values, _LEARNED, Except(), _STATISTICS, way_out)
        for key, values, way_out in (
            ("learner.sync_every", _MANY, "set it to 1"),
            ("learner.sharding", ("fsdp",), 'write "none" or "zero1"'),
            (_TENSOR, _MANY, "set it to 1"),
            (_PIPELINE, _MANY, "set it to 1"),
            (_EXPERT, _MANY, "set it to 1"),
        )
    ),
    Conflict("model.teacher", Except(), _LEARNED, Except(), _RAW, "take the section out"),
    Conflict("learner.sharding", ("zero1",), _VOCABULARY, Except(), _ROW_STATE, 'write "none"'),
    Conflict("learner.replicas", _MANY, _INTERCEPT, Except(), _OUTPUTS_OF_ALL, "set it to 1"),
    Conflict("stream.labels.early", Except("none"), _INTERCEPT, Except(), _TAKEN_BACK, 'write "none"'),
    Conflict(
        "model.task",
        Except("classification", "multilabel", "regression"),
        _INTERCEPT,
        Except(),
        _NO_RESIDUAL,
        'take one of "classification", "multilabel" and "regression"',
    ),
    Conflict("learner.strategy", ("progressive",), _LEARNED, Except(), _COLUMNS, 'take "experts"'),
    Conflict("learner.strategy", ("ewc",), _VOCABULARY, Except(), _ROW_ANCHORS, 'take "er"'),
    Conflict("learner.strategy", ("slda", "ncm", *_GROWS), _VOCABULARY, Except(), _ROW_FROZEN, 'take "er"'),
)
"""What does not go with features that are learned on the stream."""

_COPIED = "challengers are copies of the whole model on one device"
_COPY_COMPILED = "each challenger would be compiled, or recorded, by itself"
_STATEFUL = "this strategy keeps a state of one model, which challengers would not have"
_STATISTICS_ONCE = "features are learned by the model alone, and challengers would keep the statistics of before"
_TAUGHT = "a teacher's part of the loss has not been tried with challengers"
_PARTS_ADAPTED = "adapters have not been tried with challengers"
_SEARCH = "search"
_OF_SEARCH = (
    *(
        Conflict(key, values, _SEARCH, (True,), why, f"{way_out}, or take [search] out")
        for key, values, why, way_out in (
            ("learner.replicas", _MANY, _COPIED, "set it to 1"),
            ("torchrun --nnodes", Except(), _COPIED, "start the learner without torchrun"),
            (_TENSOR, _MANY, _COPIED, "set it to 1"),
            (_PIPELINE, _MANY, _COPIED, "set it to 1"),
            (_EXPERT, _MANY, _COPIED, "set it to 1"),
            ("learner.sharding", _SET, _COPIED, 'write "none"'),
            ("learner.compile", _ON, _COPY_COMPILED, "set it to false"),
            ("learner.graphs", _ON, _COPY_COMPILED, "set it to false"),
            ("learner.strategy", _NEEDS_ALL, _STATEFUL, 'take "er"'),
            ("model.teacher", Except(), _TAUGHT, "take the section out"),
            ("model.adapter.kind", Except(), _PARTS_ADAPTED, "take the section out"),
            ("stream.labels.early", Except("none"), _WEIGHED_EARLY, 'write "none"'),
            ("stream.labels.take_back", _ON, _WEIGHED_EARLY, "set it to false"),
        )
    ),
    Conflict(_SEARCH, (True,), _LEARNED, Except(), _STATISTICS_ONCE, "take [search] out"),
)
"""What does not go with challengers."""

RULES = (
    *_DIVIDED,
    *_OF_FEATURES,
    *_OF_SEARCH,
    Conflict("learner.sharding", ("fsdp",), _PIPELINE, _MANY, _GATHER_ORDER, 'write "none"'),
    Conflict("learner.sharding", ("fsdp",), _EXPERT, _MANY, _GATHER_ORDER, 'write "none"'),
    Conflict(_EXPERT, _MANY, _TENSOR, _MANY, _TWO_SPLITS, "set one of them to 1"),
    Conflict("learner.activation_checkpointing", _ON, _EXPERT, _MANY, _TWICE_SENT, "set it to false"),
    Conflict(_EXPERT, _MANY, _PIPELINE, _MANY, _WAITS, "set one of them to 1"),
    Conflict("learner.compile", _ON, "learner.activation_checkpointing", _ON, _RECOMPUTED, "set one of them to false"),
    Conflict("learner.compile", _ON, "learner.strategy", ("agem",), _TWICE, "set it to false"),
    Conflict("learner.compile", _ON, "learner.strategy", _GROWS, _GROWN, "set it to false"),
    Conflict("learner.activation_checkpointing", _ON, "learner.strategy", _GROWS, _ROUTED, "set it to false"),
    Conflict("learner.sync_every", _MANY, "learner.strategy", _GROWS, _GROWS_ALIKE, "set it to 1"),
    Conflict("learner.sharding", ("zero1",), "learner.strategy", _GROWS, _RESETS, 'write "none"'),
    Conflict("learner.precision", ("fp8",), "learner.strategy", _GROWS, _PLAIN_LAYERS, 'write "bf16"'),
    Conflict("learner.compile", _ON, "replay.sampling", COMPARING, _UNCAPTURED, "set it to false"),
    Conflict("learner.compile", _ON, "replay.admission", COMPARING, _UNCAPTURED, "set it to false"),
    Conflict("replay.sampling", INDEXED, "learner.deterministic", _ON, _LATE, 'take "uniform"'),
    Conflict("replay.admission", INDEXED, "learner.deterministic", _ON, _LATE, 'take "reservoir"'),
    Conflict("replay.sampling", COMPARING - INDEXED, "learner.deterministic", _ON, _NOT_KEPT, 'take "uniform"'),
    Conflict("replay.admission", COMPARING - INDEXED, "learner.deterministic", _ON, _NOT_KEPT, 'take "reservoir"'),
    Conflict("learner.compile", _ON, "learner.deterministic", _ON, _COMPILED, "set it to false"),
    Conflict("learner.comm_hook", _SET, "learner.sync_every", _MANY, _NO_GRADIENTS, 'write "none"'),
    Conflict("learner.sharding", _SET, "learner.sync_every", _MANY, _NO_GRADIENTS, 'write "none"'),
    Conflict("learner.strategy", _NEEDS_ALL, "learner.sharding", ("fsdp",), _PARTS, 'take "er"'),
    Conflict("learner.optimizer", ("adafactor",), "learner.sharding", ("fsdp",), _SHAPES, 'take "adamw"'),
    Conflict("learner.compile", _ON, "learner.sharding", ("fsdp",), _GATHERED, "set it to false"),
    Conflict("learner.comm_hook", _SET, "learner.sharding", ("fsdp",), _OWN_EXCHANGE, 'write "none"'),
    Conflict("learner.precision", ("fp16",), "learner.sharding", ("fsdp",), _ONE_SCALE, 'write "bf16" or "fp32"'),
    Conflict("learner.precision", ("fp8",), "learner.sharding", ("fsdp",), _GATHERED_WHOLE, 'write "bf16"'),
    Conflict("model.adapter.base_precision", ("nf4",), "learner.sharding", ("fsdp",), _PACKED, 'write "bf16"'),
    Conflict("learner.precision", ("fp8",), "model.adapter.kind", ("lora",), _WRAPPED, 'write "bf16"'),
    Conflict("learner.replay_ratio", ("auto",), "learner.sharding", ("fsdp",), _ALL_RUN, "write a number"),
    Conflict("replay.sampling", COMPARING, "learner.sharding", ("fsdp",), _HALF_RUN, 'take "uniform"'),
    Conflict("replay.admission", COMPARING, "learner.sharding", ("fsdp",), _HALF_RUN, 'take "reservoir"'),
    Conflict("learner.optimizer", ("adafactor",), _TENSOR, _MANY, _SHAPES, 'take "adamw"'),
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
    Conflict("learner.graphs", _ON, "replay.sampling", COMPARING, _READ_OUT, "set it to false"),
    Conflict("learner.graphs", _ON, "replay.admission", COMPARING, _READ_OUT, "set it to false"),
    Conflict("learner.deterministic", _ON, "stream.labels", _ON, _NOW, "set it to false"),
    Conflict("learner.deterministic", _ON, "stream.backfill.identity", _ON, _BY_FILE, "set it to false"),
    Conflict("learner.sharding", ("fsdp",), "stream.labels", _ON, _PREDICTS, 'write "none" or "zero1"'),
    Conflict("learner.standby", _ON, "learner.replicas", _MANY, _ALONE, "set it to false"),
    Conflict("model.teacher", Except(), "learner.strategy", ("slda", "ncm"), _CLOSED_FORM, "take the section out"),
    Conflict("model.teacher", Except(), "learner.strategy", _GROWS, _OF_SOME_CLASSES, "take the section out"),
    Conflict("learner.deterministic", _ON, "model.teacher", ("url",), _ANSWERS, "set it to false"),
    Conflict("model.teacher", Except(), "stream.labels.early", Except("none"), _WEIGHED, "take the section out"),
    Conflict("model.teacher", Except(), "stream.labels.take_back", _ON, _WEIGHED, "take the section out"),
    Conflict("learner.sharding", ("zero1",), "torchrun --nnodes", _MANY, _UNPICKLES, 'write "none" or "fsdp"'),
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
    model: ModelSettings | None = None,
    schema: SchemaSettings | None = None,
    *,
    searches: bool = False,
) -> Point:
    """Return the values of the keys that the rules use; of `model.teacher`, the key that names it.

    `searches`: whether there is a section `[search]`.
    """
    named = {"strategy": learner.strategy.name, "optimizer": learner.optimizer.name}
    sections = {"learner": learner.model_dump() | named, "replay": replay.model_dump()}
    if sharing is not None:
        sections["device_sharing"] = sharing.model_dump()
    values_by_key = {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
    adapter, teacher = (None, None) if model is None else (model.adapter, model.teacher)
    values_by_key |= {f"model.adapter.{key}": getattr(adapter, key, None) for key in ("kind", "base_precision")}
    values_by_key |= {"model.teacher": None if teacher is None else teacher.kind} | {
        f"learner.mesh.{key}": value for key, value in (learner.mesh or MeshSettings()).model_dump().items()
    }
    values_by_key |= {
        _SEARCH: searches,
        _LEARNED: next(iter(() if schema is None else schema.transformed), None),
        _VOCABULARY: next(iter(() if schema is None else schema.vocabularies), None),
        _INTERCEPT: next(iter(() if schema is None else schema.intercepts), None),
        "model.task": None if model is None else model.task,
    }
    if stream is None:
        return values_by_key
    return values_by_key | {
        "stream.lag_policy.action": stream.lag_policy.action,
        "stream.labels": stream.labels is not None,
        "stream.labels.early": None if stream.labels is None else stream.labels.early,
        "stream.labels.take_back": stream.labels is not None and stream.labels.take_back,
        "stream.backfill.identity": stream.backfill is not None and stream.backfill.identity is not None,
    }


def conflicts(chosen: Point) -> Iterator[tuple[str, str]]:
    """Yield the conflicts: the key to change, and one sentence with the values and the way out."""
    for rule in RULES:
        value, other = chosen.get(rule.key), chosen.get(rule.other)
        if value in rule.values and other in rule.others:
            clash = f"{rule.key} = {_toml(value)} does not go with {rule.other} = {_toml(other)}"
            yield rule.key, f"{clash}: {rule.why}; {rule.way_out}"


def stage_conflicts(model: ModelSettings, learner: LearnerSettings) -> Iterator[tuple[str, str]]:
    """Yield as `conflicts` does where `model.stages` does not fit the ranks of a pipeline."""
    ranks, named = (learner.mesh or MeshSettings()).pipeline, len(model.stages)
    interleaved = learner.pipeline_schedule == "interleaved"
    fits = (named + 1) % ranks == 0 and named >= ranks if interleaved else named + 1 == ranks
    if ranks > 1 and not fits:
        way_out = f"one stage on each rank; name {ranks - 1}"
        if interleaved:
            way_out = f"two or more stages on each rank; name {2 * ranks - 1}, {3 * ranks - 1} or so on"
        sentence = (
            f"model.stages names {named} modules, so that there are {named + 1} stages, but learner.mesh.pipeline = "
            f'{ranks} and learner.pipeline_schedule = "{learner.pipeline_schedule}" need {way_out}'
        )
        yield "model.stages", sentence


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()
