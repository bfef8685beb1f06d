"""What the versions of a learner are made with: settings, code, packages and device."""

import hashlib
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from anabranch.ingest.settings.formats import FORMAT
from anabranch.learner.settings.learner import OPTIMIZER
from anabranch.learner.settings.model import TASK_NAMES
from anabranch.learner.settings.pipeline import PipelineSettings
from anabranch.learner.settings.strategies import STRATEGY
from anabranch.learner.state_dir.origin import UNPUBLISHED, ResumedFrom, VersionOrigin
from anabranch.replay.settings import ADMISSION, SAMPLING

_WHOLE = {
    "model.args",
    "model.teacher.args",
    "stream.format_args",
    "replay.sampling_args",
    "replay.admission_args",
}
"""Keys whose tables are values."""


def settings_of_weights(spec: PipelineSettings) -> dict[str, Any]:
    """Return the settings on which weights depend, as JSON values by dotted key; the schema has its own digest."""
    stream, replay, gate = spec.stream, spec.replay, spec.gate
    sections: dict[str, BaseModel] = {"stream": stream, "model": spec.model, "learner": spec.learner, "replay": replay}
    tree = {name: section.model_dump(mode="json", exclude=UNPUBLISHED[name]) for name, section in sections.items()}
    if spec.learner.deterministic:
        del tree["learner"]["round"]  # the bits are the same for rounds of any length
    tree["gate"] = {"holdout_fraction": gate.holdout_fraction, "holdout_rows": gate.holdout_rows}
    if stream.backfill is not None:
        tree["stream"]["backfill"]["files"] = [Path(file).name for file in stream.backfill.files]
    version = (tree["model"].get("teacher") or {}).get("version")
    if version is not None:
        version.pop("state_dir")
    for cache in ["device_bytes", *replay.slower][: len(replay.slower)]:
        tree["replay"].pop(cache, None)  # the last tier has all events, and caches change no sample
    search = {} if spec.search is None else {"search": spec.search.model_dump(mode="json")}
    return {**dict(_flat(tree)), **search}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in _WHOLE:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def origin_of(
    settings: Mapping[str, Any],
    spec: PipelineSettings,
    device: torch.device,
    resumed_from: ResumedFrom | None = None,
) -> VersionOrigin:
    """Return the origin of the versions of a learner; its modules are imported already."""
    return VersionOrigin(
        seed=spec.seed,
        settings=dict(settings),
        code=code_digests(spec),
        packages=packages(),
        device=device_name(device),
        resumed_from=resumed_from,
    )


def device_name(device: torch.device) -> str:
    """Return the name of a device, which decides how sums are rounded; of a CPU, its instructions for vectors."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else device.type


def code_digests(spec: PipelineSettings) -> dict[str, str]:
    """Return the SHA-256 of the file of each module that the settings name; of those that are imported and have one.

    What these modules import is not included.
    """
    model = spec.model
    references = [model.factory, *([] if model.task in TASK_NAMES else [model.task])]
    if model.teacher is not None and model.teacher.factory is not None:
        references.append(model.teacher.factory)
    chosen = {
        STRATEGY: spec.learner.strategy.name,
        OPTIMIZER: spec.learner.optimizer.name,
        SAMPLING: spec.replay.sampling,
        ADMISSION: spec.replay.admission,
        FORMAT: spec.stream.format,
    }
    modules = {reference.partition(":")[0] for reference in references}
    modules |= {setting.find(name).__module__ for setting, name in chosen.items() if name not in setting.names}
    digests = {}
    for name in sorted(modules):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and Path(file).is_file():
            digests[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return digests


def packages() -> dict[str, str]:
    """Return the versions of what computes weights."""
    try:
        own = installed_version("anabranch")
    except PackageNotFoundError:
        own = "unknown"
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": str(np.__version__),
        "anabranch": own,
    }
