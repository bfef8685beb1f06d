"""`anabranch versions export`: the files of a version, or a program that answers as it does."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from anabranch.command import AsJson, command, output, say
from anabranch.commands.versions.export.folder import new_folder
from anabranch.commands.versions.show import VersionArgument, Which, parse_which, stored_versions, version_number
from anabranch.config.loader import Config
from anabranch.core.atomic_files import write_durably
from anabranch.core.files import file_parts
from anabranch.learner.state_dir.folders import MANIFEST
from anabranch.learner.versions.format import Manifest

EXPORTED_BASE = "base.safetensors"


@command("anabranch versions export served weights/", private=False)
def export(
    version: VersionArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create; it may exist if it is empty.")],
    config: Config,
    format_: Annotated[
        Literal["safetensors", "hf", "peft", "onnx", "program", "mlflow", "triton"],
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="safetensors: the weights; hf: with config and model card; peft: those of an adapter; onnx or "
            "program: a program that answers without Anabranch, compared with the version's own answers; mlflow or "
            "triton: it as a model of theirs.",
        ),
    ] = "safetensors",
    as_json: AsJson = False,
) -> None:
    """Write the weights or a program, and the manifest, of a version into a folder, completely or not at all."""
    which, compared = parse_which(version), ""
    if format_ == "safetensors":
        manifest = export_version(config, which, folder)
        files: object = manifest.files
    else:
        from anabranch.commands.versions.export.program import export_program
        from anabranch.commands.versions.export.weights import export_weights

        program = (
            export_weights(config, which, folder, format_)
            if format_ == "hf" or format_ == "peft"
            else export_program(config, which, folder, format_)
        )
        manifest, files = program.manifest, [program.file]
        compared = f"; {program.rows} answers differ from the version's by {program.difference:.1g} at most"
    if as_json:
        output({"version": manifest.number, "folder": str(folder), "files": files}, lambda: None)
    else:
        say(f"exported version {manifest.number} to {folder}{compared}")


def export_version(config: Config, which: Which, folder: Path) -> Manifest:
    """Write the weights and the manifest of a version into a folder, completely or not at all.

    The frozen weights, which several versions share, are in `base.safetensors` there.

    Raises:
        SettingsError: there is no such version; or the folder is a file, holds something, or cannot be written.
        VersionError: files of the version are missing or damaged.
    """
    versions = stored_versions(config)
    number = version_number(config, which)
    manifest = versions.manifest(number)
    contents, base = versions.contents(manifest), versions.checked_base(manifest)
    with new_folder(folder) as temporary:
        for name, content in contents.items():
            write_durably(temporary / name, [content])
        if base is not None:
            write_durably(temporary / EXPORTED_BASE, file_parts(base))
        write_durably(temporary / MANIFEST, [versions.folder(number).read(MANIFEST)])
    return manifest
