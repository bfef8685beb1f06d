"""Swaps of a model whose weights are frozen but for 0.3 %, as an adapter leaves them: its versions share one base.

As `serving_swaps.py`, with the memory in bytes. `base_version_ratio` and `base_checkpoint_ratio` are the sizes of a
version, and of the tensors of a checkpoint with AdamW, over that of a version with all weights.
"""

import tempfile
from pathlib import Path

import torch

from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.state_dir.safetensors_file import pieces_of
from benchmarks.harness.results import Form, Results, Target
from benchmarks.harness.serving_swaps import size, under_load
from benchmarks.harness.version_publisher import VersionPublisher

TARGETS = {
    "base_swap_failed": Target(0),
    "base_swap_added_p99_seconds": Target(0.001),
    "base_swap_memory_growth_bytes": Target(5e6),
    "base_version_ratio": Target(0.01),
    "base_checkpoint_ratio": Target(0.03),
}
ADAPTED = {"factory": "adapted_mlp", "args": {"widths": [384, 2048, 2048, 2048, 2048, 10], "rank": 3}}
_MOMENTS = 2


def measure(results: Results, form: Form, bootstrap: str) -> None:  # noqa: ARG001 - every section takes the same
    """Measure the section."""
    swaps, rounds = size(form)
    results.title(f"swaps: {swaps * rounds} of an MLP of 13 million frozen parameters with adapters of rank 3")
    with tempfile.TemporaryDirectory(dir=".", prefix="swaps-") as folder:
        root = Path(folder).resolve()
        published = VersionPublisher(root, ADAPTED, 384, {"max_delay": "1ms"})
        found = under_load(root, published, 384, form)
        manifest = published.versions.manifest(max(published.versions.numbers()))
        assert manifest.base is not None
        version = published.versions.size_bytes(manifest.number)
        full = version + bases_in(root / "var").file(manifest.base).stat().st_size
        weights = published.versions.weights(manifest)
    first, last = found.resident
    results.add("base_swap_failed", float(found.refused.total()))
    results.add("base_swap_added_p99_seconds", found.added_p99)
    results.add("base_swap_memory_growth_bytes", last - first, f"of {first / 1e6:.0f} MB")
    results.add("base_version_ratio", version / full, f"{version / 1e3:.0f} kB of {full / 1e6:.0f} MB")
    moments = {f"{n}.{name}": torch.zeros_like(value) for n in range(_MOMENTS) for name, value in weights.items()}
    checkpoint = sum(len(piece) for piece in pieces_of({**weights, **moments}))
    results.add("base_checkpoint_ratio", checkpoint / full, "weights and two moments")
