"""Memory by part, on the host and on the learner's device."""

from anabranch.commands.planning.constants import Constants
from anabranch.commands.planning.ledger_of import learner_tensors, serving_tensors
from anabranch.commands.planning.lines import Line, PlanSection, size, summed
from anabranch.commands.planning.store_size import (
    COPIES_SAVED,
    ENTRY_BYTES,
    EVENT_BYTES,
    SLOT_BYTES,
    PlannedStore,
    schema_row_bytes,
)
from anabranch.config.model import Pipeline
from ingest.events.block import BlockLayout
from ingest.events.schema import Schema
from ingest.label_stream_settings import LabelStreamSettings
from ingest.transport.shared_ring import ring_bytes
from learner.device_memory.ledger import CONTEXT_BYTES
from learner.labels.waiting_events import EVENT_BYTES as WAITING_EVENT_BYTES
from replay.checkpoint.segments import most_events
from replay.tiers.disk import DiskTier

TOTAL = "total"


def host_memory(pipeline: Pipeline, constants: Constants, store: PlannedStore | None, added: float) -> PlanSection:
    """Return the memory of the host by part, at its highest; `added`: new events from one checkpoint to the next."""
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
    last = [name for name in ("redis", "disk") if getattr(pipeline.replay, name) is not None][-1:]
    for name in last:
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
    formula = f"{slots:,} events in stream.labels.bytes x {WAITING_EVENT_BYTES} B; labels that are kept come on top"
    return Line("table of events that wait for labels", slots * WAITING_EVENT_BYTES, "bytes", formula)


def _ring(pipeline: Pipeline) -> Line:
    bound = int(pipeline.stream.buffer_bytes)
    layout = BlockLayout(Schema(pipeline.events, pipeline.stream.labels))
    return Line("ingest ring", ring_bytes(layout, bound), "bytes", f"whole slots in stream.buffer_bytes = {bound:,}")


def _serving(pipeline: Pipeline, constants: Constants) -> Line:
    workers, each = pipeline.serving.workers, constants.serving_bytes
    formula = _measured(constants) if each is None else f"{workers} processes x {size(each)}, {_measured(constants)}"
    return Line("serving", None if each is None else workers * each, "bytes", formula)


def _measured(constants: Constants) -> str:
    return f"at its highest in the {constants.source}"


def _spaced(name: str) -> str:
    return name.replace("_", " ")
