"""The model factory and the device, tried in a separate process: user code may crash or hang."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from anabranch.doctor.findings import CheckContext, Finding, found
from learner.config import LearnerSettings
from replay.config import ReplaySettings

_SHARE = 0.9
"""Fraction of a check's time for the probe; the rest is for its report."""
_LAST_WORDS = 300


class Step(msgspec.Struct, tag=True):
    """What the probe does next: named in the finding if the process hangs or crashes there."""

    doing: str


class ProbeFinding(msgspec.Struct, tag=True):
    """A finding of the probe; `kind` is empty when all is well."""

    kind: str
    message: str
    key: str = ""


class Size(msgspec.Struct, tag=True):
    """Bytes of the model's weights: of those that it trains, and of the frozen ones."""

    bytes: int
    base_bytes: int


class Asked(msgspec.Struct):
    """What the probe checks: sections as JSON, without secrets except those in model.args."""

    events: str
    model: str
    learner: str
    replay: str
    serving_device: str
    serving_workers: int
    serving_shadow: bool
    device_sharing: str
    folder: str
    state_dir: str
    seed: int
    on_device: bool = False
    """Whether the model is tried on the learner's device, whoever uses that."""
    challengers: int = 0
    """`search.challengers`."""


def _without_secret(replay: ReplaySettings) -> str:
    """Return `[replay]` as JSON, with a placeholder for the URL."""
    section = replay.model_dump(mode="json")
    if replay.redis is not None:
        section["redis"]["url"] = "redis://hidden"
    return msgspec.json.encode(section).decode()


def check_alone(context: CheckContext) -> Iterator[Finding]:
    """Whether a learner of one process has settings that only several processes use."""
    learner = context.config.pipeline.learner
    if learner.replicas == 1:
        values = {key: getattr(learner, key) for key in ("sharding", "sync_every", "comm_hook")}
        for key, value in values.items():
            if value != LearnerSettings.model_fields[key].default:
                shown = f'"{value}"' if isinstance(value, str) else value
                yield found("learner.alone", f"learner.{key} = {shown} has no effect with one replica.", key=key)


class ProbeResult(NamedTuple):
    """The result of a probe."""

    messages: Sequence[Step | ProbeFinding | Size]
    code: int | None
    """The exit code of its process; None when it was killed because its time was over."""
    words: str
    """What it wrote to stderr."""


Launcher: TypeAlias = Callable[[Asked, float], ProbeResult]
"""Runs a probe, with a time limit in seconds."""


def in_a_process(asked: Asked, seconds: float) -> ProbeResult:
    """Run `anabranch.doctor.probe` as a process, so that a crash or a hang there is a finding."""
    code, words = None, b""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as output:
        command = [sys.executable, "-P", "-m", "anabranch.doctor.probe", str(writing)]
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[writing],
            )
        finally:
            os.close(writing)
        with child:
            try:
                _, words = child.communicate(msgspec.json.encode(asked), timeout=seconds)
                code = child.returncode
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        os.set_blocking(output.fileno(), False)  # a grandchild may hold the other end
        lines = (output.read() or b"").splitlines()
    messages = [msgspec.json.decode(line, type=Step | ProbeFinding | Size) for line in lines]
    return ProbeResult(messages, code, words.decode(errors="replace"))


def check_model(context: CheckContext, launch: Launcher = in_a_process) -> Iterator[Finding]:
    """Import torch, choose the device, build the model and what trains it, and restore the newest checkpoint."""
    pipeline, seconds = context.config.pipeline, context.timeout * _SHARE
    asked = Asked(
        pipeline.events.model_dump_json(),
        pipeline.model.model_dump_json(),
        pipeline.learner.model_dump_json(),
        _without_secret(pipeline.replay),
        pipeline.serving.device,
        pipeline.serving.workers,
        pipeline.serving.shadow > 0,
        pipeline.device_sharing.model_dump_json(),
        str(context.config.folder),
        str(context.config.state_dir),
        pipeline.seed,
        context.on_device,
        0 if pipeline.search is None else pipeline.search.challengers,
    )
    result, doing = launch(asked, seconds), "starting Python"
    for sent in result.messages:
        match sent:
            case Step(doing):
                pass
            case Size(size, base_bytes):
                context.model_bytes, context.base_bytes = size, base_bytes
            case ProbeFinding(kind, message, key):
                yield found(kind, message, key=key) if kind else Finding("ok", message)
    module = pipeline.model.factory.partition(":")[0]
    if result.code is None:
        yield found("model.hang", f"After {seconds:.0f} s the model's process was still {doing}.")
    elif result.code != 0:
        end = f"signal {-result.code}" if result.code < 0 else f"exit code {result.code}"
        last = result.words.strip().splitlines()[-1:] or ["nothing"]
        message = f"The model's process ended with {end} while {doing}; it said: {last[0][:_LAST_WORDS]}."
        yield found("model.crash", message, module=module)
