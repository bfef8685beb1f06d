"""Frozen layers in fewer bits: what they compute, in which dtype, and which bytes they store."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from anabranch.learner.errors import ModelError
from anabranch.learner.model.base_precision import Nf4Embedding, Nf4Linear, store_frozen
from anabranch.learner.state_dir.safetensors_file import digest_of, pieces_of

# Dettmers et al. 2023, appendix E.
NF4_LEVELS = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


class Everything(nn.Module):
    """A model with each kind of layer, all frozen but the last."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 64)
        self.conv = nn.Conv1d(64, 64, 3, padding=1)
        self.norm = nn.LayerNorm(64)
        self.body = nn.Linear(64, 32)
        self.odd = nn.Linear(32, 7)
        self.head = nn.Linear(7, 3)
        self.requires_grad_(False)
        self.head.requires_grad_()

    def forward(self, tokens):
        hidden = self.norm(self.conv(self.words(tokens).transpose(1, 2)).transpose(1, 2))
        return self.head(self.odd(functional.gelu(self.body(hidden.mean(dim=1)))))


@pytest.fixture
def model():
    torch.manual_seed(3)
    return Everything().eval()


TOKENS = torch.arange(12).reshape(3, 4)


def nearest_nf4(weight):
    """Return the plain reference: each block of 64 weights, scaled, at its nearest level."""
    blocks = functional.pad(weight.reshape(-1), (0, -weight.numel() % 64)).reshape(-1, 64)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    nearest = NF4_LEVELS[(blocks / scales).unsqueeze(-1).sub(NF4_LEVELS).abs().argmin(dim=-1)]
    return (nearest * scales).reshape(-1)[: weight.numel()].reshape(weight.shape)


class TestNf4:
    @pytest.mark.parametrize("shape", [(32, 64), (8, 300), (5, 66), (64, 64)])
    def test_weights_are_at_the_nearest_of_16_levels(self, shape):
        torch.manual_seed(0)
        layer = nn.Linear(shape[1], shape[0])
        torch.testing.assert_close(Nf4Linear(layer).weight, nearest_nf4(layer.weight.detach()), rtol=1e-6, atol=1e-7)

    def test_a_layer_multiplies_by_those_weights(self):
        torch.manual_seed(0)
        layer = Nf4Linear(nn.Linear(64, 8))
        x = torch.randn(2, 5, 64, requires_grad=True)
        expected = functional.linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(layer(x), expected)
        gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (layer(x), expected)]
        torch.testing.assert_close(*gradients)

    def test_an_embedding_returns_its_rows(self):
        torch.manual_seed(0)
        words = nn.Embedding(50, 128)
        stored = Nf4Embedding(words)
        tokens = torch.randint(0, 50, (3, 7))
        torch.testing.assert_close(stored(tokens), nearest_nf4(words.weight.detach())[tokens], rtol=1e-6, atol=1e-7)

    def test_the_number_of_threads_does_not_change_a_byte(self):
        torch.manual_seed(0)
        layer, threads, digests = nn.Linear(512, 512), torch.get_num_threads(), set()
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                digests.add(digest_of(pieces_of(Nf4Linear(layer).state_dict())))
        finally:
            torch.set_num_threads(threads)
        assert len(digests) == 1

    def test_weights_that_are_not_finite_are_refused(self):
        layer = nn.Linear(64, 2).requires_grad_(False)
        layer.weight[1, 3] = float("nan")
        with pytest.raises(ModelError, match='base_precision = "nf4": a frozen weight is not finite'):
            store_frozen(nn.Sequential(layer), "nf4")

    def test_a_packed_weight_takes_a_seventh_of_the_bytes(self):
        layer = nn.Linear(512, 512, bias=False)
        assert bytes_of(Nf4Linear(layer)) / bytes_of(layer) == (4 + 32 / 64) / 32


def bytes_of(module):
    return sum(value.numel() * value.element_size() for value in module.state_dict().values())


@pytest.mark.parametrize("precision", ["bf16", "nf4"])
class TestStored:
    def test_what_trains_and_what_normalizes_stays_float32(self, model, precision):
        store_frozen(model, precision)
        assert {value.dtype for value in [*model.head.parameters(), *model.norm.parameters()]} == {torch.float32}
        assert type(model.head) is nn.Linear

    def test_outputs_are_near_and_in_float32(self, model, precision):
        expected = model(TOKENS)
        store_frozen(model, precision)
        output = model(TOKENS)
        assert output.dtype is torch.float32
        distance = (output - expected).abs().max()
        assert 0 < distance < {"bf16": 0.005, "nf4": 0.2}[precision]

    def test_outputs_are_those_of_the_rounded_weights(self, model, precision):
        store_frozen(model, precision)
        plain = Everything().eval()
        for name in ("words", "conv", "body", "odd"):
            getattr(plain, name).weight.data = getattr(model, name).weight.detach().float()
            if name != "words":
                getattr(plain, name).bias = getattr(model, name).bias
        plain.norm, plain.head = model.norm, model.head
        torch.testing.assert_close(model(TOKENS), plain(TOKENS))

    def test_autocast_computes_in_its_dtype(self, model, precision):
        expected = model(TOKENS)
        store_frozen(model, precision)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(TOKENS)
        assert output.dtype is torch.bfloat16
        torch.testing.assert_close(output.float(), expected, rtol=0, atol=0.25)

    def test_only_what_trains_gets_a_gradient(self, model, precision):
        store_frozen(model, precision)
        model(TOKENS).sum().backward()
        assert {name for name, value in model.named_parameters() if value.grad is not None} == {
            "head.weight",
            "head.bias",
        }

    def test_a_copy_and_a_loaded_state_compute_the_same(self, model, precision):
        store_frozen(model, precision)
        other = Everything().eval()
        store_frozen(other, precision)
        assert not torch.equal(other(TOKENS), model(TOKENS))
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(TOKENS), model(TOKENS))
        assert torch.equal(copy.deepcopy(model)(TOKENS), model(TOKENS))

    def test_a_layer_with_a_hook_or_of_another_class_is_left_alone(self, precision):
        class Own(nn.Linear):
            pass

        layers = nn.Sequential(Own(64, 64), nn.Linear(64, 64)).requires_grad_(False)
        layers[1].register_forward_hook(lambda *_: None)
        before = list(layers)
        store_frozen(layers, precision)
        assert list(layers) == before

    def test_layers_that_have_one_weight_store_it_once(self, precision):
        model = nn.ModuleDict({"words": nn.Embedding(20, 64), "head": nn.Linear(64, 20), "other": nn.Linear(64, 20)})
        model["head"].weight = model["words"].weight
        model.requires_grad_(False)
        store_frozen(model, precision)
        weights = [name for name, _ in model.named_parameters() if "bias" not in name]
        assert {name.partition(".")[0] for name in weights} == {"words", "other"}
        assert torch.equal(model["head"].weight, model["words"].weight)
        assert not torch.equal(model["head"].bias, model["other"].bias)
        x = torch.randn(3, 64)
        expected = functional.linear(x, model["words"].weight.float(), model["head"].bias)
        torch.testing.assert_close(model["head"](x), expected)

    def test_two_names_of_one_layer_remain_one_layer(self, precision):
        layers = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
        layers.append(layers[0])
        store_frozen(layers, precision)
        assert layers[0] is layers[1]
        assert type(layers[0]) is not nn.Linear
