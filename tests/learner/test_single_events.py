"""Single events of extreme values, weights, labels and times leave what a model has of the others as it was."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from anabranch.config.loader import load_config
from anabranch.ingest.events.block import Outcome
from anabranch.ingest.events.partition import TopicPartition
from anabranch.ingest.events.position import Position
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.kafka.client import Messages
from anabranch.ingest.settings.stream import HoldOut
from anabranch.ingest.worker.block_builder import BlockBuilder, Incoming
from anabranch.learner.loop.learning_step import ValueWatch
from anabranch.learner.model.converter import ModelContext
from anabranch.learner.model.device import choose_precision
from anabranch.learner.model.features.learned import FeatureLearning, features_of
from anabranch.learner.model.features.numbers import LearnedNumber
from anabranch.learner.model.task import Classification, Regression
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from tests.faults.outliers import CODE, VARIANTS, Kind, Sent, kinds_of, right, stream_of
from tests.faults.pipeline import Pipeline

CPU = torch.device("cpu")
NAME = TopicPartition("events", 0)


@dataclass
class Trained:
    """A model that has learned a stream, and the offsets that are reported."""

    trainer: Trainer
    accuracy: float = 0.0
    named: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    not_finite: int = 0


def learn(folder, variant, sent, batch=64):
    """Decode messages and train on them as a learner does, without a broker."""
    pipeline = Pipeline(folder, "localhost:1", "events", CODE, variant.text)
    config = load_config(pipeline.path).pipeline
    schema = Schema(config.events)
    builder = BlockBuilder(schema, config.stream, HoldOut(fraction=0.0, seed=0))
    torch.manual_seed(0)
    namespace: dict[str, Any] = {}
    exec(CODE, namespace)
    model = namespace["build"](**config.model.args)
    FeatureLearning().convert(model, ModelContext(CPU, schema))
    task = Regression() if variant.regression else Classification()
    trainer = Trainer(
        TrainingSetup(model, task, STRATEGIES["none"](), schema, config.learner, CPU, choose_precision("fp32", CPU))
    )
    learned = features_of(model)
    assert learned is not None
    done, watch = Trained(trainer), ValueWatch(learned.of(LearnedNumber))
    for begin in range(0, len(sent), batch):
        part = sent[begin : begin + batch]
        messages = Messages(
            *(NAME, range(begin, begin + len(part)), [each.when_ms or 10**12 for each in part], [b"k"] * len(part)),
            *([each.value for each in part], [[]] * len(part), begin + len(part)),
        )
        assembled = builder.assemble([Incoming(messages, 0, Position(0))])
        outcome = assembled.columns["outcome"]
        done.dead |= set(assembled.columns["offset"][outcome == Outcome.DEAD_LETTERED].tolist())
        if assembled.overweight:
            done.named |= set(assembled.columns["offset"][assembled.columns["weight"] == 100].tolist())
        columns = {name: column[outcome == Outcome.PENDING] for name, column in assembled.columns.items()}
        result = trainer.step(trainer.examples(columns), (), columns)
        if not result.finite:
            done.not_finite += 1
            done.named |= set(columns["offset"].tolist())
        watch.observe(columns, [NAME])
    done.named |= {int(each.split("@")[1].split(" ")[0]) for each in watch.said}
    done.named |= {outlier.offset for outlier in learned.outliers}
    test = [Sent(each.value, None, None) for each in stream_of(variant, 3000, [], seed=99)]
    values = [each.value for each in test]
    messages = Messages(NAME, range(len(test)), [10**12] * len(test), [b"k"] * len(test), values, [[]] * len(test), 0)
    done.accuracy = right(model, variant, builder.assemble([Incoming(messages, 0, Position(0))]).columns)
    return done


ALONE = [each for each in VARIANTS if not (each.late or each.tokens or each.registered)]
"""Those that need no other file, server or topic."""


@pytest.mark.slow
@pytest.mark.parametrize("variant", ALONE, ids=lambda variant: variant.name)
def test_single_events_leave_what_is_known_of_the_others(tmp_path, variant):
    kinds = kinds_of(variant)
    clean = learn(tmp_path / "clean", variant, [*stream_of(variant, 8_000, [])])
    sent = [*stream_of(variant, 8_000, kinds)]
    found = learn(tmp_path / "spoiled", variant, sent)
    at = {each.kind.name: offset for offset, each in enumerate(sent) if each.kind is not None}
    by_name: dict[str, Kind] = {kind.name: kind for kind in kinds}
    assert {name for name, offset in at.items() if offset in found.dead} == {n for n, k in by_name.items() if k.dead}
    unnamed = {name for name, offset in at.items() if by_name[name].named and offset not in found.named}
    assert clean.accuracy > 0.85
    assert found.accuracy > clean.accuracy - 0.01
    assert unnamed == set()
