"""The events of a step, new and replayed, as a strategy takes them.

Legend: B new events, R replayed ones, C classes, D dimensions of an embedding.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from replay.row_layout import Fields
from replay.sample_plan import Sample

Tensors = Mapping[str, Tensor]


OUTPUTS = OUTPUT, TEACHER = "output", "teacher"
"""Columns that a step adds to its events: the model's outputs, for strategies that keep them, and the teacher's."""


@dataclass(frozen=True)
class Examples:
    """Events as tensors on the learner's device: features by name `[B, ...]`, labels `[B]`, loss weights `[B]`.

    An event without a label has weight 0 and some valid label. `output_B` is the model's output from when the event
    was new, NaN where that is not known; only strategies that keep outputs have it. `early_B`, uint8, says
    how far the labels of new events are known (`learner.strategies.early_negatives`); None: all are final.

    With a teacher there are three more: its output `teacher_B`, NaN where that is not known; `taught_B`, the loss
    weight of the teacher's output, of unlabelled events too; and `labelled_B`, bool.
    """

    features: Tensors
    label_B: Tensor
    weight_B: Tensor
    output_B: Tensor | None = None
    early_B: Tensor | None = None
    teacher_B: Tensor | None = None
    taught_B: Tensor | None = None
    labelled_B: Tensor | None = None

    def __len__(self) -> int:
        return self.label_B.shape[0]

    def __getitem__(self, which: slice | Tensor) -> "Examples":
        """Return the selected events."""
        return self.map(lambda value: value[which])

    @property
    def optional(self) -> dict[str, Tensor]:
        """The tensors that not all examples have, by the name of the field."""
        return {name: value for name in _OPTIONAL if (value := getattr(self, name)) is not None}

    @property
    def total_weight(self) -> Tensor:
        """The sum of all loss weights, a scalar."""
        return self.weight_B.sum() if self.taught_B is None else (self.weight_B + self.taught_B).sum()

    def map(self, change: Callable[[Tensor], Tensor]) -> "Examples":
        """Return examples with every tensor changed, in a fixed order: features, label, weight, and the others."""
        features = {name: change(value) for name, value in self.features.items()}
        required = change(self.label_B), change(self.weight_B)
        return Examples(features, *required, **{name: change(value) for name, value in self.optional.items()})

    def weightless(self) -> "Examples":
        """Return the same events with all loss weights 0."""
        taught_B = None if self.taught_B is None else torch.zeros_like(self.taught_B)
        return replace(self, weight_B=torch.zeros_like(self.weight_B), taught_B=taught_B)


_OPTIONAL = ("output_B", "early_B", "teacher_B", "taught_B", "labelled_B")


def concat(parts: Sequence[Examples]) -> Examples:
    """Join examples in order: features, labels and weights alone."""
    if len(parts) == 1:
        return parts[0]
    return Examples(
        {name: torch.cat([part.features[name] for part in parts]) for name in parts[0].features},
        torch.cat([part.label_B for part in parts]),
        torch.cat([part.weight_B for part in parts]),
    )


def split_like(values: Tensor, parts: Sequence[Examples]) -> list[Tensor]:
    """Split values of all events, in order, into those of each of the parts."""
    ends = [*itertools.accumulate(map(len, parts))]
    return [values[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def pad_single(one: Examples) -> Examples:
    """Return an event and a copy of weight 0: batch norm has no statistics of a single event."""
    pair, none = one.map(lambda value: torch.cat([value, value])), one.weightless()
    taught = None if one.taught_B is None or none.taught_B is None else torch.cat([one.taught_B, none.taught_B])
    return replace(pair, weight_B=torch.cat([one.weight_B, none.weight_B]), taught_B=taught)


def output_fields(shapes: Mapping[str, Sequence[int] | None]) -> Fields:
    """Return the columns of OUTPUTS in which a store keeps outputs of these shapes; none where the shape is None."""
    kept = {name: tuple(shape) for name in OUTPUTS if (shape := shapes.get(name)) is not None}
    return {name: (np.dtype(np.float32), shape) for name, shape in kept.items()}


_FEATURE = "feature."


def examples_of(sample: Sample, samples: Sequence[int]) -> list[Examples]:
    """Split a sample into examples of the sizes `samples`: smaller ones if it has fewer events, none if too few.

    Their weight is 0 where there is no label. The sample's importance corrects for how events were kept and sampled:
    with `[schema.weight]` heavy events are kept more often, and yet the rehearsed loss is that of the stream.
    """
    columns = sample.columns
    labelled, label, weight = columns["labelled"], columns["label"], sample.importance
    # On a CPU it is cheap to see that all are labelled, the usual case. Both are copied: contiguous and unshared.
    if labelled.is_cpu and labelled.numpy().all():
        label, weight = label.clone(memory_format=torch.contiguous_format), weight.clone()
    else:
        known = labelled.reshape(-1, *[1] * (label.dim() - 1))
        label = torch.where(known, label, torch.zeros_like(label))
        weight = torch.where(labelled, weight, 0.0)
    features = {name.removeprefix(_FEATURE): column for name, column in columns.items() if name.startswith(_FEATURE)}
    everything = Examples(features, label, weight, columns.get(OUTPUT))
    if TEACHER in columns:
        everything = replace(
            everything, teacher_B=columns[TEACHER], taught_B=sample.importance.clone(), labelled_B=labelled
        )
    if len(samples) == 1:
        return [everything]
    n, total = len(sample), sum(samples)
    ends = [sum(samples[: index + 1]) * n // total for index in range(len(samples))]
    parts = [everything[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return parts if all(map(len, parts)) else []
