"""The section `[storage]` of `pipeline.toml`. Imports no obstore."""

from datetime import timedelta
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import SecretStr, model_validator

from anabranch.core.durations import PositiveDuration
from anabranch.core.object_store.bucket import Bucket
from anabranch.core.settings import Section, written

_SCHEMES = "s3|gs|az|abfs|abfss|file|memory"
_QUICK = {"connect_timeout": "2s", "timeout": "5s"}
"""Limits of obstore's client for the head; `storage.options` may have others."""
_LEAST_LEASE = timedelta(seconds=4)


class StorageSettings(Section):
    """The object store that has checkpoints and versions, for hosts that share no disk."""

    url: Annotated[
        str, written(rf"({_SCHEMES})://\S+", '"s3://bucket/prefix", "gs://...", "az://..." or "file:///..."')
    ]
    """Where the state is: a prefix that no other pipeline has (`s3://`, `gs://`, `az://`, `file://`)."""
    mode: Literal["mirror", "only"] = "mirror"
    """`mirror` writes into `state_dir` and uploads in the background; `only` writes into the object store alone."""
    options: dict[str, SecretStr] = {}
    """Options of the object store, in the names of obstore (`aws_region`, `endpoint`, `aws_server_side_encryption` and
    so on); by default they come from the environment, the instance or the pod."""
    lease: PositiveDuration = timedelta(seconds=20)
    """How long the learner of another `state_dir` must have been silent before a learner replaces it."""

    @property
    def bucket(self) -> Bucket:
        """The objects below `url`; raises SettingsError when they cannot be opened."""
        return Bucket(self.url, self._options)

    @property
    def quick_bucket(self) -> Bucket:
        """The same, with short limits of time: for requests on which a lease depends, of small objects."""
        return Bucket(self.url, {**_QUICK, **self._options}, retries=1)

    @property
    def _options(self) -> dict[str, str]:
        return {name: value.get_secret_value() for name, value in self.options.items()}

    @model_validator(mode="after")
    def _a_lease_can_be_renewed(self) -> Self:
        if self.lease < _LEAST_LEASE:
            raise ValueError(
                f"lease: write {_LEAST_LEASE.total_seconds():g}s or more, so that it can be renewed in time"
            )
        if urlsplit(self.url).query:
            raise ValueError("url: a query may be a secret; write its parts into options")
        return self
