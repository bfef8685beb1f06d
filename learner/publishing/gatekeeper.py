"""Judges versions before they are published, and watches the served one afterwards.

It knows three versions: the one that serving takes if it obeys, the best of those served within `gate.max_hold`, and
the last that the watch has found well. What a person decided is in `state.json`, which serving writes.
"""

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from torch import Tensor

from learner.config import GateSettings
from learner.errors import VersionError
from learner.evaluation.holdout import YOUNG, HoldoutRows
from learner.evaluation.scoring import Scorer, Scores, class_marks
from learner.publishing.baseline import Contender
from learner.publishing.gate import Hearing, compare, judge, surpasses
from learner.state_dir.version import ModelReference, RegistryState, Verdict, Versions

WATCH_ROWS = 50
"""Held-out events that came after a swap, before the watch judges it."""
WATCH_ENOUGH = 500
"""With so many a version is found well, or with the youngest quarter of the holdout set, if that is less. A holdout set
whose quarter is less than `WATCH_ROWS` is not watched."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Held:
    """Versions have failed in a row.

    Attributes:
        began: when the first of them did, by the monotonic clock: what lasts is measured by it.
        since: the same in seconds since 1970, for display alone.
        served: the version that is served meanwhile.
    """

    began: float
    since: float
    served: int | None


class Jury:
    """Used by the publisher's thread; attributes may be read by others."""

    def __init__(self, versions: Versions, settings: GateSettings, scorer: Scorer, reference: ModelReference) -> None:
        self._versions = versions
        self._settings = settings
        self._scorer = scorer
        self._reference = reference
        self._served: Contender | None = None
        self._best: Contender | None = None
        self._best_served = 0.0
        """When it was the served one last, or became the best; by the monotonic clock."""
        self._well: Contender | None = None
        self._first_on_trial: int | None = None
        """The first version that was served after that; all from it on are on trial. None where none is."""
        self._before_trial = np.empty(0, np.uint64)
        self._enough = min(WATCH_ENOUGH, max(1, settings.holdout_rows // YOUNG))
        self._looks_at = 0
        """With how many events that came after the trial began the watch looks next."""
        self._state: RegistryState | None = None
        self._surpasses = True
        self._held: _Held | None = None
        self._held_before: _Held | None = None
        """What the checkpoint says that the learner goes on from; counts while the same version is served."""
        self.reasons: list[str] = []
        """Why the last one did."""
        self.withdrawn = 0
        """Versions that the watch has failed."""

    @property
    def held_since(self) -> float | None:
        """Since when versions have failed in a row, seconds since 1970; None when the last one did not."""
        held = self._held
        return held.since if held is not None else None

    @property
    def held_seconds(self) -> float:
        """For how long they have; 0 when the last one did not."""
        held = self._held
        return time.monotonic() - held.began if held is not None else 0.0

    @property
    def problem(self) -> str | None:
        """One sentence when versions have failed for longer than `gate.max_hold`."""
        held = self._held
        if held is None or not self._is_over(held):
            return None
        when = datetime.fromtimestamp(held.since, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        why = self.reasons[0] if self.reasons else "no reason is known"
        return f"no version has passed the gate since {when}: {why}; promote one, or look at the events since then"

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, so that a restart does not begin a hold anew. Any thread may ask."""
        held = self._held
        return {} if held is None else {"held_seconds": self.held_seconds, "served": held.served}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what a checkpoint kept, before anything is judged; time in which no learner ran does not count."""
        if "held_seconds" in state:
            seconds = float(state["held_seconds"])
            self._held_before = _Held(time.monotonic() - seconds, time.time() - seconds, state["served"])

    def judge(self, scores_G: Scores, rows: HoldoutRows) -> Verdict:
        """Judge a candidate by its scores on the held-out events."""
        self._look(rows)
        hearing = self._hearing(scores_G, rows)
        bounded = self._scorer.bounded
        self._surpasses = surpasses(hearing, bounded=bounded)
        verdict = judge(hearing, self._settings, bounded=bounded)
        if verdict.verdict == "fail" and self._hold_is_over() and np.isfinite(scores_G).any():
            self._forget_rivals()
            reason = 'served all the same: nothing has passed for gate.max_hold, and gate.on_hold is "serve"'
            return Verdict("inconclusive", [reason, *verdict.reasons], verdict.numbers)
        return verdict

    def take(
        self, number: int, weights: Mapping[str, Tensor], scores_G: Scores, rows: HoldoutRows, verdict: Verdict
    ) -> None:
        """Take note of a version that was published, weights on the host; what passed is served from now on."""
        if verdict.verdict == "fail":
            self._hold(verdict.reasons)
            return
        if self._held is not None:
            log.info("version %d may be served, after none could", number)
        contender = Contender(number, weights, rows.hashes)
        if len(rows):
            contender.remember(rows.columns["hash"].astype(np.uint64), scores_G)
        if self._well is None:
            self._well = contender
        else:
            if self._first_on_trial is None:
                self._before_trial, self._looks_at = contender.known, min(WATCH_ROWS, self._enough)
                self._first_on_trial = number
        if self._best is None or self._surpasses:
            self._compare_with(contender)
        self._served, self._held, self.reasons = contender, None, []

    def watch(self, rows: HoldoutRows) -> None:
        """Compare what is served with the last version found well, on what was held out since: withdraw what is worse.

        Versions follow each other faster than held-out events come, so all since then are on trial together. It looks
        each time that there are half as many events more: whoever looks at each finds something by chance.
        """
        self._look(rows)
        served, well = self._served, self._well
        if served is None or well is None or self._first_on_trial is None or not len(rows):
            return
        fresh = ~np.isin(rows.columns["hash"].astype(np.uint64), self._before_trial)
        count = int(np.count_nonzero(fresh))
        if count < self._looks_at:
            return
        self._looks_at = min(count + count // 2, self._enough)
        now_G, before_G = (each.scores(self._scorer, rows.columns)[fresh] for each in (served, well))
        finite = np.isfinite(now_G) & np.isfinite(before_G)
        if not finite.any():
            return
        drop = compare(now_G[finite], before_G[finite], bounded=self._scorer.bounded)
        if drop.rows >= WATCH_ROWS and drop.surely_exceeds(self._settings.max_drop_new):
            reason = f"the watch found it worse than version {well.number} on {drop.rows} events that came after it"
            numbers = {"watch": drop.candidate, "watch_rival": drop.rival, "watch_drop": drop.drop}
            self._withdraw(Verdict("fail", [reason], numbers), well, self._first_on_trial)
        elif count >= self._enough:
            self._well, self._first_on_trial = served, None

    @property
    def needed(self) -> set[int]:
        """Versions that serving may have to go back to: not to be deleted."""
        return {each.number for each in (self._served, self._well) if each is not None}

    def _hearing(self, scores_G: Scores, rows: HoldoutRows) -> Hearing:
        total, held = len(scores_G), self._held is not None
        new = np.arange(total) >= total - total // YOUNG
        served, best = self._served, self._best
        if served is None or (total < self._settings.min_rows and not held) or not total:
            return Hearing(scores_G, scores_G if served else None, None, new, ~new, {}, held=held)
        if best is served:
            self._best_served = time.monotonic()
        elif time.monotonic() - self._best_served > self._settings.max_hold.total_seconds():
            best = self._compare_with(served)
        served_G = served.scores(self._scorer, rows.columns)
        best_G = best.scores(self._scorer, rows.columns) if best is not None and best is not served else None
        # While nothing passes, what comes may be what makes the candidates worse: it does not become old knowledge.
        old = ~new & served.knew(rows.columns["hash"].astype(np.uint64)) if held else ~new
        told = np.isfinite(served_G) & np.isfinite(scores_G)
        classes = {name: marks & told for name, marks in class_marks(self._scorer.schema, rows).items()}
        classes = {name: marks for name, marks in classes.items() if marks.any()}
        return Hearing(scores_G, served_G, best_G, new, old, classes, held=held)

    def _compare_with(self, best: Contender) -> Contender:
        """Have what comes compared with another best, for `gate.max_hold` at least."""
        self._best, self._best_served = best, time.monotonic()
        return best

    def _hold_is_over(self) -> bool:
        held = self._held
        return held is not None and self._is_over(held) and self._settings.on_hold == "serve"

    def _is_over(self, held: _Held) -> bool:
        return time.monotonic() - held.began >= self._settings.max_hold.total_seconds()

    def _hold(self, reasons: list[str]) -> None:
        served = self._served.number if self._served is not None else None
        if self._held is None:
            self._held = _Held(time.monotonic(), time.time(), served)
            log.warning("a version failed the gate: %s", "; ".join(reasons))
        self._held = replace(self._held, served=served)
        self.reasons = reasons

    def _forget_rivals(self) -> None:
        """Have the next version that is served be what all others are compared with."""
        self._best = self._well = self._first_on_trial = None

    def _withdraw(self, verdict: Verdict, well: Contender, first: int) -> None:
        """Fail all versions on trial that are still there: serving rolls back to the last one found well."""
        trial = [number for number in self._versions.numbers() if number >= first and not self._has_failed(number)]
        log.warning("versions %s are withdrawn: %s", ", ".join(map(str, trial)), verdict.reasons[0])
        for number in trial:
            with contextlib.suppress(FileNotFoundError):
                self._versions.write_verdict(number, verdict)
        self.withdrawn += 1
        if self._best is not None and self._best.number >= first:
            self._compare_with(well)
        self._served, self._first_on_trial = well, None
        self._hold(verdict.reasons)

    def _has_failed(self, number: int) -> bool:
        try:
            verdict = self._versions.verdict(number)
        except VersionError:
            return False
        return verdict is not None and verdict.verdict == "fail"

    def _look(self, rows: HoldoutRows) -> None:
        """Take up what is served after a restart, and what a person has decided since the last look."""
        try:
            state = self._versions.state()
        except (VersionError, OSError):  # serving, whose file it is, tells of it
            return
        before, self._state = self._state, state
        if before is None:
            self._meet(state, rows)
        elif state.promoted is not None and state.promoted != before.promoted:
            self._begin_with(self._read(state.promoted, rows))
            self._held = None
        elif self._served is not None and self._served.number in state.rolled_back and state.serving is not None:
            self._begin_with(self._read(state.serving, rows))
            self._hold(["a person rolled back the version before"])

    def _meet(self, state: RegistryState, rows: HoldoutRows) -> None:
        """Begin with the newest version on disk that serving may take."""
        failed, numbers = False, self._versions.numbers()
        passed_over = (self._versions.stale(numbers) - {state.promoted}) | {*state.rolled_back}
        for number in reversed(numbers):
            if number in passed_over:
                continue
            with contextlib.suppress(VersionError, OSError):
                verdict = self._versions.verdict(number)
                if verdict is None or (verdict.verdict == "fail" and number != state.promoted):
                    failed = failed or verdict is not None
                    continue
            if (found := self._read(number, rows)) is not None:
                self._begin_with(found)
                break
        if failed and self._served is not None and len(rows):
            before = self._held_before
            if before is not None and before.served == self._served.number:
                self._held = before
            self._hold(["versions failed before the learner was started"])

    def _begin_with(self, contender: Contender | None) -> None:
        if contender is not None:
            self._served = self._well = self._compare_with(contender)
            self._first_on_trial = None

    def _read(self, number: int, rows: HoldoutRows) -> Contender | None:
        """Read a version of this schema and model; None when it is not, or is damaged or gone."""
        try:
            manifest = self._versions.manifest(number)
            same = manifest.schema == self._scorer.schema.digest and manifest.model == self._reference
            weights = self._versions.weights(manifest) if same else {}
        except (VersionError, OSError) as exc:
            log.warning("no version can be compared with version %d: %s", number, exc)
            return None
        return Contender(number, weights, rows.hashes) if same and self._scorer.fits(weights) else None
