"""`anabranch up`: learner and serving as one."""

from anabranch.command import ConfigFile, command
from anabranch.runtime.lifecycle import Exit, stop_on_signals
from anabranch.runtime.supervisor import Supervisor, pipeline_parts


@command("anabranch up -c digits/pipeline.toml")
def up(config: ConfigFile) -> Exit:
    """Run learner and serving in the foreground until Ctrl-C; a part that dies is started again."""
    parts = pipeline_parts(config.load())
    with stop_on_signals() as stop:
        return Supervisor(parts).run(stop)
