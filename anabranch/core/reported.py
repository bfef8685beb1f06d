"""A number of a report is declared once, at its field: the name, help and labels of its metric. Imports no client.

class Letters(msgspec.Struct):
    waiting_bytes: Annotated[int, Reported("letters_waiting_bytes", "Disk space of waiting letters.")] = 0
    refused: Annotated[dict[str, int], Reported("letters_refused_total", "By why.", "reason")] = {}

    @Reported("letters", "All letters.")
    def count(self) -> int: ...
"""

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

Value = float | Mapping[str, float] | Mapping[tuple[str, ...], float] | None
"""One number; or with labels, numbers by the values of the labels. None: it is not known."""


class Reported:
    """The metric of a field, or of a property that it decorates.

    Its unit is the end of its name: `_bytes`, `_seconds`, `_ratio`; `_total` is a counter.
    """

    def __init__(self, metric: str, description: str, *labels: str) -> None:
        """With `labels`, the field has a mapping by the value of the label, or by a tuple of the values of several."""
        self.metric = metric
        self.description = description
        self.labels = labels

    def __call__(self, read: Callable[[Any], Value]) -> property:
        """Return a property that has this metric."""
        return _ReportedProperty(read, self)


class _ReportedProperty(property):
    def __init__(self, read: Callable[[Any], Value], reported: Reported) -> None:
        super().__init__(read)
        self.reported = reported


class ReportedBy:
    """The reports in a field, as `each` returns them by the values of `labels`, which all their metrics have too."""

    def __init__(self, each: Callable[[Any], Mapping[tuple[str, ...], Any]], *labels: str) -> None:
        self.each = each
        self.labels = labels


class Declared(NamedTuple):
    """A metric of a report, and how to read it."""

    metric: Reported
    labels: tuple[str, ...]
    read: Callable[[Any], Value]


def declared(report: type[Any], without: str = "") -> Iterator[Declared]:
    """Yield the metrics at the fields and properties of a report, and of the reports in it.

    Those of the field `without` are left out.
    """
    for name in dir(report):
        if isinstance(member := getattr(report, name), _ReportedProperty):
            yield Declared(member.reported, member.reported.labels, attrgetter(name))
    for name, hint in get_type_hints(report, include_extras=True).items():
        if name == without:
            continue
        kind, *declarations = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        inner = [one for one in (kind, *get_args(kind)) if isinstance(one, type) and issubclass(one, msgspec.Struct)]
        by = next((each for each in declarations if isinstance(each, ReportedBy)), None)
        yield from (
            Declared(each, each.labels, attrgetter(name)) for each in declarations if isinstance(each, Reported)
        )
        for metric, labels, read in (found for struct in inner for found in declared(struct)):
            if by is None:
                yield Declared(metric, labels, _of_field(name, read))
            else:
                yield Declared(metric, (*by.labels, *labels), _of_each(name, by, read))


def _of_field(name: str, read: Callable[[Any], Value]) -> Callable[[Any], Value]:
    """Return what reads a number of the report in a field; the number is not known where there is no report."""
    return lambda report: None if (inner := getattr(report, name)) is None else read(inner)


def _of_each(name: str, by: ReportedBy, read: Callable[[Any], Value]) -> Callable[[Any], Value]:
    """Return what reads a number of each of the reports in a field that have it."""

    def read_all(report: Any) -> dict[tuple[str, ...], float]:
        found = dict[tuple[str, ...], float]()
        for labels, inner in by.each(getattr(report, name)).items():
            value = read(inner)
            if isinstance(value, Mapping):
                found |= {(*labels, *([key] if isinstance(key, str) else key)): number for key, number in value.items()}
            elif value is not None:
                found[labels] = value
        return found

    return read_all
