"""Answers by other ways than HTTP, each with an extra that is imported only where it is configured."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.core.errors import SettingsError
from anabranch.core.extras import needs
from anabranch.serving.http.request_body import BodyReader
from anabranch.serving.inference.service import Service
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.settings import ServingSettings

if TYPE_CHECKING:
    from anabranch.serving.grpc.server import GrpcServer
    from anabranch.serving.stream.answer_log import AnswerLog
    from anabranch.serving.stream.answer_stream import AnswerStream


def grpc_server(
    service: Service, settings: ServingSettings, metrics: ServingMetrics, bodies: BodyReader, folder: Path
) -> "GrpcServer | None":
    """Return the server of `serving.grpc_port`; None without one. Raises SettingsError where its extra is missing."""
    if settings.grpc_port is None:
        return None
    try:
        from anabranch.serving.grpc.server import GrpcServer
    except ImportError as exc:
        raise SettingsError(
            f'serving.grpc_port needs grpcio ({exc}): pip install "anabranch[grpc]", or take the key out'
        ) from exc
    return GrpcServer(service, settings, metrics, bodies, folder)


def answer_stream(
    deployment: Deployment,
    settings: ServingSettings,
    service: Service,
    metrics: ServingMetrics,
    on_error: Callable[[BaseException], None],
    instance: str,
) -> "AnswerStream | None":
    """Return what answers `[serving.stream]`; None without it. Raises SettingsError where its extra is missing."""
    if settings.stream is None:
        return None
    with needs("[serving.stream]", "confluent-kafka", "fast", "take the section out"):
        from anabranch.serving.stream.answer_stream import AnswerStream
    return AnswerStream(deployment, settings, service, metrics.stream, on_error, instance)


def answer_log(
    deployment: Deployment, settings: ServingSettings, metrics: ServingMetrics, instance: str
) -> "AnswerLog | None":
    """Return the log of `[serving.log]`; None without it. Raises SettingsError where its extra is missing."""
    if settings.log is None:
        return None
    with needs("[serving.log]", "confluent-kafka", "fast", "take the section out"):
        from anabranch.serving.stream.answer_log import AnswerLog
    return AnswerLog(deployment, settings.log, metrics.log, instance)
