"""What ranks send to average their gradients: compressed, with error feedback, and counted."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn
from torch.distributed import HashStore
from torch.nn.parallel import DistributedDataParallel

from anabranch.learner.parallel.gradient_exchange import GradientExchange, _Int8, _TopK
from anabranch.learner.parallel.process_group import leave_group
from anabranch.learner.settings.learner import LearnerSettings
from tests import forkserver
from tests.support.waiting import PATIENCE_SECONDS

PROGRAM = Path(__file__).parent / "exchange_program.py"
FEEDBACK = ["topk", "int8"]
MICRO = {"steps": [[7, 6], [9, 4]], "times": 4, "width": 16}
"""Steps of several micro-batches, in double precision."""


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    leave_group()


class Pair(nn.Module):
    """Two vectors; the second is used where it is asked to be."""

    def __init__(self, n=40):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(n)), nn.Parameter(torch.zeros(n))

    def forward(self, first_N, second_N=None):
        total = (first_N * self.first).sum()
        return total if second_N is None else total + (second_N * self.second).sum()


class Rank:
    """A group of one that exchanges gradients of a `Pair`; a factor is the gradient of what it multiplies."""

    def __init__(self, name, *, search=False, fraction=0.1, n=40):
        options = {"topk_fraction": fraction} if name == "topk" else {}
        settings = LearnerSettings.model_validate({"comm_hook": name, **options})
        self.model = Pair(n)
        self.exchange = GradientExchange(settings, search=search)
        self.trained = DistributedDataParallel(self.model, gradient_as_bucket_view=True, find_unused_parameters=search)
        self.exchange.register(self.trained)

    def gradients(self, first_N, second_N=None):
        """Return the averaged gradients `[2, N]`; zeros of a parameter without one."""
        self.model.zero_grad()
        self.trained(first_N, second_N).backward()
        given = [parameter.grad for parameter in (self.model.first, self.model.second)]
        return torch.stack([torch.zeros_like(first_N) if each is None else each.clone() for each in given])


@pytest.mark.parametrize("name", FEEDBACK)
def test_what_a_rank_leaves_out_is_sent_later(group_of_one, name):
    """After the first pass, in which torch orders its buckets."""
    rank, torch_generator = Rank(name), torch.Generator().manual_seed(0)
    rank.gradients(torch.zeros(40), torch.zeros(40))
    true, sent = torch.zeros(2, 40), torch.zeros(2, 40)
    for _ in range(3):
        factors = torch.randn(2, 40, generator=torch_generator)
        sent += rank.gradients(*factors)
        true += factors
    assert not torch.allclose(sent, true, atol=1e-4)
    for _ in range(40):
        sent += rank.gradients(torch.zeros(40), torch.zeros(40))
    assert torch.allclose(sent, true, atol=1e-5)


def test_top_k_sends_the_numbers_of_the_largest_magnitude(group_of_one):
    rank = Rank("topk")
    rank.gradients(torch.zeros(40), torch.zeros(40))
    factors = torch.arange(1.0, 81).view(2, 40) * torch.tensor([-1.0, 1.0]).repeat(40).view(2, 40)
    sent = rank.gradients(*factors)
    assert torch.equal(sent, torch.where(factors.abs() > 72, factors, 0))


def test_8_bits_are_within_a_254th_of_the_largest_magnitude(group_of_one):
    rank = Rank("int8", n=1000)
    rank.gradients(torch.zeros(1000), torch.zeros(1000))
    factors = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    factors[0, :500] *= 1e-30
    sent = rank.gradients(*factors)
    assert (sent - factors).abs().max() <= 2 * factors.abs().max() / 254 * 1.001  # rounded twice


@pytest.mark.parametrize("name", [*FEEDBACK, "powersgd"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_reaches_all_and_leaves_nothing_after_a_reset(group_of_one, name, value):
    rank, fresh = Rank(name), Rank(name)
    good = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    bad = good.clone()
    bad[1, 7] = value
    for each in (rank, fresh):
        each.gradients(torch.zeros(40), torch.zeros(40))
    assert not rank.gradients(*bad).isfinite().all()
    rank.exchange.reset()
    for _ in range(3):
        assert torch.equal(rank.gradients(*good), fresh.gradients(*good))


@pytest.mark.parametrize("name", FEEDBACK)
def test_a_parameter_without_a_gradient_keeps_what_was_not_sent(group_of_one, name):
    """`DistributedDataParallel` discards what is sent for it."""
    rank = Rank(name, search=True, fraction=0.5)
    second = torch.arange(1.0, 41)
    sent = rank.gradients(torch.full((40,), 1000.0), second)
    for _ in range(5):
        sent += rank.gradients(torch.zeros(40))
    for _ in range(5):
        sent += rank.gradients(torch.zeros(40), torch.full((40,), 1e-6))
    assert torch.allclose(sent[1], second, atol=1e-3)


def test_memory_is_one_number_for_each_of_the_gradient(group_of_one):
    for name, most in (("topk", 80), ("int8", 80 + 1024)):
        rank = Rank(name)
        for _ in range(3):
            rank.gradients(torch.ones(40), torch.ones(40))
        feedback: Any = rank.exchange._feedback
        held = [each.numel() for _, each in feedback._remainders.values()]
        held += [each.numel() for each in getattr(feedback._compressor, "_remainders", {}).values()]
        assert sum(held) <= most


@pytest.mark.parametrize(("ranks", "topk", "int8"), [(1, 0, 0), (2, 80, 2 * 1028), (4, 240, 6 * 1028)])
def test_bytes_are_those_of_the_algorithm(ranks, topk, int8):
    """Of 1000 numbers: 10 numbers and indices to each rank; a chunk of 1024 bytes and a scale to each, twice."""
    value_N = torch.zeros(1000)
    assert (_TopK(ranks, 0.01).sent_bytes(value_N), _Int8(ranks).sent_bytes(value_N)) == (topk, int8)


def test_a_single_process_and_sharded_weights_count_nothing(play):
    scenario = {"steps": [[8, 8]], "times": 2, "counts_bytes": True}
    (alone,) = play(1, [scenario])
    (replicas,) = play(2, [scenario | {"settings": {"replicas": 2}}])
    assert alone["sent_bytes"] == -1
    assert replicas["sent_bytes"] > 2 * 59 * 8  # two passes of 59 gradients in double precision


@pytest.mark.parametrize("name", FEEDBACK)
def test_a_step_in_micro_batches_sends_what_one_pass_does(play, name):
    whole, parts = (
        MICRO | {"settings": {"replicas": 2, "comm_hook": name, "micro_batch_size": size}, "counts_bytes": True}
        for size in (None, 4)
    )
    one, several = play(2, [whole, parts])
    assert one["sent_bytes"] == several["sent_bytes"]
    for key in (key for key in one if key.startswith("model.")):
        assert torch.allclose(one[key], several[key], rtol=0, atol=1e-9), key


@pytest.mark.parametrize("name", FEEDBACK)
def test_a_restart_begins_without_what_was_left_out(play, tmp_path, name):
    """Twice with the same weights."""
    scenario = MICRO | {"settings": {"replicas": 2, "comm_hook": name}}
    (without,) = play(2, [scenario | {"write_at": 5, "write_to": str(tmp_path)}])
    first, again = play(2, [scenario | {"go_on_from": str(tmp_path)}] * 2)
    assert torch.equal(first["model.0.weight"], again["model.0.weight"])
    assert not torch.equal(first["model.0.weight"], without["model.0.weight"])


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not count the bytes of a connection")
def test_counted_bytes_are_those_on_the_wire(tmp_path):
    """Within the headers of messages, with three ranks and several buckets; bytes that TCP sends again count once."""
    ranks = [forkserver.start([str(PROGRAM), str(rank), "3", str(tmp_path)]) for rank in range(3)]
    try:
        assert [rank.wait(PATIENCE_SECONDS) for rank in ranks] == [0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert measured.keys() == {"none", "fp16", "powersgd", "int8", "topk"}
    for name, (counted, on_wire, full) in measured.items():
        assert counted <= on_wire <= counted + 25_000, name
        assert counted <= {"none": 1, "fp16": 0.5, "powersgd": 0.03, "int8": 0.253, "topk": 0.0301}[name] * full, name


def test_a_fraction_without_top_k_is_refused():
    with pytest.raises(ValidationError, match=r'topk_fraction = 0\.1 needs comm_hook = "topk", but it is "int8"; take'):
        LearnerSettings.model_validate({"comm_hook": "int8", "topk_fraction": 0.1})
    for fraction in (0, 1.01):
        with pytest.raises(ValidationError):
            LearnerSettings.model_validate({"comm_hook": "topk", "topk_fraction": fraction})
