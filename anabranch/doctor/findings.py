"""What doctor can find, each with its level and how to fix it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from anabranch.config.loader import Config

Level = Literal["ok", "info", "warning", "problem"]


class Kind(NamedTuple):
    """What all findings of a kind share; `fix` is filled in with the finding's own values."""

    level: Level
    fix: str
    unreachable: bool = False
    """Whether it is about something outside that cannot be reached: exit code 3 rather than 2."""


class Finding(msgspec.Struct, frozen=True):
    """One result of a check."""

    level: Level
    matter: str
    """One sentence."""
    fix: str = ""
    """One sentence with the command or the key."""
    kind: str = ""
    """The name in `FINDINGS`; empty when all is well."""
    unreachable: bool = False


FINDINGS: dict[str, Kind] = {
    "config.unreadable": Kind("problem", 'Name the file with -c FILE, or write an example with "anabranch init DIR".'),
    "config.invalid": Kind("problem", "Fix this key where it stands; docs/reference.md lists them all."),
    "schema.invalid": Kind("problem", "Fix [schema] in {path}, or choose another stream.format."),
    "install.torch": Kind("problem", "Install torch anew: pip install --force-reinstall torch."),
    "install.crc32c": Kind("warning", "Install it: pip install crc32c."),
    "install.extra": Kind("problem", "Install it: pip install 'anabranch[{extra}]'."),
    "limit.files": Kind("warning", 'Raise it before the start: "ulimit -n {wanted}", or LimitNOFILE in a unit file.'),
    "device.missing": Kind("problem", 'Set {key} = "auto", or install a torch that has the device.'),
    "device.precision": Kind("problem", 'Set learner.precision = "auto".'),
    "device_sharing.refinement": Kind("problem", "Take the key out, or give the learner a device that can do it."),
    "device_sharing.mps": Kind("warning", "Start the daemon: nvidia-cuda-mps-control -d. Or take the key out."),
    "device.memory": Kind("problem", "Lower replay.device_bytes or replay.capacity."),
    "model.factory": Kind("problem", "Fix the function that model.factory names, or model.args."),
    "model.output": Kind("problem", "Fix the model's forward, model.task or [schema]."),
    "model.strategy": Kind("problem", "Fix learner.strategy."),
    "model.optimizer": Kind("problem", "Fix learner.optimizer."),
    "model.embedding": Kind("problem", "Set model.embedding to the name of a module that forward calls."),
    "model.checkpointing": Kind("problem", "Fix learner.activation_checkpointing."),
    "replay.policy": Kind("problem", "Fix replay.admission or replay.sampling."),
    "learner.replicas": Kind("problem", "Fix learner.replicas, or what it is told not to go with."),
    "learner.alone": Kind("info", "Take learner.{key} out, or raise learner.replicas or learner.hosts."),
    "learner.hosts": Kind("problem", "Set learner.interface to the one that leads to the other hosts."),
    "model.crash": Kind("problem", 'Run it by hand in the config\'s folder: python -c "import {module}".'),
    "model.hang": Kind("problem", "Find out what it waits for, or give it more time with --timeout."),
    "broker.name": Kind("problem", "Fix stream.bootstrap_servers, or the name service.", unreachable=True),
    "broker.connect": Kind(
        "problem", "Start the broker, or fix stream.bootstrap_servers or the firewall.", unreachable=True
    ),
    "broker.partly": Kind("warning", "Take it out of stream.bootstrap_servers, or start it."),
    "broker.tls": Kind(
        "problem", "Fix security.protocol in [stream.properties], or the port in stream.bootstrap_servers."
    ),
    "broker.certificate": Kind(
        "problem", "Set ssl.ca.location in [stream.properties] to the authority that signed it, or renew it."
    ),
    "broker.files": Kind("problem", "Fix the ssl.* paths in [stream.properties]."),
    "broker.credentials": Kind(
        "problem", "Fix sasl.username, sasl.password and sasl.mechanism in [stream.properties].", unreachable=True
    ),
    "broker.protocol": Kind(
        "problem", "Fix security.protocol and the rest of [stream.properties], or the port.", unreachable=True
    ),
    "broker.unseen": Kind(
        "warning", "Nothing, if the pipeline itself reads; doctor and produce take what kafka-python can do."
    ),
    "topic.missing": Kind(
        "problem", 'Make it: "anabranch produce --create-topic FILE", or fix stream.{key}.', unreachable=True
    ),
    "topic.denied": Kind("problem", "Let the user of [stream.properties] {right} it.", unreachable=True),
    "topic.retention": Kind("warning", "Raise the topic's retention.ms, or set stream.start later."),
    "message.none": Kind("info", 'Send some: "anabranch produce FILE".'),
    "message.codec": Kind(
        "problem", "Install it: pip install 'anabranch[codecs]'; or set stream.client = \"confluent\"."
    ),
    "message.unusable": Kind("problem", "Fix whoever writes to the topic, or [schema] and stream.format."),
    "message.unlabelled": Kind("warning", 'Send labels, or set stream.unlabelled = "store".'),
    "message.unknown": Kind("info", "Nothing, if they are not meant to be features."),
    "redis.connect": Kind("problem", "Start it, or fix replay.redis.url.", unreachable=True),
    "redis.away": Kind("warning", "Start it, or fix replay.redis.url; the store does without it meanwhile."),
    "redis.refused": Kind("problem", "Fix replay.redis.url, or the rights of its user on anabranch:*."),
    "redis.memory": Kind("warning", 'Raise it: "CONFIG SET maxmemory {wanted}"; or lower replay.redis.bytes.'),
    "redis.policy": Kind(
        "warning", 'Set it to noeviction, or add replay.disk: "CONFIG SET maxmemory-policy noeviction".'
    ),
    "redis.unseen": Kind("info", "Let the user of replay.redis.url say INFO, or nothing."),
    "state.unwritable": Kind("problem", "Fix the rights of the directory, or set state_dir."),
    "state.full": Kind("problem", "Make room, set state_dir elsewhere, or lower replay.device_bytes or replay.disk."),
    "state.filling": Kind("warning", "Make room, or lower checkpoints.keep, versions.keep and versions.keep_hourly."),
    "state.memory": Kind("warning", "Set state_dir to a disk."),
    "state.network": Kind("warning", "Set state_dir to a local disk, unless its locks and fsync can be relied upon."),
    "state.sync": Kind("problem", "Set state_dir to a file system that can fsync."),
    "state.lock": Kind("problem", "Set state_dir to a file system that has flock."),
    "state.exposed": Kind(
        "warning", "chmod 700 {path}, by its owner; or set state_dir to a folder for the state alone."
    ),
    "state.held": Kind("info", "Nothing; stop that learner before another is started."),
    "checkpoint.damaged": Kind(
        "warning", "Nothing, when an older checkpoint is whole; else move {path} away to begin anew."
    ),
    "checkpoint.schema": Kind("problem", "Put [schema] back, or begin anew by moving {path} away."),
    "checkpoint.misfit": Kind(
        "problem", "Put the settings of the checkpoint back, or begin anew by moving the checkpoints away."
    ),
    "version.damaged": Kind("warning", 'Nothing, serving takes none such; see "anabranch versions show {number}".'),
    "version.model": Kind("warning", "Put [model] back, or let the learner publish a version of it."),
    "version.schema": Kind("info", "Nothing, when [schema] was changed on purpose: serving waits for newer ones."),
    "port.taken": Kind("problem", "Stop the program that has it, or set {key} to another port."),
    "port.address": Kind("problem", "Set {key} to an address of this machine and a port above 1023."),
    "port.clash": Kind("problem", "Set serving.port or learner.status to another port."),
    "tls.unreadable": Kind("problem", "Fix serving.tls.cert and serving.tls.key."),
    "tls.mismatch": Kind("problem", "Set serving.tls.key to the key that the certificate was made for."),
    "tls.expired": Kind("problem", "Renew the certificate."),
    "tls.expiring": Kind("warning", "Renew the certificate."),
    "clock.ahead": Kind("warning", "Set this machine's clock, or that of whoever writes to the topic (ntp)."),
    "clock.files": Kind("warning", "Set the clock of the file server and of this machine by the same source (ntp)."),
    "check.slow": Kind("problem", "Try again with a longer --timeout.", unreachable=True),
}


def ok(matter: str) -> Finding:
    """Return that all is well."""
    return Finding("ok", matter)


def found(kind: str, matter: str, **values: object) -> Finding:
    """Return a finding of a kind of `FINDINGS`, whose `fix` takes `values`."""
    level, fix, unreachable = FINDINGS[kind]
    return Finding(level, matter, fix.format(**values), kind, unreachable)


@dataclass
class Patient:
    """The pipeline that is looked at, and what earlier checks have learned of it."""

    path: Path
    timeout: float
    """Seconds that a check may take."""
    pipeline: Config | None = None
    """None while the config is unknown or unusable."""
    secrets: set[str] = field(default_factory=set)
    model_bytes: int = 0
    """Size of the weights; 0 while it is unknown."""

    @property
    def config(self) -> Config:
        """The config; only for checks that need a part of it."""
        assert self.pipeline is not None
        return self.pipeline
