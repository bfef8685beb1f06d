"""The key `learner.strategy`, and the catalog of what each strategy is. Imports no torch.

A class of `learner.strategies` has its entry of the catalog as `kind`; checks, estimates and the rules of
`learner.settings.compatibility` read it without building one. A class of the user is imported, and has its facts too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from anabranch.core.users_code import NamedClass


@dataclass(frozen=True)
class StrategyKind:
    """What a strategy is to all that is around it.

    Attributes:
        replays: whether old events are sampled.
        keeps_output: whether the store keeps the model's output with each event.
        embeds: whether it needs embeddings.
        learns_gradient: whether the optimizer takes a step; if not, the strategy's `after_step` updates the model.
        grows: whether the model gets parts while it trains.
        needs_whole: whether it works on all weights or all gradients at once, or keeps a state of one model.
        copies: copies of the weights that it keeps, or takes in a step.
    """

    replays: bool = True
    keeps_output: bool = False
    embeds: bool = False
    learns_gradient: bool = True
    grows: bool = False
    needs_whole: bool = False
    copies: int = 0

    @property
    def storeless(self) -> bool:
        """Whether there is no store that old events are sampled from."""
        return not self.replays

    @property
    def closed_form(self) -> bool:
        """Whether weights are computed, and not learned by a gradient."""
        return not self.learns_gradient


KINDS: Mapping[str, StrategyKind] = {
    "none": StrategyKind(replays=False),
    "er": StrategyKind(),
    "er-ace": StrategyKind(),
    "der": StrategyKind(keeps_output=True),
    "der++": StrategyKind(keeps_output=True),
    "mir": StrategyKind(needs_whole=True, copies=2),
    "agem": StrategyKind(needs_whole=True, copies=1),
    "ewc": StrategyKind(replays=False, needs_whole=True, copies=3),
    "lwf": StrategyKind(replays=False, needs_whole=True, copies=1),
    "slda": StrategyKind(replays=False, embeds=True, learns_gradient=False, needs_whole=True),
    "ncm": StrategyKind(replays=False, embeds=True, learns_gradient=False, needs_whole=True),
    "experts": StrategyKind(replays=False, grows=True, needs_whole=True),
    "progressive": StrategyKind(replays=False, grows=True, needs_whole=True),
}
"""The catalog: our strategies, by the names that `learner.strategy` takes."""


STRATEGY = NamedClass(
    "learner.strategy", tuple(KINDS), "anabranch.strategies", "anabranch.learner.strategies.base:Strategy"
)


class StrategySettings(BaseModel):
    """A strategy by its name, or a table of the name and its arguments, such as `{name = "der++", alpha = 0.1, beta =
    0.5}`."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: Annotated[str, STRATEGY] = "er"
    """The method against forgetting, such as `er` for experience replay, or `none`; further keys are its arguments.
    `my_code:MyStrategy` is your own class."""

    @property
    def kind(self) -> StrategyKind:
        """What the strategy is."""
        return STRATEGY.kind_of(self.name, KINDS)
