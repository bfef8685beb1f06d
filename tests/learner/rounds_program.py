"""One of two ranks that train in rounds: `RANK FOLDER STEPS...`, a learner for each largest number of steps of a round.

The first rank compares them: the weights, the optimizer and the ledger of each have to be the same.
"""

import sys
from pathlib import Path

import torch

from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.task import Classification
from anabranch.learner.parallel.channel import Channel
from anabranch.learner.parallel.data_parallel import DataParallelGroup
from anabranch.learner.parallel.follower import follow
from anabranch.learner.parallel.process_group import RankAssignment, exiting_at_once, join_group
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from tests.learner.conftest import NUMBERS
from tests.learner.test_rounds import BATCH, Picky, assert_equal, made, rounds_of, spoil

LEARNER = {"batch_size": BATCH // 2, "deterministic": True, "device": "cpu", "replicas": 2}


def trainer(replicas):
    settings = LearnerSettings.model_validate(LEARNER)
    torch.manual_seed(0)
    model, precision = Picky(), choose_precision("fp32", torch.device("cpu"))
    setup = TrainingSetup(
        model, Classification(), STRATEGIES["er"](), NUMBERS, settings, torch.device("cpu"), precision
    )
    torch.manual_seed(1)
    return Trainer(setup, ranks=replicas)


def main():
    rank, folder, numbers = int(sys.argv[1]), Path(sys.argv[2]), [int(each) for each in sys.argv[3:]]
    torch.set_num_threads(1)
    settings = LearnerSettings.model_validate(LEARNER)
    with join_group(RankAssignment(rank, 2, folder / "rendezvous"), settings) as device:
        found = []
        for steps in numbers:
            replicas, channel = DataParallelGroup(settings), Channel(device)
            if rank:
                follow(channel, lambda replicas=replicas: (trainer(replicas), replicas))
                continue
            with channel.leading():
                learner = LEARNER | {"precision": "fp32"}
                bench = made(
                    folder / str(steps), NUMBERS, steps, learner=learner, change=spoil, group=(channel, replicas)
                )
                assert max(rounds_of(bench)) == steps
                found.append(bench)
                assert_equal(found[0], bench)
        assert rank or found[0].loop.ledger.totals.skipped == {"non_finite": 32, "model": 36}
        for bench in found:
            bench.close()


if __name__ == "__main__":
    with exiting_at_once():
        main()
