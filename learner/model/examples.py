"""The events of a step, new and replayed, as a strategy takes them.

Legend: B new events, R replayed ones, C classes, D dimensions of an embedding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate, pairwise, starmap

import numpy as np
import torch
from torch import Tensor

from anabranch.ingest.events.block import Array
from anabranch.learner.model.factory import ForOnePass
from anabranch.replay.row_layout import Fields
from anabranch.replay.sample_plan import Sample
from anabranch.replay.tiers.store_stream import upload

Tensors = Mapping[str, Tensor]


OUTPUTS = OUTPUT, TEACHER = "output", "teacher"
"""Columns that a step adds to its events: the model's outputs, for strategies that keep them, and the teacher's."""
EARLY = "early"
"""A column of the new events of a step, uint8 `[B]` with values of `Early`; without it, all are PLAIN."""


class Early(IntEnum):
    """How far the label of an event in a step is known."""

    PLAIN = 0
    """It is final, and the event was not trained on before."""
    NEGATIVE = 1
    """It has not come: the event is trained on as a negative."""
    CORRECTED = 2
    """It has come and is positive: the event, which was trained on as a NEGATIVE, is trained on as a positive."""
    TAKEN_BACK = 3
    """It has come after the event was trained on as a plain negative when it timed out, and is positive."""


@dataclass(frozen=True)
class Examples:
    """Events as tensors on the learner's device: features by name `[B, ...]`, labels `[B]`, loss weights `[B]`.

    An event without a label has weight 0 and some valid label. `output_B` is the model's output from when the event
    was new, NaN where that is not known; only strategies that keep outputs have it. `early_B`, uint8, says
    how far the labels of new events are known (`Early`); None: all are final.

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

    def split(self, sizes: Sequence[int]) -> list["Examples"]:
        """Return consecutive parts of these sizes, which add up to all events, and share memory with them.

        Takes a third of the time of slices: one call a tensor makes all its parts.
        """
        if len(sizes) == 1:
            return [self]
        parts = {name: torch.split_with_sizes(value, sizes) for name, value in self.features.items()}
        features = [dict(zip(parts, each, strict=True)) for each in zip(*parts.values(), strict=True)]
        optional = {name: torch.split_with_sizes(value, sizes) for name, value in self.optional.items()}
        others = [dict(zip(optional, each, strict=True)) for each in zip(*optional.values(), strict=True)]
        label, weight = (torch.split_with_sizes(each, sizes) for each in (self.label_B, self.weight_B))
        required = zip(features, label, weight, strict=True)
        if not others:
            return [*starmap(Examples, required)]
        return [Examples(*each, **rest) for each, rest in zip(required, others, strict=True)]

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


_FEATURE = "feature."
_OPTIONAL = ("output_B", "early_B", "teacher_B", "taught_B", "labelled_B")


class Transfer:
    """Copies new events to the device. On CUDA in one copy, from pinned memory in a separate stream: no host wait.

    Used by one thread.
    """

    def __init__(self, features: Sequence[str], device: torch.device) -> None:
        """Take the names of the model's features."""
        self._features = features
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __call__(self, columns: Mapping[str, Array]) -> Examples:
        """Return the columns of B events as tensors on the device; columns `early` and `teacher` are taken where they
        are. All events have a label unless there is a column `teacher`."""
        optional = {"early_B": columns[EARLY]} if EARLY in columns else {}
        label, weight = columns["label"], columns["weight"]
        if TEACHER in columns:
            labelled = columns["labelled"].astype(np.bool_)
            optional |= {"teacher_B": columns[TEACHER], "taught_B": weight, "labelled_B": labelled}
            weight = np.where(labelled, weight, np.float32(0))
            label = np.where(labelled.reshape(-1, *[1] * (label.ndim - 1)), label, np.zeros_like(label))
        features = [columns[f"{_FEATURE}{name}"] for name in self._features]
        tensors = iter(self.copy([*features, label, weight, *optional.values()]))
        by_name = dict(zip(self._features, tensors, strict=False))
        required = next(tensors), next(tensors)
        return Examples(by_name, *required, **dict(zip(optional, tensors, strict=True)))

    def copy(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Return arrays on the device; work that is queued later sees them, and the arrays may change at once."""
        if self._stream is None:
            return [torch.from_numpy(array).to(self._device) for array in arrays]
        with torch.cuda.stream(self._stream):
            there = upload(arrays, self._device)
        now = torch.cuda.current_stream(self._device)
        now.wait_stream(self._stream)
        there[0].record_stream(now)  # all are views of one block
        return there


def concat(parts: Sequence[Examples]) -> Examples:
    """Join examples in order: features, labels and weights alone. The features are for one pass of the model."""
    if len(parts) == 1:
        return parts[0]
    return Examples(
        ForOnePass((name, torch.cat([part.features[name] for part in parts])) for name in parts[0].features),
        torch.cat([part.label_B for part in parts]),
        torch.cat([part.weight_B for part in parts]),
    )


def split_like(values: Tensor, parts: Sequence[Examples]) -> list[Tensor]:
    """Split values of all events, in order, into those of each of the parts."""
    ends = [*accumulate(map(len, parts))]
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


def examples_of(sample: Sample, samples: Sequence[int]) -> list[Examples]:
    """Split a sample into examples of the sizes `samples`: smaller ones if it has fewer events, none if too few.

    Their weight is 0 where there is no label. The sample's importance corrects for how events were kept and sampled:
    with `[schema.weight]` heavy events are kept more often, and yet the rehearsed loss is that of the stream.
    """
    sizes = sizes_of(len(sample), samples)
    return all_examples_of(sample).split(sizes) if sizes else []


def sizes_of(n: int, samples: Sequence[int]) -> list[int]:
    """Return how `examples_of` splits n events; empty where they are too few."""
    if len(samples) == 1:
        return [n] if n else []
    ends = [end * n // sum(samples) for end in accumulate(samples)]
    sizes = [end - begin for begin, end in pairwise([0, *ends])]
    return sizes if all(sizes) else []


def all_examples_of(sample: Sample) -> Examples:
    """Return a sample as one part of examples, for which see `examples_of`."""
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
    return everything
