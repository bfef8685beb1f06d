"""Whatever the table lets pass learns; whatever it refuses is refused with one sentence."""

import itertools
from typing import Any, cast

import pytest
import torch
from torch import nn

from anabranch.core.errors import SettingsError
from anabranch.ingest.kafka.fake import fake_columns
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.learner.assembly import build_trainer
from anabranch.learner.model.device import Precision, choose_precision
from anabranch.learner.model.embedding import Embedding
from anabranch.learner.model.task import Classification
from anabranch.learner.parallel.channel import Channel
from anabranch.learner.settings.compatibility import RULES, conflicts
from anabranch.learner.settings.learner import DeviceSharingSettings, LearnerSettings
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.strategies.registry import STRATEGIES
from anabranch.learner.train import converters as compiled
from anabranch.learner.train.setup import TrainingSetup
from anabranch.learner.train.trainer import Trainer
from anabranch.testing.strategies import extended
from tests.support.facts import facts_of
from tests.support.strategies import small_strategy

CPU = torch.device("cpu")
AXES: dict[str, list[Any]] = {
    "strategy": list(STRATEGIES),
    "precision": ["fp32", "bf16"],
    "micro_batch_size": [None, 4],
    "activation_checkpointing": [False, True],
    "compile": [False, True],
}


def cells():
    """Every combination; of those that are compiled, which take a second, each strategy alone and all with ER."""
    for values in itertools.product(*AXES.values()):
        cell = dict(zip(AXES, values, strict=True))
        alone = (cell["precision"], cell["micro_batch_size"], cell["activation_checkpointing"]) == ("fp32", None, False)
        if not cell["compile"] or alone or cell["strategy"] == "er":
            yield pytest.param(cell, id=" ".join(str(value) for value in values))


def traced_ahead(cell):
    """Whether backward is traced as well, which takes twice as long: each value of each axis is, once or more."""
    return (cell["precision"], cell["micro_batch_size"]) == ("fp32", None) or cell["strategy"] == "er"


@pytest.mark.parametrize("cell", list(cells()))
@pytest.mark.slow
def test_what_is_not_refused_learns(schema, cell, monkeypatch):
    settings = LearnerSettings.model_validate({**cell, "optimizer": {"name": "adam", "lr": 0.05}})
    if list(conflicts(facts_of(learner=settings))):
        grows = cell["strategy"] in {"experts", "progressive"}
        assert cell["compile"] or grows
        assert cell["activation_checkpointing"] or cell["strategy"] == "agem" or grows
        return
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager" if traced_ahead(cell) else "eager")
    torch.manual_seed(0)
    norm = nn.Identity() if cell["strategy"] == "progressive" else nn.BatchNorm1d(16)
    model = nn.Sequential(nn.Linear(3, 16), norm, nn.ReLU(), nn.Linear(16, 3))
    strategy = extended(small_strategy(cell["strategy"]), model, schema)
    precision = choose_precision(settings.precision, CPU)
    embedding = Embedding(model, "2") if strategy.kind.embeds else None
    trainer = Trainer(TrainingSetup(model, Classification(), strategy, schema, settings, CPU, precision, embedding))
    losses = []
    for _ in range(12):
        columns = fake_columns(schema, range(12), label=[0, 1, 2])
        columns["feature.x"][:] = torch.eye(3)[torch.from_numpy(columns["label"])].numpy()
        new = trainer.examples(columns)
        old = [new] * len(strategy.samples(12))
        result = trainer.step(new, [type(new)(e.features, e.label_B, e.weight_B, torch.zeros(12, 3)) for e in old])
        assert result.finite
        losses.append(result.loss)
    assert losses[-1] < 0.7 * losses[0]
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("learner", "replay", "sentence"),
    [
        (
            {"compile": True, "strategy": "agem"},
            {},
            'learner.compile = true does not go with learner.strategy = "agem": compiled code',
        ),
        (
            {"compile": True, "activation_checkpointing": ["0"]},
            {},
            "learner.compile = true does not go with learner.activation_checkpointing = ['0']: modules that",
        ),
        (
            {"deterministic": True},
            {"sampling": "similar"},
            'replay.sampling = "similar" does not go with learner.deterministic = true: neighbours are found in a sepa',
        ),
        ({"deterministic": True, "compile": True}, {}, "learner.compile = true does not go with learner.deterministic"),
        ({"deterministic": True, "compile": "auto"}, {}, 'learner.compile = "auto" does not go with learner.determin'),
        (
            {"sync_every": 2, "comm_hook": "fp16"},
            {},
            'learner.comm_hook = "fp16" does not go with learner.sync_every = 2',
        ),
        (
            {"sync_every": 2, "sharding": "zero1"},
            {},
            'learner.sharding = "zero1" does not go with learner.sync_every = 2',
        ),
        (
            {"sync_every": 2, "precision": "fp16"},
            {},
            'learner.precision = "fp16" does not go with learner.sync_every =',
        ),
        (
            {"sharding": "fsdp", "strategy": "mir"},
            {},
            'learner.strategy = "mir" does not go with learner.sharding = "fsdp": it needs all weights',
        ),
        (
            {"sharding": "fsdp", "optimizer": {"name": "adafactor"}},
            {},
            'learner.optimizer = "adafactor" does not go with learner.sharding = "fsdp": it takes whole weights',
        ),
        (
            {"sharding": "fsdp", "compile": True},
            {},
            'learner.compile = true does not go with learner.sharding = "fsdp"',
        ),
        (
            {"sharding": "fsdp", "comm_hook": "fp16"},
            {},
            'learner.comm_hook = "fp16" does not go with learner.sharding = "fsdp"',
        ),
        (
            {"sharding": "fsdp", "precision": "fp16"},
            {},
            'learner.precision = "fp16" does not go with learner.sharding = "fsdp"',
        ),
        (
            {"sharding": "fsdp", "replay_ratio": "auto"},
            {},
            'learner.replay_ratio = "auto" does not go with learner.sharding = "fsdp"',
        ),
        (
            {"sharding": "fsdp"},
            {"sampling": "similar"},
            'replay.sampling = "similar" does not go with learner.sharding = "fsdp"',
        ),
        (
            {"sharding": "fsdp"},
            {"admission": "diverse"},
            'replay.admission = "diverse" does not go with learner.sharding = "fsdp"',
        ),
        ({"replicas": 2, "deterministic": True}, {}, "learner.replicas = 2 does not go with learner.deterministic"),
        ({"standby": True, "replicas": 2}, {}, "learner.standby = true does not go with learner.replicas = 2: a stan"),
        (
            {"compile": True},
            {"admission": "diverse"},
            'learner.compile = true does not go with replay.admission = "div',
        ),
    ],
)
def test_what_does_not_go_together_is_one_sentence(learner, replay, sentence):
    chosen = facts_of(learner=learner, replay=replay)
    ((key, said),) = conflicts(chosen)
    assert said.startswith(sentence)
    assert said.startswith(key)
    assert any(f"; {verb} " in said for verb in ("set", "take", "write"))


@pytest.mark.parametrize(
    ("adapter", "learner", "sentence"),
    [
        (
            {"base_precision": "nf4"},
            {"sharding": "fsdp"},
            (
                'model.adapter.base_precision = "nf4" does not go with learner.sharding = "fsdp": weights of 4 bits '
                'are packed bytes, which cannot be gathered in another precision; write "bf16"'
            ),
        ),
        (
            {},
            {"precision": "fp8"},
            (
                'learner.precision = "fp8" does not go with model.adapter.kind = "lora": an adapter wraps the linear '
                'layers, and its own matrices would be multiplied in 8 bits too; write "bf16"'
            ),
        ),
        ({"base_precision": "bf16"}, {"sharding": "fsdp"}, None),
        ({"base_precision": "nf4"}, {"sharding": "zero1", "replicas": 2}, None),
    ],
)
def test_adapters_go_with_what_keeps_their_layers(adapter, learner, sentence):
    model = ModelSettings.model_validate({"factory": "m:build", "adapter": adapter})
    chosen = facts_of(learner=learner, model=model)
    assert [said for _, said in conflicts(chosen)] == ([] if sentence is None else [sentence])


def test_compiled_code_has_no_layers_to_yield_between():
    share = DeviceSharingSettings.model_validate({"yield_at": "layer"})
    assert list(conflicts(facts_of(device_sharing=share))) == []
    chosen = facts_of(learner={"compile": True}, device_sharing=share)
    ((key, said),) = conflicts(chosen)
    assert key == "device_sharing.yield_at"
    assert said == (
        'device_sharing.yield_at = "layer" does not go with learner.compile = true: '
        'it runs across the borders of layers; write "micro-batch"'
    )


def test_a_percentage_under_mps_overrides_multiprocessors():
    for settings in ({"sms": 16}, {"mps_percentage": 50}):
        alone = DeviceSharingSettings.model_validate(settings)
        assert list(conflicts(facts_of(device_sharing=alone))) == []
    both = DeviceSharingSettings(sms=16, mps_percentage=50)
    ((key, said),) = conflicts(facts_of(device_sharing=both))
    assert key == "device_sharing.sms"
    assert said == (
        "device_sharing.sms = 16 does not go with device_sharing.mps_percentage = 50: "
        "a percentage under MPS overrides how many multiprocessors a green context has; take one out"
    )


def test_deterministic_batches_need_files_that_are_partitions():
    files = {"files": ["/x/*.parquet"]}
    identity = {"partition": "p", "offset": "o"}
    learner = LearnerSettings.model_validate({"deterministic": True})
    alone, both = (
        StreamSettings.model_validate({"topics": ["events"], "backfill": backfill})
        for backfill in (files, {**files, "identity": identity})
    )
    assert list(conflicts(facts_of(learner=learner, stream=alone))) == []
    assert list(conflicts(facts_of(stream=both))) == []
    ((key, said),) = conflicts(facts_of(learner=learner, stream=both))
    assert key == "learner.deterministic"
    assert said == (
        "learner.deterministic = true does not go with stream.backfill.identity = true: files may have one partition "
        "after the other, and deterministic batches take turns between partitions; set it to false"
    )


def test_each_rule_is_of_keys_that_there_are():
    known = set(facts_of())
    assert {key for rule in RULES for key in (rule.choice.key, rule.other.key)} <= known | {"torchrun --nnodes"}
    assert list(conflicts(facts_of())) == []


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("sharding", "fsdp", 'sharding = "fsdp"'),
        ("sync_every", 4, "sync_every = 4"),
        ("mesh", {"tensor": 2}, r"mesh\.tensor, pipeline or expert above 1"),
    ],
)
def test_a_device_that_makes_auto_fp16_is_refused_where_losses_would_be_scaled_differently(schema, key, value, named):
    settings = LearnerSettings.model_validate({"replicas": 2, key: value})
    half, strategy = Precision("fp16", torch.float16), STRATEGIES["er"]()
    bench = TrainingSetup(nn.Linear(3, 3), Classification(), strategy, schema, settings, CPU, half, output_shape=(3,))
    with pytest.raises(SettingsError, match=rf'learner.precision = "auto" is fp16 here.*{named}.*"fp32"'):
        build_trainer(bench, cast("Channel", object()), None)
