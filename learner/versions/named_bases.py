"""Which bases versions and checkpoints name: the others are deleted."""

import contextlib
from pathlib import Path

from anabranch.core.failures import DamagedError, decoded
from anabranch.core.files import MOST_BYTES, read_file
from anabranch.learner.checkpoints.format import CheckpointManifest, Checkpoints
from anabranch.learner.errors import CheckpointError, VersionError
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.state_dir.folders import MANIFEST, SET_ASIDE
from anabranch.learner.versions.format import Versions


def prune_bases(state_dir: Path, base: str | None) -> None:
    """Delete the bases that no version and no checkpoint of a state directory names, except `base`.

    Called while no checkpoint is written or deleted. Raises OSError.
    """
    bases = bases_in(state_dir)
    if bases.digests() <= {base}:
        return
    checkpoints = Checkpoints(state_dir / "checkpoints", "", 0)
    named = {base} | named_bases(Versions(state_dir / "versions")) | named_bases(checkpoints)
    for path in checkpoints.path.glob(f"*{SET_ASIDE}/{MANIFEST}"):
        with contextlib.suppress(DamagedError, FileNotFoundError):
            named.add(decoded(read_file(path, MOST_BYTES), CheckpointManifest).base)
    bases.prune([sha256 for sha256 in named if sha256 is not None])


def named_bases(directory: Versions | Checkpoints) -> set[str | None]:
    """Return the bases that versions or checkpoints name; damaged ones, which nothing can use, name none.

    Raises OSError where a manifest cannot be read for now.
    """
    named = set[str | None]()
    for number in directory.numbers():
        with contextlib.suppress(VersionError, CheckpointError):
            named.add(directory.manifest(number).base)
    return named
