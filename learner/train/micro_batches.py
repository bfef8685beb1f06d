"""Micro-batches: a step's events in parts that are small enough for the device.

Legend: B new events, R of a sample.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from anabranch.learner.model.cuda_graph import GraphedPass
from anabranch.learner.model.examples import Examples, pad_single
from anabranch.learner.strategies.base import MicroBatchLoss, StepWeights

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


def run_graphed(
    graphs: GraphedPass,
    run_pass: Callable[[Examples, list[Examples], StepWeights], MicroBatchLoss],
    given: tuple[Examples, Sequence[Examples], StepWeights],
    undo: Callable[[], object],
) -> MicroBatchLoss | None:
    """Run a pass over given new events, old ones and weights by a CUDA graph; None: it has to run as it is.

    `undo` is called where the pass cannot be recorded, and undoes it.
    """
    new, old, weights = given
    events = [new, *old]

    def run(tensors: list[Tensor]) -> list[Tensor | None]:
        (new_, *old_), weights_ = _with_tensors(events, weights, tensors)
        loss = run_pass(new_, old_, weights_)
        return [loss.total.detach(), loss.output_B, loss.new_B, *loss.old]

    results = graphs(run, _tensors_of(events, weights), undo)
    if results is None:
        return None
    total, output_B, new_B, *losses = results
    assert total is not None
    assert output_B is not None
    return MicroBatchLoss(total, output_B, [each for each in losses if each is not None], new_B)


def _tensors_of(events: Sequence[Examples], weights: StepWeights) -> list[Tensor]:
    """Return all tensors of a pass, in a fixed order."""
    tensors = [weights.new, *weights.old, *([] if weights.present_C is None else [weights.present_C])]
    for each in events:
        tensors += [*each.features.values(), each.label_B, each.weight_B]
        tensors += each.optional.values()
    return tensors


def _with_tensors(
    events: Sequence[Examples], weights: StepWeights, tensors: Sequence[Tensor]
) -> tuple[list[Examples], StepWeights]:
    """Return the events and weights with other tensors, which are in the order of `_tensors_of`."""
    rest: Iterator[Tensor] = iter(tensors)
    new, old = next(rest), [next(rest) for _ in weights.old]
    given = StepWeights(new, old, None if weights.present_C is None else next(rest))
    replaced = [each.map(lambda _: next(rest)) for each in events]
    return replaced, given
