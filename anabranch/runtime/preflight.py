"""What would keep a command or a daemon from its start: this Python, open files, and who may read the state."""

import platform
import resource
from collections.abc import Iterator

from anabranch.config.loader import Config
from anabranch.config.pipeline import Pipeline
from anabranch.core.preflight import Finding, check_import, ok, warning
from anabranch.runtime.private_state import is_exposed, is_open_to_others, is_own

_FILES = 1024
"""File descriptors: what the parts need, and some hundred connections of serving."""


def check_install(pipeline: Pipeline) -> Iterator[Finding]:
    """Whether what sections need that are absent by default can be imported."""
    yield ok(f"This is Python {platform.python_version()}.")
    if pipeline.tracing is not None:
        yield from check_import("[tracing]", "opentelemetry.sdk.trace", "otel")
    if (track := pipeline.track) is not None:
        yield from check_import(f'[track] kind = "{track.kind}"', track.kind, track.kind)


def check_limits() -> Iterator[Finding]:
    """Whether enough files may be open, once a daemon has raised its limit as far as it may."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < _FILES:
        message = f"Only {limit} files may be open, so that serving refuses connections beyond about {limit // 2}."
        fix = f'Raise it before the start: "ulimit -n {4 * _FILES}", or LimitNOFILE in a unit file.'
        yield warning("limit.files", message, fix)
    else:
        yield ok("Enough files may be open.")


def check_private(config: Config) -> Iterator[Finding]:
    """Whether the state directory and the private key of TLS are closed to other users, or a start closes them."""
    if is_exposed(config) and not is_own(config):
        message = f"{config.state_dir} will hold events in clear text, and users other than its owner may read it."
        fix = f"chmod 700 {config.state_dir}, by its owner; or set state_dir to a folder for the state alone."
        yield warning("state.exposed", message, fix)
    key = config.pipeline.serving.tls.key
    if key is not None and is_open_to_others(path := config.folder / key):
        message = f"serving.tls.key = {path} may be read by users other than its owner."
        yield warning("key.exposed", message, f"chmod 600 {path}, by its owner.")
