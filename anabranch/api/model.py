"""A version as a torch module, from a state directory or an object store.

Legend: B events of a batch, N events of a call.
"""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from anabranch.api.data import EventReader, predicted, without_label
from anabranch.commands.versions.export.program import ServedProgram
from anabranch.commands.versions.show import number_in, parse_which
from anabranch.config.loader import Config, load_config
from anabranch.core.errors import SettingsError
from anabranch.core.failures import damage_is, state_errors
from anabranch.core.temporary_files import temporary_folder
from anabranch.ingest.events.block import Array
from anabranch.ingest.events.schema import Schema
from anabranch.learner.errors import VersionError
from anabranch.learner.object_storage.fleet import RolloutFile
from anabranch.learner.object_storage.head import HeadReader
from anabranch.learner.settings.storage import StorageSettings
from anabranch.learner.versions.format import Versions
from anabranch.serving.fleet.damaged_versions import DamagedVersions
from anabranch.serving.fleet.follower import CopyChoice
from anabranch.serving.fleet.version_cache import VersionCache
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.model.loaded_version import ServedVersion, load_version
from anabranch.serving.rollout.eligibility import misfit, requirements_of

_PIPELINE = "pipeline.toml"
_CPU = torch.device("cpu")


class Model(ServedProgram):
    """A version as serving answers with it, on the CPU in evaluation mode: `anabranch.load` returns it.

    Example:
        >>> model = anabranch.load("var", "served")
        >>> model.predict(frame)["prediction"]
        >>> model(x=torch.zeros(2, 64))["probabilities"]
    """

    def __init__(self, version: ServedVersion, deployment: Deployment) -> None:
        """Take a version that was loaded; users call `anabranch.load`."""
        schema = deployment.schema
        super().__init__(version.module, deployment.task, [each.name for each in schema.features], version.answers)
        self._schema, self._inputs = schema, EventReader(without_label(schema))
        self._served = version  # whose tensors another version would take once it is gone
        self.version = version.number
        """The number of the version."""
        self.trained_through = version.trained_through
        """The last offset that it has learned of each partition, `topic:partition=offset`, separated by commas."""
        self.metrics = dict(version.manifest.metrics)
        """What the gate measured on held-out events."""
        self.eval()

    @override
    def forward(self, *features: Tensor, **named: Tensor) -> dict[str, Tensor]:
        """Return what serving answers, with its calibration, for B events.

        Args:
            features: in the order of the schema, each `[B, ...]`, strings as ids.
            named: features by name, in place of some or all of these. `module` alone is the model with the features
                that it has learned, and returns its output.

        Raises:
            SettingsError: a feature is missing.
        """
        left = self.names[len(features) :]
        if missing := [name for name in left if name not in named]:
            raise SettingsError(f"the feature {missing[0]} is missing; the model takes {', '.join(self.names)}")
        return super().forward(*features, *(named[name] for name in left))

    def predict(self, data: Any) -> Any:
        """Return the predictions for N events.

        Args:
            data: a dict of arrays `[N, ...]`, or a data frame of pandas, polars or Arrow; a label is not read.

        Returns:
            As `Learner.predict` returns them, calibrated where the version is.

        Raises:
            SettingsError: an event cannot be used.
        """

        def run(part: Mapping[str, Array]) -> dict[str, NDArray[Any]]:
            features = [torch.from_numpy(part[f"feature.{name}"]) for name in self.names]
            return {name: values.numpy() for name, values in self(*features).items()}

        with torch.no_grad():
            return predicted(self._schema, self._inputs, data, run)


def load(source: str | Path, version: int | str = "served", *, pipeline: str | Path | None = None) -> Model:
    """Load a version with what serving needs of it: weights, learned features, calibration.

    Args:
        source: a state directory, such as `var`, or the URL of an object store, as `storage.url` has it.
        version: its number, `newest`, or `served`: of an object store the one that a new server would serve.
        pipeline: the settings, which say how the model is built. By default the `pipeline.toml` in the folder above a
            state directory, or for an object store in the current folder.

    Returns:
        The version as a module on the CPU, in evaluation mode.

    Raises:
        AnabranchError: there is no such version, its files are damaged, or it is of another model or schema than the
            settings describe.
    """
    is_url = "://" in str(source)
    folder = Path() if is_url else Path(source).absolute()
    file = Path(pipeline) if pipeline is not None else (folder if is_url else folder.parent) / _PIPELINE
    if not is_url and not folder.is_dir():
        raise SettingsError(f"{source} is no state directory: name one such as var, or the URL of an object store")
    if not file.is_file():
        raise SettingsError(f"{file} does not exist, and says how the model is built: load(..., pipeline=FILE)")
    config = load_config(file)
    if not is_url:
        return load_from(config, folder, None, version)
    known = config.pipeline.storage
    options = known.options if known is not None and known.url == str(source) else {}
    return load_from(config, folder, StorageSettings(url=str(source), options=options), version)


def load_from(config: Config, state_dir: Path, storage: StorageSettings | None, version: int | str) -> Model:
    """Load a version of a state directory, or of an object store where one is given; raises as `load`."""
    which = parse_which("latest" if version == "newest" else str(version))
    with contextlib.ExitStack() as stack:
        if storage is not None:
            state_dir = stack.enter_context(temporary_folder("anabranch-load-"))
            number = _fetch(storage, Versions(state_dir / "versions"), which)
        else:
            number = number_in(Versions(state_dir / "versions"), which)
        pipeline = config.pipeline
        schema = Schema(pipeline.events)
        with state_errors(f"version {number} cannot be read"):
            manifest = Versions(state_dir / "versions").manifest(number)
        if sentence := misfit(manifest, requirements_of(schema, pipeline.model)):
            raise SettingsError(f"version {number} cannot be loaded with {config.path}: {sentence}")
        model, strategy = pipeline.model, pipeline.learner.strategy
        deployment = Deployment(pipeline.name, schema, model, config.folder, state_dir, _CPU, strategy=strategy)
        return Model(load_version(deployment, manifest, 1), deployment)


def _fetch(storage: StorageSettings, versions: Versions, which: int | str) -> int:
    """Copy a version of an object store, and return its number."""
    what = f"the versions of {storage.url} cannot be read"
    with state_errors(what), damage_is(VersionError, what):
        reader, rollout = HeadReader(storage.quick_bucket), RolloutFile(storage.quick_bucket)
        reader.poll()
        rollout.poll()
        head, cache = reader.contents, VersionCache(storage.bucket, versions)
        if head is None or not head.versions:
            raise SettingsError(f"no version has been published yet in {storage.url}")
        number: int | None
        if which == "served":
            choice = CopyChoice(cache, "", DamagedVersions(time.monotonic))
            number = choice.next_copy(head, set(), rollout.contents)
        else:
            number = max(head.versions) if which == "latest" else int(which)
        if number not in head.versions:
            there = f"there are {min(head.versions)} to {max(head.versions)}"
            sentence = "may be served" if which == "served" else f"has the number {which}; {there}"
            raise SettingsError(f"no version in {storage.url} {sentence}")
        versions.path.mkdir(parents=True)
        cache.add(number, head.versions[number])
        cache.complete(number, head.versions[number], head.bases)
    return number
