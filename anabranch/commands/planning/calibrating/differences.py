"""What differs between a calibration and the pipeline."""

from anabranch.commands.planning.calibrating.synthetic_events import Synthetic
from anabranch.commands.planning.calibrating.synthetic_ingest import KAFKA_PYTHON
from anabranch.commands.planning.constants import Load
from anabranch.config.model import Pipeline
from anabranch.core.net import is_loopback
from ingest.registry_settings import REGISTRY_FORMATS

_SAME = 0.02
"""Sizes that differ by a smaller part are the same."""


def differences_of(pipeline: Pipeline, load: Load, messages: Synthetic) -> list[str]:
    """Return what differs between the calibration and the pipeline."""
    differences = list[str]()
    if pipeline.stream.format in REGISTRY_FORMATS:
        differences.append(f'events came as JSON, not as "{pipeline.stream.format}"')
    if load.event_bytes is not None and abs(messages.event_bytes - load.event_bytes) > _SAME * load.event_bytes:
        differences.append(f"an event of this schema takes {messages.event_bytes:,.0f} bytes, not {load.event_bytes:,}")
    if pipeline.stream.client != KAFKA_PYTHON:
        differences.append(f'"{pipeline.stream.client}" did not read: {KAFKA_PYTHON} parsed messages, without a broker')
    if pipeline.stream.labels is not None:
        differences.append("labels came with their events")
    if pipeline.replay.redis is not None:
        differences.append("the tier in Redis was left out")
    if pipeline.learner.replicas > 1 or pipeline.learner.mesh is not None:
        differences.append("one process trained; more replicas raise the rate of steps by their number at most")
    if any(is_loopback(server.strip().rpartition(":")[0]) for server in pipeline.stream.bootstrap_servers.split(",")):
        differences.append("the broker has cores of this host, too: --cores plans with those that it leaves")
    if pipeline.storage is not None:
        differences.append("nothing was uploaded to [storage]")
    return differences
