"""Versions of a model, published into a folder as a learner would, without a learner."""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import models
from benchmarks.harness.pipeline import toml
from ingest.config import SchemaSettings
from ingest.events.schema import Schema
from learner.model.factory import build_model
from learner.state_dir.trained_through import PartitionProgress
from learner.state_dir.version import Manifest, ModelReference, Verdict, Versions

NAME = "bench"
_KEPT = 5


class VersionPublisher:
    """A folder with a pipeline file, its model's code, and versions that differ in their weights."""

    def __init__(self, folder: Path, model: Mapping[str, Any], features: int, serving: Mapping[str, Any]) -> None:
        shutil.copy(models.__file__, folder / "benchmark_models.py")
        described = {
            "features": {"x": {"dtype": "float32", "shape": [features]}},
            "label": {"name": "y", "classes": 10},
        }
        self._model = ModelReference(f"benchmark_models:{model['factory']}", dict(model["args"]), "classification")
        document = {
            "name": NAME,
            "stream": {"topics": ["events"]},
            "schema": described,
            "model": {"factory": self._model.factory, "args": self._model.args},
            "serving": {"port": 0, "device": "cpu", **serving},
        }
        (folder / "pipeline.toml").write_text(toml(document))
        self._schema = Schema(SchemaSettings.model_validate(described)).digest
        self._weights: dict[str, Tensor] = build_model(self._model.factory, self._model.args, folder).state_dict()
        self.versions = Versions(folder / "var" / "versions")
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
            schema=self._schema,
            encoders={},
            model=self._model,
            files={},
        )
        self.versions.write(self._weights, manifest, Verdict("pass"))
        self.versions.delete(self.number - _KEPT)
        return self.number

    def served(self) -> int | None:
        """Return the number of the version that is served."""
        return self.versions.state().serving
