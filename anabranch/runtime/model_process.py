"""The model and its device, tried in a separate process, since user code may crash or hang.

`python -m anabranch.runtime.model_process FD DEVICE -c pipeline.toml` is that process: it writes messages as lines of
JSON into a file descriptor. `doctor` and `plan` start it by `try_model`. Imports no torch at load time.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from anabranch.config.loader import Config, examine_config
from anabranch.config.pipeline import Pipeline
from anabranch.core.preflight import Finding, ok, problem
from anabranch.learner.device.memory_ledger import learner_ledger, serving_ledger
from anabranch.learner.preflight.device import check_compiler, check_load, check_sharing, list_devices
from anabranch.replay.preflight import check_memory, memory_bytes
from anabranch.serving.preflight import check_device

_SHARE = 0.9
_LAST_WORDS = 300
_MAX_CHARACTERS = 2_000

Message: TypeAlias = Finding | tuple[int, int] | str
"""A finding, the bytes of the model's weights (trained and frozen), or what is tried next."""


class Result(NamedTuple):
    """What a process has said."""

    messages: Sequence[Message]
    code: int | None
    """Its exit code; None when it was killed because its time was over."""
    words: str
    """What it wrote to stderr last."""


@dataclass
class Trial:
    """How a model is tried, and how large it is."""

    timeout: float = 30.0
    """Seconds that the trial may take."""
    on_device: bool = False
    """Whether the learner's device is used, whoever uses that."""
    model_bytes: int = 0
    """Size of the weights that are trained, and of buffers; 0 while it is unknown."""
    base_bytes: int = 0
    """Size of the frozen weights, which are stored once."""

    @property
    def seconds(self) -> float:
        """The time that the process may take: the rest is for its report."""
        return self.timeout * _SHARE


def in_a_process(config: Config, trial: Trial) -> Result:
    """Run `main` in a process, for at most the time of the trial."""
    code = None
    reading, writing = os.pipe()
    # A file, which neither fills up nor waits for a grandchild that holds it.
    with os.fdopen(reading, "rb") as output, tempfile.TemporaryFile() as written:
        command = [
            sys.executable,
            "-P",
            "-m",
            "anabranch.runtime.model_process",
            str(writing),
            str(int(trial.on_device)),
        ]
        command += config.arguments()
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=written,
                pass_fds=[writing],
            )
        finally:
            os.close(writing)
        with child:
            try:
                code = child.wait(trial.seconds)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        os.set_blocking(output.fileno(), False)  # a grandchild may hold the other end
        lines = (output.read() or b"").splitlines()
        written.seek(max(0, written.seek(0, os.SEEK_END) - _MAX_CHARACTERS))
        words = written.read()
    return Result([msgspec.json.decode(line, type=Message) for line in lines], code, words.decode(errors="replace"))


def try_model(
    config: Config, trial: Trial, launch: Callable[[Config, Trial], Result] = in_a_process
) -> Iterator[Finding]:
    """Import torch, choose the device, build the model and what trains it, and restore the newest checkpoint.

    Sets the sizes of `trial`.
    """
    result, doing = launch(config, trial), "starting Python"
    for message in result.messages:
        match message:
            case str():
                doing = message
            case Finding():
                yield message
            case _:
                trial.model_bytes, trial.base_bytes = message
    if result.code is None:
        fix = "Find out what it waits for, or give it more time with --timeout."
        yield problem("model.hang", f"After {trial.seconds:.0f} s the model's process was still {doing}.", fix)
    elif result.code != 0:
        end = f"signal {-result.code}" if result.code < 0 else f"exit code {result.code}"
        last = result.words.strip().splitlines()[-1:] or ["nothing"]
        said = f"The model's process ended with {end} while {doing}; it said: {last[0][:_LAST_WORDS]}."
        module = config.pipeline.model.factory.partition(":")[0]
        yield problem("model.crash", said, f'Run it by hand in the config\'s folder: python -c "import {module}".')


def main() -> int:
    """Try the model of a config, whatever else is wrong with its settings."""
    parser = argparse.ArgumentParser()
    parser.add_argument("descriptor", type=int)
    parser.add_argument("on_device", type=int)
    parser.add_argument("-c", type=Path)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()

    def send(message: Message) -> None:
        if isinstance(message, Finding):  # a pipe buffers so much without a reader
            message = msgspec.structs.replace(message, message=message.message[:_MAX_CHARACTERS])
        os.write(options.descriptor, msgspec.json.encode(message) + b"\n")

    config = examine_config(options.c, assignments=options.set).config
    assert config is not None
    run_trial(config.pipeline, send, on_device=bool(options.on_device))
    return 0


def run_trial(pipeline: Pipeline, send: Callable[[Message], None], *, on_device: bool) -> None:
    """Try torch, the device and the model; send what is tried before it begins, and each finding."""
    send("importing torch")
    try:
        import torch
    except (ImportError, OSError) as exc:
        fix = "Install torch again: pip install --force-reinstall torch."
        send(problem("install.torch", f"torch cannot be imported: {exc}.", fix))
        return
    send(ok(f"torch {torch.__version__} can be imported."))
    from anabranch.learner.preflight.model import ModelTrial, try_device

    learner, sharing, replay, serving = pipeline.learner, pipeline.device_sharing, pipeline.replay, pipeline.serving
    visible = dict(os.environ)

    def send_all(findings: Iterator[Finding]) -> None:
        for finding in findings:
            send(finding)

    send("choosing the device")
    send_all(list_devices())
    device = try_device(pipeline, send)
    server = check_device(serving.device, device, visible, send)
    send_all(check_sharing(sharing, device))
    if learner.compile is True:
        send_all(check_compiler(device.type))
    on_host = replay.device_memory == "host" or device.type != "cuda"
    model = ModelTrial(pipeline, send, on_device=on_device).run(device)
    send((model.bytes, model.base_bytes))
    needed = memory_bytes(replay, model.columns) if learner.strategy.kind.replays else 0
    if on_host:
        send_all(check_memory(needed))
    if device.type == "cuda" and model.elements:
        total = int(torch.cuda.get_device_properties(device).total_memory)
        challengers = 0 if pipeline.search is None else pipeline.search.challengers
        on_learner = learner_ledger(model.elements, learner, 0 if on_host else needed, model.base_bytes, challengers)
        on_server = dict[str, int]()
        if server == device:
            workers, shadow = serving.workers, serving.shadow > 0
            on_server = serving_ledger(model.elements, workers=workers, shadow=shadow, base_bytes=model.base_bytes)
        send_all(check_load(str(device), total, on_learner, on_server, sharing))


if __name__ == "__main__":
    # A model may leave threads behind that never end.
    code = main()
    sys.stderr.flush()
    os._exit(code)
