"""`versions export --format hf` and `peft`: the weights of a version as the Hub and PEFT have them."""

import json
import re
import warnings
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from anabranch.commands.versions.export.folder import new_folder
from anabranch.commands.versions.export.program import ExportedVersion, OpenedVersion, open_version
from anabranch.commands.versions.show import Which
from anabranch.config.loader import Config
from anabranch.core.atomic_files import write_durably
from anabranch.core.errors import SettingsError
from anabranch.core.extras import needs
from anabranch.learner.model.base_precision import stay_offline
from anabranch.learner.model.factory import build_model
from anabranch.learner.model.features.learned import features_of
from anabranch.learner.model.trained_set import trained_state
from anabranch.learner.state_dir.safetensors_file import TensorFile, pieces_of

_HF_FILE, _PEFT_FILE = "model.safetensors", "adapter_model.safetensors"
_ADAPTED = re.compile(r"(.+)\.lora_A\.default\.weight")
"""The weight by which a module of peft shows that it is adapted; files leave out the name of the adapter."""


def export_weights(config: Config, which: Which, folder: Path, form: Literal["hf", "peft"]) -> ExportedVersion:
    """Write the weights of a version into a new folder, load them into a new module, and compare answers.

    `hf` has all weights, and `config.json` with the arguments of `model.factory`: what a class with
    `PyTorchModelHubMixin` loads. `peft` has what `PeftModel.from_pretrained` adds to the module of `model.factory`.

    Raises:
        SettingsError: there is no such version, its answers need more than such a format has, or they differ; an extra
            is missing, or the folder cannot be written.
        VersionError: files of the version are missing or damaged.
    """
    opened = open_version(config, which, form)
    refused = f"version {opened.version.number} cannot be exported as {form}"
    if features_of(opened.version.module) is not None:
        raise SettingsError(f"{refused}: [schema] learns features, which others do not have; take --format mlflow")
    if opened.version.answers is not None:
        raise SettingsError(f"{refused}: [task] changes what the model answers; take --format mlflow")
    adapter = config.pipeline.model.adapter
    if form == "hf" and adapter is not None:
        raise SettingsError(f"{refused}: its weights are those of [model.adapter]; take --format peft")
    if form == "peft" and adapter is None:
        raise SettingsError(f"{refused}: it has no [model.adapter]; take --format hf")
    write = _hf if adapter is None else _peft
    with new_folder(folder) as temporary:
        module, file, usage = write(opened, temporary)
        difference = opened.difference_of(module)
        opened.write_facts(temporary, usage)
    return ExportedVersion(opened.manifest, file, opened.rows, difference)


def _hf(opened: OpenedVersion, folder: Path) -> tuple[nn.Module, str, str]:
    """Write `config.json` and the weights; return the module that loads them, the file and how that is done."""
    module, reference = opened.version.module, opened.manifest.model
    _write_tensors(folder / _HF_FILE, dict(module.state_dict()))
    facts = {"factory": reference.factory, "task": reference.task, "version": opened.manifest.number}
    content = {**reference.args, "architectures": [type(module).__name__], "anabranch": facts}
    write_durably(folder / "config.json", [json.dumps(content, indent=2).encode()])
    built = _built(opened)
    built.load_state_dict(TensorFile(folder / _HF_FILE))
    usage = (
        f"`{reference.factory}` builds the module with the arguments in `config.json`; `{_HF_FILE}` has its weights. A "
        "class with `PyTorchModelHubMixin` loads both with `from_pretrained(folder)`."
    )
    return built, _HF_FILE, usage


def _peft(opened: OpenedVersion, folder: Path) -> tuple[nn.Module, str, str]:
    """Write what peft adds to the module of the factory; return as `_hf`."""
    stay_offline()
    with needs("--format peft", "peft", "hf"):
        from peft import LoraConfig, PeftModel
    adapter, factory = opened.config.pipeline.model.adapter, opened.manifest.model.factory
    assert adapter is not None
    trained = trained_state(opened.version.module)
    targets = [found[1] for name in trained if (found := _ADAPTED.fullmatch(name))]
    LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]
        lora_dropout=adapter.dropout,
        target_modules="|".join(map(re.escape, targets)),  # as one pattern: names in a list match as ends, too
        modules_to_save=list(adapter.train) or None,
        inference_mode=True,
    ).save_pretrained(str(folder))
    _write_tensors(folder / _PEFT_FILE, {_name_in_file(name): each for name, each in trained.items()})
    with warnings.catch_warnings(action="ignore"):  # of transposed weights, and of buffers besides the adapters
        module = PeftModel.from_pretrained(_built(opened), str(folder)).eval()
    return module, _PEFT_FILE, f"`PeftModel.from_pretrained(module, folder)`, with the module that `{factory}` builds."


def _name_in_file(name: str) -> str:
    return "base_model.model." + re.sub(r"(\.lora_[AB])\.default\b", r"\1", name)


def _built(opened: OpenedVersion) -> nn.Module:
    model = opened.config.pipeline.model
    return build_model(model.factory, model.args, opened.config.folder).float().eval()


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    write_durably(path, pieces_of({name: value.contiguous().cpu() for name, value in tensors.items()}))
