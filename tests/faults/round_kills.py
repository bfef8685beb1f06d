"""SIGKILLs of the learner in the middle of rounds of several steps, counted by the weights of the model.

The model is that of `kills`. It kills its own process in the forward pass of a step, once the process has taken a
random number of steps: in a round of which a step was taken, and another is left. So no kill misses the rounds, nor
comes after the stream, as one by a clock may. What a round was when it was killed is written to a file first.
"""

import random
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from tests.faults.figures import Figures
from tests.faults.kills import (
    CODE,
    LEAST_A_SECOND,
    PARTITIONS,
    ROW,
    TEXT,
    accounts,
    is_exact,
    messages_of,
)
from tests.faults.pipeline import PATIENCE_SECONDS, Pipeline, Supervised, make_topic, send
from tests.pipelines import total

_KILLING = """
import os
import random
import signal
import sys
from pathlib import Path

_KILLED = Path(__file__).parent / "killed"
_left = random.SystemRandom().randrange({steps})

def round_now():
    "Return how many steps of the round were taken, and how many it has, from the call of `LearningStep.take`."
    frame = sys._getframe()
    while frame is not None and not (frame.f_code.co_name == "take" and "taken" in frame.f_locals):
        frame = frame.f_back
    return (0, 0) if frame is None else (len(frame.f_locals["taken"]), len(frame.f_locals["steps"]))

class Killed(Accounts):
    def forward(self, id):
        global _left
        output = super().forward(id)
        if output.requires_grad and (found := round_now())[1]:
            _left -= 1
            if _left < 0 and 0 < found[0] < found[1]:
                with _KILLED.open("a+") as file:
                    file.seek(0)
                    if len(file.readlines()) < {kills}:
                        file.write("%d %d\\n" % found)
                        file.flush()
                        os.kill(os.getpid(), signal.SIGKILL)
        return output

def build(events):
    return Killed(events)
"""


_BATCH = 2
_OF_STEPS = 0.8
"""Part of the steps of the stream that precede the last kill at most."""


@dataclass(frozen=True)
class RoundKills:
    """The outcome of a stream.

    Attributes:
        rounds: of each kill, how many steps of the round were taken, and how many it had.
        lost: events that were not trained on.
        twice: events that were trained on more than once.
        exact: whether each weight is a whole number, and the ledger counts each outcome exactly.
    """

    rounds: list[tuple[int, int]]
    lost: int
    twice: int
    exact: bool
    seconds: float


def killed_inside_rounds(
    folder: Path, bootstrap: str, events: int, kills: int, checkpoint_every: str, seed: int
) -> RoundKills:
    """Train on a stream of `events` events, which is complete before the start, with `kills` kills inside rounds."""
    begin, most = time.monotonic(), int(_OF_STEPS * events / (_BATCH * kills))
    topic = make_topic(bootstrap, "accounts", PARTITIONS)
    code = CODE + _KILLING.replace("{steps}", str(most)).replace("{kills}", str(kills))
    text = TEXT.format(events=events, batch=_BATCH, checkpoint_every=checkpoint_every)
    text = text.replace("{learner}", '{learner}\nround = "1h"')  # else a slow machine takes one step a round
    pipeline = Pipeline(folder, bootstrap, topic, code, text)
    messages = list(messages_of(events, random.Random(seed)))
    bad = sum(1 for message in messages if len(message) % ROW.itemsize)
    send(bootstrap, topic, messages)
    patience = PATIENCE_SECONDS * (1 + kills / 4) + events / LEAST_A_SECOND
    with Supervised(pipeline) as learner:
        last = learner.wait_for(lambda report: total(report) >= events + bad, "an outcome for every event", 0, patience)
    weights, finished = accounts(pipeline), pipeline.report()
    lines = (folder / "killed").read_text().split("\n")[:-1]
    return RoundKills(
        rounds=[(int(taken), int(steps)) for taken, steps in map(str.split, lines)],
        lost=int((weights == 0).sum()),
        twice=int((weights > 1).sum()),
        exact=(weights == 1).all() and is_exact(last, events, bad) and is_exact(finished, events, bad),
        seconds=time.monotonic() - begin,
    )


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Measure the part `rounds`."""
    del minutes
    events, kills = (16_000, 8) if quick else (200_000, 100)
    figures.part("rounds", f"{kills} SIGKILLs inside rounds of several steps, in a stream of {events:,} events")
    found = killed_inside_rounds(folder, bootstrap, events, kills, "300ms", seed=int(time.time()))
    taken, steps = (mean(each) for each in zip(*found.rounds, strict=True))
    remark = f"on average after {taken:.1f} of {steps:.1f} steps of the round; {found.seconds:.0f} s"
    figures.add("round_kills", len(found.rounds), remark)
    figures.add("round_kills_lost", found.lost)
    figures.add("round_kills_twice", found.twice)
    figures.add("round_kills_exact", found.exact)
