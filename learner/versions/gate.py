"""The quality gate: judges versions before they are published, and follows which one serves.

It compares with two versions: the one that serving should serve, and the best of those served within `gate.max_hold`.
`ServedMonitor` has a third one. Decisions by a person are in `state.json`, which serving writes.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from anabranch.learner.errors import VersionError
from anabranch.learner.evaluate.holdout import YOUNG, HoldoutRows
from anabranch.learner.evaluate.measures import Measure, Outcomes
from anabranch.learner.evaluate.outcomes import TaskMeasures
from anabranch.learner.evaluate.scoring import EventScores, Scorer, Scores, class_marks
from anabranch.learner.evaluate.slices import Slices
from anabranch.learner.settings.learner import GateSettings
from anabranch.learner.state_dir.folders import other_base
from anabranch.learner.versions.format import ModelReference, RegistryState, Verdict, Versions
from anabranch.learner.versions.scores import Baseline
from anabranch.learner.versions.verdict import (
    Drop,
    DropEvidence,
    GateInput,
    compare,
    difference_on,
    judge,
    surpasses,
    weight_of,
)

MONITOR_ROWS = 50
"""Held-out events after a swap before monitoring judges it."""
MONITOR_ENOUGH = 500
"""After so many events, or the youngest quarter of the holdout set if that is less, a version is good. With a holdout
set whose quarter is less than `MONITOR_ROWS` there is no monitoring."""

_RARE, _STILL_RARE = 0.2, 0.25
"""Share of class 1 below which average precision decides, and below which it continues to."""
_FEWEST_YOUNG = 50
_ENOUGH = 25
"""Batches of evidence by measures, or fewer larger ones, after which a version is good."""
_BATCHES_OF_RELEASE = 4
_Z_UNDONE = 4.5

Measures = Sequence[tuple[Measure, float]]
"""Those that decide, each with the drop that is allowed."""

log = logging.getLogger(__name__)


class _Start(NamedTuple):
    """The start of a hold."""

    began: float
    """When the first version failed, by the monotonic clock, which measures durations."""
    since: float
    """The same in seconds since 1970, for display only."""
    served: int | None
    """The version that is served meanwhile."""


class Hold:
    """Whether versions fail in a row, and since when. Used by one thread; others may read attributes."""

    def __init__(self, max_hold: timedelta) -> None:
        self._max_seconds = max_hold.total_seconds()
        self._start: _Start | None = None
        self._restored: _Start | None = None
        """The hold of the restored checkpoint."""
        self.reasons: Sequence[str] = ()
        """Why the last version failed."""

    @property
    def since(self) -> float | None:
        """When the first version failed, in seconds since 1970; None without a hold."""
        start = self._start
        return start.since if start is not None else None

    @property
    def is_over(self) -> bool:
        """Whether versions have failed for longer than `gate.max_hold`."""
        start = self._start
        return start is not None and time.monotonic() - start.began >= self._max_seconds

    @property
    def problem(self) -> str | None:
        """One sentence when versions have failed for longer than `gate.max_hold`."""
        start = self._start
        if start is None or not self.is_over:
            return None
        when = datetime.fromtimestamp(start.since, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        why = self.reasons[0] if self.reasons else "the reason is unknown"
        return f"no version has passed the gate since {when}: {why}; serve one by hand, or check the events since then"

    def start(self, served: int | None, reasons: Sequence[str]) -> None:
        """Start or continue the hold after a version failed."""
        if self._start is None:
            self._start = _Start(time.monotonic(), time.time(), served)
            log.warning("a version failed the gate: %s", "; ".join(reasons))
        self._start = self._start._replace(served=served)
        self.reasons = reasons

    def resume(self, served: int) -> None:
        """Continue the hold of the restored checkpoint if the same version is served."""
        if self._restored is not None and self._restored.served == served:
            self._start = self._restored

    def end(self) -> None:
        """End the hold, since a version may be served."""
        self._start, self.reasons = None, ()

    def state(self) -> dict[str, Any]:
        """Return the hold for a checkpoint. Any thread may call this."""
        start = self._start
        return {} if start is None else {"held_seconds": time.monotonic() - start.began, "served": start.served}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the hold of a checkpoint, before anything is judged; time without a learner does not count."""
        if "held_seconds" in state:
            seconds = float(state["held_seconds"])
            self._restored = _Start(time.monotonic() - seconds, time.time() - seconds, state["served"])


class ServedMonitor:
    """Compares what serves with the last version that it found good. Used by the publisher's thread.

    Versions are published faster than held-out events come, so all since the last good one are on probation together.
    """

    def __init__(self, settings: GateSettings, scorer: Scorer) -> None:
        self._settings = settings
        self._scorer = scorer
        self.last_good: Baseline | None = None
        self.first: int | None = None
        """The first version served after the last good one; all from it on are on probation. None where none is."""
        self._before = np.empty(0, np.uint64)
        """The events that were held out before the probation began."""
        self._enough = min(MONITOR_ENOUGH, max(1, settings.holdout_rows // YOUNG))
        self.next_check_at = 0
        """How many events have to come after the probation began before the next comparison."""

    def begin(self, served: Baseline) -> None:
        """Put a version that serves from now on on probation, or count it as good where there is no other."""
        if self.last_good is None:
            self.last_good = served
        elif self.first is None:
            self._before, self.next_check_at = served.held_out, min(MONITOR_ROWS, self._enough)
            self.first = served.number

    def restart(self, last_good: Baseline | None) -> None:
        """End the probation of all versions, and compare later ones with this one."""
        self.last_good, self.first = last_good, None

    def verdict(self, served: Baseline, rows: HoldoutRows) -> Verdict | None:
        """Return a verdict on all versions on probation where the served one is worse; None as long as it is not.

        The comparison is repeated each time the events have grown by half: one after each event would fail by chance.

        A last good version that is certainly worse on the events held out before does not come back: it has learned too
        little, and where labels are wrong it may well be the better one on the newest events.
        """
        last_good = self.last_good
        if last_good is None or self.first is None or not len(rows):
            return None
        fresh = ~np.isin(rows.columns["hash"].astype(np.uint64), self._before)
        count = int(np.count_nonzero(fresh))
        if count < self.next_check_at:
            return None
        served_G, last_good_G = (each.scores(self._scorer, rows.columns) for each in (served, last_good))
        self.next_check_at = min(count + count // 2, self._enough)
        drop = self._drop(served_G, last_good_G, fresh)
        if drop is None:
            return None
        if drop.rows >= MONITOR_ROWS and drop.certain(self._settings.max_drop_new):
            undone = self._drop(last_good_G, served_G, ~fresh)
            if undone is not None and undone.certain(self._settings.max_drop_old):
                return None
            reason = (
                f"monitoring found it worse than version {last_good.number} on {drop.rows} events that came after it"
            )
            numbers = {"watch": drop.candidate, "watch_rival": drop.baseline, "watch_drop": drop.drop}
            return Verdict("fail", [reason], numbers)
        if count >= self._enough:
            self.restart(served)
        return None

    def _drop(self, candidate_G: Scores, baseline_G: Scores, marked_G: NDArray[np.bool_]) -> Drop | None:
        """Compare two versions on the marked events; None without one on which the scores of both are finite."""
        both = marked_G & np.isfinite(candidate_G) & np.isfinite(baseline_G)
        return compare(candidate_G[both], baseline_G[both], bounded=self._scorer.bounded) if both.any() else None


class MeasureMonitor:
    """Compares what serves, by measures, with the last version that it found good; holds candidates back afterwards.

    A single verdict does not see a small drop, so that such a version is served. `DropEvidence` adds up over all
    versions since the last good one, from events that were held out after it. Used by the publisher's thread; a
    process that starts begins with no evidence.
    """

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self.last_good: Baseline | None = None
        self.first: int | None = None
        """The first version served after the last good one; None where none is."""
        self._before = self._judged = np.empty(0, np.uint64)
        """The events that were held out before the first one, and those that evidence needs no longer."""
        self._evidence: dict[str, DropEvidence] = {}
        self.reason: str | None = None
        """Why candidates fail: the versions before them were withdrawn."""
        self._seen, self._came = self._judged, 0
        """The events of the last candidate that was held back, and what those that came until then weigh. Most leave
        the set of a long stream soon, so that those still in it would hardly ever be enough."""

    def begin(self, served: Baseline, measures: Measures) -> None:
        """Compare a version that serves from now on, or count it as good where there is no other, or no measure."""
        if self.last_good is None or not measures:
            self.restart(served)
        elif self.first is None:
            self.first, self._before, self._judged = served.number, served.held_out, served.held_out
            self._evidence = {}

    def restart(self, last_good: Baseline | None) -> None:
        """End the comparison, and compare later versions with this one."""
        self.last_good, self.first, self.reason = last_good, None, None

    def hold_back(self, reason: str, rows: HoldoutRows) -> None:
        """Fail candidates until events that come from now on show no drop."""
        self.reason, self._judged, self._seen, self._came = reason, rows.hashes, rows.hashes, 0

    def verdict(self, served: Baseline, rows: HoldoutRows, measures: Measures) -> Verdict | None:
        """Return a verdict on all versions since the last good one where they are worse; None as long as they are not.

        A last good version that is certainly worse on the events held out before does not come back.
        """
        if self.last_good is None or self.first is None or not measures:
            return None
        if (fresh := self._fresh(rows)) is None:
            return None
        found = self._outcomes(served, rows), self._outcomes(self.last_good, rows)
        self._judged = rows.hashes
        before = np.isin(rows.columns["hash"].astype(np.uint64), self._before)
        for measure, limit in measures:
            evidence = self._evidence.setdefault(measure.name, DropEvidence())
            if (difference := difference_on(fresh, measure, *found)) is not None:
                evidence.add(difference, weight_of(found[0].where(fresh))[0])
            if evidence.certain(limit, len(measures)):
                undone = difference_on(before, measure, *found[::-1])
                if undone is not None and undone.drop - limit > _Z_UNDONE * undone.error:
                    continue
                amount = f"{evidence.drop:.4f} (at most {evidence.upper:.4f}, of {limit:g} that are allowed)"
                reason = (
                    f"worse than version {self.last_good.number} by {measure.name}: {amount}, by monitoring of all "
                    f"versions from {self.first} on, on events that came after it"
                )
                name = f"watch_{measure.name}"
                return Verdict("fail", [reason], {f"{name}_drop": evidence.drop, f"{name}_drop_upper": evidence.upper})
        if all(each.weight >= _ENOUGH * weight_of(found[0])[1] for each in self._evidence.values()):
            self.restart(served)
        return None

    def why_held_back(self, candidate: Outcomes, rows: HoldoutRows, measures: Measures) -> str | None:
        """Return why a candidate fails whatever its own verdict; None if it does not.

        That ends once four batches of events have come, and on those that are left it is no worse than the last good
        version, or certainly less worse than is allowed.
        """
        if self.reason is None or self.last_good is None or not measures:
            return None
        if not len(rows):
            return self.reason
        weight, least = self._weight_of(rows, _others(rows, self._seen))
        self._seen, self._came = rows.hashes, self._came + weight
        if self._came < _BATCHES_OF_RELEASE * least:
            return self.reason
        fresh, last_good = _others(rows, self._judged), self._outcomes(self.last_good, rows)
        found = [(difference_on(fresh, measure, candidate, last_good), limit) for measure, limit in measures]
        if all(each is not None and (each.drop <= 0 or each.upper <= limit) for each, limit in found):
            self.reason = None
        return self.reason

    def _fresh(self, rows: HoldoutRows) -> NDArray[np.bool_] | None:
        """Return which events are new as evidence; None while they are fewer than a batch needs."""
        if not len(rows):
            return None
        fresh = _others(rows, self._judged)
        weight, least = self._weight_of(rows, fresh)
        return fresh if weight >= least else None

    def _weight_of(self, rows: HoldoutRows, marks: NDArray[np.bool_]) -> tuple[int, int]:
        none = np.empty((len(marks), self._scorer.measures.columns), np.float32)
        return weight_of(self._scorer.measures.outcomes(none, rows.columns).where(marks))

    def _outcomes(self, version: Baseline, rows: HoldoutRows) -> Outcomes:
        predicted = version.scores_and_predicted(self._scorer, rows.columns)[1]
        return self._scorer.measures.outcomes(predicted, rows.columns)


class MeasureChoice:
    """The measures that decide besides the score. Used by the publisher's thread; any thread may read attributes."""

    def __init__(self, settings: GateSettings, known: TaskMeasures, score: str) -> None:
        """`score`: what the task's own score is called."""
        self._settings, self._known, self._score = settings, known, score
        self.now: Measures = ()
        """Each with the drop that is allowed."""
        self.why = "too few events are held out"
        """One sentence."""
        if settings.measures != "auto":
            self.now = [(known.each[name], limit) for name, limit in settings.measures.items()]
            self.why = "gate.measures names it" if self.now else "gate.measures is empty"
        elif known.kind != "two-classes":
            self.why = "it is not one of two classes"

    @property
    def name(self) -> str:
        """The first measure by which versions are judged, or the task's score."""
        return self.now[0][0].name if self.now else self._score

    def follow(self, rows: HoldoutRows) -> None:
        """Choose by the labels of the youngest quarter, in which classes have their natural share.

        What is chosen stays while the part of class 1 is near the bound.
        """
        young = len(rows) // YOUNG
        if self._settings.measures != "auto" or self._known.kind != "two-classes" or young < _FEWEST_YOUNG:
            return
        share = float((rows.columns["label"][-young:] == 1).mean())
        rare = share < (_STILL_RARE if self.now else _RARE)
        self.now = [(self._known.each["average_precision"], self._settings.max_drop_new)] if rare else ()
        self.why = f"{share:.1%} of the newest held-out labels are class 1"


class QualityGate:
    """Decides which versions serving may take. Used by the publisher's thread; other threads may read attributes."""

    def __init__(
        self,
        versions: Versions,
        settings: GateSettings,
        scorer: Scorer,
        reference: ModelReference,
        served: Callable[[RegistryState], RegistryState] = lambda own: own,
    ) -> None:
        """`served` adds to `state.json` what servers on other hosts serve and have decided.

        Raises:
            SettingsError: a slice is of no feature.
        """
        self._versions = versions
        self._served_by_all = served
        self._settings = settings
        self.scorer = scorer
        score = "accuracy" if scorer.bounded else "absolute error"
        self.choice = MeasureChoice(settings, scorer.measures, score)
        """The measures by which versions are judged."""
        self._reference = reference
        self._slices = Slices(settings.slices, scorer.schema)
        self._served: Baseline | None = None
        self._best: Baseline | None = None
        self._best_served = 0.0
        """When the best version was served last, or became the best; by the monotonic clock."""
        self.monitored = ServedMonitor(settings, scorer)
        self.by_measures = MeasureMonitor(scorer)
        self._state: RegistryState | None = None
        self._surpasses = True
        self.hold = Hold(settings.max_hold)
        """The hold while versions fail in a row."""
        self.withdrawn = 0
        """Times that monitoring has withdrawn the served versions."""

    def judge(self, found: EventScores, rows: HoldoutRows) -> Verdict:
        """Judge a candidate by its scores on the held-out events."""
        self._refresh(rows)
        self.choice.follow(rows)
        inputs = self._gate_input(found, rows)
        bounded = self.scorer.bounded
        self._surpasses = surpasses(inputs, bounded=bounded)
        verdict = judge(inputs, self._settings, bounded=bounded)
        if "candidate" in inputs.outcomes and (
            why := self.by_measures.why_held_back(inputs.outcomes["candidate"], rows, self.choice.now)
        ):
            verdict = msgspec.structs.replace(verdict, verdict="fail", reasons=[*verdict.reasons, why])
        if (
            verdict.verdict == "fail"
            and self.hold.is_over
            and self._settings.on_hold == "serve"
            and np.isfinite(found.scores).any()
        ):
            self._best = None  # the next served version is the one that all others are compared with
            self._restart_monitors(None)
            reason = 'served although it failed: no version has passed for gate.max_hold, and gate.on_hold is "serve"'
            return msgspec.structs.replace(verdict, verdict="inconclusive", reasons=[reason, *verdict.reasons])
        return verdict

    def record_published(
        self, number: int, weights: Mapping[str, Tensor], found: EventScores, rows: HoldoutRows, verdict: Verdict
    ) -> None:
        """Record a published version, weights on the host; one that has not failed is served from now on."""
        if verdict.verdict == "fail":
            self._start_hold(verdict.reasons)
            return
        if self.hold.since is not None:
            log.info("version %d may be served, after none could", number)
        baseline = Baseline(number, weights, rows.hashes, found.rule)
        if len(rows):
            baseline.set_scores(rows.columns, found.scores, found.predicted)
        self.monitored.begin(baseline)
        self.by_measures.begin(baseline, self.choice.now)
        if self._best is None or self._surpasses:
            self._compare_with(baseline)
        self._serve(baseline)
        self.hold.end()

    def monitor(self, rows: HoldoutRows) -> None:
        """Compare the served version with the last good one on events held out since; withdraw it if it is worse."""
        self._refresh(rows)
        if self._served is None:
            return
        first, last_good = self.monitored.first, self.monitored.last_good
        verdict = self.monitored.verdict(self._served, rows)
        if verdict is not None and first is not None and last_good is not None:
            self._withdraw(verdict, last_good, first)
            return
        first, last_good = self.by_measures.first, self.by_measures.last_good
        verdict = self.by_measures.verdict(self._served, rows, self.choice.now)
        if verdict is not None and first is not None and last_good is not None:
            self._withdraw(verdict, last_good, first)
            self.by_measures.hold_back(verdict.reasons[0], rows)

    def return_to(self, baseline: Baseline, reasons: list[str]) -> None:
        """Compare later versions with this one: those since were rejected, for these reasons."""
        self._start_with(baseline)
        self._start_hold(reasons)

    @property
    def served(self) -> int | None:
        """The version that serving should serve; None before the first."""
        return None if self._served is None else self._served.number

    def has_failed(self, number: int) -> bool:
        """Return whether the verdict of a version is `fail`."""
        return _has_failed(self._versions, number)

    def withdraw(self, verdict: Verdict, good: int, rows: HoldoutRows) -> None:
        """Fail all versions after a good one, which serves again, unless that is gone or serves already.

        Raises:
            OSError: the verdict cannot be written now.
        """
        if self._served is None or self._served.number <= good:
            return
        if (last_good := self._read_baseline(good, rows)) is not None:
            self._withdraw(verdict, last_good, good + 1)
            self.by_measures.hold_back(verdict.reasons[0], rows)

    @property
    def needed(self) -> set[int]:
        """Versions that serving may roll back to, and that must not be deleted."""
        needed = self._served, self.monitored.last_good, self.by_measures.last_good
        return {each.number for each in needed if each is not None}

    def _gate_input(self, found: EventScores, rows: HoldoutRows) -> GateInput:
        scores_G, held = found.scores, self.hold.since is not None
        total = len(scores_G)
        new = np.arange(total) >= total - total // YOUNG
        served, best = self._served, self._best
        slices = self._slices.of(rows.columns) if total else {}
        label = rows.columns["label"] if total else np.empty(0)
        if served is None or (total < self._settings.min_rows and not held) or not total:
            scores = scores_G if served else None
            return GateInput(scores_G, scores, None, new, ~new, {}, held=held, label=label, slices=slices)
        if best is served:
            self._best_served = time.monotonic()
        elif time.monotonic() - self._best_served > self._settings.max_hold.total_seconds():
            best = self._compare_with(served)
        compared = {"served": served} | ({"best": best} if best is not None and best is not served else {})
        scored = {name: each.scores_and_predicted(self.scorer, rows.columns) for name, each in compared.items()}
        served_G, best_G = scored["served"][0], scored["best"][0] if "best" in scored else None
        outcomes: dict[str, Outcomes] = {}
        if self.choice.now:
            predicted = {"candidate": found.predicted, **{name: each for name, (_, each) in scored.items()}}
            outcomes = {name: self.scorer.measures.outcomes(each, rows.columns) for name, each in predicted.items()}
        # Events that come while nothing passes may be why the candidates are worse: they do not become old knowledge.
        old = ~new & served.held_out_before(rows.columns["hash"].astype(np.uint64)) if held else ~new
        finite = np.isfinite(served_G) & np.isfinite(scores_G)
        classes = {name: marks & finite for name, marks in class_marks(self.scorer.schema, rows).items()}
        classes = {name: marks for name, marks in classes.items() if marks.any()}
        return GateInput(
            scores_G,
            served_G,
            best_G,
            new,
            old,
            classes,
            held=held,
            measures=self.choice.now,
            outcomes=outcomes,
            label=label,
            slices=slices,
        )

    def _compare_with(self, best: Baseline) -> Baseline:
        """Compare later versions with another best, for `gate.max_hold` at least."""
        self._best, self._best_served = best, time.monotonic()
        return best

    def _serve(self, served: Baseline) -> None:
        self._served = served
        self.scorer.keep_on_device(served.weights)

    def _start_hold(self, reasons: list[str]) -> None:
        self.hold.start(self.served, reasons)

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
        self._restart_monitors(last_good)
        self._start_hold(verdict.reasons)

    def _refresh(self, rows: HoldoutRows) -> None:
        """Load the baselines after a restart, and apply decisions that a person has made since the last call."""
        try:
            state = self._served_by_all(self._versions.state())
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
            self._restart_monitors(self._compare_with(baseline))
            self._serve(baseline)

    def _restart_monitors(self, last_good: Baseline | None) -> None:
        for monitor in (self.monitored, self.by_measures):
            monitor.restart(last_good)

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
        if manifest.schema != self.scorer.schema.digest or manifest.model != self._reference:
            return None
        if (other := other_base(manifest.base, self._versions.base)) is not None:
            log.warning("version %d %s, so that no version can be compared with it", number, other)
            return None
        weights = versions.weights(manifest)
        return Baseline(number, weights, rows.hashes, manifest.rule) if self.scorer.fits(weights) else None


def _others(rows: HoldoutRows, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which events are not of these."""
    return ~np.isin(rows.columns["hash"].astype(np.uint64), hashes)


def _has_failed(versions: Versions, number: int) -> bool:
    try:
        verdict = versions.verdict(number)
    except VersionError:
        return False
    return verdict is not None and verdict.verdict == "fail"
