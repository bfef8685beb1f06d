"""Which settings exclude each other: strategy, precision, replicas, compiler and others. Imports no torch.

The number of hosts is no setting: torchrun passes it to the ranks, and they check it.

A choice is one or more values of a key; which strategies are what comes from the catalog. `RULES` has all conflicts.
The conformance suite runs each other combination.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from anabranch.learner.settings.learner import LearnerSettings, MeshSettings, optimizer_needs_whole
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.settings.strategies import KINDS, STRATEGY
from anabranch.replay.settings import INDEXED, admission_compares, sampling_compares

Point = Mapping[str, Any]
"""The values of one configuration, by the names of their keys."""


class Except:
    """All values of a key but these; a key without a value is in none."""

    def __init__(self, *values: Any) -> None:
        self._values = None, *values

    def __contains__(self, value: object) -> bool:
        return value not in self._values


@dataclass(frozen=True)
class Selected:
    """Values of a key, and what to do to be without them."""

    key: str
    values: Container[Any]
    way_out: str = ""


@dataclass(frozen=True)
class Conflict:
    """Two choices that exclude each other; the key of the first is the one to change."""

    choice: Selected
    other: Selected
    why: str


AnySelected = Selected | tuple[Selected, ...]


def _each(choices: AnySelected) -> tuple[Selected, ...]:
    return (choices,) if isinstance(choices, Selected) else choices


def _no(choices: AnySelected, others: AnySelected, why: str, way_out: str = "") -> list[Conflict]:
    """Return the conflicts of each choice with each of the others; `way_out`: in place of a choice's own."""
    outs = [replace(each, way_out=way_out or each.way_out) for each in _each(choices)]
    return [Conflict(choice, other, why) for other in _each(others) for choice in outs]


class _Names:
    """The names of the classes of which a fact is true."""

    def __init__(self, is_so: Callable[[str], bool]) -> None:
        self._is_so = is_so

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._is_so(name)


def _strategies(fact: str) -> Selected:
    """Return the choice of the strategies of whose kind a fact is true."""
    return Selected("learner.strategy", _Names(lambda name: getattr(STRATEGY.kind_of(name, KINDS), fact)), 'take "er"')


GRAPHS = Selected("learner.graphs", (True,), 'write "auto" or false')
_ANY, _ON, _MANY, _SET, _NONE = Except(), Except(False, []), Except(1), Except("none"), 'write "none"'
COMPILE, RECOMPUTE, DETERMINISTIC, STANDBY, TAKE_BACK = (
    Selected(key, _ON, "set it to false")
    for key in (
        *(f"learner.{name}" for name in ("compile", "activation_checkpointing", "deterministic", "standby")),
        "stream.labels.take_back",
    )
)
REPLICAS, SYNC_EVERY, TENSOR, PIPELINE, EXPERT = (
    Selected(f"learner.{name}", _MANY, "set it to 1")
    for name in ("replicas", "sync_every", "mesh.tensor", "mesh.pipeline", "mesh.expert")
)
SHARDING, COMM_HOOK = (Selected(f"learner.{name}", _SET, _NONE) for name in ("sharding", "comm_hook"))
ZERO1, FSDP = replace(SHARDING, values=("zero1",)), replace(SHARDING, values=("fsdp",))
SPLITS, PARTS = (TENSOR, PIPELINE, EXPERT), (TENSOR, PIPELINE, EXPERT, FSDP)
FP16 = Selected("learner.precision", ("fp16",), 'write "bf16" or "fp32"')
FP8, NF4 = (
    Selected("learner.precision", ("fp8",), 'write "bf16"'),
    Selected("model.adapter.base_precision", ("nf4",), 'write "bf16"'),
)
WHOLE_OPTIMIZER = Selected("learner.optimizer", _Names(optimizer_needs_whole), 'take "adamw"')
AUTO_RATIO = Selected("learner.replay_ratio", ("auto",), "write a number")
SAMPLING, ADMISSION = (
    Selected("replay.sampling", _Names(sampling_compares), 'take "uniform"'),
    Selected("replay.admission", _Names(admission_compares), 'take "reservoir"'),
)
COMPARES = SAMPLING, ADMISSION
"""Embeddings of events are compared, which are captured while a module runs."""
ADAPTER, TEACHER = (Selected(key, _ANY, "take the section out") for key in ("model.adapter.kind", "model.teacher"))
LABELS, EARLY = Selected("stream.labels", _ON, "take the section out"), Selected("stream.labels.early", _SET, _NONE)
LAG_POLICY = "stream.lag_policy.action"
LAYER = Selected("device_sharing.yield_at", ("layer",), 'write "micro-batch"')
SMS, MPS = Selected("device_sharing.sms", _ANY, "take the key out"), Selected("device_sharing.mps_percentage", _ANY)
LEARNED, VOCABULARY, INTERCEPT = (
    Selected(key, _ANY)
    for key in (
        *("a learned input of [schema]", "an input of [schema] with encode.learn"),
        "a feature of [schema] with intercept",
    )
)
_NO_RESIDUAL = Selected(
    "model.task",
    Except("classification", "multilabel", "regression"),
    'take one of "classification", "multilabel" and "regression"',
)
SEARCH = Selected("search", (True,), "take [search] out")
NEEDS_WHOLE, GROWS, CLOSED_FORM = _strategies("needs_whole"), _strategies("grows"), _strategies("closed_form")
PROGRESSIVE, AGEM, EWC = (replace(NEEDS_WHOLE, values=(name,)) for name in ("progressive", "agem", "ewc"))

_PREDICTS = "all replicas have to run a sharded model, and only the first predicts events when they come"
_SCORES = "all replicas have to run a sharded model, and only the first scores old events with it"
_RESTARTED = "rows of embeddings start again when their value is another one, and"
_UNEQUAL = "ranks that train alone for some steps, or have parts of the model, do not agree on what is learned"

_OF_SEARCH = (
    *_no((*SPLITS, SHARDING), SEARCH, "each rank trains copies of the whole model, with all of the optimizer's state"),
    *_no((SYNC_EVERY, COMM_HOOK), SEARCH, "challengers average gradients in each step, and as they are"),
    *_no((COMPILE, GRAPHS), SEARCH, "each challenger would be compiled, or recorded, by itself"),
    *_no(NEEDS_WHOLE, SEARCH, "this strategy keeps a state of one model, which challengers would not have"),
    *_no((TEACHER, ADAPTER), SEARCH, "it has not been tried with challengers"),
    *_no(
        (EARLY, TAKE_BACK),
        SEARCH,
        "a label that comes later takes back what an early one taught, and challengers began in between",
    ),
)

RULES = (
    # Ranks have a part of the model, or of its weights.
    *_no(NEEDS_WHOLE, PARTS, "it needs all weights or gradients, and each rank has a part of them"),
    *_no(COMPARES, PARTS, "a sharded model can only be run in full"),
    *_no(AUTO_RATIO, PARTS, _SCORES),
    *_no(LABELS, SPLITS, _PREDICTS),
    *_no(FSDP, LABELS, _PREDICTS, 'write "none" or "zero1"'),
    *_no(FP16, PARTS, "replicas with shards of the gradients would scale losses differently"),
    *_no(WHOLE_OPTIMIZER, (TENSOR, FSDP), "it takes whole weights together, and each shard has a part of them"),
    *_no(ZERO1, SPLITS, "it divides the optimizer's state of a whole model"),
    *_no((SYNC_EVERY, COMM_HOOK), SPLITS, "ranks with parts of a model average gradients once a step, without hooks"),
    *_no(COMM_HOOK, FSDP, "sharded modules exchange gradients in their own way"),
    *_no(FP8, PARTS, "the weights of its linear layers in 8 bits cannot be split"),
    *_no(NF4, FSDP, "weights of 4 bits are packed bytes, which cannot be gathered in another precision"),
    *_no(ADAPTER, SPLITS, "an adapter wraps the modules that are divided by their names"),
    *_no(TEACHER, SPLITS, "a teacher's part of the loss has not been tried where ranks have parts of the model"),
    *_no(
        FSDP, (PIPELINE, EXPERT), "modules are gathered in the order of the whole model, and each rank has some of them"
    ),
    *_no(EXPERT, TENSOR, "only modules that all ranks have are split", "set one of them to 1"),
    *_no(
        EXPERT,
        PIPELINE,
        "ranks that exchange vectors for experts would wait for ranks that run another stage",
        "set one of them to 1",
    ),
    *_no(RECOMPUTE, EXPERT, "modules that recompute their activations would exchange vectors for experts again"),
    # Replicas that exchange gradients, or weights now and then.
    *_no((COMM_HOOK, SHARDING), SYNC_EVERY, "replicas that average weights now and then exchange no gradients"),
    *_no(FP16, SYNC_EVERY, "replicas agree on the loss scale when they exchange gradients"),
    *_no(
        ZERO1,
        Selected("torchrun --nnodes", _MANY),
        "torch unpickles the data that replicas exchange for it, which must not come from another host",
        'write "none" or "fsdp"',
    ),
    *_no(STANDBY, REPLICAS, "a standby replaces one process"),
    # Compiled code, and a CUDA graph that launches a step at once.
    *_no(COMPILE, PARTS, "ranks exchange weights or activations within the pass, which compiled code does not support"),
    *_no(
        (COMPILE, GRAPHS),
        RECOMPUTE,
        "modules that recompute their activations can be neither compiled nor recorded as a CUDA graph",
        "set one of them to false",
    ),
    *_no((COMPILE, GRAPHS), COMPARES, "embeddings are captured in Python while a module runs, which it leaves out"),
    *_no(LAYER, (COMPILE, GRAPHS), "it runs across the borders of layers"),
    *_no(COMPILE, AGEM, "compiled code supports one gradient per pass, and this strategy takes two"),
    *_no(GRAPHS, COMPILE, "only plain code is recorded as a CUDA graph", "set one of them to false"),
    *_no(
        GRAPHS, NEEDS_WHOLE, "this strategy decides in Python what a step computes, and a CUDA graph repeats one step"
    ),
    *_no(GRAPHS, REPLICAS, "replicas exchange gradients within the pass, which is not recorded as a CUDA graph"),
    *_no(GRAPHS, FP16, "the host decides whether to repeat a step with a smaller loss scale", 'write "bf16" or "fp32"'),
    *_no(SMS, GRAPHS, "a CUDA graph is recorded for the whole device"),
    *_no(SMS, MPS, "a percentage under MPS overrides how many multiprocessors a green context has", "take one out"),
    # Strategies whose model grows, or that take no gradient.
    *_no(
        COMPILE,
        GROWS,
        "this strategy adds layers while it trains, and a compiled module has the layers that it was compiled with",
    ),
    *_no(
        RECOMPUTE, GROWS, "this strategy chooses an expert in each pass, and activations are recomputed outside of it"
    ),
    *_no(SYNC_EVERY, GROWS, "replicas freeze an expert in the same step, and then their weights have to be the same"),
    *_no(
        ZERO1,
        GROWS,
        "this strategy discards the optimizer's state with each expert, and each replica has a shard of it",
    ),
    *_no(FP8, GROWS, "this strategy adds to linear layers, and those in 8 bits are of another class"),
    *_no(TEACHER, GROWS, "this strategy trains a part for some classes alone, and a teacher's outputs are of all"),
    *_no(TEACHER, CLOSED_FORM, "this strategy computes weights from labels, and takes no gradient of a loss"),
    *_no(
        Selected(LAG_POLICY, ("store-only",), 'write "sample"'), _strategies("storeless"), "that strategy has no store"
    ),
    # The same weights from the same stream, bit for bit.
    *_no(
        (replace(SAMPLING, values=INDEXED), replace(ADMISSION, values=INDEXED)),
        DETERMINISTIC,
        "neighbours are found in a separate process, and arrive at no fixed step",
    ),
    *_no(
        (
            replace(SAMPLING, values=_Names(lambda name: name not in INDEXED and sampling_compares(name))),
            replace(ADMISSION, values=_Names(lambda name: name not in INDEXED and admission_compares(name))),
        ),
        DETERMINISTIC,
        "embeddings of recent events are in no checkpoint, and a restart begins without them",
    ),
    *_no(COMPILE, DETERMINISTIC, "compiled code may differ from one start to the next"),
    *_no(REPLICAS, DETERMINISTIC, "sums over replicas are rounded differently than those of one process"),
    *_no(
        Selected(LAG_POLICY, Except("train-all"), 'write "train-all"'),
        DETERMINISTIC,
        "whether the learner is behind depends on a clock",
    ),
    *_no(DETERMINISTIC, LABELS, "events time out by the clock where no labels come"),
    *_no(
        DETERMINISTIC, Selected("model.teacher", ("url",)), "whether a server's outputs come in time depends on a clock"
    ),
    *_no(
        DETERMINISTIC,
        Selected("stream.backfill.identity", _ON),
        "files may have one partition after the other, and deterministic batches take turns between partitions",
    ),
    # Late labels, teachers and adapters.
    *_no(
        TEACHER,
        (EARLY, TAKE_BACK),
        "weights of events whose label comes late apply to the output, and so to the teacher's part of the loss",
    ),
    *_no(FP8, ADAPTER, "an adapter wraps the linear layers, and its own matrices would be multiplied in 8 bits too"),
    # Features that are learned on the stream.
    *_no((SYNC_EVERY, *SPLITS), LEARNED, _UNEQUAL),
    *_no(FSDP, LEARNED, _UNEQUAL, 'write "none" or "zero1"'),
    *_no(TEACHER, LEARNED, "a teacher gets the features as they are in events, and has not learned what the model has"),
    *_no(
        PROGRESSIVE,
        LEARNED,
        "this strategy connects the columns of layers, and learned features are no layer",
        'take "experts"',
    ),
    *_no(
        SEARCH, LEARNED, "features are learned by the model alone, and challengers would keep the statistics of before"
    ),
    *_no(ZERO1, VOCABULARY, f"{_RESTARTED} each replica has a part of the optimizer's state"),
    *_no(EWC, VOCABULARY, f"{_RESTARTED} this strategy pulls weights towards those they had before"),
    *_no((CLOSED_FORM, GROWS), VOCABULARY, f"{_RESTARTED} this strategy does not train them"),
    *_no(REPLICAS, INTERCEPT, "intercepts learn from the outputs of all events, and each replica has a part of them"),
    *_no(
        EARLY,
        INTERCEPT,
        "each event would count as a negative in its group until its label comes, which has no weight there",
    ),
    *_no(_NO_RESIDUAL, INTERCEPT, "intercepts are for outputs whose distance from the label is known"),
    # Challengers.
    *(
        replace(each, choice=replace(each.choice, way_out=f"{each.choice.way_out}, or take [search] out"))
        for each in _OF_SEARCH
    ),
)


def facts(pipeline: PipelineSettings) -> Point:
    """Return the values of the keys that the rules use; of `model.teacher`, the key that names it."""
    learner, stream, model, schema = pipeline.learner, pipeline.stream, pipeline.model, pipeline.events
    labels, backfill = stream.labels, stream.backfill
    sections = {
        "learner": learner.model_dump() | {"strategy": learner.strategy.name, "optimizer": learner.optimizer.name},
        "learner.mesh": (learner.mesh or MeshSettings()).model_dump(),
        "replay": pipeline.replay.model_dump(),
        "device_sharing": pipeline.device_sharing.model_dump(),
    }
    values = {f"{section}.{key}": value for section, found in sections.items() for key, value in found.items()}
    return values | {
        ADAPTER.key: None if model.adapter is None else model.adapter.kind,
        NF4.key: None if model.adapter is None else model.adapter.base_precision,
        TEACHER.key: None if model.teacher is None else model.teacher.kind,
        _NO_RESIDUAL.key: model.task,
        SEARCH.key: pipeline.search is not None,
        LEARNED.key: next(iter(schema.transformed), None),
        VOCABULARY.key: next(iter(schema.vocabularies), None),
        INTERCEPT.key: next(iter(schema.intercepts), None),
        LAG_POLICY: stream.lag_policy.action,
        LABELS.key: labels is not None,
        EARLY.key: None if labels is None else labels.early,
        TAKE_BACK.key: labels is not None and labels.take_back,
        "stream.backfill.identity": backfill is not None and backfill.identity is not None,
    }


def conflicts(chosen: Point) -> Iterator[tuple[str, str]]:
    """Yield the conflicts: the key to change, and one sentence with the values and the way out."""
    for rule in RULES:
        choice, other = rule.choice, rule.other
        value, also = chosen.get(choice.key), chosen.get(other.key)
        if value in choice.values and also in other.values:
            clash = f"{choice.key} = {_toml(value)} does not go with {other.key} = {_toml(also)}"
            yield choice.key, f"{clash}: {rule.why}; {choice.way_out}"


def obstacle(chosen: Point, key: str) -> str | None:
    """Return with which other value a key does not go if it is true, and why; None: it goes with all."""
    for rule in RULES:
        for own, other in ((rule.choice, rule.other), (rule.other, rule.choice)):
            if own.key == key and True in own.values and chosen.get(other.key) in other.values:
                return f"{other.key} = {_toml(chosen.get(other.key))}: {rule.why}"
    return None


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
