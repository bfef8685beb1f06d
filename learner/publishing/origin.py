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

from ingest.config import StreamSettings
from learner.config import TASK_NAMES, GateSettings, LearnerSettings, ModelSettings
from learner.state_dir.origin import UNPUBLISHED, VersionOrigin
from replay.config import ReplaySettings

_WHOLE = {"model.args", "model.teacher.args"}
"""Keys whose tables are values."""


def settings_of_weights(
    stream: StreamSettings,
    model: ModelSettings,
    learner: LearnerSettings,
    replay: ReplaySettings,
    gate: GateSettings,
) -> dict[str, Any]:
    """Return the settings on which weights depend, as JSON values by dotted key; the schema has its own digest."""
    sections: dict[str, BaseModel] = {"stream": stream, "model": model, "learner": learner, "replay": replay}
    tree = {name: section.model_dump(mode="json", exclude=UNPUBLISHED[name]) for name, section in sections.items()}
    tree["gate"] = {"holdout_fraction": gate.holdout_fraction, "holdout_rows": gate.holdout_rows}
    if stream.backfill is not None:
        tree["stream"]["backfill"]["files"] = [Path(file).name for file in stream.backfill.files]
    version = (tree["model"].get("teacher") or {}).get("version")
    if version is not None:
        version.pop("state_dir")
    for cache in ["device_bytes", *replay.slower][: len(replay.slower)]:
        del tree["replay"][cache]  # the last tier has all events, and caches change no sample
    return dict(_flat(tree))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in _WHOLE:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def origin_of(settings: Mapping[str, Any], model: ModelSettings, seed: int, device: torch.device) -> VersionOrigin:
    """Return the origin of the versions of a learner that begins at the start; its modules are imported already."""
    return VersionOrigin(
        seed=seed,
        settings=dict(settings),
        code=code_digests(model),
        packages=packages(),
        device=device_name(device),
        resumed_from=None,
    )


def device_name(device: torch.device) -> str:
    """Return the name of a device, which decides how sums are rounded; of a CPU, its instructions for vectors."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {torch.backends.cpu.get_cpu_capability()}" if device.type == "cpu" else device.type


def code_digests(model: ModelSettings) -> dict[str, str]:
    """Return the SHA-256 of the file of each module that the settings name; of those that are imported and have one.

    What these modules import is not included.
    """
    references = [model.factory, *([] if model.task in TASK_NAMES else [model.task])]
    if model.teacher is not None and model.teacher.factory is not None:
        references.append(model.teacher.factory)
    digests = {}
    for name in sorted({reference.partition(":")[0] for reference in references}):
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
