"""A canary from end to end: servers report themselves, the learner decides by labels, and the servers follow."""

from datetime import timedelta

import httpx
import numpy as np
import pytest
import torch

from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.evaluate.holdout import HoldoutSet
from anabranch.learner.evaluate.scoring import Scorer
from anabranch.learner.extensions.fleet.canary import CanaryJudge
from anabranch.learner.extensions.fleet.extension import FleetWatch
from anabranch.learner.model.factory import build_model
from anabranch.learner.settings.learner import GateSettings
from anabranch.learner.versions.format import reference_to
from anabranch.learner.versions.gate import QualityGate
from tests.support.waiting import PATIENCE_SECONDS


class Judging:
    """The part of a learner that judges canaries, with held-out events whose label is 1."""

    def __init__(self, learning):
        deployment = learning.publisher.deployment
        self.learning, self.schema, self.offset = learning, deployment.schema, 0
        model = build_model(deployment.model.factory, deployment.model.args, deployment.folder)
        scorer = Scorer(model, deployment.task, self.schema, torch.device("cpu"))
        settings = GateSettings(min_rows=50, holdout_rows=400)
        self.fleet = FleetWatch(learning.storage)
        gate = QualityGate(deployment.versions, settings, scorer, reference_to(deployment.model), self.fleet.served)
        self.outcomes = []
        self.judge = CanaryJudge(*(self.fleet, deployment.versions, settings, gate, 0.5), count=self.outcomes.append)
        self.holdout = HoldoutSet(self.schema, 400, 0)

    def publish(self, number, answer):
        """Publish a version that predicts this number."""
        self.learning.publish(number, weights={"number": torch.tensor(answer)}, verdict="pass")

    def hold_out(self, events):
        columns = fake_columns(self.schema, range(self.offset, self.offset + events))
        columns["label"] = np.ones(events, np.float32)
        self.holdout.add(columns, [TopicPartition("events", 0)])
        self.offset += events

    def step(self):
        """Read the fleet, judge, and upload what changed; returns the decisions."""
        self.fleet.poll()
        withdrawn = list(self.outcomes)
        self.judge.update(self.holdout.held)
        self.fleet.poll()
        return self.fleet.rollout, self.outcomes != withdrawn


@pytest.fixture(autouse=True)
def _servers_are_quick(monkeypatch):
    monkeypatch.setattr("anabranch.serving.fleet.member._POLL_EVERY", timedelta(seconds=0.05))
    monkeypatch.setattr("anabranch.serving.fleet.member.REPORT_EVERY", timedelta(seconds=0.05))


@pytest.mark.slow
def test_a_bad_version_reaches_the_canaries_alone_and_a_good_one_all_servers(
    learning, followed, served, body_of, eventually
):
    judging = Judging(learning)
    judging.hold_out(100)
    judging.publish(1, 1.25)

    def answers():
        replies = [httpx.post(server.infer, json=body_of(1), timeout=PATIENCE_SECONDS) for server in servers]
        return sorted(reply.json()["model_version"] for reply in replies)

    # A busy machine makes no canary slower than `slo`.
    with served(followed("a"), slo="60s") as a, served(followed("b"), slo="60s") as b:
        servers = a, b
        eventually(lambda: judging.step()[0].stable == 1)
        judging.publish(2, 50.0)
        eventually(lambda: judging.step()[0].canary == 2)
        eventually(lambda: answers() == ["1", "2"])
        judging.step()
        judging.hold_out(60)
        eventually(lambda: judging.step()[0].rolled_back == [2])
        eventually(lambda: answers() == ["1", "1"])
        judging.publish(3, 1.0)
        eventually(lambda: judging.step()[0].canary == 3)
        eventually(lambda: answers() == ["1", "3"])
        judging.step()
        judging.hold_out(60)
        eventually(lambda: judging.step()[0].stable == 3)
        eventually(lambda: answers() == ["3", "3"])
    assert judging.outcomes == ["rejected", "promoted"]
