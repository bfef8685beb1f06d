"""Memory by part, on the host and on the learner's device."""

from anabranch.commands.plan.constants import Constants
from anabranch.commands.plan.lines import Line, PlanSection, summed
from anabranch.commands.plan.store_size import (
    COPIES_SAVED,
    ENTRY_BYTES,
    EVENT_BYTES,
    SLOT_BYTES,
    PlannedStore,
    schema_row_bytes,
)
from anabranch.config.pipeline import Pipeline
from anabranch.core.sizes import size_text
from anabranch.ingest.events.block import BlockLayout
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.labels import LabelStreamSettings
from anabranch.ingest.transport.shared_ring import ring_bytes
from anabranch.learner.checkpoints.part_formats import WAITING_BYTES
from anabranch.learner.device.memory_ledger import CONTEXT_BYTES, learner_ledger, serving_ledger
from anabranch.replay.segments import most_events
from anabranch.replay.tiers.disk import DiskTier

TOTAL = "total"


def host_memory(pipeline: Pipeline, constants: Constants, store: PlannedStore | None, added: float) -> PlanSection:
    """Return the memory of the host by part; `added`: new events from one checkpoint to the next."""
    on_cpu = constants.device == "cpu"
    lines = _tensors(pipeline, constants) if on_cpu else []
    if store is not None and (on_cpu or pipeline.replay.device_memory == "host"):
        lines.append(_memory_tier(store))
    if store is not None:
        formula = f"{store.slots:,} slots x {SLOT_BYTES} B + {store.events:,} events x {EVENT_BYTES} B"
        lines.append(Line("table of events", store.table_bytes, "bytes", formula))
        if not pipeline.replay.slower:
            lines.append(_checkpoint_buffers(store, added))
    if pipeline.stream.labels is not None:
        lines.append(_waiting(pipeline.stream.labels, pipeline, constants))
    lines += [
        Line("learner's programs and buffers", constants.learner_bytes, "bytes", _measured(constants)),
        Line("ingest process", constants.ingest_bytes, "bytes", _measured(constants)),
        _ring(pipeline),
        _serving(pipeline, constants),
    ]
    return PlanSection("host memory", [*lines, summed(TOTAL, lines)])


def device_memory(pipeline: Pipeline, constants: Constants, store: PlannedStore | None) -> PlanSection | None:
    """Return the memory of the learner's device by part, at the worst moment; None where that is the host."""
    if constants.device == "cpu":
        return None
    lines = _tensors(pipeline, constants)
    if store is not None and pipeline.replay.device_memory == "device":
        lines.append(_memory_tier(store))
    lines.append(Line("learner's context", CONTEXT_BYTES, "bytes", "an estimate, which depends on the driver"))
    if pipeline.serving.device in ("auto", pipeline.learner.device):
        tensors = serving_tensors(pipeline, constants.parameters, constants.base_bytes)
        lines += [
            Line(f"serving's {_spaced(name)}", value, "bytes", f"ledger, {pipeline.serving.workers} processes")
            for name, value in tensors.items()
        ]
        contexts = CONTEXT_BYTES * pipeline.serving.workers
        lines.append(Line("serving's contexts", contexts, "bytes", f"{pipeline.serving.workers} x an estimate"))
    return PlanSection("device memory, without activations", [*lines, summed(TOTAL, lines)])


def hit_rates(pipeline: Pipeline, store: PlannedStore) -> PlanSection:
    """Return the fractions of sampled events that come from each tier."""
    tiers = {"memory": store.memory_hit_rate}
    formula = {"memory": f"{store.memory_rows:,} of {store.events:,} events, sampled evenly"}
    if pipeline.replay.redis is not None and pipeline.replay.disk is not None:
        cached = min(1.0, store.redis_rows / store.events)
        tiers["redis"] = max(0.0, cached - tiers["memory"])
        formula["redis"] = f"{store.redis_rows:,} of {store.events:,} events, without those in memory"
    if (name := pipeline.replay.primary) is not None:
        tiers[name] = 1 - sum(value for tier, value in tiers.items() if tier != name)
        formula[name] = "the others"
    return PlanSection(
        "hit rates of replay", [Line(f"{name} tier", value, "ratio", formula[name]) for name, value in tiers.items()]
    )


def _tensors(pipeline: Pipeline, constants: Constants) -> list[Line]:
    tensors = learner_tensors(pipeline, constants.parameters, constants.base_bytes)
    full = 4 * constants.parameters
    return [
        Line(_spaced(name), value, "bytes", f"{value / full:.3g} x {constants.parameters:,} parameters x 4 B")
        if name != "base" and full
        else Line(_spaced(name), value, "bytes", "the frozen weights")
        for name, value in tensors.items()
    ]


def _memory_tier(store: PlannedStore) -> Line:
    return Line("memory tier", store.memory_bytes, "bytes", f"{store.memory_rows:,} rows x {store.row_bytes:,} B")


def _checkpoint_buffers(store: PlannedStore, added: float) -> Line:
    """Return the copies of rows while a checkpoint that has them is written: as they are read, and in a new segment."""
    most = most_events(store.row_bytes)
    new = min(store.events, round(added))
    merged = min(store.events - new, max(0, most - new))
    each = ENTRY_BYTES + store.row_bytes
    formula = f"{COPIES_SAVED} x ({new:,} new events + {merged:,} of merged segments) x {each:,} B"
    return Line("buffers of checkpoints", COPIES_SAVED * (new + merged) * each, "bytes", formula)


def _waiting(labels: LabelStreamSettings, pipeline: Pipeline, constants: Constants) -> Line:
    """Return the table of the events that wait for labels, whose payload is on the disk, when it is full."""
    row = constants.row_bytes or schema_row_bytes(Schema(pipeline.events, labels))
    slots = DiskTier.slots_in(int(labels.bytes), row)
    formula = f"{slots:,} events in stream.labels.bytes x {WAITING_BYTES} B; labels that are kept come on top"
    return Line("table of events that wait for labels", slots * WAITING_BYTES, "bytes", formula)


def _ring(pipeline: Pipeline) -> Line:
    bound = int(pipeline.stream.buffer_bytes)
    layout = BlockLayout(Schema(pipeline.events, pipeline.stream.labels))
    return Line("ingest ring", ring_bytes(layout, bound), "bytes", f"whole slots in stream.buffer_bytes = {bound:,}")


def _serving(pipeline: Pipeline, constants: Constants) -> Line:
    workers, each = pipeline.serving.workers, constants.serving_bytes
    formula = (
        _measured(constants) if each is None else f"{workers} processes x {size_text(each)}, {_measured(constants)}"
    )
    return Line("serving", None if each is None else workers * each, "bytes", formula)


def _measured(constants: Constants) -> str:
    return f"measured in the {constants.source}"


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def learner_tensors(pipeline: Pipeline, parameters: int, base_bytes: int) -> dict[str, int]:
    """Return the bytes of the tensors of rank 0 by purpose, without the store and CUDA's contexts."""
    challengers = 0 if pipeline.search is None else pipeline.search.challengers
    found = learner_ledger(parameters, pipeline.learner, 0, base_bytes, challengers)
    return {name: size for name, size in found.items() if name not in ("replay", "contexts") and size}


def serving_tensors(pipeline: Pipeline, parameters: int, base_bytes: int) -> dict[str, int]:
    """Return the bytes of the tensors of all serving processes by purpose."""
    workers, shadow = pipeline.serving.workers, pipeline.serving.shadow > 0
    found = serving_ledger(parameters, workers=workers, shadow=shadow, base_bytes=base_bytes)
    return {name: size for name, size in found.items() if name != "contexts" and size}
