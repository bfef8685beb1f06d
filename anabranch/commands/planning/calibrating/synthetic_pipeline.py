"""The learner or serving of a pipeline, as a process of a calibration.

Both take the settings of the pipeline, but the state directory, the addresses and the stream. Nothing outside the
folder of the calibration is written, and a teacher's server alone is asked.
"""

import argparse
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import msgspec

from anabranch.config.loader import Config
from anabranch.config.model import Pipeline
from anabranch.core.stream_secret import StreamSecret
from anabranch.runtime.daemon import enter, exit_at_once
from ingest.config import StreamSettings
from ingest.reader.reader import BlockReader
from ingest.registry_settings import REGISTRY_FORMATS
from serving.config import TlsSettings, Tokens

PROGRAM = ("-m", "anabranch.commands.planning.calibrating.synthetic_pipeline")
_ANY_DROP = 1e9
_INGEST = ("-m", "anabranch.commands.planning.calibrating.synthetic_ingest")


class CalibrationSpec(msgspec.Struct, frozen=True):
    """What of the settings a calibration changes, and the synthetic stream."""

    state_dir: str
    messages: str
    """File with the messages."""
    rate: float
    """Messages a second."""
    flood: str
    """From when this file exists on, messages come as fast as they are read."""
    status: str
    """Address of the learner's metrics."""
    checkpoint_seconds: float
    publish_seconds: float
    """Longest times between checkpoints and between versions, so that there are some."""
    store_fraction: float
    """Size of the store, as a fraction of the pipeline's."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the two until the end of stdin, and return the exit code."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--part", choices=("learner", "serving"), required=True)
    parser.add_argument("--spec", type=Path, required=True)
    options, others = parser.parse_known_args(arguments)
    spec = msgspec.json.decode(options.spec.read_bytes(), type=CalibrationSpec)
    work = {"learner": _learn, "serving": _serve}[options.part]

    def run(config: Config, stop: threading.Event) -> None:
        work(Config(calibrated(config.pipeline, spec), config.path), spec, stop)

    return enter(options.part, "One part of a calibration.", run, others)


def calibrated(pipeline: Pipeline, spec: CalibrationSpec) -> Pipeline:
    """Return the settings of the calibration."""
    learner = {"replicas": 1, "mesh": None, "profile": None, "standby": False, "status": spec.status}
    serving = pipeline.serving.model_copy(
        update={
            "host": "127.0.0.1",
            "port": 0,
            "grpc_port": None,
            "workers": 1,
            "tokens": Tokens(),
            "tls": TlsSettings(),
            "versions_from": "state_dir",
            "canary": 0.0,
            "baseline": "",
        }
    )
    replay, part = pipeline.replay, spec.store_fraction
    sizes = {"capacity": max(1, int(replay.capacity * part)), "device_bytes": int(replay.device_bytes * part)}
    disk = replay.disk and replay.disk.model_copy(update={"bytes": max(1_000_000, int(replay.disk.bytes * part))})
    if replay.redis is not None and disk is None:
        sizes["device_bytes"] += int(replay.redis.bytes * part)
    return pipeline.model_copy(
        update={
            "state_dir": Path(spec.state_dir),
            "stream": calibrated_stream(pipeline.stream),
            # Labels are random: the gate would hold versions back.
            "gate": pipeline.gate.model_copy(update={"max_drop_new": _ANY_DROP, "max_drop_old": _ANY_DROP}),
            "learner": pipeline.learner.model_copy(update=learner),
            "replay": replay.model_copy(update={**sizes, "disk": disk, "redis": None}),
            "checkpoints": pipeline.checkpoints.model_copy(
                update={"every": min(pipeline.checkpoints.every, timedelta(seconds=spec.checkpoint_seconds))}
            ),
            "versions": pipeline.versions.model_copy(
                update={"publish_every": min(pipeline.versions.publish_every, timedelta(seconds=spec.publish_seconds))}
            ),
            "storage": None,
            "serving": serving,
        }
    )


def calibrated_stream(stream: StreamSettings) -> StreamSettings:
    """Return a stream of one topic, without a registry, files or late labels."""
    changes = {"topics": stream.topics[:1], "registry": None, "backfill": None, "labels": None, "envelope": "none"}
    form = "json" if stream.format in REGISTRY_FORMATS else stream.format
    return stream.model_copy(update={**changes, "format": form, "start": "earliest"})


def synthetic_source(pipeline: Pipeline, spec: CalibrationSpec) -> BlockReader:
    """Return the reader of the synthetic stream."""
    program = (*_INGEST, "--messages", spec.messages, "--rate", str(spec.rate), "--flood", spec.flood)
    stream = calibrated_stream(pipeline.stream)
    return BlockReader(stream, pipeline.events, pipeline.gate.hold_out(StreamSecret.fixed(0)), program)


def _learn(config: Config, spec: CalibrationSpec, stop: threading.Event) -> None:
    from learner.__main__ import deployment_of
    from learner.run import learn

    source = synthetic_source(config.pipeline, spec)
    try:
        learn(deployment_of(config), stop, source=source)
    finally:
        source.close()


def _serve(config: Config, _spec: CalibrationSpec, stop: threading.Event) -> None:
    from serving.__main__ import deployment_of
    from serving.server import serve

    serve(deployment_of(config), config.pipeline.serving, stop)


if __name__ == "__main__":
    exit_at_once(main(sys.argv[1:]))
