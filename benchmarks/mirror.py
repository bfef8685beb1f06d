"""Steps a second of a learner that uploads its state, over those of one that does not.

    python -m benchmarks.mirror [--quick] [--json FILE] [--save] [--only PART ...] [--bootstrap HOST:PORT]

    s3      `[storage]` in an S3 server (SeaweedFS) on the cores of all other processes
    folder  `[storage]` in a folder, which costs no server and no signatures

Both learners train the MLP of `benchmarks.learner`, publish a version of 4 MB each second, and make a checkpoint each
30 seconds. They run in turns: each is suspended while the other trains. The training loop has one core. Uploads are on
the other cores, with the broker, ingest, the producer and the S3 server: what these take from each other counts. The
CPU time of the learner's process, with its uploads, is a separate figure.

The embedded broker has stalled for half a minute in the long form, with gigabytes in its topic: give it another one.
"""

import argparse
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.interleave import Spread, interleave, ratio
from benchmarks.harness.pipeline import broker
from benchmarks.harness.results import Form, Results, Target, options
from benchmarks.learner import BATCH, CORE, MLP, OTHERS, SIZES, Live, Sizes, live
from tests.support.s3 import started_s3

TARGETS = {"mirror_over_local": Target(0.99, least=True), "mirror_folder_over_local": Target(0.99, least=True)}


def over_local(results: Results, key: str, storage: dict[str, Any], sizes: Sizes, bootstrap: str) -> None:
    """Measure a learner with `[storage]` and one without in turns."""
    busy: dict[str, list[float]] = {"local": [], "mirror": []}

    def turn(arm: str, learner: Live) -> Callable[[], float]:
        def taken() -> float:
            rate = learner.turn()
            busy[arm].append(learner.busy)
            return rate

        return taken

    with contextlib.ExitStack() as stack:

        def learner(name: str, more: dict[str, Any]) -> Live:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=".", prefix=f"{name}-"))
            return stack.enter_context(live(bootstrap, MLP, "rows", sizes, Path(folder).resolve(), BATCH, more))

        local, mirror = learner("local", {}), learner("mirror", {"storage": storage})
        rates = interleave({"local": turn("local", local), "mirror": turn("mirror", mirror)}, sizes.rounds, warm_up=0)
        uploads = mirror.report().storage
    assert uploads is not None
    results.add(f"{key}_over_local", ratio(rates["mirror"], rates["local"]))
    results.add(f"{key}_busy_over_local", ratio(busy["mirror"], busy["local"]), "CPU time of the process a step")
    results.add(f"{key}_uploaded_bytes", uploads.uploaded_bytes, f"{uploads.failures} rounds of uploads failed")
    for arm, found in rates.items():
        results.add(f"{key}_steps_per_second_{arm}", Spread.of(found))


@contextlib.contextmanager
def s3_server() -> Iterator[dict[str, Any]]:
    """An S3 server; yields the section `[storage]`."""
    with (
        tempfile.TemporaryDirectory(dir=".", prefix="s3-") as folder,
        started_s3(Path(folder).resolve() / "s3") as server,
    ):
        prefix = server.prefix()
        yield {"url": prefix.url, "options": dict(prefix.options)}


def s3(results: Results, sizes: Sizes, bootstrap: str) -> None:
    """Measure the uploads to an S3 server."""
    results.title("s3: a version each second and a checkpoint each 30 s to an S3 server on the other cores")
    with s3_server() as storage:
        over_local(results, "mirror", storage, sizes, bootstrap)


def folder(results: Results, sizes: Sizes, bootstrap: str) -> None:
    """Measure the uploads to a folder."""
    results.title("folder: the same to a folder")
    with tempfile.TemporaryDirectory(dir=".", prefix="bucket-") as path:
        over_local(results, "mirror_folder", {"url": f"file://{Path(path).resolve()}"}, sizes, bootstrap)


PARTS: dict[str, Callable[[Results, Sizes, str], None]] = {"s3": s3, "folder": folder}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options(parser, PARTS)
    parser.add_argument(
        "--bootstrap", metavar="HOST:PORT", help="a broker, where topics are left, instead of an embedded one"
    )
    chosen = parser.parse_args()
    results = Results("mirror", TARGETS)
    results.fact("quick", chosen.form is not Form.LONG)
    if CORE is None:
        results.remark("cores cannot be chosen here: all processes of the benchmark compete for them")
    else:
        os.sched_setaffinity(0, OTHERS or CORE)
    with broker(chosen.bootstrap) as bootstrap:
        for part in chosen.only or PARTS:
            results.fact(f"load_before_{part}", os.getloadavg()[0])
            PARTS[part](results, SIZES[chosen.form], bootstrap)
    results.write(chosen)


if __name__ == "__main__":
    main()
