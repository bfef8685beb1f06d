"""`[model.adapter]`: a pretrained model trains in its adapters and a few modules, and all else is frozen.

LoRA: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", by peft. It needs no model of transformers:
any linear layer or convolution can be adapted.
"""

import re
import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from typing_extensions import override

from anabranch.core.extras import needs
from anabranch.learner.errors import ModelError
from anabranch.learner.model.base_precision import stay_offline, store_frozen
from anabranch.learner.model.converter import ModelContext, ModelConverter
from anabranch.learner.model.trained_set import declare_constant
from anabranch.learner.settings.model import AdapterSettings
from anabranch.learner.settings.strategies import StrategySettings

_MOST_NAMES = 8


class Adapter(ModelConverter):
    """Adds adapters to a model, in place, and freezes all that does not train."""

    def __init__(self, settings: AdapterSettings) -> None:
        self._settings = settings

    @override
    def convert(self, model: nn.Module, _context: ModelContext) -> nn.Module:
        """Return the model on the CPU.

        What trains stays float32, whatever the precision of the frozen layers is. The adapters change nothing at first.

        Raises:
            SettingsError: a package is not installed.
            ModelError: a name in `targets` or `train` fits no module that can be adapted or trained.
        """
        settings = self._settings
        stay_offline()
        with needs("[model.adapter]", "peft", "hf", "take the section out"):
            from peft import LoraConfig, inject_adapter_in_model
        trained = _trained_modules(model, settings)
        targets = _target_names(model, settings, trained)
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # type: ignore[arg-type]
            lora_dropout=settings.dropout,
            target_modules="|".join(map(re.escape, targets)),  # as one pattern: names in a list match as ends, too
        )
        model.cpu().float().requires_grad_(False)
        try:
            with warnings.catch_warnings(action="ignore"):  # of transposed weights, which peft recognizes itself
                model = inject_adapter_in_model(config, model)
        except ValueError as exc:
            raise ModelError(f"model.adapter: peft cannot adapt {_listed(targets)}: {exc}") from exc
        for name in trained:
            model.get_submodule(name).requires_grad_()
        if any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules()):
            torch.backends.mha.set_fastpath_enabled(False)  # it reads its layers' weights, and skips their adapters
        if settings.base_precision != "fp32":
            store_frozen(model, settings.base_precision)
        declare_constant(model, "model.adapter.alpha / model.adapter.rank", settings.alpha / settings.rank)
        return model

    @override
    def check(self, model: nn.Module, strategy: StrategySettings) -> None:
        weights = dict(model.named_parameters())
        groups = {"targets": [weight for name, weight in weights.items() if ".lora_" in name]}
        for part in self._settings.train:
            groups[f"train = {part!r}"] = [weight for name, weight in weights.items() if name.startswith(f"{part}.")]
        for key, found in groups.items():
            if not strategy.kind.learns_gradient or not any(weight.requires_grad for weight in found):
                raise ModelError(
                    f'learner.strategy = "{strategy.name}" trains nothing of what model.adapter.{key} names, since it '
                    'keeps the model as it was built: take [model.adapter] out, or take the strategy "er"'
                )


def _trained_modules(model: nn.Module, settings: AdapterSettings) -> list[str]:
    modules = [name for name, module in model.named_modules() if name and list(module.parameters())]
    for name in settings.train:
        if name not in modules:
            raise ModelError(
                f'model.adapter.train = "{name}": the model has no such module with weights, but {_listed(modules)}'
            )
    return list(settings.train)


def _target_names(model: nn.Module, settings: AdapterSettings, trained: Iterable[str]) -> list[str]:
    """Return the full names of the layers to adapt, in the order of the model."""
    inside = tuple(f"{name}." for name in trained)
    candidates = {
        name: layer
        for name, layer in model.named_modules()
        if name and _adaptable(layer) and not f"{name}.".startswith(inside)
    }
    if settings.targets == "all-linear":
        names = [name for name, layer in candidates.items() if not isinstance(layer, _CONVOLUTIONS)]
        if not names:
            raise ModelError(
                'model.adapter.targets = "all-linear": the model has no linear layer outside model.adapter.train; '
                "name the layers to adapt"
            )
        return names
    for target in settings.targets:
        if not any(_fits(name, target) for name in candidates):
            raise ModelError(
                f'model.adapter.targets = "{target}": the model has no such linear layer or convolution outside '
                f"model.adapter.train, but {_listed(candidates)}"
            )
    return [name for name in candidates if any(_fits(name, target) for target in settings.targets)]


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _adaptable(layer: nn.Module) -> bool:
    """Whether a layer is run as a module: the output projection of attention, a subclass, is only read."""
    return type(layer) in (nn.Linear, *_CONVOLUTIONS) or type(layer).__name__ == "Conv1D"


def _fits(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(_first(names)) or "none"


def _first(names: Iterable[str]) -> Iterator[str]:
    for count, name in enumerate(names):
        if count == _MOST_NAMES:
            yield "..."
            return
        yield name
