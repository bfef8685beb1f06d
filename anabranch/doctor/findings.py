"""What doctor can find, each with its level and how to fix it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from anabranch.config.loader import Config

Level = Literal["ok", "info", "warning", "problem"]


class FindingType(NamedTuple):
    """What all findings of a kind have in common; `fix` is a format string for values of the finding."""

    level: Level
    fix: str
    unreachable: bool = False
    """Whether it is about something outside that cannot be reached: exit code 3 rather than 2."""


class Finding(msgspec.Struct, frozen=True):
    """One result of a check."""

    level: Level
    message: str
    """One sentence."""
    fix: str = ""
    """One sentence with the command or the key."""
    kind: str = ""
    """The name in `FINDINGS`; empty when all is well."""
    unreachable: bool = False


FINDINGS: dict[str, FindingType] = {
    "config.unreadable": FindingType(
        "problem", 'Name the file with -c FILE, or write an example with "anabranch init DIR".'
    ),
    "config.invalid": FindingType("problem", "Fix this key where it is set; docs/reference.md lists all keys."),
    "schema.invalid": FindingType("problem", "Fix [schema] in {path}, or choose another stream.format."),
    "schema.padding": FindingType("warning", "Name in schema.features the tokenizer.json of the same model: {path}."),
    "install.torch": FindingType("problem", "Install torch again: pip install --force-reinstall torch."),
    "install.crc32c": FindingType("warning", "Install it: pip install crc32c."),
    "install.extra": FindingType("problem", "Install it: pip install 'anabranch[{extra}]'."),
    "compile.compiler": FindingType(
        "warning", "Install it: apt-get install gcc libc6-dev (g++ for a CPU). Or set learner.compile = false."
    ),
    "compile.folder": FindingType(
        "warning", "Set {key} to a folder that the learner can write, of a file system that is mounted exec."
    ),
    "limit.files": FindingType(
        "warning", 'Raise it before the start: "ulimit -n {needed}", or LimitNOFILE in a unit file.'
    ),
    "device.missing": FindingType("problem", 'Set {key} = "auto", or install a torch that has the device.'),
    "device.driver": FindingType(
        "problem", "Update NVIDIA's driver, or build the image with TORCH_INDEX; docs/deploy/gpu.md says which."
    ),
    "device.busy": FindingType("warning", "Stop what uses the device, or run doctor without --device."),
    "device.ledger": FindingType(
        "problem",
        "Lower replay.device_bytes or serving.workers, raise learner.replicas with learner.sharding, set "
        "device_sharing.memory, or give serving another device.",
    ),
    "device.precision": FindingType("problem", 'Set learner.precision = "auto".'),
    "device.unwatched": FindingType(
        "info", "Install it: pip install 'anabranch[gpu]'. Or set device.enabled = \"off\"."
    ),
    "device.failing": FindingType(
        "problem", "Drain the machine and reset the device; if it is so again, have it replaced."
    ),
    "device.warning": FindingType("warning", "See docs/operate/device-health.md; reset the device when it is idle."),
    "device_sharing.refinement": FindingType(
        "problem", "Take the key out, or give the learner a device that can do it."
    ),
    "device_sharing.mps": FindingType("warning", "Start the daemon: nvidia-cuda-mps-control -d. Or take the key out."),
    "device_sharing.sms": FindingType("warning", "Start the daemon: nvidia-cuda-mps-control -d. Or take the key out."),
    "device.memory": FindingType("problem", "Lower replay.device_bytes or replay.capacity."),
    "model.factory": FindingType("problem", "Fix the function that model.factory names, or model.args."),
    "model.output": FindingType("problem", "Fix the model's forward, model.task or [schema]."),
    "model.strategy": FindingType("problem", "Fix learner.strategy."),
    "model.optimizer": FindingType("problem", "Fix learner.optimizer."),
    "model.embedding": FindingType("problem", "Set model.embedding to the name of a module that forward calls."),
    "model.checkpointing": FindingType("problem", "Fix learner.activation_checkpointing."),
    "replay.policy": FindingType("problem", "Fix replay.admission or replay.sampling."),
    "learner.replicas": FindingType("problem", "Fix learner.replicas, or the setting that it conflicts with."),
    "learner.alone": FindingType("info", "Take learner.{key} out, or raise learner.replicas."),
    "model.crash": FindingType("problem", 'Run it by hand in the config\'s folder: python -c "import {module}".'),
    "model.hang": FindingType("problem", "Find out what it waits for, or give it more time with --timeout."),
    "broker.name": FindingType("problem", "Fix stream.bootstrap_servers, or the name service.", unreachable=True),
    "broker.connect": FindingType(
        "problem", "Start the broker, or fix stream.bootstrap_servers or the firewall.", unreachable=True
    ),
    "broker.partly": FindingType("warning", "Take it out of stream.bootstrap_servers, or start it."),
    "broker.tls": FindingType(
        "problem", "Fix security.protocol in [stream.properties], or the port in stream.bootstrap_servers."
    ),
    "broker.certificate": FindingType(
        "problem", "Set ssl.ca.location in [stream.properties] to the authority that signed it, or renew it."
    ),
    "broker.files": FindingType("problem", "Fix the ssl.* paths in [stream.properties]."),
    "broker.credentials": FindingType(
        "problem", "Fix sasl.username, sasl.password and sasl.mechanism in [stream.properties].", unreachable=True
    ),
    "broker.protocol": FindingType(
        "problem", "Fix security.protocol and the rest of [stream.properties], or the port.", unreachable=True
    ),
    "broker.advertised": FindingType(
        "problem", "Fix advertised.listeners of the broker, or the name service of this host.", unreachable=True
    ),
    "broker.unseen": FindingType(
        "warning", "Nothing, if the pipeline itself reads; doctor and produce take what kafka-python can do."
    ),
    "topic.missing": FindingType(
        "problem", 'Make it: "anabranch produce --create-topic FILE", or fix stream.{key}.', unreachable=True
    ),
    "topic.denied": FindingType("problem", "Let the user of [stream.properties] {right} it.", unreachable=True),
    "topic.retention": FindingType("warning", "Raise the topic's retention.ms, or set stream.start later."),
    "backfill.missing": FindingType("problem", "Fix stream.backfill.files, or copy the files there."),
    "backfill.unreadable": FindingType(
        "problem",
        "Fix the rights of the file or its folder, stream.backfill.storage, or the network.",
        unreachable=True,
    ),
    "backfill.schema": FindingType("problem", "Fix [schema] or [stream.backfill], or leave the file out."),
    "backfill.label": FindingType("problem", "Write the label into the files as a column, or fix schema.label.name."),
    "backfill.identity": FindingType("problem", "Fix stream.backfill.identity, or have the sink write these columns."),
    "backfill.line": FindingType("warning", "Nothing, if it may be dead-lettered; else fix [schema], or the file."),
    "backfill.damaged": FindingType("problem", "Write the file again, or leave it out of stream.backfill.files."),
    "backfill.others": FindingType("info", "Fix the ones above first, and run doctor again."),
    "backfill.until": FindingType("problem", 'Set stream.backfill.until to a time in the past, or to "stream".'),
    "backfill.retention": FindingType(
        "warning", "Raise the topic's retention.ms until the history is read, or read less of it."
    ),
    "message.none": FindingType("info", 'Send some: "anabranch produce FILE".'),
    "message.codec": FindingType(
        "problem", "Install it: pip install 'anabranch[codecs]'; or set stream.client = \"confluent\"."
    ),
    "message.unusable": FindingType("problem", "Fix the producer of the topic, or [schema] and stream.format."),
    "message.time": FindingType("warning", "Let the producer write milliseconds since 1970, or leave the time out."),
    "message.tombstone": FindingType(
        "warning", "Let the connector write the key as text, or erase with anabranch replay erase --key."
    ),
    "message.unlabelled": FindingType("warning", 'Send labels, or set stream.unlabelled = "store".'),
    "message.unknown": FindingType("info", "Nothing, if they are not meant to be features."),
    "registry.ca": FindingType("problem", "Set stream.registry.ca to a PEM file of certificates."),
    "registry.proxy": FindingType("problem", "Fix the variable, or unset it."),
    "registry.connect": FindingType("problem", "Start the registry, or fix stream.registry.url.", unreachable=True),
    "registry.credentials": FindingType(
        "problem", "Fix stream.registry.user and password, or token.", unreachable=True
    ),
    "registry.certificate": FindingType(
        "problem", "Set stream.registry.ca to the authority that signed it, or renew it."
    ),
    "registry.subject": FindingType("problem", "Set stream.registry.subject, or let the producer write first."),
    "registry.format": FindingType("problem", 'Set stream.format = "{written}", or stream.registry.subject.'),
    "registry.schema": FindingType("problem", "Fix the field in [schema]; one that may be missing needs a default."),
    "labels.key": FindingType(
        "warning",
        "Set stream.labels.key to the field that both messages have, or check what the producers write to it.",
    ),
    "labels.wait": FindingType("warning", "Raise stream.labels.wait: labels that come later are dropped."),
    "redis.connect": FindingType("problem", "Start or repair it, or fix replay.redis.url.", unreachable=True),
    "redis.away": FindingType(
        "warning", "Start or repair it, or fix replay.redis.url; the store does without it meanwhile."
    ),
    "redis.refused": FindingType("problem", "Fix replay.redis.url, or the rights of its user on anabranch:*."),
    "redis.full": FindingType("warning", "Raise its maxmemory, or lower replay.redis.bytes."),
    "redis.memory": FindingType("warning", 'Raise it: "CONFIG SET maxmemory {needed}"; or lower replay.redis.bytes.'),
    "redis.policy": FindingType(
        "warning", 'Set it to noeviction, or add replay.disk: "CONFIG SET maxmemory-policy noeviction".'
    ),
    "storage.unusable": FindingType("problem", "Fix storage.url or storage.options."),
    "storage.connect": FindingType(
        "problem", "Start it, or fix storage.url and storage.options.endpoint.", unreachable=True
    ),
    "storage.denied": FindingType(
        "problem", "Fix the credentials, or allow what docs/guides/object-store.md lists below storage.url."
    ),
    "storage.conditional": FindingType(
        "problem", "Use an object store with conditional writes: without them two learners may overwrite each other."
    ),
    "storage.head": FindingType("problem", "Use the release that wrote it, or another storage.url."),
    "storage.encryption": FindingType(
        "info", "Nothing, when that is intended; else set it, such as storage.options.aws_server_side_encryption."
    ),
    "redis.unseen": FindingType("info", "Allow INFO to the user of replay.redis.url, or nothing."),
    "state.unwritable": FindingType("problem", "Fix the rights of the directory, or set state_dir."),
    "state.full": FindingType(
        "problem", "Make room, set state_dir elsewhere, or lower replay.device_bytes or replay.disk."
    ),
    "state.filling": FindingType(
        "warning", "Make room, or lower checkpoints.keep, versions.keep and versions.keep_hourly."
    ),
    "learner.warning": FindingType("warning", "See docs/operate/troubleshoot.md."),
    "state.memory": FindingType("warning", "Set state_dir to a disk."),
    "state.network": FindingType(
        "warning", "Set state_dir to a local disk, unless its locks and fsync can be relied upon."
    ),
    "state.sync": FindingType("problem", "Set state_dir to a file system that can fsync."),
    "state.lock": FindingType("problem", "Set state_dir to a file system that has flock."),
    "state.exposed": FindingType(
        "warning", "chmod 700 {path}, by its owner; or set state_dir to a folder for the state alone."
    ),
    "key.exposed": FindingType("warning", "chmod 600 {path}, by its owner."),
    "state.held": FindingType("info", "Nothing; stop that learner before another is started."),
    "checkpoint.damaged": FindingType(
        "warning", "Nothing, when an older checkpoint is whole; else move {path} away to start again."
    ),
    "checkpoint.schema": FindingType("problem", "Put [schema] back, or move {path} away to start again."),
    "checkpoint.misfit": FindingType(
        "problem", "Put the settings of the checkpoint back, or move the checkpoints away to start again."
    ),
    "version.damaged": FindingType(
        "warning", 'Nothing, serving takes none such; see "anabranch versions show {number}".'
    ),
    "version.model": FindingType("warning", "Put [model] back, or let the learner publish a version of it."),
    "version.schema": FindingType(
        "info", "Nothing, when [schema] was changed on purpose: serving waits for newer ones."
    ),
    "port.taken": FindingType("problem", "Stop the program that has it, or set {key} to another port."),
    "port.address": FindingType("problem", "Set {key} to an address of this machine and a port above 1023."),
    "port.clash": FindingType("problem", "Set serving.port or learner.status to another port."),
    "tls.unreadable": FindingType("problem", "Fix serving.tls.cert and serving.tls.key."),
    "tls.mismatch": FindingType("problem", "Set serving.tls.key to the key that the certificate was made for."),
    "tls.expired": FindingType("problem", "Renew the certificate."),
    "tls.expiring": FindingType("warning", "Renew the certificate."),
    "clock.ahead": FindingType("warning", "Set this machine's clock, or the producer's (ntp)."),
    "clock.files": FindingType(
        "warning", "Set the clock of the file server and of this machine by the same source (ntp)."
    ),
    "check.slow": FindingType("problem", "Try again with a longer --timeout.", unreachable=True),
}


def ok(message: str) -> Finding:
    """Return that all is well."""
    return Finding("ok", message)


def found(kind: str, message: str, **values: object) -> Finding:
    """Return a finding of a kind of `FINDINGS`, whose `fix` takes `values`."""
    level, fix, unreachable = FINDINGS[kind]
    return Finding(level, message, fix.format(**values), kind, unreachable)


@dataclass
class CheckContext:
    """The pipeline to check, and what earlier checks found out about it."""

    path: Path
    timeout: float
    """Seconds that a check may take."""
    pipeline: Config | None = None
    """None while the config is unknown or unusable."""
    on_device: bool = False
    """Whether the model is tried on the learner's device, whoever uses that."""
    secrets: set[str] = field(default_factory=set)
    model_bytes: int = 0
    """Size of the weights that are trained, and of buffers; 0 while it is unknown."""
    base_bytes: int = 0
    """Size of the frozen weights, which are stored once."""

    @property
    def config(self) -> Config:
        """The config; only for checks that need a part of it."""
        assert self.pipeline is not None
        return self.pipeline
