"""Micro-batches: a step's events in parts that are small enough for the device.

Legend: B new events, R of a sample.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from anabranch.learner.model.examples import Examples, pad_single

LaunchContext = Callable[[], contextlib.AbstractContextManager[object]]
"""Returns the context manager under which device work is launched."""


@dataclass(frozen=True)
class StepHooks:
    """Where device sharing takes part in a step.

    Attributes:
        before_micro_batch: called before each pass of the model over a micro-batch, with its index in the step, from 0;
            may wait. None: nothing is called.
        launch_context: returns the context manager under which a step launches device work.
        before_chunk: called by other threads before they copy a chunk of a version or checkpoint from the device.
    """

    before_micro_batch: Callable[[int], object] | None = None
    launch_context: LaunchContext = contextlib.nullcontext
    before_chunk: Callable[[], object] = bool


Part = tuple[Examples, list[Examples]]
"""Some of the new events, and some of those of each sample."""


def micro_batches(new: Examples, old: Sequence[Examples], max_rows: int | None) -> list[Part]:
    """Split a step into parts of at most `max_rows` events, alike in what they have of each; None: one part.

    No part has a single event, for which batch norm has no statistics, unless the step has only one.
    """
    parts = 1 if max_rows is None else num_parts([len(new), *map(len, old)], max_rows)
    if parts == 1:
        return [(new, list(old))]
    return [
        (_part(new, index, parts), [_part(events, index, parts) for events in old if len(events)])
        for index in range(parts)
    ]


def num_parts(counts: Sequence[int], max_rows: int | None) -> int:
    """Return the number of micro-batches of a step with so many new events, and of each sample."""
    if max_rows is None:
        return 1
    limit = max(1, max(counts) // 2)
    parts = max(1, math.ceil(sum(counts) / max_rows))
    while parts < limit and sum(math.ceil(count / parts) for count in counts) > max_rows:
        parts += 1
    return min(parts, limit)


def idle(new: Examples, old: Sequence[Examples]) -> Part:
    """Return events of weight 0, two of each group, for a pass that other ranks need this rank to run."""
    first, *others = [events[:2] if len(events) > 1 else pad_single(events) for events in (new, *old) if len(events)]
    return first.weightless(), [events.weightless() for events in others]


def _part(examples: Examples, index: int, parts: int) -> Examples:
    n = len(examples)
    return examples[index * n // parts : (index + 1) * n // parts]
