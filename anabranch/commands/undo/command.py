"""Carries out an undo: the record, the version that is served, and the wait for the learner."""

import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Any

import typer

from anabranch.command import AsJson, DryRun, Yes, command, confirm, output, say, time_option
from anabranch.commands.undo.plan import UndoPlan, check_checkpoint, plan_undo
from anabranch.commands.undo.selection import Selection
from anabranch.commands.versions.rollout import apply_command
from anabranch.config.loader import Config
from anabranch.core.errors import AnabranchError, SettingsError
from anabranch.learner.state_dir.lock import is_locked
from anabranch.learner.state_dir.undo_file import NAME, UndoRecord, append_record, read_undo
from anabranch.runtime.private_state import private_state

_PAUSE_SECONDS = 0.05


@command('anabranch undo --offsets "payments[3]@100..200" --dry-run')
def undo(
    config: Config,
    offsets: Annotated[
        list[str] | None,
        typer.Option(metavar="RANGE", help="Undo these offsets, such as payments[3]@100..200; repeatable."),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Undo the messages with an event of this \\[schema.key]; repeatable."),
    ] = None,
    producer: Annotated[
        list[str] | None,
        typer.Option(metavar="HEADER=VALUE", help="Undo the messages with this header; repeatable."),
    ] = None,
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Undo only what came from then on, such as 2026-07-03T14:00 (UTC).")
    ] = "",
    until: Annotated[str, typer.Option(metavar="TIME", help="Undo only what came before then.")] = "",
    timeout: Annotated[
        timedelta, time_option("How long to wait until the learner has gone back.", default="60s")
    ] = timedelta(seconds=60),
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Undo events: serve the newest version without them, and learn again without them from the checkpoint before."""
    plan = plan_undo(config, Selection(offsets or [], key or [], producer or [], since, until), _show_progress)
    if dry_run:
        output(plan.document() if as_json else None, lambda: "\n".join(plan.sentences()))
        return
    confirm("undo", "\n".join(plan.sentences()), yes=yes)
    with private_state(config):
        result = carry_out(config, plan, timeout)
    if as_json:
        output(result.document(), lambda: None)
    else:
        say(*result.sentences())


def _show_progress(read: int, total: int) -> None:
    """Show how far the stream is searched, where a person is there to see it."""
    if sys.stderr.isatty():
        end = "\n" if read == total else ""
        sys.stderr.write(f"\rreading the stream: {read:,} of {total:,} offsets{end}")
        sys.stderr.flush()


@dataclass(frozen=True)
class UndoResult:
    """The result of a command.

    Attributes:
        plan: what was to be done.
        number: of the record.
        checkpoint: the checkpoint that the learner has returned to; None: it has not yet.
        serving: what is served instead of tainted versions, or why it is not known.
        running: whether a learner runs.
    """

    plan: UndoPlan
    number: int
    checkpoint: int | None
    serving: str | None
    running: bool

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            **self.plan.document(),
            "undo": self.number,
            "returned_to": self.checkpoint,
            "serving": self.serving,
            "running": self.running,
        }

    def sentences(self) -> list[str]:
        """Return it as sentences for a person."""
        sentences = [*self.plan.sentences(), *([] if self.serving is None else [self.serving])]
        if self.checkpoint is not None:
            done = f"the learner has returned to checkpoint {self.checkpoint}; `anabranch status` shows how far it is"
        elif self.running:
            done = "the learner has not returned to its checkpoint in time; it does so before it publishes a version"
        else:
            done = "no learner runs: the next one returns to the checkpoint when it starts"
        return [*sentences, f"recorded as undo {self.number}; {done}"]


def carry_out(config: Config, plan: UndoPlan, patience: timedelta) -> UndoResult:
    """Undo events.

    1. Append the record: from here on nothing more is published by a learner that has seen the events, and the next
       start of one returns to a checkpoint and fails the tainted versions, also after a crash of this command.
    2. Record the newest clean version to be served.
    3. Wait for the learner.

    The record comes first, which takes milliseconds: otherwise a version could be published after it, and be served.

    Raises:
        SettingsError: the record cannot be written, or the learner has deleted the checkpoint of the plan since, and
            nothing has changed.
    """

    def planned(number: int) -> UndoRecord:
        record = plan.record(number, time.time())
        check_checkpoint(config, plan, record)
        return record

    ran = is_locked(config.state_dir)
    try:
        record = append_record(config.state_dir, planned)
    except OSError as exc:
        raise SettingsError(f"{config.state_dir / NAME} cannot be written: {exc.strerror}; nothing is undone") from exc
    serving = _serve_clean(config, plan)
    deadline = time.monotonic() + patience.total_seconds()
    # A learner that runs ends, and is started again: for a moment there is none.
    while (checkpoint := _returned(config, record)) is None and ran and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
    return UndoResult(plan, record.number, checkpoint, serving, running=is_locked(config.state_dir))


def _returned(config: Config, record: UndoRecord) -> int | None:
    went_back = read_undo(config.state_dir)[record.number - 1].went_back
    return None if went_back is None else went_back.checkpoint


def _serve_clean(config: Config, plan: UndoPlan) -> str | None:
    """Record serving to the clean version, and let no tainted one be taken; return what came of it as a sentence."""
    tainted, state, result = [each.version for each in plan.tainted], plan.state, None
    if not tainted or state.pinned is not None:
        return None
    try:
        if plan.clean is not None and max(tainted) > plan.clean:
            result = apply_command(config, "promote", plan.clean)
            state = result.state
        for number in tainted:
            if number not in state.rolled_back or number == state.replaced:  # to which a rollback would return
                result = apply_command(config, "reject", number)
    except AnabranchError as exc:
        return (
            f"serving could not be ordered ({exc}); it stops serving tainted versions once the learner has marked them"
        )
    return None if result is None else result.sentence()
