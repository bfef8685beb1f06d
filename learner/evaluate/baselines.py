"""What a model has to beat: rules that need no features, scored on the same new events as the model, before training.

- `constant`: always the most frequent class so far, or the mean. Of classes that are equally frequent it is the one
  that was most frequent before.
- `last_label`: the label of the event before (Bifet et al. 2013, "Pitfalls in benchmarking data stream classification
  and how to avoid them": on a stream with runs of one class it seems a good model).
- `group`: the same as `constant`, of the events of one group, where `[schema.group]` is set.

Each event is predicted with the labels of those before it, as if events came one by one. Of an event whose label comes
late, the guess is made when the event comes. A round of events is one call, without a loop over events.

Legend: B or N events, G baselines, S slots of groups, C classes.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Schema
from anabranch.learner.evaluate.adwin import limit_of, winsorized

CONSTANT, LAST_LABEL, GROUP = "constant", "last_label", "group"

_MOST_SLOTS = 2**14
"""Groups are counted by their hash modulo this: groups that share a slot share a guess, and memory is bounded."""
_MOST_COUNTS = 2**16
"""Slots times classes; with many classes there are fewer slots."""
_FEW_CLASSES = 8
"""So many classes are counted faster by a sum of each than by sorting."""
_SMALLEST = 0.0005
"""A difference of parts that is no tenth of a point."""
_RECENT = 63
"""Rounds whose labels say how large a label is."""


class _MostFrequent:
    """The most frequent class of each slot. Used by one thread."""

    def __init__(self, slots: int, classes: int) -> None:
        self._counts = np.zeros((slots, classes), np.int64)
        self._most = np.zeros(slots, np.int64)
        self.guess = np.zeros(slots, np.int64)

    def add(self, slot_B: NDArray[np.int64], label_B: NDArray[Any]) -> NDArray[np.int64]:
        """Count B labels, and return the guess that preceded each."""
        if len(self.guess) == 1:
            return self._add_to_one(label_B.astype(np.int64))
        order = np.argsort(slot_B, kind="stable")
        slot, label = slot_B[order], label_B[order].astype(np.int64)
        first = np.concatenate([[True], slot[1:] != slot[:-1]])
        pair, most = slot * self._counts.shape[1] + label, self._most[slot]
        count = self._counts.reshape(-1)[pair] + _occurrence(pair) + 1
        # The largest count so far in each slot: slots are separated by an offset that no count reaches.
        offset = np.cumsum(first) * (1 + max(int(count.max()), int(most.max())))
        reached = np.maximum.accumulate(np.maximum(count, most) + offset) - offset
        leads = count > np.where(first, most, np.roll(reached, 1))
        # The guess changes after the event that leads.
        changes = np.flatnonzero(first | np.roll(leads, 1))
        guesses = np.where(first[changes], self.guess[slot[changes]], label[changes - 1])
        guess = np.repeat(guesses, np.diff(changes, append=len(label)))
        guess_B = np.empty_like(guess)
        guess_B[order] = guess
        np.add.at(self._counts.reshape(-1), pair, 1)
        last = np.flatnonzero(np.roll(first, -1))
        self._most[slot[last]] = reached[last]
        self.guess[slot[last]] = np.where(leads[last], label[last], guess[last])
        return guess_B

    def _add_to_one(self, label_B: NDArray[np.int64]) -> NDArray[np.int64]:
        """Do the same with a single slot, in less time: only classes that may lead are counted event by event."""
        counts, most, guess = self._counts[0], int(self._most[0]), int(self.guess[0])
        after = counts + np.bincount(label_B, minlength=len(counts))
        may_lead = np.flatnonzero(after > most)
        if may_lead.tolist() in ([], [guess]):
            self._counts[0], self._most[0] = after, max(most, int(after[guess]))
            return np.full(len(label_B), guess)
        if len(may_lead) <= _FEW_CLASSES:
            largest = (counts[may_lead, None] + np.cumsum(label_B == may_lead[:, None], axis=1)).max(axis=0)
        else:
            largest = np.maximum.accumulate(counts[label_B] + _occurrence(label_B) + 1)
        reached = np.maximum(largest, most)
        leads = np.flatnonzero(np.diff(reached, prepend=most))
        self._counts[0], self._most[0] = after, reached[-1]
        self.guess[0] = label_B[leads[-1]]
        # The guess changes after the event that leads.
        return np.repeat(np.concatenate([[guess], label_B[leads]]), np.diff(leads + 1, prepend=0, append=len(label_B)))

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        there = np.flatnonzero(self._counts)
        slots = np.flatnonzero(self._most)
        counts = self._counts.reshape(-1)[there]
        return {"counts": [there.tolist(), counts.tolist()], "guess": [slots.tolist(), self.guess[slots].tolist()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        (there, counts), (slots, guesses) = state["counts"], state["guess"]
        self._counts.reshape(-1)[there] = counts
        self.guess[slots] = guesses
        self._most = self._counts.max(axis=1)


class _Mean:
    """The mean of the labels of each slot, 0 before the first. Used by one thread."""

    def __init__(self, slots: int) -> None:
        self._count, self._total = np.zeros(slots, np.int64), np.zeros(slots)

    @property
    def guess(self) -> NDArray[np.float64]:
        """The mean of each slot, float64 `[S]`."""
        return self._total / np.maximum(self._count, 1)

    def add(self, slot_B: NDArray[np.int64], label_B: NDArray[Any]) -> NDArray[np.float64]:
        """Add B labels, and return the mean that preceded each."""
        order = np.argsort(slot_B, kind="stable")
        slot, label, index = slot_B[order], label_B[order], np.arange(len(order))
        first = np.concatenate([[True], slot[1:] != slot[:-1]])
        start = np.maximum.accumulate(np.where(first, index, 0))
        through = np.cumsum(label)
        total = self._total[slot] + (through - label) - (through - label)[start]
        guess_B = np.empty(len(order))
        guess_B[order] = total / np.maximum(self._count[slot] + index - start, 1)
        np.add.at(self._total, slot, label)
        np.add.at(self._count, slot, 1)
        return guess_B

    def state(self) -> list[list[Any]]:
        """Return plain values, for a checkpoint."""
        there = np.flatnonzero(self._count)
        return [there.tolist(), self._count[there].tolist(), self._total[there].tolist()]

    def restore(self, state: list[list[Any]]) -> None:
        """Restore the state of a checkpoint."""
        there, count, total = state
        self._count[there], self._total[there] = count, total


def _occurrence(value_B: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how often each value has occurred before, int64 `[B]`."""
    narrow_B = value_B.astype(np.uint16) if int(value_B.max()) < 1 << 16 else value_B  # sorted several times as fast
    order = np.argsort(narrow_B, kind="stable")
    ordered, index = value_B[order], np.arange(len(order))
    start = np.maximum.accumulate(np.where(np.concatenate([[True], ordered[1:] != ordered[:-1]]), index, 0))
    found = np.empty(len(order), np.int64)
    found[order] = index - start
    return found


class Baselines:
    """The baselines of labels that are one class or one number; none for others. Used by one thread."""

    def __init__(self, schema: Schema) -> None:
        label = schema.label
        self._classes = label.one_of
        self.names: tuple[str, ...] = ()
        """Of the G baselines, in their order."""
        if label.one_of is not None or label.classes is None:
            self.names = (CONSTANT, LAST_LABEL, *([GROUP] if schema.group else []))
        self._class_names = label.names
        slots = min(_MOST_SLOTS, max(1, _MOST_COUNTS // (label.one_of or 1))) if GROUP in self.names else 1
        self._slots = slots
        self._priors = [self._prior(each) for each in ((1, slots) if GROUP in self.names else (1,))]
        self._last = 0.0
        self._limits: deque[float] = deque(maxlen=_RECENT)
        """Of the newest rounds: what a number counts at most as a label, so that one of any size moves no mean."""

    def _prior(self, slots: int) -> _MostFrequent | _Mean:
        return _Mean(slots) if self._classes is None else _MostFrequent(slots, self._classes)

    def add(self, label_B: Array, group_B: Array) -> Sequence[float]:
        """Learn the labels of B new events in their order, and return what `score` returns of the guesses for them."""
        return self.score(self.learn(label_B, group_B), label_B)

    def learn(self, label_B: Array, group_B: Array) -> NDArray[Any]:
        """Learn the labels of B new events in their order, and return the guesses for each before it, `[B, G]`.

        `group_B` has the hashes of their groups, uint64.
        """
        if not self.names or not len(label_B):
            return np.empty((len(label_B), len(self.names)))
        found = [self._priors[0].add(np.zeros(len(label_B), np.int64), self._within(label_B))]
        found.append(np.concatenate([np.array([self._last], label_B.dtype), label_B[:-1]]))
        if GROUP in self.names:
            # The labels count as they are, since a group may have larger ones than all others.
            slot_B = (group_B.astype(np.uint64) % self._slots).astype(np.int64)
            found.append(self._priors[1].add(slot_B, label_B))
        self._last = label_B[-1].item()
        return np.stack(found).T

    def score(self, guess_BG: NDArray[Any], label_B: Array) -> Sequence[float]:
        """Return the sum of the scores of each baseline, `[G]`: 1 for right and 0 for wrong, or minus the absolute
        error."""
        if not self.names:
            return ()
        if self._classes is not None:
            return [float(np.count_nonzero(guess_B == label_B)) for guess_B in guess_BG.T]
        number_B = label_B.astype(np.float64)
        return [-float(np.abs(guess_B - number_B).sum()) for guess_B in guess_BG.T]

    def guess(self, group_N: Array) -> NDArray[np.float32]:
        """Return what each baseline answers for N events now, float32 `[N, G]`; `group_N`: hashes of groups, uint64."""
        guess_NG = np.empty((len(group_N), len(self.names)), np.float32)
        if self.names:
            guess_NG[:, 0], guess_NG[:, 1] = self._priors[0].guess[0], self._last
        if GROUP in self.names:
            guess_NG[:, 2] = self._priors[1].guess[(group_N.astype(np.uint64) % self._slots).astype(np.int64)]
        return guess_NG

    @property
    def rules(self) -> Mapping[str, str]:
        """What each baseline does, in words that follow *than*."""
        guess = int(self._priors[0].guess[0])
        name = str(guess) if self._class_names is None else self._class_names[guess]
        most = "the mean" if self._classes is None else name
        of_group = "the mean of the group" if self._classes is None else "the most frequent class of the group"
        rules = {CONSTANT: f"always answering {most}", LAST_LABEL: "the last label", GROUP: of_group}
        return {name: rules[name] for name in self.names}

    def state(self) -> dict[str, Any]:
        """Return plain values, for a checkpoint."""
        priors = [prior.state() for prior in self._priors] if self.names else []
        return {"names": [*self.names], "priors": priors, "last": self._last, "limits": [*self._limits]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint. A baseline that it has not, since the schema had no group, begins now."""
        self._last = state["last"]
        self._limits.extend(state["limits"])
        for prior, before in zip(self._priors, state["priors"], strict=False):
            prior.restore(before)

    def _within(self, label_B: Array) -> Array:
        """Return labels as means learn from them."""
        if self._classes is not None:
            return label_B
        numbers = label_B.astype(np.float64)
        if np.isfinite(limit := limit_of(numbers)):
            self._limits.append(limit)
        limit = float(np.median(self._limits)) if self._limits else np.inf
        return np.clip(numbers, -limit, limit)


_SIGNIFICANT = 3.0
"""Standard errors of a difference that is not by chance: once in 740 comparisons it is."""


class AgainstBaseline(NamedTuple):
    """How a model compares with a baseline on the same events."""

    words: str
    """Such as *better than the last label by 3.1 points*; empty while that is not known."""
    worse: bool
    """Whether the model is worse, and not by chance."""


def compare(rule: str, score: float, baseline: float, error: float, *, bounded: bool) -> AgainstBaseline:
    """Compare mean scores of the same events.

    Args:
        rule: what the baseline does.
        score: of the model.
        baseline: its own.
        error: the standard error of the difference; infinity where it is not known.
        bounded: whether scores are parts of 1, whose differences are points of a hundred; else they are errors.
    """
    difference = score - baseline
    if not math.isfinite(error):
        return AgainstBaseline("", worse=False)
    if difference == 0 and bounded and baseline == 1:
        return AgainstBaseline(f"equal to {rule}, which is always right", worse=False)
    size = f"{abs(difference) * 100:.1f} points" if bounded else f"{abs(difference):.3g}"
    if bounded and abs(difference) < _SMALLEST:
        size = "less than 0.1 points"
    if abs(difference) <= _SIGNIFICANT * error:
        return AgainstBaseline(f"no better than {rule}", worse=False)
    kind = "worse" if difference < 0 else "better"
    return AgainstBaseline(f"{kind} than {rule} by {size}", worse=difference < 0)


def score_of_constant(label_G: NDArray[Any]) -> float | None:
    """Return the mean score of the one answer that fits G labels best; None where they are no classes nor numbers."""
    if label_G.ndim != 1 or not len(label_G):
        return None
    if label_G.dtype.kind in "iu":
        return float(np.unique(label_G, return_counts=True)[1].max()) / len(label_G)
    label = label_G.astype(np.float64)
    return -float(winsorized(np.abs(label - np.median(label))).mean())
