"""What has to be as it was when a version was published: differences in settings are refused, others are warnings."""

from collections.abc import Mapping
from typing import Any

import torch

from learner.build import LearnerSpec
from learner.publishing.origin import code_digests, device_name, packages
from learner.rebuilding.errors import RebuildError
from learner.state_dir.origin import VersionOrigin
from learner.state_dir.version import Manifest, other_model, reference_to

_MOST_KEYS = 5
_ABSENT = object()


def check_settings(deployment: LearnerSpec, schema: str, manifest: Manifest) -> list[str]:
    """Return what about the settings of a version is unknown, one sentence each.

    Args:
        deployment: the settings as they are now.
        schema: digest of the schema as it is now.
        manifest: of the version.

    Raises:
        RebuildError: the settings differ from those of the version, or a rebuild does not support them.
    """
    what = f"version {manifest.number} cannot be rebuilt"
    check_supported(deployment, what)
    if manifest.schema != schema:
        raise RebuildError(f"{what}: it was trained under another [schema], or with another tokenizer; restore the old")
    if (other := other_model(manifest.model, reference_to(deployment.model))) is not None:
        raise RebuildError(f"{what}: {other}")
    origin = manifest.origin
    if origin is None:
        return ["the version is of a release that did not record its settings and code: those of now are used"]
    now = deployment.settings_of_weights
    differ = _differences(origin.settings, now)
    if origin.seed != deployment.seed:
        differ.insert(0, f"seed was {origin.seed}, and is {deployment.seed}")
    if differ:
        more = f"; and {len(differ) - _MOST_KEYS} more" if len(differ) > _MOST_KEYS else ""
        raise RebuildError(
            f"{what}, since settings have changed: {'; '.join(differ[:_MOST_KEYS])}{more}; set them back"
        )
    if added := sorted(now.keys() - origin.settings.keys()):
        return [f"settings that the version's release did not have are as they are now: {', '.join(added)}"]
    return []


def check_supported(deployment: LearnerSpec, what: str) -> None:
    """Raise RebuildError where a rebuild does not support the settings; `what` begins the sentence."""
    learner, teacher = deployment.learner, deployment.model.teacher
    if learner.replicas > 1 or learner.mesh is not None:
        raise RebuildError(
            f"{what}: learner.replicas = {learner.replicas} train together, and a rebuild is one process; their sums "
            "of gradients are rounded in another order"
        )
    if learner.strategy.replays and deployment.replay.redis is not None and deployment.replay.disk is None:
        raise RebuildError(
            f"{what}: its stored events are in replay.redis alone, which keeps none of an earlier time; "
            "add [replay.disk]"
        )
    if teacher is not None and teacher.version is not None and teacher.version.number is None:
        raise RebuildError(
            f"{what}: model.teacher.version names no number, so that its teacher is not known; write the number"
        )


def changes_since(deployment: LearnerSpec, origin: VersionOrigin | None, device: torch.device) -> list[str]:
    """Return what else has changed since a version was published, one sentence each; the model is built already."""
    if origin is None:
        return []
    changes = []
    for module, digest in code_digests(deployment.model).items():
        if origin.code.get(module) != digest:
            changes.append(f"the file of module {module} is not the one that the version was made with")
    now = packages()
    for name, version in origin.packages.items():
        if now.get(name) != version:
            changes.append(f"{name} was {version}, and is {now.get(name, 'not installed')}")
    if (name := device_name(device)) != origin.device:
        changes.append(f"the version was trained on {origin.device}, and this is {name}, which rounds in another way")
    return changes


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ; where no other key does, those of `now` alone are of a later release."""
    differ = [key for key in before if before[key] != now.get(key, _ABSENT)]
    if differ:
        differ += now.keys() - before.keys()
    return [f"{key} was {_shown(before, key)}, and is {_shown(now, key)}" for key in sorted(differ)]


def _shown(settings: Mapping[str, Any], key: str) -> str:
    value = settings.get(key, _ABSENT)
    text = "not there" if value is _ABSENT else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
