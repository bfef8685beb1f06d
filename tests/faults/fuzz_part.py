"""The part `fuzz`: malformed messages of every format."""

import time
from pathlib import Path

from tests.faults import fuzz, registered_fuzz
from tests.faults.figures import Figures
from tests.faults.fuzz import Fuzzed
from tests.support.formats import FORMATS

_SEED = 0
"""Of formats with a registry: their damaged messages are the same in each run."""


def run(folder: Path, bootstrap: str, figures: Figures, *, quick: bool, minutes: float) -> None:
    """Measure the part `fuzz`."""
    alone, registered, through = (3_000, 3_000, 700) if quick else (30_000, 100_000, 4_000)
    title = (
        f"{alone} malformed messages for the decoder of each format, {registered} damaged ones where it has a "
        f"registry, {through} more of each through Kafka"
    )
    figures.part("fuzz", title)
    fuzzed, seed = Fuzzed(), int(time.time())
    for form in FORMATS:
        fuzzed.add(fuzz.decoded(form, alone, seed))
        fuzzed.add(fuzz.dead_lettered(folder, bootstrap, form, through, seed + 1))
    for form in registered_fuzz.FORMATS:
        found = registered_fuzz.decoded(form, registered, _SEED)
        found.add(registered_fuzz.dead_lettered(folder, bootstrap, form, through, _SEED + 1))
        figures.add(f"fuzzed_{form.replace('-', '_')}", found.cases)
        fuzzed.add(found)
    figures.add("fuzzed", fuzzed.cases, f"seed {seed}")
    figures.add("crashes", len(fuzzed.crashes), " ".join(fuzzed.crashes[:2]))
    figures.add("not_dead_lettered", len(fuzzed.passed), " ".join(map(repr, fuzzed.passed[:2]))[:300])
