"""All checks: one line for each, in the order in which they run. Their code is in `preflight` of each package."""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from anabranch.config.loader import Config
from anabranch.core.preflight import Finding
from anabranch.ingest.preflight import broker, history, schema
from anabranch.learner.preflight import device, state_dir, storage
from anabranch.learner.status.report import read_report
from anabranch.replay import preflight as replay
from anabranch.runtime import preflight as runtime
from anabranch.runtime.model_process import Trial, try_model
from anabranch.serving import preflight as serving


class Check(NamedTuple):
    """A check, and the sections of the config without which it cannot be made."""

    name: str
    run: Callable[[Config, Trial], Iterable[Finding]]
    needs: Sequence[str]


def _history_left(path: Path) -> timedelta | None:
    """Return the time that the learner of a state directory expects for the history; None: it has not begun."""
    report = read_report(path)
    if report is None or report.backfill is None:
        return None
    return timedelta(seconds=0.0 if report.backfill.done else report.backfill.seconds_left or 0.0)


_MODEL = ("schema", "model", "learner", "replay", "serving")
_VERSIONS = ("state_dir", "schema", "model", "serving", "storage")
_STATE = ("state_dir", "learner", "replay", "checkpoints", "versions", "schema")

CHECKS: Sequence[Check] = (
    Check("install", lambda of, _: runtime.check_install(of.pipeline), ("tracing", "mlflow", "lineage")),
    Check("install", lambda of, _: schema.check_install(of.pipeline.stream), ("stream",)),
    Check("install", lambda of, _: replay.check_install(of.pipeline.replay), ("replay",)),
    Check("limits", lambda *_: runtime.check_limits(), ()),
    Check("schema", lambda of, _: schema.check_schema(of.pipeline.stream, of.pipeline.events), ("schema", "stream")),
    Check("model", lambda of, trial: try_model(of, trial), _MODEL),
    Check("replicas", lambda of, _: state_dir.check_replicas(of.pipeline.learner), ("learner",)),
    Check("device", lambda of, _: device.check_device(of.pipeline.device), ("device",)),
    Check("broker", lambda of, _: broker.check_broker(of.pipeline.stream, of.pipeline.events), ("stream", "schema")),
    Check(
        "answers", lambda of, _: serving.check_stream(of.pipeline.serving, of.pipeline.stream), ("serving", "stream")
    ),
    Check(
        "registry", lambda of, _: schema.check_registry(of.pipeline.stream, of.pipeline.events), ("stream", "schema")
    ),
    Check(
        "history",
        lambda of, _: history.check_history(of.pipeline.stream, of.pipeline.events, _history_left(of.state_dir)),
        ("stream", "schema"),
    ),
    Check("redis", lambda of, _: replay.check_redis(of.pipeline.replay, of.pipeline.name), ("replay", "name")),
    Check("storage", lambda of, _: storage.check_storage(of.pipeline.storage, of.state_dir), ("storage", "state_dir")),
    Check("state", lambda of, trial: state_dir.check_state(of.pipeline, trial.model_bytes, trial.base_bytes), _STATE),
    Check("state", lambda of, _: runtime.check_private(of), ("state_dir", "lineage", "serving")),
    Check("checkpoints", lambda of, _: state_dir.check_checkpoints(of.pipeline), ("state_dir", "schema")),
    Check("versions", lambda of, _: serving.check_versions(of.pipeline, of.pipeline.serving), _VERSIONS),
    Check(
        "ports",
        lambda of, _: serving.check_port(of.pipeline.serving, of.pipeline.learner.status, of.state_dir),
        ("serving", "learner", "state_dir"),
    ),
    Check("ports", lambda of, _: state_dir.check_status(of.pipeline), ("learner", "state_dir")),
    Check("tls", lambda of, _: serving.check_tls(of.pipeline.serving.tls, of.folder), ("serving",)),
)
