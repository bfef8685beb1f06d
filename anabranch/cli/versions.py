"""`anabranch versions`: the commands that list versions and control which one is served."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from anabranch.cli.common import PIPELINE, AsJson, ConfigPath, DryRun, Yes, confirm, run_command, say, show
from anabranch.runtime.lifecycle import Exit

versions = typer.Typer(
    help="List model versions and control which one is served.",
    epilog="Example: anabranch versions ls",
    no_args_is_help=True,
)

_Version = Annotated[str, typer.Argument(metavar="VERSION", help="Its number, latest or served.")]
_VersionOrServed = Annotated[
    str | None, typer.Argument(metavar="VERSION", help="Its number, latest or served; by default the served one.")
]


@versions.command("ls", epilog="Example: anabranch versions ls --limit 5")
def versions_ls(
    config: ConfigPath = PIPELINE,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Only the newest N.", metavar="N")] = None,
    as_json: AsJson = False,
) -> int:
    """List the versions, the newest first, with verdict, step and accuracy."""

    def start() -> None:
        from anabranch.commands.versions import list_versions, render_list
        from anabranch.config.loader import load_config

        listed = list_versions(load_config(config), limit)
        show([one.document() for one in listed] if as_json else None, lambda: render_list(listed))

    return run_command(start)


@versions.command("show", epilog="Example: anabranch versions show latest")
def versions_show(version: _Version, config: ConfigPath = PIPELINE, as_json: AsJson = False) -> int:
    """Show one version: manifest, verdict, a check of its files, and why serving refuses it."""

    def start() -> None:
        from anabranch.commands.versions import parse_which, render_one, show_version
        from anabranch.config.loader import load_config

        one = show_version(load_config(config), parse_which(version))
        show(one.document() if as_json else None, lambda: render_one(one))

    return run_command(start)


@versions.command("diff", epilog="Example: anabranch versions diff served latest")
def versions_diff(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="A version: its number, latest or served.")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The version that it is compared with.")],
    config: ConfigPath = PIPELINE,
    as_json: AsJson = False,
) -> int:
    """Compare two versions: metrics, offsets trained through, and how far each tensor of the weights has changed."""

    def start() -> None:
        from anabranch.commands.version_files import diff_versions, render_diff
        from anabranch.commands.versions import parse_which
        from anabranch.config.loader import load_config

        diff = diff_versions(load_config(config), parse_which(before), parse_which(after))
        show(diff.document() if as_json else None, lambda: render_diff(diff))

    return run_command(start)


@versions.command("export", epilog="Example: anabranch versions export served weights/")
def versions_export(
    version: _Version,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to create; it may exist if it is empty.")],
    format_: Annotated[
        Literal["safetensors", "onnx", "torch"],
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="safetensors: the weights; onnx or torch: a program that answers without Anabranch, compared with the "
            "version's own answers.",
        ),
    ] = "safetensors",
    config: ConfigPath = PIPELINE,
    as_json: AsJson = False,
) -> int:
    """Write the weights or a program, and the manifest, of a version into a folder, completely or not at all."""

    def start() -> None:
        from anabranch.commands.versions import parse_which
        from anabranch.config.loader import load_config

        if format_ == "safetensors":
            from anabranch.commands.version_files import export_version

            manifest, files, compared = export_version(load_config(config), parse_which(version), folder), None, ""
        else:
            from anabranch.commands.exporting.program import export_program

            program = export_program(load_config(config), parse_which(version), folder, format_)
            manifest, files = program.manifest, [program.file]
            compared = f"; {program.rows} answers differ from the version's by {program.difference:.1g} at most"
        if as_json:
            written = manifest.files if files is None else files
            show({"version": manifest.number, "folder": str(folder), "files": written}, lambda: None)
        else:
            say(f"exported version {manifest.number} to {folder}{compared}")

    return run_command(start, private=False)


@versions.command("rebuild", epilog="Example: anabranch versions rebuild 4711 --verify")
def versions_rebuild(
    version: _Version,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare it with the version that was published, bit for bit.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Folder to write it to; it may exist if it is empty."),
    ] = None,
    config: ConfigPath = PIPELINE,
    as_json: AsJson = False,
) -> int:
    """Learn a version again, from the checkpoint before it and the stream, and say whether the weights are the same."""

    def start() -> Exit:
        from anabranch.commands.auditing.rebuild import rebuild, render_rebuild
        from anabranch.commands.versions import parse_which
        from anabranch.config.loader import load_config
        from anabranch.core.errors import SettingsError

        if not verify and output is None:
            raise SettingsError("add --verify to compare the rebuilt version, or --output DIR to write it")
        report = rebuild(load_config(config), parse_which(version), output)
        if report is None:
            say("stopped; nothing was written")
            return Exit.DONE
        if verify or as_json:
            show(report.document() if as_json else None, lambda: render_rebuild(report))
        else:
            say(f"wrote version {report.rebuilt.manifest.number} as rebuilt to {output}")
        return report.code if verify else Exit.DONE

    return run_command(start)


@versions.command("lineage", epilog="Example: anabranch versions lineage 4711 > lineage.json")
def versions_lineage(
    version: _Version,
    sign_key: Annotated[
        Path | None,
        typer.Option(
            "--sign-key", metavar="FILE", help="Ed25519 private key, PEM; by default lineage.sign_key, if it is set."
        ),
    ] = None,
    verify_signature: Annotated[
        Path | None,
        typer.Option(
            "--verify-signature",
            metavar="ENVELOPE",
            help="Check a signed statement of this command instead; the key may be the public one.",
        ),
    ] = None,
    config: ConfigPath = PIPELINE,
) -> int:
    """Print where a version comes from: an in-toto statement with SLSA provenance, in a DSSE envelope if signed."""

    def start() -> None:
        from anabranch.commands.auditing.lineage import lineage, verify_lineage
        from anabranch.commands.versions import parse_which
        from anabranch.config.loader import load_config

        loaded, which = load_config(config), parse_which(version)
        if verify_signature is not None:
            say(verify_lineage(loaded, which, verify_signature, sign_key))
        else:
            show(lineage(loaded, which, sign_key), lambda: None)

    return run_command(start)


@versions.command("promote", epilog="Example: anabranch versions promote 4711")
def versions_promote(version: _Version, config: ConfigPath = PIPELINE, as_json: AsJson = False) -> int:
    """Serve this version whatever its verdict, until a newer one passes the gate. Versions newer now are not served."""
    return _command(config, "promote", version, as_json=as_json)


@versions.command("rollback", epilog="Example: anabranch versions rollback --to 4711")
def versions_rollback(
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="VERSION", help="The version to return to; by default the one served before."),
    ] = None,
    config: ConfigPath = PIPELINE,
    as_json: AsJson = False,
) -> int:
    """Return to an older version, until a newer one passes the gate. Versions newer now are not served."""
    return _command(config, "rollback", to, as_json=as_json)


@versions.command("reject", epilog="Example: anabranch versions reject 4711 --dry-run")
def versions_reject(
    version: _Version,
    config: ConfigPath = PIPELINE,
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> int:
    """Never serve this version again. When it is served now, serve the newest other one that may be served."""

    def start() -> None:
        from anabranch.commands.rollout import preview_rejection
        from anabranch.commands.versions import parse_which, version_number
        from anabranch.config.loader import load_config

        loaded = load_config(config)
        which = parse_which(version)
        number = which if isinstance(which, int) else version_number(loaded, which)
        preview = preview_rejection(loaded, number)
        if dry_run:
            show({"preview": preview} if as_json else None, lambda: preview)
            return
        confirm("versions reject", preview, yes=yes)
        _apply(config, "reject", str(number), as_json=as_json)

    return run_command(start)


@versions.command("pin", epilog="Example: anabranch versions pin 4711")
def versions_pin(version: _VersionOrServed = None, config: ConfigPath = PIPELINE, as_json: AsJson = False) -> int:
    """Serve exactly this version until it is unpinned."""
    return _command(config, "pin", version, as_json=as_json)


@versions.command("unpin", epilog="Example: anabranch versions unpin")
def versions_unpin(config: ConfigPath = PIPELINE, as_json: AsJson = False) -> int:
    """Serve the newest version that may be served again."""
    return _command(config, "unpin", None, as_json=as_json)


def _command(config: ConfigPath, action: str, version: str | None, *, as_json: bool) -> int:
    return run_command(lambda: _apply(config, action, version, as_json=as_json))


def _apply(config: ConfigPath, action: str, version: str | None, *, as_json: bool) -> None:
    from anabranch.commands.rollout import apply_command
    from anabranch.commands.versions import parse_which
    from anabranch.config.loader import load_config

    result = apply_command(load_config(config), action, None if version is None else parse_which(version))
    if as_json:
        show(result.document(), lambda: None)
    else:
        say(result.sentence())
