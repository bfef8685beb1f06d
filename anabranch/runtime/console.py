"""The console that shows what state files hold: reports, verdicts and manifests, which others may have written."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from anabranch.runtime.printable import printable

_UNWRAPPED_COLUMNS = 10_000


class PlainConsole(Console):
    """Prints text without markup or control characters in it. Rich's own colours and cursor moves stay."""

    def __init__(self, **options: Any) -> None:
        """Take the options of a console; without a terminal lines are not wrapped, so that programs can read them."""
        super().__init__(markup=False, emoji=False, **options)
        if "width" not in options and not self.is_terminal:
            self.width = _UNWRAPPED_COLUMNS

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render everything that is printed, parts of others too."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
