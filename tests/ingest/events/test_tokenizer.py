"""The tokenizer of a text feature: its ids, files that are refused, and texts that are hostile."""

import json
import os
import pickle
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.errors import SettingsError
from anabranch.ingest.events import tokenizer as tokenizer_module
from anabranch.ingest.events.encoders import encoder_of
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.events.tokenizer import CHARACTERS_PER_ID, TokenizerEncoder, UnencodableError
from anabranch.ingest.settings.features import TokenizerFile
from anabranch.ingest.settings.stream import SchemaSettings
from tests.support.tokenizer import WORDS, tokenizer_json, write_tokenizer

PAD, UNKNOWN, CLS, SEP = range(4)
GOOD, BAD, FILM = 4, 5, 6


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("model") / "tokenizer.json")


def encoder(path, length=6):
    made = encoder_of(TokenizerFile(tokenizer=path, length=length), "schema.features.text.encode")
    assert isinstance(made, TokenizerEncoder)
    return made


def schema_of(path, length=6, **feature):
    text = {"dtype": "string", "encode": {"tokenizer": str(path), "length": length}} | feature
    return Schema(SchemaSettings.model_validate({"features": {"text": text}, "label": {"name": "y", "classes": 2}}))


def test_texts_become_ids_of_one_length(path):
    ids = encoder(path).encode(["A good film", "", "good bad good bad good bad", "unseen"])
    assert (ids.dtype, ids.shape) == (np.int32, (4, 6))
    assert ids.tolist() == [
        [CLS, 11, GOOD, FILM, SEP, PAD],
        [CLS, SEP, PAD, PAD, PAD, PAD],
        [CLS, GOOD, BAD, GOOD, BAD, SEP],
        [CLS, UNKNOWN, SEP, PAD, PAD, PAD],
    ]
    assert encoder(path).encode([]).shape == (0, 6)


def test_words_have_the_index_of_their_first_id(path, tmp_path):
    """What spaces separate is a word, also where the tokenizer has two of it, or none."""
    nothing = {"type": "Replace", "pattern": {"String": "#"}, "content": ""}
    lower = {"normalizer": {"type": "Sequence", "normalizers": [nothing, {"type": "Lowercase"}]}}
    made = encoder_of(
        TokenizerFile(tokenizer=write_tokenizer(tmp_path / "tokenizer.json", **lower), length=6, words=True), "text"
    )
    assert isinstance(made, TokenizerEncoder)
    found = made.encode(["good,film  bad", "", "good # film", "a a a a a a a"])
    assert (found.dtype, found.shape) == (np.int32, (4, 2, 6))
    assert found[0].tolist() == [[CLS, GOOD, UNKNOWN, FILM, BAD, SEP], [2, 5, 0, 0, 0, 0]]
    assert found[1].tolist() == [[CLS, SEP, PAD, PAD, PAD, PAD], [0] * 6]
    assert found[2].tolist() == [[CLS, GOOD, FILM, SEP, PAD, PAD], [2, 0, 3, 0, 0, 0]]
    assert found[3].tolist() == [[CLS, 11, 11, 11, 11, SEP], [2, 3, 4, 5, 0, 0]]
    assert made.identity == {**encoder(made.path).identity, "words": True}


def test_a_tokenizer_to_which_a_word_is_another_by_itself_is_refused(tmp_path):
    alphabet = [*map(chr, range(ord("a"), ord("z") + 1)), "\u0120"]
    spaces = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    file = write_tokenizer(
        tmp_path / "tokenizer.json", [*alphabet, "\u0120text", "text", "\u0120a"], pre_tokenizer=spaces, normalizer=None
    )
    with pytest.raises(SettingsError, match="a word has other ids by itself than in a text; save it with add_prefix_"):
        TokenizerEncoder(TokenizerFile(tokenizer=file, length=6, words=True), "text")
    TokenizerEncoder(TokenizerFile(tokenizer=file, length=6), "text")


@given(texts=st.lists(st.text()))
def test_the_ids_of_a_text_do_not_depend_on_its_neighbours(path, texts):
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    made = encoder(path)
    ids = made.encode(texts)
    assert ids.shape == (len(texts), 6)
    assert ((ids >= 0) & (ids < made.size)).all()
    assert ids.tolist() == [made.encode([text])[0].tolist() for text in texts]


def test_many_texts_are_encoded_as_few(path):
    texts = [" ".join(WORDS[: n % 9]) for n in range(1000)]
    made = encoder(path)
    assert made.encode(texts).tolist() == [made.encode([text])[0].tolist() for text in texts]


def test_truncation_and_padding_of_the_file_do_not_count(path, tmp_path):
    padding = {
        "strategy": {"Fixed": 3}, "direction": "Left", "pad_to_multiple_of": None,
        "pad_id": 7, "pad_type_id": 0, "pad_token": "very",
    }  # fmt: skip
    truncation = {"direction": "Left", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    other = write_tokenizer(tmp_path / "tokenizer.json", padding=padding, truncation=truncation)
    ids = encoder(other).encode(["good bad film good bad film", "bad"])
    assert ids.tolist() == [[CLS, GOOD, BAD, FILM, GOOD, SEP], [CLS, BAD, SEP, 7, 7, 7]]


def test_the_identity_is_the_content_of_the_file_wherever_it_is(path, tmp_path):
    copy = tmp_path / "copy.json"
    copy.write_bytes(path.read_bytes())
    other = write_tokenizer(tmp_path / "other.json", WORDS[::-1])
    assert schema_of(path).digest == schema_of(copy).digest
    assert len({schema_of(path).digest, schema_of(other).digest, schema_of(path, 7).digest}) == 3
    assert schema_of(copy).encoders == {"text": encoder(path).identity}
    assert set(encoder(path).identity) == {"tokenizer", "length"}
    assert len(encoder(path).identity["tokenizer"]) == 64


def test_a_link_to_the_file_is_followed(path, tmp_path):
    (tmp_path / "tokenizer.json").symlink_to(path)
    assert encoder(tmp_path / "tokenizer.json").identity == encoder(path).identity


def test_the_column_has_the_ids_after_the_shape_of_the_feature(path):
    payload = schema_of(path, shape=[2]).payload()
    assert payload["feature.text"] == (np.dtype(np.int32), (2, 6))


def test_the_example_has_the_largest_id_at_each_position(path):
    (feature,) = schema_of(path, shape=[2]).features
    assert feature.example(3).tolist() == [[[12] * 6] * 2] * 3


def test_each_id_of_the_example_begins_a_word_and_padding_begins_none(path):
    (feature,) = schema_of(path, encode={"tokenizer": str(path), "length": 6, "words": True}).features
    assert feature.example(2).tolist() == [[[12] * 6, [1, 2, 3, 4, 5, 6]]] * 2
    assert feature.example(1, short=True)[0, 1].tolist() == [1, 0, 0, 0, 0, 0]


def test_the_example_has_no_padding_where_that_has_the_largest_id(tmp_path):
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_type_id": 0}
    path = write_tokenizer(tmp_path / "tokenizer.json", padding=padding | {"pad_id": 12, "pad_token": "the"})
    (feature,) = schema_of(path).features
    assert feature.example(1).tolist() == [[11] * 6]


@pytest.mark.parametrize(
    ("shape", "default"), [([], "good film"), ([2], "good film"), ([2], ["good film", "good film"])]
)
def test_a_default_is_encoded(path, shape, default):
    (feature,) = schema_of(path, shape=shape, default=default).features
    assert feature.default is not None
    assert feature.default.shape == (*shape, 6)
    assert feature.default.reshape(-1, 6)[-1].tolist() == [CLS, GOOD, FILM, SEP, PAD, PAD]


def test_it_uses_no_threads_which_a_forked_process_would_lack(path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    encoder(path)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


class TestHostileFiles:
    def refused(self, path, length=6):
        with pytest.raises(SettingsError) as caught:
            encoder(path, length)
        sentence = str(caught.value)
        assert sentence.startswith(f'schema.features.text.encode.tokenizer = "{path}"')
        assert "\n" not in sentence
        return sentence

    @pytest.mark.parametrize(
        "content",
        [
            pytest.param(b"", id="empty"),
            pytest.param(b"{", id="torn"),
            pytest.param(b"\xff\xfe{}", id="not UTF-8"),
            pytest.param(b'["a"]', id="another document"),
            pytest.param(b"{}", id="no model"),
            pytest.param(b"[" * 100_000, id="deep"),
            pytest.param(pickle.dumps({"model": os.getcwd}), id="pickle"),
            pytest.param(json.dumps(tokenizer_json(pre_tokenizer={"type": "Custom"})).encode(), id="code"),
            pytest.param(json.dumps(tokenizer_json(model={"type": "WordLevel"})).encode(), id="no vocabulary"),
        ],
    )
    def test_a_file_that_is_no_tokenizer_is_refused(self, tmp_path, content):
        (tmp_path / "tokenizer.json").write_bytes(content)
        assert "it is not a tokenizer.json" in self.refused(tmp_path / "tokenizer.json")

    def test_code_in_the_folder_of_the_model_is_not_read(self, tmp_path):
        path = write_tokenizer(tmp_path / "tokenizer.json")
        (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}')
        (tmp_path / "evil.py").write_text("raise SystemExit(9)")
        assert encoder(path).encode(["good"]).tolist() == [[CLS, GOOD, SEP, PAD, PAD, PAD]]
        assert "evil" not in sys.modules

    def test_a_missing_file_and_a_folder_are_refused(self, tmp_path):
        assert "cannot be read: No such file" in self.refused(tmp_path / "tokenizer.json")
        assert "is not a regular file" in self.refused(tmp_path)

    def test_a_huge_file_is_refused_before_it_is_read(self, tmp_path):
        path = tmp_path / "tokenizer.json"
        with path.open("wb") as file:
            file.truncate(2**40)
        assert "has 1099511627776 bytes, more than 67108864" in self.refused(path)

    def test_a_file_without_a_padding_token_is_refused(self, tmp_path):
        model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2}, "unk_token": "[UNK]"}
        sentence = self.refused(write_tokenizer(tmp_path / "tokenizer.json", model=model))
        assert "has no padding token; load it with tokenizers.Tokenizer.from_file" in sentence

    @pytest.mark.parametrize("largest", [2**31, 2**32 - 1])
    def test_ids_beyond_32_bits_are_refused(self, tmp_path, largest):
        vocab = tokenizer_json()["model"]["vocab"] | {"huge": largest}
        model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
        assert f"its largest id {largest}" in self.refused(write_tokenizer(tmp_path / "tokenizer.json", model=model))

    def test_a_padding_id_that_is_no_id_is_refused(self, tmp_path):
        padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None}
        padding |= {"pad_id": 99, "pad_type_id": 0, "pad_token": "[PAD]"}
        assert "its padding id is 99, and its largest id 12" in self.refused(
            write_tokenizer(tmp_path / "tokenizer.json", padding=padding)
        )

    def test_a_tokenizer_that_fails_on_unknown_words_is_refused(self, tmp_path):
        model = tokenizer_json()["model"] | {"unk_token": "<no such token>"}
        sentence = self.refused(write_tokenizer(tmp_path / "tokenizer.json", model=model))
        assert "it cannot be used with length = 6" in sentence

    def test_a_length_without_room_for_a_word_is_refused(self, path):
        assert "it cannot be used with length = 1" in self.refused(path, 1)

    def test_the_extra_is_named_where_the_package_is_missing(self, path, monkeypatch):
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        assert "needs tokenizers: pip install 'anabranch[hf]'" in self.refused(path)


class TestHostileTexts:
    def test_a_text_of_ten_million_characters_costs_no_more_than_its_first_ones(self, path):
        made = encoder(path, 64)
        begin = time.process_time()
        ids = made.encode(["very good film " * 700_000])
        assert time.process_time() - begin < 0.5
        assert ids.tolist() == made.encode(["very good film " * 700])[0:1].tolist()

    def test_characters_beyond_the_bound_are_not_read(self, path):
        blank = " " * 6 * CHARACTERS_PER_ID
        assert encoder(path).encode([blank[:-4] + "good", blank + "good"]).tolist() == [
            [CLS, GOOD, SEP, PAD, PAD, PAD],
            [CLS, SEP, PAD, PAD, PAD, PAD],
        ]

    @pytest.mark.parametrize("text", ["\0", "a\0b", "\u202e", "\N{PILE OF POO}" * 50, "e\u0301" * 999, "\ufffd\uffff"])
    def test_odd_characters_are_encoded(self, path, text):
        assert encoder(path).encode([text, "good"])[1].tolist() == [CLS, GOOD, SEP, PAD, PAD, PAD]

    def test_batches_keep_memory_bounded(self, path, monkeypatch):
        made, sizes = encoder(path), []

        class Counting:
            def encode_batch_fast(self, texts):
                sizes.append(len(texts))
                return inner.encode_batch_fast(texts)

        inner = made._tokenizer
        monkeypatch.setattr(made, "_tokenizer", Counting())
        made.encode(["good"] * 1000)
        assert max(sizes) <= tokenizer_module._BATCH
        assert sum(sizes) == 1000


def test_a_text_that_makes_the_package_panic_is_refused_and_the_next_one_is_encoded(tmp_path):
    backtracks = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    made = encoder(write_tokenizer(tmp_path / "tokenizer.json", pre_tokenizer=backtracks))
    with pytest.raises(UnencodableError, match=r"the tokenizer cannot encode a text: .*retry-limit"):
        made.encode(["good", "a" * 40 + "!"])
    assert made.encode(["good"]).tolist() == [[CLS, GOOD, SEP, PAD, PAD, PAD]]
    with pytest.raises(SettingsError, match=r"schema.features.text.default .* the tokenizer cannot encode a text"):
        schema_of(made.path, default="a" * 40 + "!")
