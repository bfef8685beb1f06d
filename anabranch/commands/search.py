"""`anabranch search`: reads what the learner reports of its challengers, and lets a person control them."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.table import Table

from anabranch.command import AsJson, DryRun, Yes, command, confirm, output, say
from anabranch.config.loader import Config
from anabranch.core.errors import SettingsError
from anabranch.learner.settings.search import ARGS, arguments_of, shown
from anabranch.learner.state_dir.search_control import write_control
from anabranch.learner.status.report import ChallengerReport, SearchReport, read_report
from anabranch.runtime.private_state import private_state

_WHEN = "the learner takes it within a second, or when it starts"


@command("anabranch search status --json")
def status(config: Config, as_json: AsJson = False) -> None:
    """Show the model's settings, the challengers that train, and how the last ones ended."""
    report = read_search(config)
    output(msgspec.to_builtins(report) if as_json else None, lambda: render_search(report))


@command("anabranch search promote 7")
def promote(
    number: Annotated[int, typer.Argument(min=1, metavar="N", help="Number of the challenger.")],
    config: Config,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Let the model take the settings of a challenger, and keep its own weights."""
    values = values_of_challenger(config, number)
    if dry_run:
        _report(f"the model would take {shown(values)}", values, as_json=as_json)
        return
    confirm("search promote", f"the model would take {shown(values)}", yes=yes)
    with private_state(config):
        write_control(config.state_dir, values=values)
    _report(f"the model is to take {shown(values)}; {_WHEN}", values, as_json=as_json)


@command("anabranch search pin learner.optimizer.lr=0.003")
def pin(
    config: Config,
    assignments: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings to take first; by default none change.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Keep the model's settings as they are: challengers end, and none begins until unpin."""
    values = dict(_assigned(config, assignments or []))
    with private_state(config):
        write_control(config.state_dir, values=values or None, pinned=True)
    _report(f"the model is to keep {shown(values) or 'its settings'}; {_WHEN}", values, as_json=as_json, pinned=True)


@command("anabranch search unpin")
def unpin(config: Config, as_json: AsJson = False) -> None:
    """Search again."""
    with private_state(config):
        write_control(config.state_dir, pinned=False)
    _report(f"the search is to continue; {_WHEN}", {}, as_json=as_json, pinned=False)


def _report(sentence: str, values: Mapping[str, float], *, as_json: bool, pinned: bool | None = None) -> None:
    if as_json:
        output({"values": dict(values), "pinned": pinned}, lambda: None)
    else:
        say(sentence)


def read_search(config: Config) -> SearchReport:
    """Return what the learner reports of its search; raises SettingsError where it has reported none."""
    report = read_report(config.state_dir)
    if report is None or report.search is None:
        raise SettingsError(
            f"no learner of {config.state_dir} has reported a search; write a section [search], and start the learner"
        )
    return report.search


def render_search(report: SearchReport) -> RenderableType:
    """Return the screen: settings, challengers and history, the newest last."""
    head = Table.grid(padding=(0, 2))
    head.add_column(style="bold", no_wrap=True)
    head.add_column(overflow="fold")
    head.add_row("settings", f"{shown(report.values)}{', pinned' if report.pinned else ''}")
    head.add_row("in the config", shown(report.given))
    ended = ", ".join(f"{outcome} {count:,}" for outcome, count in report.outcomes.items()) or "none"
    head.add_row("ended", ended)
    head.add_row("steps of challengers", f"{report.steps:,}")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("challenger", "settings", "steps", "difference", "evidence", "outcome"):
        table.add_column(name, justify="left" if name in ("settings", "outcome") else "right")
    for each in chain(report.history, report.challengers):
        table.add_row(*_row(each))
    return Group(head, "", table)


def _row(each: ChallengerReport) -> Iterator[str]:
    yield str(each.number)
    yield shown(each.values)
    yield f"{each.steps:,}"
    yield f"{each.difference:+.4f}"
    yield f"{max(0.0, each.log_wealth):.1f} of {each.log_threshold:.1f}"
    if each.outcome:
        yield f"{each.outcome} at step {each.step:,}"
    else:
        yield "trains, or waits for a lease" if each.steps or not each.taught else f"taught for {each.taught:,} steps"


def values_of_challenger(config: Config, number: int) -> Mapping[str, float]:
    """Return the settings of a challenger, which the model can take.

    Raises:
        SettingsError: the learner has reported no challenger of this number, it has another network, or the model has
            other keys by now.
    """
    report = read_search(config)
    known = {each.number: each for each in chain(report.history, report.challengers)}
    if (challenger := known.get(number)) is None:
        numbers = f"{min(known)}..{max(known)}" if known else "none yet"
        raise SettingsError(f"there is no challenger {number}: those that are known are {numbers}")
    if challenger.values.keys() != report.values.keys():
        raise SettingsError(
            f"challenger {number} had {shown(challenger.values)}, and search.space has {', '.join(report.values)} now; "
            "write the values into the config, or change search.space back"
        )
    if (network := arguments_of(challenger.values)) != arguments_of(report.values):
        raise SettingsError(
            f"challenger {number} has another network, and a learner keeps its own: set "
            f"{', '.join(f'{name} = {value:.0f}' for name, value in network.items())} in [model].args of a new "
            "pipeline, which the versions of this one can teach"
        )
    return challenger.values


def _assigned(config: Config, assignments: Sequence[str]) -> Iterator[tuple[str, float]]:
    if config.pipeline.search is None:
        raise SettingsError(f"{config.path} has no section [search], so that there is nothing to pin")
    space = config.pipeline.search.space
    for each in assignments:
        key, _, text = each.partition("=")
        if key not in space:
            raise SettingsError(f"search.space does not have {key}; it has {', '.join(space)}")
        if key.startswith(ARGS):
            raise SettingsError(f"{key} is of the network, which a learner keeps; pin without it")
        low, high = space[key]
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise SettingsError(
                f"{key} = {text or '(nothing)'} is no number in the range of search.space, {low:g}..{high:g}"
            )
        yield key, value
