"""`anabranch search`: reads what the learner reports of its challengers, and lets a person control them."""

from collections.abc import Iterator, Sequence
from itertools import chain

from rich.console import Group, RenderableType
from rich.table import Table

from anabranch.config.loader import Config
from anabranch.core.errors import SettingsError
from anabranch.runtime.private_state import private_state
from learner.sections.search import ARGS, arguments_of
from learner.state_dir.report import read_report
from learner.state_dir.search.control import ChallengerReport, SearchReport, shown, write_control

_WHEN = "the learner takes it within a second, or when it starts"


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


def promote(config: Config, number: int) -> str:
    """Let the model take the settings of a challenger; return what was done as a sentence.

    Raises:
        SettingsError: the learner has reported no challenger of this number, it has another network, the model has
            other keys by now, or the file cannot be written.
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
    with private_state(config):
        write_control(config.state_dir, values=challenger.values)
    return f"the model is to take {shown(challenger.values)}; {_WHEN}"


def pin(config: Config, assignments: Sequence[str]) -> str:
    """Let the model keep its settings, after taking `KEY=VALUE`s; return what was done as a sentence.

    Raises:
        SettingsError: there is no `[search]`, a key is not in its space, or a value is no number in its range.
    """
    values = dict(_assigned(config, assignments))
    with private_state(config):
        write_control(config.state_dir, values=values or None, pinned=True)
    return f"the model is to keep {shown(values) or 'its settings'}; {_WHEN}"


def unpin(config: Config) -> str:
    """Let the search go on; return what was done as a sentence."""
    with private_state(config):
        write_control(config.state_dir, pinned=False)
    return f"the search is to go on; {_WHEN}"


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
