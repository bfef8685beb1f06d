"""The constants of a pipeline that runs or has run, or of the model alone."""

import contextlib
import os
import tempfile
import time
from pathlib import Path

from anabranch.commands.plan.constants import Constants
from anabranch.commands.plan.memory import learner_tensors
from anabranch.commands.plan.speed import waits
from anabranch.commands.plan.store_size import held_out_bytes
from anabranch.config.loader import Config
from anabranch.config.pipeline import Pipeline
from anabranch.core.errors import SettingsError
from anabranch.learner.checkpoints.format import ROWS, SEGMENT
from anabranch.learner.status.report import LearnerReport
from anabranch.learner.status.report import read_report as read_learner
from anabranch.replay.tiers.disk_files import PAGE
from anabranch.runtime.model_process import Trial, try_model
from anabranch.serving.reporting.report import ServingReport
from anabranch.serving.reporting.report import read_report as read_serving

_PROC = Path("/proc")
_KILO = 1024
_TENSORS = 3
_FLOAT32 = 4
_PROBE_SECONDS = 120.0
_TRIAL_BYTES = 8 << 20
_TRIALS = 4
_LITTLE_LAG_SECONDS = 1.0
"""With more, what is served is late since events wait, not since versions take time."""


def measured_constants(config: Config) -> Constants:
    """Return the constants of the run whose reports are in `state_dir`; without one, of the model alone.

    Raises:
        SettingsError: there is no run, and the model cannot be built.
    """
    report = read_learner(config.state_dir)
    return constants_of_model(config) if report is None else constants_of_run(config, report)


def constants_of_run(config: Config, report: LearnerReport) -> Constants:
    """Return the constants that the reports of a pipeline show, its files, and its processes if they run."""
    pipeline, state_dir = config.pipeline, config.state_dir
    constants, serving = Constants(source="run", parameters=0), read_serving(state_dir)
    _fill_sizes(pipeline, report, state_dir, constants)
    _fill_times(pipeline, report, serving, constants)
    _fill_processes(config, report, serving, constants)
    constants.disk_bytes_per_second = _write_rate(state_dir)
    for value, remark in (
        (constants.learner_bytes, "nothing runs: plan while learner and serving do to include their memory"),
        (constants.delivery_seconds, "no freshness: plan once serving has answered for a minute without lag"),
        (constants.saturation_rate, "no highest rate: send more events than are learned, for ten seconds"),
        (constants.request_seconds, "no request in the last minute: send some to plan serving"),
        (constants.disk_bytes_per_second, f"{state_dir} cannot be written to: the speed of its disk is not known"),
    ):
        if value is None:
            constants.remarks.append(remark)
    return constants


def constants_of_model(config: Config) -> Constants:
    """Return the sizes of the model alone, which is built in a process as doctor does.

    Raises:
        SettingsError: it cannot be built.
    """
    trial = Trial(_PROBE_SECONDS)
    problems = [finding.message for finding in try_model(config, trial) if finding.level == "problem"]
    if not trial.model_bytes:
        raise SettingsError(problems[0] if problems else "the model has no weights that are trained")
    known = f"no learner has run in {config.state_dir}: its model's size alone is known. Run it, and plan again"
    return Constants(
        source="model",
        parameters=trial.model_bytes // _FLOAT32,
        base_bytes=trial.base_bytes,
        version_bytes=trial.model_bytes,
        checkpoint_bytes=_TENSORS * trial.model_bytes,
        remarks=[known, "checkpoints were taken to have the weights and two moments"],
    )


def _fill_sizes(pipeline: Pipeline, report: LearnerReport, state_dir: Path, constants: Constants) -> None:
    """Fill the sizes of the model, the rows and the files of a state directory."""
    memory = report.device_memory
    constants.parameters = memory.get("weights", 0) // _FLOAT32
    constants.base_bytes = memory.get("base", 0)
    constants.device = "cuda" if "cached" in memory else "cpu"
    if report.device is not None and report.device.devices:
        constants.device_total_bytes = report.device.devices[0].memory_total
    if report.replay_rows.get("device"):
        constants.row_bytes = report.replay_bytes["device"] // report.replay_rows["device"]
    if (version := _newest(state_dir / "versions")) is not None:
        constants.version_bytes = _size(version)
    checkpoint = _newest(state_dir / "checkpoints")
    if checkpoint is not None and any(checkpoint.rglob("*.safetensors")):
        own = _size(checkpoint, (SEGMENT, ROWS))
        constants.checkpoint_bytes = max(0, own - report.holdout_rows * held_out_bytes(pipeline, constants))
    reports = [state_dir / f"{name}.json" for name in ("learner", "serving")]
    constants.report_bytes = sum(_pages(path.stat().st_size) for path in reports if path.exists())


def _fill_times(pipeline: Pipeline, report: LearnerReport, serving: ServingReport | None, constants: Constants) -> None:
    """Fill what takes time: of the last five seconds, and of those in which events waited."""
    now, full = report.rates, report.full_rates
    if report.publish_skipped and report.versions_published:
        due = report.versions_published + report.publish_skipped
        every = pipeline.versions.publish_every.total_seconds()
        constants.publish_seconds = every * due / report.versions_published
    constants.checkpoint_seconds = report.checkpoint_seconds
    if full:
        rows = constants.saturation_rate = full["rows_new"]
        constants.full_step_seconds, constants.full_step_rows = (
            full["step_seconds"] / full["steps"],
            rows / full["steps"],
        )
        constants.stall_seconds_per_event = full["replay_stall_seconds"] / rows
        constants.checkpoint_stall_seconds_per_event = full["checkpoint_stall_seconds"] / rows
    if now.get("steps"):
        constants.step_seconds = now["step_seconds"] / now["steps"]
    else:
        constants.step_seconds = constants.full_step_seconds
    if serving is None:
        return
    constants.request_seconds = serving.request_p50_seconds
    median, most = serving.freshness_p50_seconds, serving.freshness_p99_seconds
    rate = now.get("rows_new")
    if median is not None and most is not None and rate and report.lag_seconds < _LITTLE_LAG_SECONDS:
        every = max(pipeline.versions.publish_every.total_seconds(), constants.publish_seconds or 0.0)
        mean_wait, longest_wait = waits(pipeline, constants, rate, every)
        constants.delivery_seconds = max(0.0, median - mean_wait)
        constants.delivery_p99_seconds = max(0.0, most - longest_wait)


def _fill_processes(config: Config, report: LearnerReport, serving: ServingReport | None, constants: Constants) -> None:
    """Fill what running processes take of the host besides what the ledger and the store count."""
    if not (learner := _private_bytes(report.pid)):
        return
    on_cpu = constants.device == "cpu"
    tensors = sum(learner_tensors(config.pipeline, constants.parameters, constants.base_bytes).values())
    in_memory = on_cpu or config.pipeline.replay.device_memory == "host"
    known = tensors * on_cpu + report.replay_bytes.get("device", 0) * in_memory
    constants.learner_bytes = max(0, learner - known)
    constants.ingest_bytes = max(map(_private_bytes, _children_of(report.pid)), default=None)
    if serving is not None:
        found = max(map(_private_bytes, [serving.pid, *_children_of(serving.pid)]))
        constants.serving_bytes = found or None


def _private_bytes(pid: int) -> int:
    """Return the memory of a process that is neither of a file nor shared; 0 where it is gone, or this is not Linux."""
    with contextlib.suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * _KILO
    return 0


def _children_of(pid: int) -> list[int]:
    """Return the child processes of a process; empty where it is gone, or this is not Linux."""
    found = list[int]()
    for path in (_PROC / str(pid) / "task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread has just ended
            found += map(int, path.read_text().split())
    return found


def _write_rate(folder: Path) -> float | None:
    """Return the bytes a second at which a disk takes 8 MB at a time, with fsync; None where it takes none."""
    data, begin = os.urandom(_TRIAL_BYTES), time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(_TRIALS):
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
    except OSError:
        return None
    return _TRIALS * _TRIAL_BYTES / (time.perf_counter() - begin)


def _newest(folder: Path) -> Path | None:
    numbers = [int(path.parent.name) for path in folder.glob("*/manifest.json") if path.parent.name.isdigit()]
    return folder / str(max(numbers)) if numbers else None


def _size(folder: Path, without: tuple[str, ...] = ()) -> int:
    total = 0
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith(without or ("/",)):
            with contextlib.suppress(FileNotFoundError):  # the learner has just deleted it
                total += _pages(path.stat().st_size)
    return total


def _pages(size: int) -> int:
    """Return the bytes of whole pages."""
    return -(-size // PAGE) * PAGE
