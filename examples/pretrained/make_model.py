"""Write the folder `model`: a small BERT as transformers saves it, and its tokenizer.

It is used in place of a pretrained model, so that nothing is downloaded: its weights are random, of a fixed seed. A
folder with real weights has the same three files: config.json, model.safetensors and tokenizer.json.
"""

from pathlib import Path

import torch
from make_events import COMMON, TOPICS
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def tokenizer() -> Tokenizer:
    words = [*SPECIAL, *COMMON.split(), *(word for text in TOPICS.values() for word in text.replace("|", "").split())]
    ids = {word: index for index, word in enumerate(dict.fromkeys(words))}
    made = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, ids[name]) for name in ("[CLS]", "[SEP]")]
    )
    return made


def main() -> None:
    words = tokenizer()
    config = BertConfig(
        vocab_size=words.get_vocab_size(),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
        pad_token_id=words.token_to_id("[PAD]"),
        initializer_range=0.2,  # larger than that of a model which is to be pretrained
    )
    torch.manual_seed(0)
    BertModel(config, add_pooling_layer=False).save_pretrained("model")
    words.save(str(Path("model", "tokenizer.json")))


if __name__ == "__main__":
    main()
