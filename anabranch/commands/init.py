"""`anabranch init`: writes the example pipeline, to begin with."""

import importlib.resources
from pathlib import Path

from anabranch.core.errors import SettingsError

FILES = ("pipeline.toml", "my_model.py", "events.jsonl")


def write_example(folder: Path, *, force: bool = False) -> list[Path]:
    """Write the example's files into `folder`, which is made if need be, and return their paths.

    Raises:
        SettingsError: one of them is there already and `force` is not given, or the folder cannot be written.
    """
    template = importlib.resources.files("anabranch.commands") / "template"
    paths = [folder / name for name in FILES]
    there = [path for path in paths if path.exists()]
    if there and not force:
        raise SettingsError(f"{there[0]} exists already; --force overwrites it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            path.write_bytes((template / path.name).read_bytes())
    except OSError as exc:
        raise SettingsError(f"cannot write {exc.filename or folder}: {exc.strerror}") from exc
    return paths


def next_commands(folder: Path) -> str:
    """Return what to type after `init`."""
    enter = "" if folder.resolve() == Path.cwd() else f"  cd {folder}\n"
    return (
        f"{enter}"
        "  anabranch produce events.jsonl --create-topic    # needs the Kafka broker that pipeline.toml names\n"
        "  anabranch up                                     # learn from the topic, and serve\n"
    )
