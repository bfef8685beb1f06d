"""`anabranch broker`: a broker of the Kafka protocol, without its installation."""

import sys
from typing import Annotated

import typer

from anabranch.command import command
from anabranch.runtime.embedded_broker import EmbeddedBroker
from anabranch.runtime.lifecycle import stop_on_signals


@command("anabranch broker")
def broker(
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="PORT", help="Port of loopback; 0: any free.")] = 9092,
) -> None:
    """Run a Kafka broker for development until Ctrl-C, and print its address. What it holds is lost at the end."""
    with stop_on_signals() as stop, EmbeddedBroker(port) as running:
        typer.echo(running.bootstrap)
        sys.stdout.flush()
        stop.wait()
