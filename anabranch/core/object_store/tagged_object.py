"""An object that several processes replace under compare-and-swap, and read as it changes."""

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from anabranch.core.errors import AnabranchError
from anabranch.core.failures import DamagedError
from anabranch.core.object_store.bucket import Bucket

_T = TypeVar("_T")


class TaggedObject(Generic[_T]):
    """An object, as it was read or written last. Used by one thread at a time; any thread may read the attributes."""

    def __init__(
        self,
        bucket: Bucket,
        path: str,
        decode: Callable[[bytes], _T],
        absent: _T,
        error: type[AnabranchError],
        max_bytes: int,
    ) -> None:
        """Read nothing yet.

        Args:
            bucket: where the object is.
            path: of the object.
            decode: returns what its bytes stand for; raises `error` where they cannot be used.
            absent: the contents while there is no object.
            error: the kind of error that says that it cannot be used.
            max_bytes: of the object.
        """
        self._bucket = bucket
        self._path = path
        self._decode = decode
        self._absent = absent
        self._error = error
        self._max_bytes = max_bytes
        self._damage: AnabranchError | None = None
        """Why the object of this tag cannot be used."""
        self.contents = absent
        self.tag: str | None = None
        """The tag of the object; None while there is none."""

    def poll(self) -> bool:
        """Read the object if it has changed, and return whether it has.

        Raises:
            BucketAwayError: the object store cannot be reached.
            AnabranchError: the object cannot be used; it is read again once it has changed.
        """
        try:
            found = self._bucket.read_changed(self._path, self.tag, self._max_bytes)
        except DamagedError as exc:
            raise self._error(str(exc)) from exc
        except FileNotFoundError:
            changed = self.tag is not None
            self.contents, self.tag, self._damage = self._absent, None, None
            return changed
        if found is not None:
            content, self.tag = found
            try:
                self.contents, self._damage = self._decode(content), None
            except self._error as exc:
                self._damage = exc
        if self._damage is not None:
            raise self._damage
        return found is not None

    def replace(self, contents: _T) -> None:
        """Replace what was read last by the JSON of other contents.

        Raises:
            ReplacedError: another process has replaced it since.
            BucketAwayError: the object store cannot be reached; the change may appear later.
        """
        encoded = msgspec.json.encode(contents)
        if self.tag is None:
            self.tag = self._bucket.create(self._path, encoded)
        else:
            self.tag = self._bucket.replace(self._path, encoded, self.tag)
        self.contents = contents
