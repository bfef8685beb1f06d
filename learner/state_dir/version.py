"""The version format: weights for serving, in a directory that is published completely or not at all.

    var/versions/<number>/model.safetensors   weights
    var/versions/<number>/manifest.json       everything else; immutable
    var/versions/<number>/verdict.json        whether serving may take it; replaced atomically
    var/versions/state.json                   what serving serves; replaced atomically

A directory without a manifest does not exist. Weights are safetensors: reading a version runs no code from it, but the
model factory that the manifest names is imported from the reader's own path.

Torch is imported only where tensors are read or written: listing versions does not need it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from anabranch.core.atomic_files import replace_file
from anabranch.core.failures import damage_is, decoded
from anabranch.core.files import MOST_BYTES, check_names, read_file
from learner.config import ModelSettings
from learner.errors import VersionError
from learner.state_dir.folders import MANIFEST, LocalStorage, Storage
from learner.state_dir.trained_through import NewlyTrained, PartitionProgress

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T")
VERDICT = "verdict.json"
STATE = "state.json"
STATE_LOCK = "state.lock"
WEIGHTS = "model.safetensors"
_MOST_KEYS = 5
_LONGEST_KEY = 50
"""Limit on a key of `model.args` in a sentence: a manifest may have been written by anybody."""


class ModelReference(msgspec.Struct, frozen=True):
    """How the module of the weights is built."""

    factory: str
    args: dict[str, Any]
    task: str


def reference_to(model: ModelSettings) -> ModelReference:
    """Return the reference of the model that `[model]` describes, with its args as JSON values."""
    return ModelReference(model.factory, msgspec.json.decode(msgspec.json.encode(model.args)), model.task)


def other_model(found: ModelReference, expected: ModelReference) -> str | None:
    """Return how a version's model differs from that of `[model]`, as a sentence; None when it does not.

    A factory may do anything with its arguments, so they are taken from the config alone, never from a version.
    """
    if (found.factory, found.task) != (expected.factory, expected.task):
        return f"it is of {found.factory} for {found.task}, but [model] names {expected.factory} for {expected.task}"
    absent = object()
    differ = [
        key for key in {**expected.args, **found.args} if found.args.get(key, absent) != expected.args.get(key, absent)
    ]
    if not differ:
        return None
    named = ", ".join(key[:_LONGEST_KEY] for key in differ[:_MOST_KEYS]) + (", ..." if len(differ) > _MOST_KEYS else "")
    return (
        f"it was learned with other model.args ({named}) than [model] has now; "
        "set them back to serve it, or wait for a version that is learned with the new ones"
    )


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The data of a version besides its weights."""

    number: int
    generation: int
    parent: int | None
    time: float
    step: int
    trained_through: dict[str, PartitionProgress]
    """By `topic:partition`."""
    metrics: dict[str, float]
    schema: str
    """The schema's digest."""
    encoders: dict[str, Any]
    """Settings of the encoder of each string feature."""
    model: ModelReference
    files: dict[str, str]
    """SHA-256 of every file, by name."""
    learned: NewlyTrained | None = None
    """The newly trained events; None where they are unknown."""


class Verdict(msgspec.Struct, frozen=True):
    """Whether serving may take a version. Without one it does not."""

    verdict: Literal["pass", "fail", "inconclusive"]
    reasons: list[str] = []
    numbers: dict[str, float] = {}


class RegistryState(msgspec.Struct, frozen=True):
    """What serving serves, written by serving; the learner reads it so as not to delete those versions."""

    serving: int | None = None
    previous: int | None = None
    pinned: int | None = None
    """The only version to serve until it is unpinned."""
    rolled_back: list[int] = []
    """Versions that are not served again."""
    promoted: int | None = None
    """The last version that a person promoted; served whatever its verdict."""


class Versions:
    """The directory `var/versions`. The learner writes it, serving reads it; there may be several readers."""

    def __init__(self, path: Path, storage: Storage | None = None) -> None:
        """Take the directory of `state.json`, and the storage of versions if that is elsewhere."""
        self.path = path
        self._storage = storage or LocalStorage(path)
        self._generations: dict[int, int | None] = {}

    def directory(self, number: int) -> Path:
        """Return the path of a version."""
        return self.path / str(number)

    def numbers(self) -> list[int]:
        """Return the numbers of all versions, rising."""
        return self._storage.numbers()

    def highest(self) -> int:
        """Return the highest number of any directory, complete or not; 0 when there is none."""
        return self._storage.highest()

    def generation(self) -> int:
        """Return the latest generation of a learner that wrote one; 0 when there is none. Raises OSError."""
        return max((self._generation(number) or 0 for number in self.numbers()), default=0)

    def stale(self, numbers: Sequence[int]) -> set[int]:
        """Return the versions of a learner that had lost its lock: those of an older generation than a lower number.

        `numbers` are all versions, rising. Damaged manifests are ignored; those that cannot be read now are read again.
        """
        generations, self._generations = self._generations, {}
        for number in numbers:
            with contextlib.suppress(OSError):
                self._generations[number] = generations[number] if number in generations else self._generation(number)
        latest, stale = 0, set()
        for number, generation in self._generations.items():
            latest = max(latest, generation or 0)
            if generation is not None and generation < latest:
                stale.add(number)
        return stale

    def manifest(self, number: int) -> Manifest:
        """Read a manifest; raises VersionError when it is missing, damaged or no manifest."""
        manifest = self._document(number, MANIFEST, Manifest)
        if manifest.number != number:
            raise VersionError(f"{self.directory(number) / MANIFEST} is that of version {manifest.number}")
        with damage_is(VersionError, f"{self.directory(number) / MANIFEST} cannot be used"):
            check_names(manifest.files)
        return manifest

    def verdict(self, number: int) -> Verdict | None:
        """Read a verdict; None when there is none yet."""
        return self._document(number, VERDICT, Verdict) if self.verdict_stamp(number) is not None else None

    def verdict_stamp(self, number: int) -> object:
        """Return a stamp that changes when the verdict is replaced; None when there is none yet."""
        return self._storage.folder(number).stamp(VERDICT)

    def stamp(self, number: int) -> object:
        """Return a stamp that changes when the version's files are replaced; raises OSError."""
        folder = self._storage.folder(number)
        return tuple(folder.stamp(name) for name in (MANIFEST, WEIGHTS, VERDICT))

    def write_verdict(self, number: int, verdict: Verdict) -> None:
        """Replace a verdict atomically; raises OSError, FileNotFoundError where the version has been deleted."""
        self._storage.folder(number).replace(VERDICT, msgspec.json.encode(verdict))

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

    @contextlib.contextmanager
    def changing_state(self) -> Iterator[None]:
        """Lock `state.json` for a change, against other processes and this one; must not be nested.

        Raises OSError when the directory cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / STATE_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def contents(self, manifest: Manifest) -> dict[str, bytes]:
        """Read a version's files; raises VersionError unless all are there and have their digests, else OSError."""
        directory, folder = self.directory(manifest.number), self._storage.folder(manifest.number)
        contents: dict[str, bytes] = {}
        for name, digest in manifest.files.items():
            with damage_is(VersionError, f"version {manifest.number}: cannot read {directory / name}"):
                contents[name] = folder.read(name)
            if hashlib.sha256(contents[name]).hexdigest() != digest:
                raise VersionError(f"version {manifest.number}: {directory / name} does not have its digest")
        if WEIGHTS not in contents:
            raise VersionError(f"version {manifest.number}: its manifest lists no {WEIGHTS}")
        return contents

    def weights(self, manifest: Manifest) -> dict[str, "Tensor"]:
        """Read a version's weights onto the CPU, after checking the digests of all its files."""
        from safetensors import SafetensorError
        from safetensors.torch import load as load_tensors

        contents, directory = self.contents(manifest), self.directory(manifest.number)
        try:
            return load_tensors(contents[WEIGHTS])
        except SafetensorError as exc:
            raise VersionError(f"version {manifest.number}: {directory / WEIGHTS} is not safetensors: {exc}") from exc

    def write(self, weights: Mapping[str, "Tensor"], manifest: Manifest, verdict: Verdict) -> Path:
        """Write a version, completely or not at all, and return its path. `manifest.files` is filled in here."""
        from learner.state_dir.safetensors_file import digest_of, pieces_of

        pieces = pieces_of(_untied(weights))
        files = {WEIGHTS: digest_of(pieces)}
        with self._storage.publish(manifest.number, manifest.generation) as folder:
            folder.write(WEIGHTS, *pieces)
            folder.write(VERDICT, msgspec.json.encode(verdict))
            folder.write(MANIFEST, _pretty(msgspec.structs.replace(manifest, files=files)))
        self._generations[manifest.number] = manifest.generation
        return self.directory(manifest.number)

    def size_bytes(self, number: int) -> int:
        """Return the size of a version in bytes; 0 when there is none."""
        return sum(self._storage.folder(number).files().values())

    def clean(self) -> None:
        """Remove what a crash left half-written. Only the learner that holds the lock may call it."""
        self._storage.clean()

    def delete(self, number: int) -> None:
        """Remove a version, if it is there."""
        self._storage.delete(number)

    def _generation(self, number: int) -> int | None:
        try:
            return self.manifest(number).generation
        except VersionError:
            return None

    def _document(self, number: int, name: str, kind: type[_T]) -> _T:
        path = self.directory(number) / name
        with damage_is(VersionError, f"{path} cannot be read"):
            try:
                content = self._storage.folder(number).read(name, MOST_BYTES)
            except FileNotFoundError as exc:
                raise VersionError(f"{path} does not exist") from exc
            return decoded(content, kind)


def _pretty(value: msgspec.Struct) -> bytes:
    return json.dumps(msgspec.to_builtins(value), indent=1, allow_nan=False).encode()


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
