"""Slices of events: those with one value of a feature, or with values in one range.

A category, and a number with few values, has a slice for each of its most frequent values, and one for the rest.
Another number has one for each quarter of the events. So their number is bounded, and two versions have the same on the
same events.

Legend: G events.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.core.errors import SettingsError
from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Feature, Schema
from anabranch.ingest.settings.features import HashBuckets, LearnedVocabulary, Vocabulary
from anabranch.learner.evaluate.adwin import winsorized
from anabranch.learner.evaluate.baselines import score_of_constant
from anabranch.learner.status.report import SliceReport

_MOST = 20
"""Values of a feature that have a slice each."""
_QUARTERS = (0.25, 0.5, 0.75)


class Slice(NamedTuple):
    """One slice of G events."""

    marks: NDArray[np.bool_]
    """Which events belong to it, `[G]`."""
    values: str = ""
    """The range of a quarter, in words."""


class Slices:
    """The slices of a pipeline. Immutable."""

    def __init__(self, names: Sequence[str], schema: Schema) -> None:
        """Take the features that `gate.slices` names.

        Raises:
            SettingsError: one of them is no feature, or has no single number or category.
        """
        known = {feature.name: feature for feature in schema.features}
        for name in names:
            if name not in known:
                raise SettingsError(
                    f'gate.slices: "{name}" is no feature of [schema.features]; write one of {", ".join(known)}'
                )
            if known[name].column_shape or known[name].is_time:
                raise SettingsError(
                    f'gate.slices: "{name}" is a time, a text or a vector; name features with one number or category'
                )
        self.features = [known[name] for name in dict.fromkeys(names)]
        self._encodings = {name: feature.encode for name, feature in schema.settings.features.items()}

    def of(self, columns: Mapping[str, Array]) -> dict[str, Slice]:
        """Return the slices of G events, columns `[G, ...]`, by name; those without an event are left out."""
        return dict(each for feature in self.features for each in self._of_feature(feature, columns)) if columns else {}

    def _of_feature(self, feature: Feature, columns: Mapping[str, Array]) -> Iterator[tuple[str, Slice]]:
        name, column = feature.name, columns[f"feature.{feature.name}"]
        missing_G = np.isnan(column) if column.dtype.kind == "f" else np.zeros(len(column), np.bool_)
        if missing_G.any():
            yield f"{name}: missing", Slice(missing_G)
        values, counts = np.unique(column[~missing_G], return_counts=True)
        encoding = self._encodings[name]
        if encoding is None and column.dtype.kind != "b" and len(values) > _MOST:
            yield from _quarters(name, column, missing_G)
            return
        listed = np.sort(np.argsort(-counts, kind="stable")[:_MOST])
        for value in values[listed]:
            yield f"{name}{_named(value, encoding)}", Slice(column == value)
        if len(listed) < len(values):
            yield f"{name}: the rest", Slice(~np.isin(column, values[listed]) & ~missing_G)


def _quarters(name: str, column: Array, missing_G: NDArray[np.bool_]) -> Iterator[tuple[str, Slice]]:
    number_G = column.astype(np.float64)
    edges = np.unique(np.quantile(number_G[~missing_G], _QUARTERS))
    within_G = np.searchsorted(edges, number_G)
    for quarter in range(len(edges) + 1):
        marks_G = (within_G == quarter) & ~missing_G
        above = f"above {edges[quarter - 1]:.4g}" if quarter else ""
        up_to = f"up to {edges[quarter]:.4g}" if quarter < len(edges) else ""
        if marks_G.any():
            yield f"{name}: quarter {quarter + 1}", Slice(marks_G, ", ".join(filter(None, [above, up_to])))


def _named(value: Any, encoding: object) -> str:
    if isinstance(encoding, Vocabulary):
        return f" = {encoding.vocab[value - 1]}" if value else ": other strings"
    if isinstance(encoding, HashBuckets):
        return f" = bucket {value}"
    if isinstance(encoding, LearnedVocabulary):
        return f" = {int(value) % 2**64:016x}"
    return f" = {str(value).lower().removesuffix('.0')}"  # of numbers as many digits as distinguish them


def reports_of(
    slices: Mapping[str, Slice], scores_G: NDArray[np.float64], label_G: NDArray[Any], *, bounded: bool
) -> dict[str, SliceReport]:
    """Return the score of each slice of G events; one that is not finite does not count."""
    found, finite_G = dict[str, SliceReport](), np.isfinite(scores_G)
    for name, each in slices.items():
        marks_G = each.marks & finite_G
        if not marks_G.any():
            continue
        score_G = scores_G[marks_G] if bounded else winsorized(scores_G[marks_G])
        score, constant = float(score_G.mean()), score_of_constant(label_G[marks_G])
        found[name] = SliceReport(
            values=each.values,
            rows=int(marks_G.sum()),
            accuracy=score if bounded else None,
            error=None if bounded else -score,
            constant=None if constant is None else abs(constant),
        )
    return found
