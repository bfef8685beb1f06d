"""The secret of a state directory, by which events are held out, kept and sampled.

The choice has to be the same after each start, and unknown to those who send events: with it they could send bad
events that no gate scores. So it depends on 32 random bytes in the file `secret.key`, which only its owner may read,
and not on `seed`, which is public.
"""

import functools
import hashlib
import os
import secrets
from pathlib import Path

from anabranch.core.errors import SettingsError
from anabranch.core.failures import state_errors
from anabranch.core.files import sync_directory

SECRET_FILE = "secret.key"  # noqa: S105 its name
"""Name of the file in the state directory."""
SECRET_BYTES = 32


class StreamSecret:
    """32 secret bytes, from which each use derives a separate number."""

    def __init__(self, value: bytes) -> None:
        self.value = value

    @classmethod
    def fixed(cls, seed: int) -> "StreamSecret":
        """Return the secret of a seed, for what has to be the same in another state directory: tests, benchmarks,
        `learner.deterministic`. It is as secret as the seed."""
        return cls(hashlib.blake2b(b"%d" % seed, digest_size=SECRET_BYTES, person=b"fixed secret").digest())

    @classmethod
    def read(cls, state_dir: Path) -> "StreamSecret | None":
        """Return the secret of a state directory; None where it has none.

        Raises:
            SettingsError: the file is not whole.
            DependencyError: it cannot be read.
        """
        path = state_dir / SECRET_FILE
        with state_errors(f"{path} cannot be read"):
            try:
                value = path.read_bytes()
            except FileNotFoundError:
                return None
        if len(value) != SECRET_BYTES:
            raise SettingsError(
                f"{path} has {len(value)} bytes, and not the {SECRET_BYTES} of a secret; put it back from a backup"
            )
        return cls(value)

    @classmethod
    def open(cls, state_dir: Path, seed: int | None = None) -> "StreamSecret":
        """Return the secret of a state directory, which is made at the first call; its lock must be held.

        `seed`: makes that of the seed, in place of a random one. Raises as `read`.
        """
        secret = cls.read(state_dir)
        if secret is None:
            secret = cls(secrets.token_bytes(SECRET_BYTES)) if seed is None else cls.fixed(seed)
            secret.write(state_dir)
        return secret

    def write(self, state_dir: Path) -> None:
        """Make this the secret of a state directory; it is durable when this returns."""
        path = state_dir / SECRET_FILE
        temporary = path.with_name(f".{SECRET_FILE}.{os.getpid()}")
        with state_errors(f"{path} cannot be written"):
            temporary.unlink(missing_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(self.value)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_directory(state_dir)

    def number(self, purpose: str) -> int:
        """Return a number of 128 bits for one purpose, from which neither the secret nor another number follows."""
        return int.from_bytes(hashlib.blake2b(purpose.encode(), key=self.value, digest_size=16).digest(), "little")

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the secret without revealing it."""
        return f"{self.number('digest') >> 64:016x}"
