"""How the events of a step are dealt to ranks, and how they travel there: as bytes of a form that both sides know.

Legend: N ranks, b bytes of a message.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from learner.strategies.examples import Examples

_ALIGNMENT = 16


class Column(NamedTuple):
    """One tensor of examples: `feature.<name>`, `label`, `weight` or `output`, each `[B, *shape]`."""

    name: str
    dtype: str
    shape: tuple[int, ...]


Form = tuple[Column, ...]
"""The tensors of examples, in the order in which they travel."""
Slices = list[slice]
"""Of the new events and of each sample, which are a rank's."""


def scatter(counts: Sequence[int], ranks: int) -> list[Slices]:
    """Deal new events and samples to N ranks, so that all have nearly as many: who gets fewer new ones gets more
    old."""
    dealt: list[Slices] = [[] for _ in range(ranks)]
    total = [0] * ranks
    for count in counts:
        order = sorted(range(ranks), key=lambda rank: (total[rank], rank))
        sizes = [count // ranks] * ranks
        for rank in order[: count % ranks]:
            sizes[rank] += 1
        for rank, end in enumerate(accumulate(sizes)):
            dealt[rank].append(slice(end - sizes[rank], end))
            total[rank] += sizes[rank]
    return dealt


@dataclass(frozen=True)
class RankBatch:
    """A rank's part of a step: so many of the new events and of each sample travel, and so many of them are real.

    They differ where the rank has none while others have: one of no weight stands in, so that all ranks do alike.
    """

    parts: list[Examples]
    real: list[int]

    @classmethod
    def of(cls, everything: Sequence[Examples], slices: Slices) -> "RankBatch":
        """Return the events in the slices of each."""
        parts = [each[where] for each, where in zip(everything, slices, strict=True)]
        travelling = [part if len(part) else _stand_in(each) for part, each in zip(parts, everything, strict=True)]
        return cls(travelling, [len(part) for part in parts])

    @property
    def counts(self) -> list[int]:
        """How many travel of each."""
        return [len(part) for part in self.parts]

    def whose(self, places: Iterable[int], slices: Slices) -> Iterator[tuple[int, int]]:
        """Return of each place among the events that travel where its event comes from: the group, and the place there.

        What stands in is the first event of its group.
        """
        groups = [(group, place) for group, count in enumerate(self.counts) for place in range(count)]
        for group, place in (groups[each] for each in places):
            yield group, slices[group].start + place if place < self.real[group] else 0


def form_of(examples: Examples) -> Form:
    """Return the form of examples."""
    return tuple(
        Column(name, str(value.dtype).removeprefix("torch."), tuple(value.shape[1:]))
        for name, value in _columns(examples)
    )


def packed(parts: Sequence[Examples]) -> Tensor:
    """Return examples as one message, uint8 `[b]` on their device."""
    columns = [value for part in parts for _, value in _columns(part)]
    ends = list(accumulate(_aligned(value.nbytes) for value in columns))
    message = torch.empty(ends[-1], dtype=torch.uint8, device=columns[0].device)
    for value, end in zip(columns, ends, strict=True):
        begin = end - _aligned(value.nbytes)
        message[begin : begin + value.nbytes].view(value.dtype).copy_(value.reshape(-1))
    return message


def unpacked(message: Tensor, forms: Sequence[Form], counts: Sequence[int]) -> list[Examples]:
    """View a message of `packed` as examples, of which each has a form and a count."""
    place, found = 0, []
    for form, count in zip(forms, counts, strict=True):
        tensors = {}
        for column in form:
            dtype = getattr(torch, column.dtype)
            size = count * dtype.itemsize * _numbers(column.shape)
            tensors[column.name] = message[place : place + size].view(dtype).view(count, *column.shape)
            place += _aligned(size)
        features = {name[8:]: value for name, value in tensors.items() if name.startswith("feature.")}
        found.append(Examples(features, tensors["label"], tensors["weight"], tensors.get("output")))
    return found


def forms_to_json(forms: Sequence[Form]) -> bytes:
    """Return forms as JSON."""
    return json.dumps(forms).encode()


def forms_from_json(text: bytes) -> list[Form]:
    """Return the forms that `forms_to_json` wrote."""
    return [tuple(Column(name, dtype, tuple(shape)) for name, dtype, shape in form) for form in json.loads(text)]


def _stand_in(examples: Examples) -> Examples:
    """Return one event of no weight, or none where there is none."""
    one = examples[:1]
    return replace(one, weight_B=torch.zeros_like(one.weight_B))


def _columns(examples: Examples) -> list[tuple[str, Tensor]]:
    columns = [(f"feature.{name}", value) for name, value in examples.features.items()]
    columns += [("label", examples.label_B), ("weight", examples.weight_B)]
    return columns if examples.output_B is None else [*columns, ("output", examples.output_B)]


def _numbers(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
