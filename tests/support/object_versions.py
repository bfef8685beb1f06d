"""Plays the learner that writes versions into an object store."""

import hashlib
from datetime import timedelta

import msgspec

from anabranch.learner.object_storage.head import folder_path
from anabranch.learner.object_storage.lease import Lease
from anabranch.learner.state_dir.folders import MANIFEST
from anabranch.learner.versions.format import VERDICT


class VersionUploader:
    """Copies versions of a directory into an object store: files, manifest, then the head."""

    def __init__(self, bucket, versions):
        self.bucket = bucket
        self.versions = versions
        self.lease = Lease(bucket, timedelta(seconds=20), "learner")
        self.lease.acquire(0)

    def path(self, number, name):
        return f"{folder_path('versions', number, self.lease.head.versions[number])}/{name}"

    def upload(self, *numbers):
        """Upload versions, and list them all at once."""
        generation, verdicts = self.lease.generation, {}
        for number in numbers:
            folder, files = folder_path("versions", number, generation), self.versions.folder(number)
            for name in sorted(files.files(), key=lambda name: name == MANIFEST):
                self.bucket.write(f"{folder}/{name}", files.read(name))
            verdicts[number] = hashlib.sha256(files.read(VERDICT)).hexdigest()

        def listed(head):
            versions = {**head.versions, **dict.fromkeys(numbers, generation)}
            return msgspec.structs.replace(head, versions=versions, verdicts={**head.verdicts, **verdicts})

        self.lease.update(listed)

    def judge(self, number, verdict):
        """Replace a verdict."""
        content = msgspec.json.encode(verdict)
        digest = hashlib.sha256(content).hexdigest()
        self.bucket.write(self.path(number, VERDICT), content)
        self.lease.update(
            lambda head: msgspec.structs.replace(head, verdicts={**head.verdicts, number: digest}),
        )

    def delete(self, *numbers):
        """Delete versions, the head first."""
        paths = [path for number in numbers for path in self.bucket.sizes(self.path(number, "").rstrip("/"))]
        self.lease.update(
            lambda head: msgspec.structs.replace(
                head, versions={number: each for number, each in head.versions.items() if number not in numbers}
            )
        )
        self.bucket.delete(paths)
