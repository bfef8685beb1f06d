"""What is shown of a backtest."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from anabranch.commands.backtest.measure import BacktestResult
from anabranch.learner.status.report import worst_first


def render_backtest(result: BacktestResult) -> RenderableType:
    """Return the table of accuracy over time, below one of the runs where there are several."""
    shown = "{:.4g}" if result.score == "absolute error" else "{:.1%}"
    constant = ("constant",) if result.baselines else ()
    table = table_of("events", f"recent {result.score}", *constant, f"overall {result.score}", *constant, "loss")
    for point in result.points:
        scores = (point.recent, point.constant_recent, point.overall, point.constant_overall)
        cells = [shown.format(score) for score in scores if score is not None]
        table.add_row(f"{point.events:,}", *cells, f"{point.loss:.4g}")
    lines = [
        f"{each.rule}: recent {shown.format(each.recent)}, overall {shown.format(each.overall)}"
        + (f"; of late the model is {each.comparison}" if each.comparison else "")
        for each in result.baselines
    ]
    measures = table_of("measure", "window", "value", "95 % interval", "constant")
    for each in result.measures:
        interval = f"{each.lower:.3g} to {each.upper:.3g}"
        measures.add_row(each.name, each.window, f"{each.value:.3g}", interval, f"{each.constant:.3g}")
    said = [*_of_versions(result), *result.warnings]
    if result.drifts:
        said.insert(0, f"changes of the stream that raised the error: {result.drifts}")
    parts: list[RenderableType] = [table, "", *map(Text, lines)]
    parts += ["", measures] if result.measures else []
    slices = [Text(f"{name} {each.words()}") for name, each in worst_first(result.slices)]
    parts += ["", *slices] if slices else []
    parts += ["", *map(Text, said)] if said else []
    found = Group(*parts)
    if len(result.runs) == 1:
        return found
    compared = table_of("labels", "replay", f"overall {result.score}", "overall loss")
    for run in result.runs:
        compared.add_row(
            run.policy, "yes" if run.replay else "no", shown.format(run.overall), f"{run.overall_loss:.4f}"
        )
    return Group(compared, "", found)


def _of_versions(result: BacktestResult) -> list[str]:
    """Return one sentence on all versions, and one on each that is held back."""
    held_back = [each for each in result.versions if each.verdict == "fail"]
    if not result.versions:
        return []
    return [
        f"versions: {len(result.versions)}, of which the gate holds back {len(held_back)}",
        *(f"version {each.number}, after {each.events:,} events: {each.reasons[0]}" for each in held_back),
    ]


def table_of(*names: str) -> Table:
    """Return an empty table of numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table
