"""Models of transformers from a local folder, for `model.factory`: `"anabranch.pretrained:sequence_classifier"`.

The folder has `config.json` and `model.safetensors`, as transformers saves a model. Nothing else in it is read, nothing
in it is run, and nothing is downloaded. The class of the model is one that transformers itself has.

Each module takes token ids, integers `[B, L]`, padded at the end with `pad_token_id` of `config.json`; that for tokens
takes ids and where words begin, integers `[B, 2, L]`, of `encode = {..., words = true}`.

Legend: B texts, L tokens of a text, H numbers of the encoder's output for a token, C classes.
"""

import inspect
import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from anabranch.core.extras import needs
from anabranch.core.failures import DamagedError
from anabranch.core.files import MOST_BYTES, read_file
from anabranch.learner.errors import ModelError
from anabranch.learner.model.base_precision import stay_offline
from anabranch.learner.state_dir.safetensors_file import TensorFile

Pooling = Literal["mean", "first", "last"]
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_REFUSED_KEYS = {
    "auto_map": "names code of the folder, which is never run; convert the model to a class of transformers",
    "quantization_config": 'says that weights are quantized; take the original weights, and base_precision = "nf4"',
}
_IGNORED_KEYS = ("_attn_implementation", "attn_implementation", "dtype", "torch_dtype", "use_kernels")
"""What would select other kernels, some of them from the hub, or another precision than the settings say."""
_MOST_NAMES = 3


def sequence_classifier(
    path: str, classes: int, *, config_folder: Path, pooling: Pooling = "mean", frozen: bool = False, trim: bool = True
) -> nn.Module:
    """Return a classifier of texts, with logits `[B, C]`: an encoder, and a new linear layer on its pooled output.

    Args:
        path: the folder of the model, relative to the config's folder.
        classes: number of classes.
        config_folder: the config's folder; Anabranch sets it.
        pooling: what represents a text: the `mean` of its tokens, the `first` or the `last` of them.
        frozen: whether the classifier alone trains, without adapters.
        trim: whether a batch is shortened to its longest text.

    Raises:
        ModelError: the folder has no model that can be used, or an argument is invalid.
        SettingsError: transformers is not installed.
    """
    encoder = _encoder(path, config_folder, frozen=frozen, trim=trim)
    return SequenceClassifier(encoder, TextPooling(_checked_pooling(pooling)), _classes(classes))


def token_classifier(
    path: str, classes: int, *, config_folder: Path, frozen: bool = False, trim: bool = True
) -> nn.Module:
    """Return a classifier of the words of texts, with logits `[B, L, C]`: an encoder, and a new linear layer on its
    output for the first token of each word.

    For `task = "token-classification"`; arguments and errors as of `sequence_classifier`.
    """
    return TokenClassifier(_encoder(path, config_folder, frozen=frozen, trim=trim), _classes(classes))


def embedder(path: str, *, config_folder: Path, pooling: Pooling = "mean", trim: bool = True) -> nn.Module:
    """Return a module with an embedding of unit length for each text, `[B, H]`; arguments as `sequence_classifier`."""
    return Embedder(_encoder(path, config_folder, frozen=False, trim=trim), TextPooling(_checked_pooling(pooling)))


class TextEncoder(nn.Module):
    """An encoder of transformers, on token ids alone."""

    def __init__(self, model: nn.Module, pad_id: int, *, trim: bool) -> None:
        super().__init__()
        self.model = model
        self.pad_id = pad_id
        self.trim = trim
        self.longest = _positions(model)

    @property
    def width(self) -> int:
        """H, the numbers of the output for a token."""
        width: int = self.model.config.hidden_size  # type: ignore[union-attr, assignment]
        return width

    def forward(self, tokens_BL: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output for each token `[B, L, H]`, and which tokens belong to the text, bool `[B, L]`.

        L is the length of the longest text in the batch, if that is trimmed. The first token always belongs to the
        text: attention without any token would be NaN.
        """
        if tokens_BL.is_floating_point() or tokens_BL.ndim != 2:
            raise ModelError(
                f"anabranch.pretrained takes token ids, integers [B, length], but the feature is {tokens_BL.dtype} "
                f"{list(tokens_BL.shape)}; give the feature an encode with a tokenizer"
            )
        if tokens_BL.shape[1] > self.longest:
            raise ModelError(
                f"the feature has texts of {tokens_BL.shape[1]} tokens, but the model has positions for {self.longest};"
                " lower the length in its encode"
            )
        mask_BL = tokens_BL != self.pad_id
        mask_BL[:, 0] = True
        if self.trim and not _is_recorded(tokens_BL):
            length = int(mask_BL.any(dim=0).nonzero()[-1]) + 1  # waits for the device
            tokens_BL, mask_BL = tokens_BL[:, :length], mask_BL[:, :length]
        output = self.model(input_ids=tokens_BL, attention_mask=mask_BL.long())
        hidden_BLH: Tensor = output.last_hidden_state
        return hidden_BLH, mask_BL


def _positions(model: nn.Module) -> int:
    """Return how many tokens an encoder has positions for."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa counts from after the position of padding.
            return module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    return sys.maxsize


class TextPooling(nn.Module):
    """The output of an encoder for a text, from those for its tokens. It has no weights."""

    def __init__(self, how: Pooling) -> None:
        super().__init__()
        self.how = how

    def forward(self, hidden_BLH: Tensor, mask_BL: Tensor) -> Tensor:
        """Return the pooled output, float32 `[B, H]`."""
        hidden_BLH = hidden_BLH.float()
        if self.how == "first":
            return hidden_BLH[:, 0]
        if self.how == "mean":
            weights_BL1 = mask_BL.to(hidden_BLH.dtype).unsqueeze(-1)
            return (hidden_BLH * weights_BL1).sum(dim=1) / weights_BL1.sum(dim=1)
        positions_L = torch.arange(mask_BL.shape[1], device=mask_BL.device)
        last_B = (mask_BL * positions_L).argmax(dim=1)
        return hidden_BLH[torch.arange(len(last_B), device=mask_BL.device), last_B]


class SequenceClassifier(nn.Module):
    """Logits for texts; `pooling` is the module whose output is a text's embedding."""

    def __init__(self, encoder: TextEncoder, pooling: TextPooling, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.pooling = pooling
        self.classifier = nn.Linear(encoder.width, classes)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Return logits `[B, C]`."""
        logits_BC: Tensor = self.classifier(self.pooling(*self.encoder(tokens_BL)))
        return logits_BC


class TokenClassifier(nn.Module):
    """Logits for the words of texts."""

    def __init__(self, encoder: TextEncoder, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = nn.Linear(encoder.width, classes)

    def forward(self, words_B2L: Tensor) -> Tensor:
        """Return the logits of each word `[B, L, C]`, zeros after the last one, and for words beyond the L tokens."""
        if words_B2L.ndim != 3 or words_B2L.shape[1] != 2:
            raise ModelError(
                "anabranch.pretrained:token_classifier takes ids and words, integers [B, 2, length], but the feature "
                f"is {words_B2L.dtype} {list(words_B2L.shape)}; give it an encode with a tokenizer and words = true"
            )
        tokens_BL, first_BL = words_B2L.unbind(dim=1)
        hidden_BLH, _ = self.encoder(tokens_BL)
        index_BL = first_BL.long().clamp(1, hidden_BLH.shape[1]) - 1
        hidden_BLH = hidden_BLH.float().take_along_dim(index_BL.unsqueeze(-1), dim=1)
        logits_BLC: Tensor = self.classifier(hidden_BLH) * (first_BL > 0).unsqueeze(-1)
        return logits_BLC


class Embedder(nn.Module):
    """Embeddings of texts."""

    def __init__(self, encoder: TextEncoder, pooling: TextPooling) -> None:
        super().__init__()
        self.encoder = encoder
        self.pooling = pooling

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """Return embeddings of unit length, float32 `[B, H]`."""
        return nn.functional.normalize(self.pooling(*self.encoder(tokens_BL)), dim=1)


def _is_recorded(tokens_BL: Tensor) -> bool:
    """Whether the pass is recorded for others, whose texts may be longer."""
    if torch.compiler.is_compiling():
        return True
    return tokens_BL.is_cuda and torch.cuda.is_current_stream_capturing()


def _checked_pooling(pooling: Pooling) -> Pooling:
    if pooling not in get_args(Pooling):
        raise ModelError(f"model.args.pooling = {pooling!r}: write one of {', '.join(get_args(Pooling))}")
    return pooling


def _classes(classes: Any) -> int:
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 2:
        raise ModelError(f"model.args.classes = {classes!r}: write the number of classes, 2 or more")
    return classes


def _encoder(path: str, config_folder: Path, *, frozen: bool, trim: bool) -> TextEncoder:
    """Load the encoder of a folder, in float32 on the CPU."""
    where = f'model.args.path = "{path}"'
    stay_offline()  # whatever config.json names
    with needs("anabranch.pretrained", "transformers", "hf"):
        import transformers
    # What is wrong with the weights is in our sentence.
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = config_folder / path
    written = _read_config(where, folder)
    kind, config = _class_of(where, written)
    tensors = _read_weights(where, folder)
    try:
        model, report = kind.from_pretrained(
            None, config=config, state_dict=tensors, dtype=torch.float32, output_loading_info=True,
            ignore_mismatched_sizes=True, trust_remote_code=False, local_files_only=True,
        )  # fmt: skip
    except Exception as exc:
        raise ModelError(f"{where}: transformers cannot build {kind.__name__} from {_CONFIG}: {_line(exc)}") from exc
    _check_report(where, report, written, config)
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # not used, and would be stored with every version
    pad_id = config.pad_token_id
    if pad_id is None:
        raise ModelError(f"{where}: {_CONFIG} has no pad_token_id; add the id that the tokenizer pads with")
    # In training mode, which from_pretrained ends: modules stay in evaluation mode that a factory gives so.
    return TextEncoder(model.requires_grad_(not frozen).train(), int(pad_id), trim=trim)


def _read_config(where: str, folder: Path) -> dict[str, Any]:
    """Read `config.json`; raises ModelError where it is missing, damaged or names code."""
    try:
        config = json.loads(read_file(folder / _CONFIG, MOST_BYTES))
    except FileNotFoundError as exc:
        raise ModelError(f"{where}: there is no {folder / _CONFIG}; save the model there with save_pretrained") from exc
    except (OSError, DamagedError, ValueError) as exc:
        raise ModelError(f"{where}: {folder / _CONFIG} cannot be read: {_line(exc)}") from exc
    if not isinstance(config, dict):
        raise ModelError(f"{where}: {folder / _CONFIG} is not a JSON object")
    for key, why in _REFUSED_KEYS.items():
        if config.get(key):
            raise ModelError(f"{where}: {key} in {_CONFIG} {why}")
    return {key: value for key, value in config.items() if key not in _IGNORED_KEYS}


def _class_of(where: str, written: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the class of the encoder, one of transformers' own, and its configuration."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    model_type = written.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ModelError(f"{where}: model_type in {_CONFIG} is {model_type!r}, which transformers does not have")
    try:
        config = CONFIG_MAPPING[model_type].from_dict(dict(written))
        kind: Any = MODEL_MAPPING[type(config)]
    except Exception as exc:
        raise ModelError(f"{where}: transformers refuses {_CONFIG}: {_line(exc)}") from exc
    if not str(getattr(kind, "__module__", "")).startswith("transformers.models."):
        raise ModelError(f"{where}: model_type = {model_type!r} in {_CONFIG} is no encoder of transformers")
    takes = inspect.signature(kind.forward).parameters
    if config.is_encoder_decoder or not {"input_ids", "attention_mask"} <= takes.keys():
        raise ModelError(f"{where}: {kind.__name__} is no encoder of token ids; take a model such as BERT or MiniLM")
    config._attn_implementation = "sdpa" if kind._supports_sdpa else "eager"
    config.use_cache = False
    return kind, config


def _read_weights(where: str, folder: Path) -> dict[str, Tensor]:
    """Read `model.safetensors`; raises ModelError where it is missing or is something else."""
    path = folder / _WEIGHTS
    try:
        return dict(TensorFile(path))
    except FileNotFoundError as exc:
        raise ModelError(
            f"{where}: there is no {path}; save the model with save_pretrained, in one file of safetensors: "
            "other formats can run code"
        ) from exc
    except (OSError, DamagedError) as exc:
        raise ModelError(f"{where}: {_line(exc)}") from exc


def _check_report(where: str, report: Mapping[str, Any], written: Mapping[str, Any], config: Any) -> None:
    """Raise ModelError unless the file has each tensor of the encoder in its shape, and else only those of a head."""
    mismatched = [name for name, *_ in report["mismatched_keys"]]
    if mismatched:
        name, found, expected = min(report["mismatched_keys"])
        raise ModelError(
            f"{where}: {name} in {_WEIGHTS} has the shape {list(found)}, but {_CONFIG} makes it {list(expected)}"
        )
    missing = [name for name in report["missing_keys"] if not name.startswith("pooler.")]
    if missing:
        raise ModelError(f"{where}: {_WEIGHTS} lacks {_listed(missing)}, which {_CONFIG} asks for")
    unexpected = set(report["unexpected_keys"])
    unexpected -= _names_of_head(written, config) if unexpected else set()
    if unexpected:
        raise ModelError(f"{where}: {_WEIGHTS} has {_listed(unexpected)}, which the model of {_CONFIG} does not have")


def _names_of_head(written: Mapping[str, Any], config: Any) -> set[str]:
    """Return the names of the tensors of the class that `architectures` names, which has the head of another task."""
    import transformers

    names = set[str]()
    for architecture in written.get("architectures") or ():
        kind = getattr(transformers, str(architecture), None)
        if inspect.isclass(kind) and kind.__module__.startswith("transformers.models.") and issubclass(kind, nn.Module):
            with torch.device("meta"):
                names |= kind(config).state_dict().keys()
    return names


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:_MOST_NAMES]) + (", ..." if len(names) > _MOST_NAMES else "")


def _line(exc: BaseException) -> str:
    return " ".join(str(exc).split()) or type(exc).__name__
