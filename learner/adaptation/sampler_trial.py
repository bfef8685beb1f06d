"""By which sampler old events are drawn, where `replay.sampling = "auto"`: by that which is measured to do best."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Stage = Literal["pause", "before", "other", "after"]

_TRIAL = 40
"""Looks of a trial, one in four steps: three half lives of what they tell, so that its end is of the trial alone."""
_PAUSE = 250
"""Looks between two rounds of trials; twice as many after each that changed nothing."""
_LONGEST = 64 * _PAUSE


@dataclass(frozen=True)
class Look:
    """How well a model does on old and new events together.

    Attributes:
        score: mean score, old and new as they are declared to weigh.
        chance: by how much chance may part two such means.
    """

    score: float
    chance: float


class MeasuredKind:
    """Draws by the sampler that did best when it was last tried.

    When replay has come on, each other sampler is tried between two trials of the one in use, since the model goes on
    learning meanwhile. It is taken when it does better than either of them by more than chance: a model that gets
    better or worse throughout, or a stream that changes once, favours none. All are tried again after a pause, which
    doubles for as long as none is taken.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        """Begin with the first of the names."""
        self._kinds = kinds
        self._best = kinds[0] if kinds else None
        self._others: list[str] = []
        self._stage: Stage = "pause"
        self._left, self._pause = 1, _PAUSE
        self._before, self._tried = 0.0, 0.0

    @property
    def now(self) -> str | None:
        """The name of the sampler to draw by; None where there is no choice."""
        return self._others[0] if self._stage == "other" else self._best

    @property
    def compares(self) -> bool:
        """Whether trials are going on, which a change of what is replayed would spoil."""
        return self._stage != "pause"

    def learned(self, look: Look | None) -> None:
        """Hear of a look, and decide for the next draws.

        Args:
            look: None when nothing can be compared: replay is off, or on trial itself, or events that were drawn are
                all there is to look at.
        """
        if look is None:
            self._stage, self._left, self._pause = "pause", 1, _PAUSE
            return
        self._left -= 1
        if self._left or len(self._kinds) < 2:
            return
        if self._stage == "pause":
            self._others = [kind for kind in self._kinds if kind != self._best]
            self._begin("before", _TRIAL)
        elif self._stage == "before":
            self._before = look.score
            self._begin("other", _TRIAL)
        elif self._stage == "other":
            self._tried = look.score
            self._begin("after", _TRIAL)
        else:
            self._judge(look)

    def _judge(self, after: Look) -> None:
        """Take the sampler that was tried, or not, and go on to the next one."""
        tried, taken = self._others.pop(0), self._tried - max(self._before, after.score) > after.chance
        if taken:
            self._best, self._pause = tried, _PAUSE
        self._before = after.score
        if self._others:
            self._begin("before" if taken else "other", _TRIAL)
        else:
            self._begin("pause", self._pause)
            self._pause = min(2 * self._pause, _LONGEST)

    def _begin(self, stage: Stage, looks: int) -> None:
        self._stage, self._left = stage, looks

    def state(self) -> dict[str, Any]:
        """Plain values, for a cut."""
        return {
            "best": self._best,
            "others": list(self._others),
            "stage": self._stage,
            "left": self._left,
            "pause": self._pause,
            "before": self._before,
            "tried": self._tried,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the state of a cut, unless that was of other samplers, or of a trial without a sampler on trial."""
        others = state.get("others", ())
        if not {state.get("best"), *others} <= {*self._kinds} or (state["stage"] != "pause" and not others):
            return
        self._best, self._others, self._stage = state["best"], list(state["others"]), state["stage"]
        self._left, self._pause = state["left"], state["pause"]
        self._before, self._tried = state["before"], state["tried"]
