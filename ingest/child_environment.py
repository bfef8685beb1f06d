"""What of the environment a process of ingest is given."""

import os

_SETTINGS = "ANABRANCH__"


def without_settings() -> dict[str, str]:
    """Return the environment less the variables of settings: ingest is sent its own, and tokens are not for it."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS)}
