"""`anabranch init`: writes the example pipeline, to begin with."""

import importlib.resources
import shlex
from collections.abc import Mapping
from pathlib import Path

from anabranch.core.errors import SettingsError

FILES = ("pipeline.toml", "my_model.py", "events.jsonl")


def write_example(folder: Path, *, force: bool = False) -> list[Path]:
    """Write the example's files into `folder`, which is made if need be, and return their paths.

    Raises:
        SettingsError: one of them is there already and `force` is not given, or the folder cannot be written.
    """
    template = importlib.resources.files("anabranch.commands") / "template"
    return write_files(folder, {name: (template / name).read_text(encoding="utf-8") for name in FILES}, force=force)


def write_files(folder: Path, contents: Mapping[str, str], *, force: bool) -> list[Path]:
    """Write files into `folder` as `write_example` does, and return their paths."""
    paths = [folder / name for name in contents]
    there = [path for path in paths if path.exists()]
    if there and not force:
        raise SettingsError(f"{there[0]} exists already; --force overwrites it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            path.write_text(contents[path.name], encoding="utf-8")
    except OSError as exc:
        raise SettingsError(f"cannot write {exc.filename or folder}: {exc.strerror}") from exc
    return paths


def write_history(
    folder: Path, pattern: str | None, label: str | None, *, force: bool = False
) -> tuple[list[Path], list[str]]:
    """Write a pipeline for the Parquet files of a glob or URL into `folder`; return its paths, and remarks on columns.

    Raises:
        SettingsError: as `write_example`; or the files are missing, cannot be read or have no column `label`.
        HistoryAwayError: the storage does not answer.
    """
    if pattern is None or label is None:
        raise SettingsError("--history and --label go together: which files, and which of their columns to predict")
    try:
        # Imported here since it is an extra.
        from anabranch.commands.event_files.history_config import described_pipeline
    except ImportError as exc:
        raise SettingsError("--history needs pyarrow: pip install 'anabranch[arrow]'") from exc
    contents, remarks = described_pipeline(folder, pattern, label)
    return write_files(folder, contents, force=force), remarks


_NEXT = """\
  anabranch produce events.jsonl --create-topic    # needs the Kafka broker that pipeline.toml names
  anabranch up                                     # learn from the topic, and serve
"""
NEXT_OF_HISTORY = """\
  anabranch doctor                                 # checks the files, the topic and the model
  anabranch up                                     # learn the history, then from the topic, and serve
"""


def next_commands(folder: Path, commands: str = _NEXT) -> str:
    """Return what to type after `init`."""
    enter = "" if folder.resolve() == Path.cwd() else f"  cd {shlex.quote(str(folder))}\n"
    return f"{enter}{commands}"
