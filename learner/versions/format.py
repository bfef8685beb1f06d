"""The version format: weights for serving, in a directory that is published atomically.

    var/versions/<number>/model.safetensors   weights
    var/versions/<number>/manifest.json       everything else; immutable
    var/versions/<number>/verdict.json        whether serving may take it; replaced atomically
    var/versions/state.json                   what serving serves; replaced atomically

A directory without a manifest does not exist. Weights are safetensors: reading a version runs no code from it, but the
model factory named in the manifest is imported from the reader's path.

Torch is imported only where tensors are read or written, so that versions can be listed without it.
"""

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from anabranch.core.atomic_files import replace_file
from anabranch.core.failures import DamagedError, damage_is, decoded
from anabranch.core.files import MOST_BYTES, locked_file, read_file
from anabranch.learner.errors import VersionError
from anabranch.learner.model.answer_rule import AnswerRule
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.state_dir.bases import copy_base
from anabranch.learner.state_dir.folders import MANIFEST, FolderManifest, ManifestDirectory, Storage, encode_manifest
from anabranch.learner.state_dir.origin import VersionOrigin
from anabranch.learner.status.report import SliceReport
from anabranch.learner.stream.trained_through import NewlyTrained, PartitionProgress

if TYPE_CHECKING:
    from torch import Tensor

VERDICT = "verdict.json"
STATE = "state.json"
STATE_LOCK = "state.lock"
WEIGHTS = "model.safetensors"
VERSION_FORMAT = 2
"""Of manifests; 2 names a measure and how the version answers, and 0 is that of releases before there was one, whose
versions have no origin."""
_MOST_KEYS = 5
_LONGEST_KEY = 50
"""Characters of a key of `model.args` in a sentence: the manifest is untrusted."""


class ModelReference(msgspec.Struct, frozen=True):
    """How the module of the weights is built."""

    factory: str
    args: dict[str, Any]
    task: str
    adapter: dict[str, Any] | None = None
    """`[model.adapter]`, without what matters in training alone."""


def reference_to(model: ModelSettings) -> ModelReference:
    """Return the reference of the model that `[model]` describes, with its settings as JSON values."""
    adapter = None if model.adapter is None else model.adapter.model_dump(exclude={"dropout"})
    args, adapter = msgspec.json.decode(msgspec.json.encode((model.args, adapter)))
    return ModelReference(model.factory, args, model.task, adapter)


def other_model(actual: ModelReference, expected: ModelReference) -> str | None:
    """Return how a version's model differs from that of `[model]`, as a sentence; None when it does not.

    Arguments of the factory are only ever taken from the config, since a factory may do anything with them.
    """
    if (actual.factory, actual.task) != (expected.factory, expected.task):
        return f"it is of {actual.factory} for {actual.task}, but [model] names {expected.factory} for {expected.task}"
    if (actual.adapter is None) != (expected.adapter is None):
        then = "with [model.adapter], which the config does not have" if actual.adapter else "without [model.adapter]"
        return f"it was trained {then}; set that back to serve it, or wait for a version that is trained as it is now"
    return _other_settings("model.args", "[model]", actual.args, expected.args) or _other_settings(
        "model.adapter", "[model.adapter]", actual.adapter or {}, expected.adapter or {}
    )


def _other_settings(what: str, section: str, actual: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    absent = object()
    differ = [key for key in {**expected, **actual} if actual.get(key, absent) != expected.get(key, absent)]
    if not differ:
        return None
    named = ", ".join(key[:_LONGEST_KEY] for key in differ[:_MOST_KEYS]) + (", ..." if len(differ) > _MOST_KEYS else "")
    return (
        f"it was trained with other {what} ({named}) than {section} has now; "
        "set them back to serve it, or wait for a version that is trained with the new ones"
    )


class Manifest(FolderManifest, frozen=True, kw_only=True):
    """The data of a version besides its weights."""

    parent: int | None
    trained_through: dict[str, PartitionProgress]
    """By `topic:partition`: up to there each event has ended, with its label if it waited for one."""
    seen_through: dict[str, int] | None = None
    """Up to where events and labels were read, by `topic:partition`: some may wait. None where no labels come late."""
    metrics: dict[str, float]
    measure: str = ""
    """The name of the measure by which the gate judged it: one of `metrics`, or the task's own score."""
    constant: dict[str, float] = {}
    """What one answer for all held-out events has at best, by the names of `metrics`."""
    encoders: dict[str, Any]
    """Settings of the encoder of each string feature."""
    model: ModelReference
    parts: int = 0
    """Experts or columns of a module that grows, with the open one; 0: it does not grow."""
    undone: int = 0
    """The last record of `undo.json` whose events it has never seen."""
    learned: NewlyTrained | None = None
    """The newly trained events; None where they are unknown."""
    format: int = 0
    origin: VersionOrigin | None = None
    """What it was made with; None where it is unknown."""
    learned_from: dict[str, int] | None = None
    """The first offset that was read, by `topic:partition`; None where it is unknown."""
    erasures: int | None = None
    """The number of the last record of `erasures.log` that was applied to stored events; None where it is unknown."""
    rule: AnswerRule | None = None
    """From which it answers; None: as the model outputs it."""


class Verdict(msgspec.Struct, frozen=True):
    """Whether serving may load a version; a version without a verdict is not loaded."""

    verdict: Literal["pass", "fail", "inconclusive"]
    reasons: list[str] = []
    numbers: dict[str, float] = {}
    slices: dict[str, SliceReport] = {}
    """By the slices of `gate.slices`."""


class RegistryState(msgspec.Struct, frozen=True):
    """The served versions, written by serving; the learner reads it and does not delete them."""

    serving: int | None = None
    previous: int | None = None
    pinned: int | None = None
    """The only version that is served until it is unpinned."""
    rolled_back: list[int] = []
    """Versions that are not served again."""
    promoted: int | None = None
    """The last version that a person promoted; served whatever its verdict."""
    replaced: int | None = None
    """The version that was served when a person promoted another one: a rollback returns to it."""
    recent: list[int] = []
    """The newest versions that were swapped in, the last one last."""


class Versions(ManifestDirectory[Manifest]):
    """The directory `var/versions`. The learner writes it, serving reads it; there may be several readers."""

    _kind = "version"
    _manifest_type = Manifest
    _error = VersionError

    def __init__(self, path: Path, storage: Storage | None = None) -> None:
        """Take the directory of `state.json`, and the storage of versions if it is not that directory."""
        super().__init__(path, storage)
        self._generations: dict[int, int | None] = {}

    def stale(self, numbers: Sequence[int]) -> set[int]:
        """Return the versions of learners that had lost their lock: those with an older generation than a lower number.

        `numbers` are all versions, ascending. Damaged manifests are ignored. Manifests that cannot be read for now are
        read again by the next call.
        """
        generations, self._generations = self._generations, {}
        for number in numbers:
            with contextlib.suppress(OSError):
                self._generations[number] = generations[number] if number in generations else self.generation_of(number)
        latest, stale = 0, set()
        for number, generation in self._generations.items():
            latest = max(latest, generation or 0)
            if generation is not None and generation < latest:
                stale.add(number)
        return stale

    def verdict(self, number: int) -> Verdict | None:
        """Read a verdict; None when there is none yet."""
        return self._document(number, VERDICT, Verdict) if self.verdict_stamp(number) is not None else None

    def verdict_stamp(self, number: int) -> object:
        """Return a stamp that changes when the verdict is replaced; None when there is none yet."""
        return self.folder(number).stamp(VERDICT)

    def stamp(self, number: int) -> object:
        """Return a stamp that changes when the version's files are replaced; raises OSError."""
        folder = self.folder(number)
        return tuple(folder.stamp(name) for name in (MANIFEST, WEIGHTS, VERDICT))

    def write_verdict(self, number: int, verdict: Verdict) -> None:
        """Replace a verdict atomically; raises OSError, FileNotFoundError where the version has been deleted."""
        self.folder(number).replace(VERDICT, msgspec.json.encode(verdict))

    def state(self) -> RegistryState:
        """Return the state that serving wrote; the empty state when there is none yet."""
        path = self.path / STATE
        with damage_is(VersionError, f"{path} cannot be read"), contextlib.suppress(FileNotFoundError):
            return decoded(read_file(path, MOST_BYTES), RegistryState)
        return RegistryState()

    def write_state(self, state: RegistryState) -> None:
        """Replace `state.json` atomically."""
        self.path.mkdir(parents=True, exist_ok=True)
        replace_file(self.path / STATE, msgspec.json.encode(state))

    def changing_state(self) -> contextlib.AbstractContextManager[None]:
        """Lock `state.json` for a change, against other processes and this one; must not be nested.

        Raises OSError when the directory cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        return locked_file(self.path / STATE_LOCK)

    def contents(self, manifest: Manifest) -> dict[str, bytes]:
        """Read all files of a version, and check their digests."""
        contents = {name: self.read(manifest, name) for name in manifest.files}
        if WEIGHTS not in contents:
            raise VersionError(f"version {manifest.number}: its manifest lists no {WEIGHTS}")
        return contents

    def weights(self, manifest: Manifest, before_piece: Callable[[], object] = bool) -> dict[str, "Tensor"]:
        """Read a version's weights onto the CPU, after checking the digests of all its files.

        `before_piece` is called before each tensor is copied out of the file's contents.
        """
        from anabranch.learner.state_dir.safetensors_file import tensors_of

        source = f"{self.location}/{manifest.number}/{WEIGHTS}"
        try:
            return tensors_of(self.contents(manifest)[WEIGHTS], source, before_piece)
        except DamagedError as exc:
            raise VersionError(f"version {manifest.number}: {exc}") from exc

    def write(
        self,
        weights: Mapping[str, "Tensor"],
        manifest: Manifest,
        verdict: Verdict,
        while_appearing: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> Path:
        """Write a version, completely or not at all, and return its path. `manifest.files` is filled in here.

        It appears within `while_appearing`; where that raises, it does not.
        """
        from anabranch.learner.state_dir.safetensors_file import digest_of, pieces_of

        pieces = pieces_of(_untied(weights))
        files = {WEIGHTS: digest_of(pieces)}
        with contextlib.ExitStack() as stack, self.storage.publish(manifest.number, manifest.generation) as folder:
            folder.write(WEIGHTS, pieces)
            folder.write(VERDICT, [msgspec.json.encode(verdict)])
            folder.write(MANIFEST, [encode_manifest(msgspec.structs.replace(manifest, files=files))])
            stack.enter_context(while_appearing())
        self._generations[manifest.number] = manifest.generation
        return self.directory(manifest.number)

    def size_bytes(self, number: int) -> int:
        """Return the size of a version in bytes; 0 when there is none."""
        return sum(self.folder(number).files().values())


def copy_versions(versions: Versions, target: Path, damaged: list[str]) -> int:
    """Copy the versions into another state directory, with the frozen weights that they name, and what serving serves.

    Returns how many. `damaged` gets a sentence on each that cannot be read, and is left out; those that the learner
    deletes meanwhile are left out too.
    """
    copied = 0
    for number in versions.numbers():
        folder = target / "versions" / str(number)
        try:
            manifest = versions.manifest(number)
            folder.mkdir(parents=True)
            for name in manifest.files:
                shutil.copyfile(versions.checked(manifest, name), folder / name)
            if versions.verdict_stamp(number) is not None:
                (folder / VERDICT).write_bytes(versions.folder(number).read(VERDICT))
            copy_base(versions, manifest, target)
            (folder / MANIFEST).write_bytes(versions.folder(number).read(MANIFEST))
            copied += 1
        except (VersionError, DamagedError, FileNotFoundError) as exc:
            shutil.rmtree(folder, ignore_errors=True)
            if number in versions.numbers():  # else the learner has deleted it
                damaged.append(str(exc))
    with contextlib.suppress(FileNotFoundError):
        content = (versions.path / STATE).read_bytes()
        (target / "versions").mkdir(exist_ok=True)
        (target / "versions" / STATE).write_bytes(content)
    return copied


def _untied(weights: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """Return contiguous tensors that share no memory, as safetensors requires: tied weights are copied."""
    import torch

    untied: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in weights.items():
        address = tensor.untyped_storage().data_ptr()
        untied[name] = tensor.clone(memory_format=torch.contiguous_format) if address in seen else tensor.contiguous()
        seen.add(address)
    return untied
