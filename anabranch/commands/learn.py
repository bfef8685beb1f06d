"""`anabranch learn`."""

from anabranch.command import ConfigFile, command
from anabranch.core.logs import log_arguments
from anabranch.runtime.lifecycle import Exit


@command("anabranch learn -c digits/pipeline.toml")
def learn(config: ConfigFile) -> Exit:
    """Run the learner alone; SIGTERM stops it within learner.stop_timeout."""
    from anabranch.learner.__main__ import main

    return Exit(main([*config.arguments(), *log_arguments()]))
