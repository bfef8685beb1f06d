"""`anabranch serve`."""

from anabranch.command import ConfigFile, command
from anabranch.core.logs import log_arguments
from anabranch.runtime.lifecycle import Exit


@command("anabranch serve -c digits/pipeline.toml")
def serve(config: ConfigFile) -> Exit:
    """Run serving alone; SIGTERM stops it after it has answered all accepted requests."""
    from anabranch.serving.__main__ import main

    return Exit(main([*config.arguments(), *log_arguments()]))
