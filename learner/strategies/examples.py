"""The events of a step, new and replayed, as a strategy takes them.

Legend: B new events, R replayed ones, C classes, D dimensions of an embedding.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from replay.row_layout import Fields
from replay.sample_plan import Sample

Tensors = Mapping[str, Tensor]


OUTPUT = "output"
"""A column that a step adds to its events for strategies that keep the model's outputs."""


@dataclass(frozen=True)
class Examples:
    """Events as tensors on the learner's device: features by name `[B, ...]`, labels `[B]`, loss weights `[B]`.

    An event without a label has weight 0 and some valid label. `output_B` is the model's output from when the event
    was new, NaN where that is not known; only strategies that keep outputs have it.
    """

    features: Tensors
    label_B: Tensor
    weight_B: Tensor
    output_B: Tensor | None = None

    def __len__(self) -> int:
        return self.label_B.shape[0]

    def __getitem__(self, which: slice | Tensor) -> "Examples":
        """Return the selected events."""
        return Examples(
            {name: value[which] for name, value in self.features.items()},
            self.label_B[which],
            self.weight_B[which],
            None if self.output_B is None else self.output_B[which],
        )


def concat(parts: Sequence[Examples]) -> Examples:
    """Join examples in order, without their outputs."""
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
    return Examples(
        {name: torch.cat([value, value]) for name, value in one.features.items()},
        torch.cat([one.label_B, one.label_B]),
        torch.cat([one.weight_B, torch.zeros_like(one.weight_B)]),
    )


def output_field(shape: tuple[int, ...]) -> Fields:
    """Return the column in which a store keeps the model's output of the given shape."""
    return {OUTPUT: (np.dtype(np.float32), shape)}


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
    if len(samples) == 1:
        return [everything]
    n, total = len(sample), sum(samples)
    ends = [sum(samples[: index + 1]) * n // total for index in range(len(samples))]
    parts = [everything[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    return parts if all(map(len, parts)) else []
