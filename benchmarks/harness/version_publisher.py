"""Versions of a model, published into a folder as a learner would, without a learner."""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.stream import SchemaSettings
from anabranch.learner.model.growing.pool import Pool, pool_of
from anabranch.learner.model.trained_set import trained_state, write_base
from anabranch.learner.settings.model import ModelSettings
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.stream.trained_through import PartitionProgress
from anabranch.learner.versions.format import Manifest, Verdict, Versions, reference_to
from benchmarks.harness import models
from benchmarks.harness.pipeline import extended_model, toml

NAME = "bench"
_KEPT = 5


class VersionPublisher:
    """A folder with a pipeline file, its model's code, and versions that differ in their weights."""

    def __init__(
        self,
        folder: Path,
        model: Mapping[str, Any],
        schema: int | Mapping[str, Any],
        serving: Mapping[str, Any],
        parts: int = 0,
    ) -> None:
        """Write the pipeline file.

        Args:
            folder: where it is written.
            model: `[model]`, whose factory is one of `harness/models.py` or an import string.
            schema: `[schema]`, or the number of floats of the one feature, with ten classes.
            serving: `[serving]`.
            parts: how many experts the model has.
        """
        shutil.copy(models.__file__, folder / "benchmark_models.py")
        if isinstance(schema, int):
            features = {"x": {"dtype": "float32", "shape": [schema]}}
            schema = {"features": features, "label": {"name": "y", "classes": 10}}
        factory = model["factory"] if ":" in model["factory"] else f"benchmark_models:{model['factory']}"
        document = {
            "name": NAME,
            "stream": {"topics": ["events"]},
            "schema": schema,
            "model": {**model, "factory": factory},
            "learner": {"strategy": {"name": "experts", "most": parts} if parts else "none"},
            "serving": {"port": 0, "device": "cpu", **serving},
        }
        (folder / "pipeline.toml").write_text(toml(document))
        self._schema = Schema(SchemaSettings.model_validate(schema))
        self._model = reference_to(ModelSettings.model_validate(document["model"]))
        module = extended_model(document, folder)
        if (pool := pool_of(module)) is not None:
            _fill(pool, parts)
        self._weights: dict[str, Tensor] = trained_state(module)
        self._parts = parts
        self.versions = Versions(folder / "var" / "versions")
        self.versions.base = write_base(bases_in(folder / "var"), module)
        self.number = 0

    def publish(self) -> int:
        """Publish one more version, and delete an old one; return its number."""
        self.number += 1
        with torch.no_grad():
            next(iter(self._weights.values())).mul_(0.999)
        manifest = Manifest(
            number=self.number,
            generation=1,
            parent=self.number - 1 or None,
            time=time.time(),
            step=self.number,
            trained_through={
                "events:0": PartitionProgress(self.number, incarnation=0, time_ms=int(time.time() * 1000))
            },
            metrics={},
            schema=self._schema.digest,
            encoders=self._schema.encoders,
            model=self._model,
            parts=self._parts,
            files={},
            base=self.versions.base,
        )
        self.versions.write(self._weights, manifest, Verdict("pass"))
        self.versions.delete(self.number - _KEPT)
        return self.number

    def served(self) -> int | None:
        """Return the number of the version that is served."""
        return self.versions.state().serving


def _fill(pool: Pool, parts: int) -> None:
    """Give a pool experts with random weights, of two of ten classes each, and a router of as many prototypes."""
    with torch.no_grad():
        for part in range(parts):
            pool.open_to([2 * part % 10, 2 * part % 10 + 1])
            for name, value in pool.named_parameters():
                if "open_first" in name or "open_second" in name:
                    value.normal_(std=0.1)
            if part < parts - 1:
                pool.freeze_open()
    owner = torch.arange(2 * parts) // 2
    weight = torch.randn(2 * parts, pool.router.weight.shape[1])
    pool.router.set(weight, torch.zeros(2 * parts), owner, torch.arange(2 * parts) % 10)
