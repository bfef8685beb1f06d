"""A state directory whose checkpoints and versions are uploaded to an object store that fails on demand."""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable
from datetime import timedelta

import torch

from anabranch.core.object_store.bucket import Bucket, BucketAwayError
from anabranch.core.shutdown import Deadline
from anabranch.learner.checkpoints.format import Checkpoint, Checkpoints
from anabranch.learner.extensions.storage.extension import Mirror
from anabranch.learner.extensions.storage.uploads import CheckpointUploads, VersionUploads
from anabranch.learner.object_storage.bases import uploads_of
from anabranch.learner.object_storage.bucket_storage import BucketStorage
from anabranch.learner.object_storage.erasure_upload import ErasureUpload
from anabranch.learner.object_storage.head import OBJECTS, HeadReader, folder_path
from anabranch.learner.object_storage.lease import Lease
from anabranch.learner.state_dir.bases import bases_in
from anabranch.learner.state_dir.folders import MANIFEST
from anabranch.learner.stream.trained_through import PartitionProgress
from anabranch.learner.versions.format import Verdict, Versions
from anabranch.replay.erasure.erased_events import ByRange
from anabranch.replay.erasure.erasure_log import NAME, ErasureLog
from tests.support.manifests import manifest_of

PATIENCE = timedelta(seconds=60)


class FaultyBucket(Bucket):
    """An object store whose requests fail on demand, and whose writes are recorded."""

    def __init__(self, url, options=None, retries=0):
        super().__init__(url, options or {}, retries=retries)
        self.away = False
        self.paths: list[str] = []
        """What was written, in order."""
        self.before_write: Callable[[str], object] = str

    def write(self, path, content):
        self._request(path)
        super().write(path, content)

    def create(self, path, content):
        self._request(path)
        return super().create(path, content)

    def replace(self, path, content, tag):
        self._request(path)
        return super().replace(path, content, tag)

    def read_tagged(self, path, max_bytes=None):
        self._answer(path)
        return super().read_tagged(path, max_bytes)

    def read_changed(self, path, tag, max_bytes=None):
        self._answer(path)
        return super().read_changed(path, tag, max_bytes)

    def download(self, path, to):
        self._answer(path)
        super().download(path, to)

    def sizes(self, prefix):
        self._answer(prefix)
        return super().sizes(prefix)

    def delete(self, paths):
        self._answer(paths[0])
        super().delete(paths)

    def _request(self, path):
        self.before_write(path)
        self._answer(path)
        self.paths.append(path)

    def _answer(self, path):
        if self.away:
            raise BucketAwayError(f"{self.url}/{path}: SlowDown")


class UploadBench:
    """Writes checkpoints and versions as a learner does, and uploads them."""

    def __init__(self, folder, bucket, name="host", keep=3):
        """Take the lease, as the state directory `name` of a folder."""
        self.state_dir = folder / name
        self.state_dir.mkdir(exist_ok=True)
        self.bucket = bucket
        self.lease = Lease(bucket, timedelta(seconds=4), name)
        self.generation = self.lease.acquire(0)
        self.checkpoints = Checkpoints(self.state_dir / "checkpoints", "", self.generation)
        self.versions = Versions(self.state_dir / "versions")
        self.log = ErasureLog(self.state_dir / NAME)
        self.log.refresh()
        versions, checkpoints = (self._storage(kind) for kind in ("versions", "checkpoints"))
        self.bases = uploads_of(versions, self.versions.path)
        local = Versions(self.versions.path)
        self.version_uploads = VersionUploads(local, versions, self.lease, keep=4, bases=self.bases)
        source = Checkpoints(self.checkpoints.path, "", self.generation)
        self.checkpoint_uploads = CheckpointUploads(source, checkpoints, self.lease, keep, self.log.through, self.bases)
        self.erasures = ErasureUpload(self.state_dir, bucket, self.lease)
        self.mirror = Mirror(self.lease, bucket.url, self.erasures, self.version_uploads, self.checkpoint_uploads)

    def _storage(self, kind):
        return BucketStorage(self.bucket, kind, self.state_dir / "fetched", self.lease)

    def checkpoint(self, number, erased=0, carried=None, size=100):
        """Write a checkpoint of `size` weights, with a segment that is new, or that of an earlier checkpoint."""
        tensors = {"model": {"w": torch.full((size,), float(number))}}
        if carried is None:
            tensors["segment-1"] = {"index": torch.zeros(1000)}
        parts = {} if carried is None else {"segment-1": carried}
        state = {"erased": erased, "ledger": []}
        self.checkpoints.write(number, Checkpoint(number, tensors, state, parts), time.time())

    def version(self, number, verdict="pass"):
        """Write a version."""
        manifest = manifest_of(
            number,
            generation=self.generation,
            time=time.time(),
            trained_through={"t:0": PartitionProgress(0, number)},
            schema="",
            factory="f",
            base=self.versions.base,
        )
        self.versions.write({"w": torch.full((10,), float(number))}, manifest, Verdict(verdict))

    def use_base(self, content):
        """Write a base, which versions and checkpoints name from now on, and return its SHA-256."""
        sha256 = hashlib.sha256(content).hexdigest()
        bases_in(self.state_dir).write(sha256, [content])
        self.versions.base = self.checkpoints.base = sha256
        return sha256

    def erase(self):
        """Append a record to the erasure log, and return its number."""
        return self.log.append([ByRange(time=0.0, by="command", partition="t#0[0]", first=1, last=2)])[0].number

    def finished(self):
        """Wait until everything is uploaded, and return whether it is."""
        return all(thread.finish(Deadline(PATIENCE)) for thread in self.mirror.threads)


@contextlib.contextmanager
def running_threads(mirror):
    """Run the threads of uploads while the block runs."""
    mirror.start()
    try:
        yield
    finally:
        mirror.close()


def damaged(bucket):
    """Return what is wrong with the folders that the head lists: files that are missing, or that differ."""
    reader, faults = HeadReader(bucket), list[str]()
    reader.poll()
    assert reader.contents is not None
    for kind in ("checkpoints", "versions"):
        for number, generation in reader.contents.folders(kind).items():
            path = folder_path(kind, number, generation)
            try:
                files: dict[str, str] = json.loads(bucket.read(f"{path}/{MANIFEST}"))["files"]
                paths = {name: f"{path}/{name}" for name in files}
                if kind == "checkpoints":
                    paths = {name: file["path"] for name, file in json.loads(bucket.read(f"{path}/{OBJECTS}")).items()}
                for name, digest in files.items():
                    if hashlib.sha256(bucket.read(paths[name])).hexdigest() != digest:
                        faults.append(f"{path}/{name} differs")
            except (FileNotFoundError, KeyError) as exc:
                faults.append(f"{path}: {exc}")
    return faults


def torn(bucket):
    """Return what is wrong with folders that the head lists, except those that are being deleted."""
    return sorted({*damaged(bucket)} & {*damaged(bucket)})
