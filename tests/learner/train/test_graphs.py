"""Steps by a graph, which a fake records: it computes again what a real one launches again."""

import copy
import logging

import pytest
import torch
from torch import nn

from anabranch.ingest.kafka.fake import fake_columns
from anabranch.learner.model.cuda_graph import GraphedPass
from anabranch.learner.model.device import Precision, choose_precision
from anabranch.learner.model.task import Classification
from anabranch.learner.settings.compatibility import conflicts
from anabranch.learner.settings.learner import LearnerSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from tests.support.facts import facts_of
from tests.support.operations import Operations

CPU = torch.device("cpu")


class FakeGraphs:
    """Records as CUDA does: without a change of the model, and with results that stay in the same tensors."""

    def __init__(self, model, *, may_read):
        self._model = model
        self._may_read = may_read
        self.recorded = self.replayed = 0

    def __call__(self, function):
        self.recorded += 1
        before, generator = copy.deepcopy(self._model.state_dict()), torch.get_rng_state()
        with Operations() as operations:
            outputs = function()
        assert self._may_read or not operations.counts["_local_scalar_dense"]
        with torch.no_grad():
            for name, value in self._model.state_dict().items():
                value.copy_(before[name])
        torch.set_rng_state(generator)
        weights = list(self._model.parameters())
        gradients = [weight.grad for weight in weights]

        def replay():
            self.replayed += 1
            for weight in weights:
                weight.grad = None
            again = [*function(), *(weight.grad for weight in weights)]
            for static, value in zip([*outputs, *gradients], again, strict=True):
                if static is not None and value is not None:
                    static.copy_(value)
            for weight in weights:
                weight.grad = None

        return outputs, replay


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))


def make_trainer(schema, strategy, graphed, built=None, fp16=False, **settings):
    options = LearnerSettings.model_validate({"optimizer": {"name": "adamw", "lr": 0.01}, **settings})
    precision = Precision("fp16", torch.float16) if fp16 else choose_precision("fp32", CPU)
    trainer = Trainer(
        TrainingSetup(built or model(), Classification(), STRATEGIES[strategy](), schema, options, CPU, precision)
    )
    # The one_hot of er-ace reads its labels on a CPU, and not on a CUDA device.
    fake = FakeGraphs(trainer.model, may_read=strategy == "er-ace")
    trainer.runner._graphs = GraphedPass(trainer.model, fake) if graphed else None
    return trainer, fake


def learn(trainer, schema, sizes, poison=None):
    torch.manual_seed(1)
    results = []
    for step, rows in enumerate(sizes):
        new, *old = (
            trainer.examples(fake_columns(schema, range(begin, begin + n), label=[0, 1, 2]))
            for begin, n in ((16 * step, rows), *((1000 + step, n) for n in trainer.strategy.samples(rows)))
        )
        if step == poison:
            new.features["x"][0] = torch.nan
        results.append(trainer.step(new, old))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["none", "er", "er-ace", "der", "der++"])
@pytest.mark.parametrize("fp16", [False, True])
def test_a_replayed_step_is_the_plain_one_bit_for_bit(schema, strategy, fp16):
    sizes = [16] * 6 + [9] + [16] * 2 + [12] * 5
    plain, _ = make_trainer(schema, strategy, False, fp16=fp16)
    fast, fake = make_trainer(schema, strategy, True, fp16=fp16)
    expected, found = (learn(trainer, schema, sizes, poison=10) for trainer in (plain, fast))
    assert fake.recorded == 2
    assert fake.replayed >= (6 - 3) + 2 + (5 - 3)
    for one, other in zip(expected, found, strict=True):
        assert (one.finite, one.replayed) == (other.finite, other.replayed)
        torch.testing.assert_close(
            (other.loss, other.score, other.loss_new, other.output_B),
            (one.loss, one.score, one.loss_new, one.output_B),
            rtol=0,
            atol=0,
            equal_nan=True,
        )
        torch.testing.assert_close(other.old_R, one.old_R, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(fast.tensors(), plain.tensors(), rtol=0, atol=0)


def test_results_of_a_step_are_not_those_of_the_next(schema):
    trainer, fake = make_trainer(schema, "er", True)
    results = learn(trainer, schema, [16] * 7)
    assert fake.replayed == 4
    assert len({result.output_B.data_ptr() for result in results}) == 7
    assert not torch.equal(results[-1].old_R, results[-2].old_R)


def test_a_step_in_micro_batches_runs_as_it_is(schema):
    trainer, fake = make_trainer(schema, "er", True, micro_batch_size=8)
    learn(trainer, schema, [16] * 6)
    assert fake.recorded == 0


def test_a_few_shapes_are_recorded_and_no_more(schema):
    trainer, fake = make_trainer(schema, "none", True)
    learn(trainer, schema, [rows for rows in range(4, 10) for _ in range(5)])
    assert fake.recorded == 4


class Rebinding(nn.Linear):
    """Binds another tensor to its buffer in each pass."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return super().forward(x - self.mean.detach())


class Reading(nn.Linear):
    """Reads a value on the host, which a recording forbids."""

    def __init__(self):
        super().__init__(3, 3)

    def forward(self, x):
        return super().forward(x) * (1.0 if x.sum().item() > 0 else 2.0)


@pytest.mark.parametrize("kind", [Rebinding, Reading])
def test_a_model_that_cannot_be_recorded_runs_as_it_is_with_one_warning(schema, kind, caplog):
    torch.manual_seed(0)
    built = kind()
    plain, _ = make_trainer(schema, "er", False, copy.deepcopy(built))
    fast, fake = make_trainer(schema, "er", True, built)
    learn(plain, schema, [16] * 8)
    with caplog.at_level(logging.WARNING):
        learn(fast, schema, [16] * 8)
    assert (fake.recorded, fake.replayed) == (1, 0)
    assert [record.getMessage()[:52] for record in caplog.records] == [
        "learner.graphs: the step cannot be recorded, and run"
    ]
    torch.testing.assert_close(fast.tensors(), plain.tensors(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("learner", "replay", "sharing"),
    [
        ({"strategy": "mir"}, {}, {}),
        ({"strategy": "agem"}, {}, {}),
        ({"strategy": "ewc"}, {}, {}),
        ({"strategy": "lwf"}, {}, {}),
        ({"compile": True}, {}, {}),
        ({"activation_checkpointing": True}, {}, {}),
        ({"replicas": 2}, {}, {}),
        ({}, {"sampling": "similar"}, {}),
        ({}, {"admission": "diverse"}, {}),
        ({}, {}, {"yield_at": "layer"}),
        ({}, {}, {"sms": 8}),
    ],
)
def test_settings_under_which_a_step_is_not_recorded_are_refused(learner, replay, sharing):
    for graphs in (False, True):
        chosen = facts_of(learner={"graphs": graphs, **learner}, replay=replay, device_sharing=sharing)
        sentences = [sentence for _, sentence in conflicts(chosen)]
        assert len(sentences) == graphs
        assert all("learner.graphs = true" in sentence for sentence in sentences)


def test_a_cpu_has_no_graphs_and_one_warning_says_so(schema, caplog):
    with caplog.at_level(logging.WARNING):
        options = LearnerSettings.model_validate({"graphs": True})
        trainer = Trainer(
            TrainingSetup(
                model(), Classification(), STRATEGIES["er"](), schema, options, CPU, choose_precision("fp32", CPU)
            )
        )
    assert caplog.messages == ["learner.graphs has no effect: it needs a CUDA device, but the device is cpu"]
    assert learn(trainer, schema, [16])[0].finite


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["none", "er", "der++"])
def test_a_gpu_replays_what_it_learns_without_graphs(schema, strategy):
    found = []
    for graphs in (False, True):
        options = LearnerSettings.model_validate({"graphs": graphs, "optimizer": {"name": "adamw", "lr": 0.01}})
        torch.manual_seed(0)
        built = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).cuda()
        cuda = torch.device("cuda", 0)
        arguments = (built, Classification(), STRATEGIES[strategy](), schema, options, cuda)
        trainer = Trainer(TrainingSetup(*arguments, choose_precision("fp32", cuda)))
        learn(trainer, schema, [16] * 10)
        if graphs:
            assert trainer.runner._graphs is not None
            assert not trainer.runner._graphs.refused
        found.append(trainer.tensors())
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
