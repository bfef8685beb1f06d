"""Events a second that ingest makes of messages.

    python -m benchmarks.ingest [--quick] [--json FILE] [--save] [--only PART ...]

    decode   messages in memory become rows of a block: Avro, Protobuf and JSON with a writer schema, and plain JSON
    poll     messages of a topic, polled by each client, and decoded to blocks, over the same client's poll alone

Messages have four fields (a float, an integer, one of 200 strings, a label), or 64 floats and a label. All formats, or
both arms of a client, take turns in one process.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.harness import ingest_formats
from benchmarks.harness.cores import split
from benchmarks.harness.pipeline import broker
from benchmarks.harness.results import Form, Results, options


@dataclass(frozen=True)
class Sizes:
    """Rounds, seconds of a turn in memory and of a topic, and messages of a topic."""

    rounds: int
    seconds: float
    poll_seconds: float
    messages: int


SIZES = Sizes(1, 0.02, 0.05, 50_000), Sizes(3, 0.3, 2.0, 200_000), Sizes(9, 2.0, 5.0, 500_000)
"""Of each form."""
CORE, OTHERS = split()


def decode(results: Results, sizes: Sizes, _bootstrap: str | None) -> None:
    """Measure messages in memory."""
    ingest_formats.decode(results, sizes.rounds, sizes.seconds)


def poll(results: Results, sizes: Sizes, bootstrap: str | None) -> None:
    """Measure messages of a topic; the broker is on the other cores."""
    if CORE is not None and OTHERS is not None:
        os.sched_setaffinity(0, OTHERS)
    with broker(bootstrap) as address:
        if CORE is not None and OTHERS is not None:
            os.sched_setaffinity(0, CORE | OTHERS)
        ingest_formats.poll(results, sizes.rounds, sizes.poll_seconds, sizes.messages, address)


PARTS: dict[str, Callable[[Results, Sizes, str | None], None]] = {"decode": decode, "poll": poll}
TARGETS = {**ingest_formats.TARGETS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, PARTS)
    parser.add_argument(
        "--bootstrap", metavar="HOST:PORT", help="a broker, where topics are left, instead of an embedded one"
    )
    chosen = parser.parse_args()
    results = Results("ingest", TARGETS)
    results.fact("quick", chosen.form is not Form.LONG)
    for part in chosen.only or PARTS:
        results.fact(f"load_before_{part}", os.getloadavg()[0])
        PARTS[part](results, SIZES[chosen.form], chosen.bootstrap)
    results.write(chosen)


if __name__ == "__main__":
    main()
