"""The example pipeline laid out for the demo: unchanged files, and everything else by the environment."""

import json
import os
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from anabranch.commands.init.command import write_example
from anabranch.config.loader import Config, load_config
from anabranch.config.overrides import ENVIRONMENT_PREFIX
from anabranch.learner.status.report import REPORT as LEARNER_REPORT
from anabranch.runtime.child_environment import without_admin_token
from anabranch.runtime.child_process import Part
from anabranch.runtime.embedded_broker import free_port
from anabranch.runtime.supervisor import pipeline_parts

_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""The demo's models are so small that more threads only get into each other's way."""

_DECIDING = {
    "VERSIONS__PUBLISH_EVERY": "1s",
    "GATE__HOLDOUT_FRACTION": 0.2,
    "GATE__HOLDOUT_ROWS": 4000,
    "GATE__MIN_ROWS": 3500,
    "GATE__MAX_DROP_NEW": 0.25,
    "GATE__MAX_DROP_OLD": 0.1,
}
"""Settings by which the gate of a watched demo decides.

Versions are inconclusive until every class was held out. Later ones pass, although the stream changes its class every
few seconds, and those of a poisoned phase fail.
"""


@dataclass(frozen=True)
class DemoPipeline:
    """The paths and processes of a demo."""

    config: Config
    parts: tuple[Part, ...]
    topics: Mapping[str, int]
    """Topics that the demo makes, with their numbers of partitions."""
    baseline_state_dir: Path | None

    @property
    def url(self) -> str:
        """Where serving answers."""
        return f"http://127.0.0.1:{self.config.pipeline.serving.port}"


def lay_out(
    folder: Path, bootstrap: str, port: int, *, own_broker: bool, baseline: bool, endless: bool
) -> DemoPipeline:
    """Write the example into `folder`, and return what is to run there.

    On a broker of the user's own (`own_broker`) the topics get names that nobody else has. An `endless` stream is
    watched, so its gate gets what it takes to decide soon: more held-out events and fewer versions.
    """
    write_example(folder)
    stem = f"anabranch-demo-{uuid.uuid4().hex[:8]}." if own_broker else ""
    events, dead, baseline_dead = f"{stem}events", f"{stem}events.dead", f"{stem}events.baseline.dead"
    overrides = {
        "STREAM__BOOTSTRAP_SERVERS": bootstrap,
        "STREAM__TOPICS": [events],
        "STREAM__DEAD_LETTER_TOPIC": dead,
        "STREAM__GROUP_ID": f"{stem}anabranch-demo",
        "SERVING__HOST": "127.0.0.1",
        "SERVING__PORT": port,
        "LEARNER__STATUS": f"127.0.0.1:{_free_port_except(port)}",
        "STATE_DIR": str(folder / "var"),
    }
    if endless:
        overrides |= _DECIDING
    baseline_state_dir = folder / "baseline" if baseline else None
    if baseline_state_dir is not None:
        overrides["SERVING__BASELINE"] = str(baseline_state_dir)
    # torch leaves a cache among the temporary files; here it goes with the folder.
    environment = {**os.environ, **_THREADS, "TMPDIR": str(folder), **_variables(overrides)}
    config = load_config(folder / "pipeline.toml", environment)
    for directory in (config.state_dir, folder / "logs"):
        directory.mkdir()
    parts = [
        replace(part, environment={**environment, **part.environment}, output=folder / "logs" / f"{part.name}.log")
        for part in pipeline_parts(config, environment)
    ]
    topics = {events: 2, dead: 1}
    if baseline_state_dir is not None:
        baseline_state_dir.mkdir()
        changes = {
            "STREAM__DEAD_LETTER_TOPIC": baseline_dead,
            "STREAM__GROUP_ID": f"{stem}anabranch-demo-baseline",
            "LEARNER__STRATEGY": "none",
            "LEARNER__STATUS": "127.0.0.1:0",
            "VERSIONS__PUBLISH_EVERY": "5s",
            "STATE_DIR": str(baseline_state_dir),
        }
        topics[baseline_dead] = 1
        withheld = without_admin_token(config.pipeline.serving.tokens, environment)
        parts.append(_baseline(config, baseline_state_dir, {**environment, **_variables(changes), **withheld}))
    return DemoPipeline(config, tuple(parts), topics, baseline_state_dir)


def _baseline(config: Config, state_dir: Path, environment: Mapping[str, str | None]) -> Part:
    return Part(
        "baseline",
        (sys.executable, "-P", "-m", "anabranch.learner", "-c", str(config.path), "--supervised"),
        state_dir / LEARNER_REPORT,
        environment,
        config.folder / "logs" / "baseline.log",
    )


def _variables(overrides: Mapping[str, object]) -> dict[str, str]:
    # JSON's strings, numbers and lists are also TOML's.
    return {f"{ENVIRONMENT_PREFIX}{name}": json.dumps(value) for name, value in overrides.items()}


def _free_port_except(taken: int) -> int:
    while True:
        port = free_port()
        if port != taken:
            return port
