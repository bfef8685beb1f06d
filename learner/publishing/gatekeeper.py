"""Judges versions before they are published, and monitors the served one afterwards.

It keeps three versions: the one that serving should serve, the best of those served within `gate.max_hold`, and the
last good one, which monitoring has passed. Decisions by a person are in `state.json`, which serving writes.
"""

import contextlib
import logging
import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from learner.config import GateSettings
from learner.errors import VersionError
from learner.evaluation.holdout import YOUNG, HoldoutRows
from learner.evaluation.scoring import Scorer, Scores, class_marks
from learner.object_storage.fleet import FleetWatch
from learner.publishing.baseline import Baseline
from learner.publishing.gate import Drop, GateInput, compare, judge, surpasses
from learner.publishing.hold import Hold
from learner.state_dir.manifest_directory import other_base
from learner.state_dir.version import ModelReference, RegistryState, Verdict, Versions

MONITOR_ROWS = 50
"""Held-out events after a swap before monitoring judges it."""
MONITOR_ENOUGH = 500
"""After so many events, or the youngest quarter of the holdout set if that is less, a version is good. With a holdout
set whose quarter is less than `MONITOR_ROWS` there is no monitoring."""

log = logging.getLogger(__name__)


class QualityGate:
    """Decides which versions serving may take. Used by the publisher's thread; other threads may read attributes."""

    def __init__(
        self,
        versions: Versions,
        settings: GateSettings,
        scorer: Scorer,
        reference: ModelReference,
        fleet: FleetWatch | None = None,
    ) -> None:
        """`fleet`: the servers on other hosts; None where only this host has one."""
        self._versions = versions
        self._fleet = fleet
        self._settings = settings
        self._scorer = scorer
        self._reference = reference
        self._served: Baseline | None = None
        self._best: Baseline | None = None
        self._best_served = 0.0
        """When the best version was served last, or became the best; by the monotonic clock."""
        self._last_good: Baseline | None = None
        self._first_on_probation: int | None = None
        """The first version served after the last good one; all from it on are on probation. None where none is."""
        self._before_probation = np.empty(0, np.uint64)
        self._enough = min(MONITOR_ENOUGH, max(1, settings.holdout_rows // YOUNG))
        self._next_check_at = 0
        """How many events have to come after the probation began before monitoring compares next."""
        self._state: RegistryState | None = None
        self._surpasses = True
        self.hold = Hold(settings.max_hold)
        """The hold while versions fail in a row."""
        self.withdrawn = 0
        """Times that monitoring has withdrawn the served versions."""

    def judge(self, scores_G: Scores, rows: HoldoutRows) -> Verdict:
        """Judge a candidate by its scores on the held-out events."""
        self._refresh(rows)
        inputs = self._gate_input(scores_G, rows)
        bounded = self._scorer.bounded
        self._surpasses = surpasses(inputs, bounded=bounded)
        verdict = judge(inputs, self._settings, bounded=bounded)
        if (
            verdict.verdict == "fail"
            and self.hold.is_over
            and self._settings.on_hold == "serve"
            and np.isfinite(scores_G).any()
        ):
            self._clear_baselines()
            reason = 'served although it failed: no version has passed for gate.max_hold, and gate.on_hold is "serve"'
            return Verdict("inconclusive", [reason, *verdict.reasons], verdict.numbers)
        return verdict

    def record_published(
        self, number: int, weights: Mapping[str, Tensor], scores_G: Scores, rows: HoldoutRows, verdict: Verdict
    ) -> None:
        """Record a published version, weights on the host; one that has not failed is served from now on."""
        if verdict.verdict == "fail":
            self._start_hold(verdict.reasons)
            return
        if self.hold.since is not None:
            log.info("version %d may be served, after none could", number)
        baseline = Baseline(number, weights, rows.hashes)
        if len(rows):
            baseline.set_scores(rows.columns, scores_G)
        if self._last_good is None:
            self._last_good = baseline
        elif self._first_on_probation is None:
            self._before_probation, self._next_check_at = baseline.held_out, min(MONITOR_ROWS, self._enough)
            self._first_on_probation = number
        if self._best is None or self._surpasses:
            self._compare_with(baseline)
        self._serve(baseline)
        self.hold.end()

    def monitor(self, rows: HoldoutRows) -> None:
        """Compare the served version with the last good one on events held out since; withdraw it if it is worse.

        Versions are published faster than held-out events come, so all since then are on probation together. The
        comparison is repeated each time the events have grown by half: one after each event would fail by chance.

        A last good version that is certainly worse on the events held out before does not come back: it has learned too
        little, and where labels are wrong it may well be the better one on the newest events.
        """
        self._refresh(rows)
        served, last_good = self._served, self._last_good
        if served is None or last_good is None or self._first_on_probation is None or not len(rows):
            return
        fresh = ~np.isin(rows.columns["hash"].astype(np.uint64), self._before_probation)
        count = int(np.count_nonzero(fresh))
        if count < self._next_check_at:
            return
        served_G, last_good_G = (each.scores(self._scorer, rows.columns) for each in (served, last_good))
        self._next_check_at = min(count + count // 2, self._enough)
        drop = self._drop(served_G, last_good_G, fresh)
        if drop is None:
            return
        if drop.rows >= MONITOR_ROWS and drop.certain(self._settings.max_drop_new):
            undone = self._drop(last_good_G, served_G, ~fresh)
            if undone is not None and undone.certain(self._settings.max_drop_old):
                return
            reason = (
                f"monitoring found it worse than version {last_good.number} on {drop.rows} events that came after it"
            )
            numbers = {"watch": drop.candidate, "watch_rival": drop.baseline, "watch_drop": drop.drop}
            self._withdraw(Verdict("fail", [reason], numbers), last_good, self._first_on_probation)
        elif count >= self._enough:
            self._last_good, self._first_on_probation = served, None

    def return_to(self, baseline: Baseline, reasons: list[str]) -> None:
        """Compare later versions with this one: those since were rejected, for these reasons."""
        self._start_with(baseline)
        self._start_hold(reasons)

    def _drop(self, candidate_G: Scores, baseline_G: Scores, marked_G: NDArray[np.bool_]) -> Drop | None:
        """Compare two versions on the marked events; None without one on which the scores of both are finite."""
        both = marked_G & np.isfinite(candidate_G) & np.isfinite(baseline_G)
        return compare(candidate_G[both], baseline_G[both], bounded=self._scorer.bounded) if both.any() else None

    @property
    def device_bytes(self) -> int:
        """Bytes on the device of the models that score versions. Any thread may ask."""
        return self._scorer.device_bytes

    @property
    def needed(self) -> set[int]:
        """Versions that serving may roll back to, and that must not be deleted."""
        return {each.number for each in (self._served, self._last_good) if each is not None}

    def _gate_input(self, scores_G: Scores, rows: HoldoutRows) -> GateInput:
        total, held = len(scores_G), self.hold.since is not None
        new = np.arange(total) >= total - total // YOUNG
        served, best = self._served, self._best
        if served is None or (total < self._settings.min_rows and not held) or not total:
            return GateInput(scores_G, scores_G if served else None, None, new, ~new, {}, held=held)
        if best is served:
            self._best_served = time.monotonic()
        elif time.monotonic() - self._best_served > self._settings.max_hold.total_seconds():
            best = self._compare_with(served)
        served_G = served.scores(self._scorer, rows.columns)
        best_G = best.scores(self._scorer, rows.columns) if best is not None and best is not served else None
        # Events that come while nothing passes may be why the candidates are worse: they do not become old knowledge.
        old = ~new & served.held_out_before(rows.columns["hash"].astype(np.uint64)) if held else ~new
        finite = np.isfinite(served_G) & np.isfinite(scores_G)
        classes = {name: marks & finite for name, marks in class_marks(self._scorer.schema, rows).items()}
        classes = {name: marks for name, marks in classes.items() if marks.any()}
        return GateInput(scores_G, served_G, best_G, new, old, classes, held=held)

    def _compare_with(self, best: Baseline) -> Baseline:
        """Compare later versions with another best, for `gate.max_hold` at least."""
        self._best, self._best_served = best, time.monotonic()
        return best

    def _serve(self, served: Baseline) -> None:
        self._served = served
        self._scorer.keep_on_device(served.weights)

    def _start_hold(self, reasons: list[str]) -> None:
        served = self._served.number if self._served is not None else None
        self.hold.start(served, reasons)

    def _clear_baselines(self) -> None:
        """Make the next served version the one that all others are compared with."""
        self._best = self._last_good = self._first_on_probation = None

    def _withdraw(self, verdict: Verdict, last_good: Baseline, first: int) -> None:
        """Fail all versions on probation that still exist: serving rolls back to the last good one."""
        on_probation = [
            number for number in self._versions.numbers() if number >= first and not _has_failed(self._versions, number)
        ]
        log.warning("versions %s are withdrawn: %s", ", ".join(map(str, on_probation)), verdict.reasons[0])
        for number in on_probation:
            with contextlib.suppress(FileNotFoundError):
                self._versions.write_verdict(number, verdict)
        self.withdrawn += 1
        if self._best is not None and self._best.number >= first:
            self._compare_with(last_good)
        self._serve(last_good)
        self._first_on_probation = None
        self._start_hold(verdict.reasons)

    def _refresh(self, rows: HoldoutRows) -> None:
        """Load the baselines after a restart, and apply decisions that a person has made since the last call."""
        try:
            state = self._versions.state()
            state = state if self._fleet is None else self._fleet.state(state)
        except (VersionError, OSError):  # serving writes the file, and reports its problems
            return
        before = self._state
        if before is None:
            self._load_baselines(state, rows)
        elif state.promoted is not None and state.promoted != before.promoted:
            self._start_with(self._read_baseline(state.promoted, rows))
            self.hold.end()
        elif self._served is not None and self._served.number in state.rolled_back and state.serving is not None:
            self._start_with(self._read_baseline(state.serving, rows))
            self._start_hold(["a person rolled back the version before"])
        self._state = state  # at the end: where memory runs out, the next call does all of this again

    def _load_baselines(self, state: RegistryState, rows: HoldoutRows) -> None:
        """Load the newest version on disk that serving may take as all three baselines."""
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
            if (baseline := self._read_baseline(number, rows)) is not None:
                self._start_with(baseline)
                break
        if failed and self._served is not None and len(rows):
            self.hold.resume(self._served.number)
            self._start_hold(["versions failed before the learner was started"])

    def _start_with(self, baseline: Baseline | None) -> None:
        if baseline is not None:
            self._last_good = self._compare_with(baseline)
            self._first_on_probation = None
            self._serve(baseline)

    def _read_baseline(self, number: int, rows: HoldoutRows) -> Baseline | None:
        """Read a version; None when it has another schema or model, or is damaged or gone."""
        try:
            return self.read(number, rows)
        except (VersionError, OSError) as exc:
            log.warning("no version can be compared with version %d: %s", number, exc)
            return None

    def read(self, number: int, rows: HoldoutRows, versions: Versions | None = None) -> Baseline | None:
        """Read a version, of this learner or of `versions`; None when it has another schema, model or base.

        Raises:
            OSError: it cannot be read for now.
            VersionError: it is damaged, or gone.
        """
        versions = versions or self._versions
        manifest = versions.manifest(number)
        if manifest.schema != self._scorer.schema.digest or manifest.model != self._reference:
            return None
        if (other := other_base(manifest.base, self._versions.base)) is not None:
            log.warning("version %d %s, so that no version can be compared with it", number, other)
            return None
        weights = versions.weights(manifest)
        return Baseline(number, weights, rows.hashes) if self._scorer.fits(weights) else None


def _has_failed(versions: Versions, number: int) -> bool:
    try:
        verdict = versions.verdict(number)
    except VersionError:
        return False
    return verdict is not None and verdict.verdict == "fail"
