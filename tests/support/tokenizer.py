"""Small `tokenizer.json` files, written without the package."""

import json

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
"""Ids 0 to 3; the words come after them."""
WORDS = ("good", "bad", "film", "very", "plot", "dull", "fun", "a", "the")


def tokenizer_json(words=WORDS, **changes):
    """Return the document of a tokenizer of whole words in lower case, with `[CLS]` before and `[SEP]` after them."""
    ids = {word: index for index, word in enumerate((*SPECIAL, *words))}
    kinds = {"id": "A", "type_id": 0}
    added = [{"SpecialToken": {"id": name, "type_id": 0}} for name in ("[CLS]", "[SEP]")]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [added[0], {"Sequence": kinds}, added[1]],
            "pair": [added[0], {"Sequence": kinds}, added[1], {"Sequence": kinds}, added[1]],
            "special_tokens": {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in ("[CLS]", "[SEP]")},
        },
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": "[UNK]"},
    } | changes


def write_tokenizer(path, words=WORDS, **changes):
    """Write such a file, and return its path."""
    path.write_text(json.dumps(tokenizer_json(words, **changes)))
    return path
