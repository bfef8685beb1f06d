"""The lines of a plan: values with the formula that they come from."""

from typing import Literal

import msgspec

from anabranch.core.sizes import size_text

Unit = Literal["bytes", "s", "1/s", "ratio", "bytes/day", "years", "1", "days"]
_LONG_SECONDS = 120.0


class Line(msgspec.Struct, frozen=True):
    """One value."""

    name: str
    value: float | None
    """None: a constant that it needs was not measured, or it has no bound."""
    unit: Unit
    formula: str
    """How it was computed, with the numbers in it, or where it was measured."""
    bounded: bool = True
    """False of a part that sets no limit, as far as can be said from what was measured."""

    @property
    def is_known(self) -> bool:
        """Whether what it needs was measured."""
        return self.value is not None or not self.bounded

    @property
    def text(self) -> str:
        """The value as a person reads it."""
        if not self.bounded:
            return "no limit"
        return "not measured" if self.value is None else written(self.value, self.unit)


class PlanSection(msgspec.Struct, frozen=True):
    """Lines that answer one question."""

    name: str
    lines: list[Line]

    def __getitem__(self, name: str) -> Line:
        """Return a line by its name; raises KeyError when there is none."""
        for line in self.lines:
            if line.name == name:
                return line
        raise KeyError(name)

    def value(self, name: str) -> float | None:
        """Return the value of a line; None where it is not measured, or there is no such line."""
        return next((line.value for line in self.lines if line.name == name), None)


def summed(name: str, lines: list[Line], unit: Unit = "bytes") -> Line:
    """Return the sum of lines; None of it where one was not measured."""
    known = [line.value for line in lines if line.value is not None]
    total = sum(known) if len(known) == len(lines) else None
    return Line(name, total, unit, " + ".join(line.name for line in lines))


def written(value: float, unit: Unit) -> str:
    """Return a value as a person reads it."""
    match unit:
        case "bytes":
            return size_text(value)
        case "bytes/day":
            return f"{size_text(value)} a day"
        case "s":
            return (
                f"{value * 1e3:,.3g} ms" if value < 1 else f"{value:,.3g} s" if value < _LONG_SECONDS else time(value)
            )
        case "1/s":
            return f"{value:,.4g} a second" if value < 1e4 else f"{value:,.0f} a second"
        case "ratio":
            return f"{value:.1%}"
        case "years" | "days":
            return f"{value:,.1f} {unit}"
        case "1":
            return f"{value:,.0f}"


def time(seconds: float) -> str:
    """Return a long time in minutes, hours or days."""
    for scale, unit in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 2 * scale:
            return f"{seconds / scale:,.3g} {unit}"
    return f"{seconds:,.3g} s"
