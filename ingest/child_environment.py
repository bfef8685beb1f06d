"""The environment of ingest processes."""

import os

_SETTINGS = "ANABRANCH__"


def without_settings() -> dict[str, str]:
    """Return the environment without variables of settings: ingest receives its own, and must not see tokens."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
