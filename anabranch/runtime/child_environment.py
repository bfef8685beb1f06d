"""What of the environment a child process is not to have."""

from collections.abc import Mapping

from anabranch.config.overrides import ENVIRONMENT_PREFIX
from anabranch.learner.settings.pipeline import Tokens

_TOKEN = f"{ENVIRONMENT_PREFIX}SERVING__TOKENS__ADMIN"
_HOST = f"{ENVIRONMENT_PREFIX}SERVING__HOST"
_TABLES = (f"{ENVIRONMENT_PREFIX}SERVING", f"{ENVIRONMENT_PREFIX}SERVING__TOKENS")


def without_admin_token(tokens: Tokens, environment: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that keep the admin token from a process that loads the same config and serves nothing.

    None stands for a variable that is to be removed. Where the read token is the same there is nothing to keep.
    """
    token = tokens.admin.get_secret_value()
    if not token or token == tokens.read.get_secret_value():
        return {}
    changes: dict[str, str | None] = {}
    for name, value in environment.items():
        if name.upper() in _TABLES:
            changes[name] = value.replace(token, "")
        elif value == token or name.upper() in (_TOKEN, _HOST):
            changes[name] = None
    # Of a config that reads the token from a variable, or listens off loopback, which takes a token.
    return changes | {_TOKEN: "", _HOST: "127.0.0.1"}
