"""Models of transformers from a local folder: what they compute, and that no folder makes them run or fetch code."""

import json
import pickle
import struct

import pytest
import torch
from torch import nn
from torch.nn import functional

from anabranch.learner.errors import ModelError
from anabranch.learner.model.embedding import Embedding
from anabranch.learner.model.factory import build_on_device
from anabranch.learner.settings.model import AdapterSettings, ModelSettings
from tests.support.trained_set import split_state

CLASSIFIER, EMBEDDER = "anabranch.pretrained:sequence_classifier", "anabranch.pretrained:embedder"
TOKENS_CLASSIFIER = "anabranch.pretrained:token_classifier"
TOKENS = torch.tensor([[5, 6, 7, 0, 0, 0], [8, 9, 3, 4, 0, 0], [0, 0, 0, 0, 0, 0]])
BERT = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def bert():
    """A small BERT of transformers with a language model's head, to compare with."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**BERT)).eval()


@pytest.fixture
def folder(bert, tmp_path):
    """The config's folder, with that BERT in `model`."""
    bert.save_pretrained(tmp_path / "model")
    return tmp_path


def build(folder, factory=CLASSIFIER, adapter=None, **args):
    args = {"path": "model", **({} if factory == EMBEDDER else {"classes": 3}), **args}
    torch.manual_seed(1)
    settings = ModelSettings(factory=factory, args=args, adapter=adapter)
    return build_on_device(settings, folder, torch.device("cpu")).eval()


def hidden(bert, tokens, mask):
    with torch.no_grad():
        return bert.bert(input_ids=tokens, attention_mask=mask).last_hidden_state


class TestOutput:
    @pytest.mark.slow
    def test_a_text_has_the_mean_of_its_tokens(self, bert, folder):
        model = build(folder, trim=False)
        mask = (TOKENS != 0).long()
        mask[:, 0] = 1
        expected = (hidden(bert, TOKENS, mask) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        with torch.no_grad():
            torch.testing.assert_close(model(TOKENS), model.classifier(expected))

    @pytest.mark.parametrize(("pooling", "positions"), [("first", [0, 0, 0]), ("last", [2, 3, 0])])
    def test_a_text_has_its_first_or_last_token(self, bert, folder, pooling, positions):
        model = build(folder, EMBEDDER, pooling=pooling)
        mask = (TOKENS != 0).long()
        mask[:, 0] = 1
        expected = hidden(bert, TOKENS, mask)[torch.arange(3), torch.tensor(positions)]
        with torch.no_grad():
            torch.testing.assert_close(model(TOKENS), functional.normalize(expected, dim=1))

    @pytest.mark.parametrize("pooling", ["mean", "first", "last"])
    def test_padding_changes_nothing_and_is_left_out(self, folder, pooling):
        model, lengths = build(folder, pooling=pooling), []
        model.encoder.model.register_forward_pre_hook(
            lambda _module, _args, named: lengths.append(named["input_ids"].shape[1]), with_kwargs=True
        )
        with torch.no_grad():
            short = model(TOKENS)
            long = model(functional.pad(TOKENS, (0, 6)))
            model.encoder.trim = False
            untrimmed = model(functional.pad(TOKENS, (0, 6)))
        assert lengths == [4, 4, 12]
        assert torch.equal(short, long)
        torch.testing.assert_close(untrimmed, short)

    def test_a_text_does_not_depend_on_the_others_of_its_batch(self, folder):
        model = build(folder)
        with torch.no_grad():
            alone = torch.cat([model(TOKENS[i : i + 1]) for i in range(3)])
            torch.testing.assert_close(model(TOKENS), alone)

    def test_an_empty_text_has_a_finite_output(self, folder):
        assert build(folder)(torch.zeros(2, 5, dtype=torch.int64)).isfinite().all()

    def test_the_embedding_is_the_output_of_pooling(self, folder):
        model = build(folder)
        embedding = Embedding(model, "pooling")
        embedding.capture_next()
        with torch.no_grad():
            logits = model(TOKENS)
            torch.testing.assert_close(model.classifier(embedding.captured()), logits)

    def test_a_word_has_the_logits_of_its_first_token_and_others_zeros(self, bert, folder):
        model = build(folder, TOKENS_CLASSIFIER)
        first = torch.tensor([[1, 3, 0, 0, 0, 0], [2, 0, 4, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
        words = torch.stack([TOKENS, first], dim=1).int()
        mask = (TOKENS != 0).long()
        mask[:, 0] = 1
        with torch.no_grad():
            found = model(words)
            expected = model.classifier(hidden(bert, TOKENS, mask))
        assert found.shape == (3, 6, 3)
        torch.testing.assert_close(found[0, :2], expected[0, [0, 2]])
        torch.testing.assert_close(found[1, [0, 2]], expected[1, [1, 3]])
        found[0, :2] = found[1, [0, 2]] = 0
        assert not found.any()

    @pytest.mark.parametrize("words", [TOKENS, torch.zeros(2, 3, 4, dtype=torch.int64)])
    def test_a_feature_without_words_is_refused(self, folder, words):
        with pytest.raises(ModelError, match=r"integers \[B, 2, length\], but the feature is .*and words = true"):
            build(folder, TOKENS_CLASSIFIER)(words)

    def test_embeddings_have_unit_length(self, folder):
        with torch.no_grad():
            embeddings = build(folder, EMBEDDER)(TOKENS)
        assert embeddings.shape == (3, 32)
        torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(3))

    def test_a_compiled_or_recorded_pass_is_not_trimmed(self, folder, monkeypatch):
        model, lengths = build(folder), []
        model.encoder.model.register_forward_pre_hook(
            lambda _module, _args, named: lengths.append(named["input_ids"].shape[1]), with_kwargs=True
        )
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        model(TOKENS)
        assert lengths == [6]

    @pytest.mark.parametrize("tokens", [torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)])
    def test_features_that_are_no_token_ids_are_refused(self, folder, tokens):
        with pytest.raises(
            ModelError, match=r"takes token ids, integers \[B, length\], but the feature is torch\..*enco"
        ):
            build(folder)(tokens)

    def test_texts_that_are_too_long_for_the_model_are_refused(self, folder):
        model = build(folder)
        model(torch.zeros(2, 16, dtype=torch.int64))
        with pytest.raises(ModelError, match=r"texts of 17 tokens, but the model has positions for 16; lower the len"):
            model(torch.zeros(2, 17, dtype=torch.int64))  # as the check at start does


class TestTraining:
    def test_all_of_it_trains_by_default(self, folder):
        assert split_state(build(folder))[1] == []

    def test_a_frozen_encoder_trains_the_classifier_alone(self, folder):
        assert split_state(build(folder, frozen=True))[0] == ["classifier.weight", "classifier.bias"]

    @pytest.mark.slow
    @pytest.mark.parametrize("precision", ["fp32", "bf16", "nf4"])
    def test_adapters_learn(self, folder, precision):
        adapter = AdapterSettings(train=("classifier",), targets=("query", "value"), rank=4, base_precision=precision)
        model = build(folder, adapter=adapter).train()
        trained, base = split_state(model)
        assert len(trained) == 2 * 2 * 2 + 2
        assert len(base) > 30
        optimizer = torch.optim.Adam([value for value in model.parameters() if value.requires_grad], 0.02)
        losses = []
        for _ in range(30):
            loss = functional.cross_entropy(model(TOKENS.int()), torch.tensor([0, 2, 1]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0] / 2
        assert {value.dtype for name, value in model.state_dict().items() if name in trained} == {torch.float32}


def rewrite_config(folder, **keys):
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def rewrite_weights(folder, change):
    from safetensors.torch import load_file, save_file

    path = folder / "model" / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


QUERY = "bert.encoder.layer.0.attention.self.query.weight"


class TestRefused:
    """A folder that is not what it should be is one sentence, and nothing of it is run."""

    def refused(self, folder, sentence):
        with pytest.raises(ModelError, match=sentence) as caught:
            build(folder)
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith('model.args.path = "model": ')

    def test_a_pickle_is_not_opened(self, folder):
        content = pickle.dumps(Evil(folder / "was_run"))
        (folder / "model" / "model.safetensors").write_bytes(content)
        self.refused(folder, "model.safetensors is not safetensors: its header has [0-9]+ bytes")
        (folder / "model" / "model.safetensors").unlink()
        (folder / "model" / "pytorch_model.bin").write_bytes(content)
        self.refused(folder, "there is no .*model.safetensors; save the model with save_pretrained, in one file of")
        assert not (folder / "was_run").exists()

    def test_a_header_of_two_to_the_63_bytes_is_not_read(self, folder):
        (folder / "model" / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}" * 50)
        self.refused(folder, "is not safetensors: its header has 9223372036854775808 bytes")

    def test_tensors_outside_the_file_are_refused(self, folder):
        header = json.dumps({QUERY: {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
        (folder / "model" / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)
        self.refused(folder, f"is not safetensors: the entry of '{QUERY}' is invalid")

    def test_a_link_is_not_followed(self, folder):
        weights = folder / "model" / "model.safetensors"
        weights.rename(folder / "elsewhere")
        weights.symlink_to("../elsewhere")
        self.refused(folder, "model.safetensors is not a regular file")

    def test_code_of_the_folder_is_not_run(self, folder):
        (folder / "model" / "evil.py").write_text(f"open({str(folder / 'was_run')!r}, 'w')\nclass Evil: pass\n")
        rewrite_config(folder, auto_map={"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"})
        self.refused(folder, "auto_map in config.json names code of the folder, which is never run")
        assert not (folder / "was_run").exists()

    def test_other_files_of_the_folder_are_not_read(self, folder):
        (folder / "model" / "adapter_config.json").write_text('{"base_model_name_or_path": "/etc/passwd"}')
        (folder / "model" / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../../x"}}')
        (folder / "model" / "tokenizer_config.json").write_text("{")
        assert isinstance(build(folder), nn.Module)

    def test_the_folder_selects_no_kernels_and_no_precision(self, folder):
        rewrite_config(folder, _attn_implementation="evil/kernels", attn_implementation="evil/kernels", dtype="float16")
        model = build(folder)
        assert model.encoder.model.config._attn_implementation == "sdpa"
        assert {value.dtype for value in model.parameters()} == {torch.float32}

    @pytest.mark.parametrize(
        ("keys", "sentence"),
        [
            ({"model_type": "evil"}, "model_type in config.json is 'evil', which transformers does not have"),
            ({"model_type": None}, "model_type in config.json is None, which"),
            ({"model_type": "vit"}, "ViTModel is no encoder of token ids; take a model such as BERT or MiniLM"),
            ({"quantization_config": {"load_in_4bit": True}}, "quantization_config in config.json says that weights"),
            ({"hidden_size": "many"}, "transformers refuses config.json: .*hidden_size"),
            ({"hidden_act": "evil"}, "transformers cannot build BertModel from config.json: .*evil"),
            ({"pad_token_id": None}, "config.json has no pad_token_id; add the id that the tokenizer pads with"),
            (
                {"num_hidden_layers": 3},
                r"model.safetensors lacks encoder.layer.2.*, \.\.\., which config.json asks for",
            ),
            ({"num_hidden_layers": 1}, "model.safetensors has bert.encoder.layer.1.*, which the model of config.json"),
            (
                {"vocab_size": 41},
                r"word_embeddings.weight .* has the shape \[40, 32\], but config.json makes it \[41, ",
            ),
        ],
    )
    def test_a_config_that_does_not_fit(self, folder, keys, sentence):
        rewrite_config(folder, **keys)
        self.refused(folder, sentence)

    @pytest.mark.parametrize("content", ["", "[]", "{", "\0"])
    def test_a_config_that_is_damaged(self, folder, content):
        (folder / "model" / "config.json").write_text(content)
        self.refused(folder, "config.json (cannot be read|is not a JSON object)")

    def test_a_config_that_is_missing(self, folder):
        (folder / "model" / "config.json").unlink()
        self.refused(folder, "there is no .*config.json; save the model there with save_pretrained")

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            (lambda tensors: tensors.pop(QUERY), "lacks encoder.layer.0.attention.self.query.weight, which config"),
            (lambda tensors: tensors.update(evil=torch.zeros(2)), "has evil, which the model of config.json does not"),
            (
                lambda tensors: tensors.update({QUERY: torch.zeros(32, 31)}),
                r"query.weight in model.safetensors has the shape \[32, 31\], but config.json makes it \[32, 32\]",
            ),
        ],
    )
    def test_weights_that_do_not_fit(self, folder, change, sentence):
        rewrite_weights(folder, change)
        self.refused(folder, sentence)

    @pytest.mark.parametrize(
        ("args", "sentence"),
        [
            ({"classes": 1}, "model.args.classes = 1: write the number of classes, 2 or more"),
            ({"classes": "3"}, "model.args.classes = '3': write the number"),
            ({"pooling": "max"}, "model.args.pooling = 'max': write one of mean, first, last"),
        ],
    )
    def test_an_argument_that_is_invalid(self, folder, args, sentence):
        with pytest.raises(ModelError, match=sentence):
            build(folder, **args)

    def test_the_head_of_another_task_is_left_out(self, folder):
        names = build(folder).state_dict()
        assert not any("cls" in name or "pooler" in name for name in names)
