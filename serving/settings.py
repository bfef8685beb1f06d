"""The section `[serving]` of `pipeline.toml`. Imports no web framework and no torch."""

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, ByteSize, Field, model_validator

from anabranch.core.durations import Duration
from anabranch.core.errors import SettingsError
from anabranch.core.net import is_loopback
from anabranch.core.settings import DeviceName, Section
from anabranch.ingest.settings.labels import TopicName
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.learner.settings.pipeline import AnswersSettings, ServedSettings
from anabranch.learner.settings.storage import StorageSettings

RequestLogLevel = Literal["none", "errors", "all"]
PrecisionName = Literal["fp32", "tf32", "bf16", "fp16"]
LinkName = Annotated[str, Field(min_length=1, max_length=40)]


def _of_the_web(address: str) -> str:
    """Return the address; a browser would run the code of one that begins with `javascript:`."""
    if not re.fullmatch(r"https?://\S+", address):
        raise ValueError("it must begin with http:// or https://, and have no space")
    return address


class TlsSettings(Section):
    """Paths of PEM files, relative to the config's folder; both or neither."""

    cert: Path | None = None
    """Certificate chain."""
    key: Path | None = None
    """Private key."""

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together")
        return self


class AnswerLogSettings(Section):
    """What HTTP and gRPC answered goes to a topic, as CloudEvents. Needs the extra `fast`."""

    topic: TopicName
    """Topic of the log, at the brokers of `[stream]`."""
    sample: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the requests to log, chosen by a hash of their id."""
    features: bool = False
    """Whether to log the features too, as they were sent."""


class ServingSettings(ServedSettings):
    """Predictions over HTTP."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on; off loopback the tokens are required."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one."""
    grpc_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """Port of `host` for the Open Inference Protocol over gRPC; 0 takes a free one, absent: none. Needs the extra
    `grpc`."""
    versions_from: Literal["state_dir", "storage"] = "state_dir"
    """Where versions come from: the learner of the same `state_dir`, or a learner elsewhere through `[storage]`, copied
    to `state_dir`."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that answer on the port, each with its own model, queue and limits."""
    max_queue: Annotated[int, Field(ge=1)] = 4096
    """Rows that may wait; requests beyond them are answered 429 with Retry-After."""
    max_body_bytes: Annotated[ByteSize, Field(ge=1024)] = ByteSize(16_000_000)
    """Requests with a longer body are answered 413."""
    max_held_bytes: Annotated[ByteSize, Field(ge=1024)] = ByteSize(256_000_000)
    """Bytes of request bodies that may be held at a time; requests beyond them are answered 429 with Retry-After."""
    drain: Duration = timedelta(0)
    """How long to answer requests after SIGTERM while `/v2/health/ready` says 503, until every balancer has noticed."""
    device: DeviceName = "auto"
    """Device of the served model; `auto` is CUDA if there is one, else the CPU."""
    precision: PrecisionName = "fp32"
    """Arithmetic of the served model: `fp32`, or the less exact `tf32` (CUDA), `fp16` (CUDA) or `bf16`."""
    graphs: bool = False
    """Whether a CUDA device runs the model as CUDA graphs; batches are padded to 1, 2, 4 ... `max_batch` rows."""
    shadow: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of the requests that the newest unserved version answers too, for comparison; 0: none."""
    baseline: str = ""
    """State directory, relative to this file, of a baseline pipeline whose accuracy the dashboard also plots."""
    links: Annotated[dict[LinkName, Annotated[str, AfterValidator(_of_the_web)]], Field(max_length=8)] = {}
    """Links in the dashboard's head: the text of each, and its address. For example the docs, and Grafana."""
    request_log: RequestLogLevel = "errors"
    """Requests that are logged, one JSON object a line, at most a hundred a second: `none`, `errors` (statuses from 500
    on) or `all`."""
    tls: TlsSettings = TlsSettings()
    """TLS certificate and key."""
    log: AnswerLogSettings | None = None
    """Log of the answers in a topic; absent: none."""

    @model_validator(mode="after")
    def _a_body_can_be_held(self) -> Self:
        if self.max_held_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_held_bytes = {self.max_held_bytes} is less than max_body_bytes = {self.max_body_bytes}"
            )
        return self

    @model_validator(mode="after")
    def _workers_share_the_port_of_grpc(self) -> Self:
        if self.grpc_port is not None and self.workers > 1 and self.grpc_port in (0, self.port):
            raise ValueError(f"grpc_port = {self.grpc_port} with workers = {self.workers}: name a port for all workers")
        return self

    @model_validator(mode="after")
    def _a_token_off_loopback(self) -> Self:
        if not is_loopback(self.host):
            for name in ("read", "admin"):
                if not getattr(self.tokens, name).get_secret_value():
                    raise ValueError(f'tokens.{name} is required because host "{self.host}" is not loopback')
        return self


def check_versions_from(serving: ServingSettings, storage: StorageSettings | None) -> None:
    """Raise SettingsError where serving would wait for versions in a state directory that no learner writes there."""
    if storage is not None and storage.mode == "only" and serving.versions_from == "state_dir":
        raise SettingsError(
            'storage.mode = "only" publishes no version into state_dir, and serving.versions_from = "state_dir" waits '
            'for one there: set serving.versions_from = "storage"'
        )


def answer_conflicts(serving: ServingSettings, stream: StreamSettings, name: str) -> Iterator[tuple[str, str]]:
    """Yield what is wrong between `[serving.stream]` or `[serving.log]` and `[stream]`: the key to change, below
    `[serving]`, and a sentence."""
    if serving.log is not None:
        yield from _log_conflicts(serving.log.topic, serving.stream, stream)
    answers = serving.stream
    if answers is None:
        return
    letters = stream.dead_letter_topic
    for topics, what in ((stream.topics, "stream.topics"), (stream.label_topics, "stream.labels.topics")):
        if answers.output in topics:
            yield (
                "stream.output",
                f'serving.stream.output = "{answers.output}" is one of {what}: the learner would read answers',
            )
    if letters == answers.output or letters in answers.topics:
        key = "output" if letters == answers.output else "topics"
        yield f"stream.{key}", f'serving.stream.{key} names "{letters}", the topic of dead letters; choose another'
    if answers.group_of(name) == stream.group_id:
        what = "stream.group_id, whose offsets are those of the learner; choose another"
        yield "stream.group_id", f'serving.stream.group_id = "{stream.group_id}" is {what}'


def _log_conflicts(topic: str, answers: AnswersSettings | None, stream: StreamSettings) -> Iterator[tuple[str, str]]:
    others = {
        "stream.topics": stream.topics,
        "stream.labels.topics": stream.label_topics,
        "stream.dead_letter_topic": (stream.dead_letter_topic,),
    }
    if answers is not None:
        others |= {"serving.stream.topics": answers.topics, "serving.stream.output": (answers.output,)}
    for key, topics in others.items():
        if topic in topics:
            yield "log.topic", f'serving.log.topic = "{topic}" is of {key} too; choose a topic for the log alone'
