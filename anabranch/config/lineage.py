"""The section `[lineage]` of `pipeline.toml`."""

from pathlib import Path

from anabranch.core.settings import Section


class LineageSettings(Section):
    """How `anabranch versions lineage` signs."""

    sign_key: Path | None = None
    """PEM file of an Ed25519 private key, relative to the config's folder; `openssl genpkey -algorithm ed25519` makes
    one. Absent: the statement is not signed. Needs the extra `sign`."""
