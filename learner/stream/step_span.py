"""The span of a training step, linked with the traces of its events."""

from collections.abc import Sequence

from anabranch.core.tracing.spans import NO_SPAN, Attributes, TracedSpan, current_tracer
from ingest.events.partition import TopicPartition
from learner.stream.batch import Batch


def step_span(batch: Batch, step: int, names: Sequence[TopicPartition]) -> TracedSpan:
    """Return the span of the step that learns from a batch, not started yet; `NO_SPAN` where it is not traced.

    Args:
        batch: the events.
        step: the number of the step.
        names: the partitions, in the order of their index.
    """
    tracer = current_tracer()
    if tracer is None:
        return NO_SPAN

    def attributes() -> Attributes:
        topics = {name.topic for name in names}
        return {
            "messaging.system": "kafka",
            "messaging.operation.name": "train",
            "messaging.operation.type": "process",
            "messaging.batch.message_count": len(batch),
            **({"messaging.destination.name": topics.pop()} if len(topics) == 1 else {}),
            "anabranch.step": step,
        }

    return tracer.step("train", batch.contexts, attributes)
