"""The ledger of device memory: bytes by purpose from settings."""

import subprocess
import sys

import pytest

from anabranch.learner.device.memory_ledger import CONTEXT_BYTES, ledger, serving_ledger
from anabranch.learner.settings.strategies import KINDS

PARAMETERS = 1_000_000


def bytes_a_parameter(**settings):
    found = ledger(PARAMETERS, **settings)  # type: ignore[arg-type]
    return (sum(found.values()) - found["replay"] - found["contexts"]) / PARAMETERS


def test_plain_replay_with_adamw_takes_24_bytes_a_parameter_at_a_checkpoint():
    assert bytes_a_parameter() == 24
    assert bytes_a_parameter(leads=False) == 16, "the other ranks score nothing"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"optimizer": "sgd"}, 16),
        ({"optimizer": "sgd", "optimizer_arguments": {"momentum": 0.9, "nesterov": True}}, 20),
        ({"optimizer": "adam", "optimizer_arguments": {"amsgrad": True}}, 28),
        ({"optimizer": "adafactor"}, 20),
        ({"optimizer": "my_code:Lion"}, 28),
        ({"strategy": KINDS["ewc"]}, 36),
        ({"strategy": KINDS["slda"]}, 12),
        ({"precision": "bf16"}, 26),
        ({"ranks": 4, "sharding": "zero1"}, 4 + 4 + 4 + 2 + 8),
        ({"ranks": 4, "sharding": "fsdp"}, (4 + 4 + 8) / 4 + 8),
        ({"ranks": 2, "comm_hook": "fp16"}, 24 + 4),
        ({"ranks": 2, "comm_hook": "topk"}, 24 + 4 + 4),
        ({"cloned": True}, 24 + 4 + 12),
        ({"challengers": 2}, 24 + 2 * 12 + 4),
    ],
)
def test_each_setting_adds_what_it_keeps(settings, expected):
    assert bytes_a_parameter(**settings) == pytest.approx(expected)


def test_the_tier_and_the_contexts_come_on_top():
    found = ledger(PARAMETERS, replay_bytes=7, processes=3)
    assert (found["replay"], found["contexts"]) == (7, 3 * CONTEXT_BYTES)


def test_serving_holds_three_versions_at_a_swap_and_two_more_with_a_shadow():
    found = serving_ledger(PARAMETERS, workers=2, shadow=True)
    versions = {"versions": 16 * PARAMETERS, "held_version": 8 * PARAMETERS, "shadow": 16 * PARAMETERS}
    assert found == {**versions, "base": 0, "contexts": 2 * CONTEXT_BYTES}


def test_frozen_weights_are_there_once_and_have_neither_gradients_nor_moments():
    assert ledger(PARAMETERS, base_bytes=100)["base"] == 100
    assert sum(ledger(PARAMETERS, base_bytes=100).values()) == sum(ledger(PARAMETERS).values()) + 100
    assert ledger(PARAMETERS, base_bytes=100, ranks=4, sharding="fsdp", leads=False)["base"] == 25
    assert ledger(PARAMETERS, base_bytes=100, ranks=4, sharding="fsdp")["base"] == 125, "the scorer has them whole"
    assert serving_ledger(PARAMETERS, workers=2, shadow=True, base_bytes=100)["base"] == 200


@pytest.mark.process
def test_it_imports_no_torch():
    code = "import sys, anabranch.learner.device.memory_ledger; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
