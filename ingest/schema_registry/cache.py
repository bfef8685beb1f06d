"""Writer schemas by id, fetched in the background and kept, within bounds, as long as the process runs."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from anabranch.core.backoff import Backoff
from anabranch.core.extras import needs
from anabranch.core.job_thread import JobThread
from anabranch.ingest.errors import MissingSchemaError, OversizedSchemaError, RegistryError
from anabranch.ingest.schema_registry.sized_cache import SizedCache
from anabranch.ingest.schema_registry.writer_schema import WriterSchema
from anabranch.ingest.settings.registry import RegistrySettings
from anabranch.ingest.settings.stream import StreamSettings

if TYPE_CHECKING:
    from anabranch.ingest.schema_registry.client import RegistryClient

_LONGEST_WAIT_SECONDS = 2.0
"""How long a lookup waits for the registry, so that known ids soon go on."""
_LONGEST_FETCH_SECONDS = 5.0
"""How long schemas are asked for before messages go on with those that have arrived."""
_AGAIN_SECONDS = 1.0
"""How long after a registry said that it lacks an id it is asked again: another of its servers may have just got it."""
_LAGGING_SECONDS = 10.0
"""How long an id is asked for again: servers of a registry may lag behind the one that the producer has asked."""
_FEW_MISSING = 3
"""Ids that were given up lately. After them, an id is asked for again once: such messages have no ids of a registry."""
_MANY_MISSING = 20
"""Ids that were given up lately, or are asked for again. After them, no other one is asked for again."""
_MOST_AWAITED = 100
"""Ids that are asked for at once: the messages of others wait behind theirs."""
_MOST_IN_A_ROW = 200
"""Ids that the registry lacked in a row. After them, new ones are asked for one at a time, others rejected at once."""
_NEXT_SECONDS = 0.1
"""Time between two of them: messages wait for each."""
_MOST_BYTES = 64_000_000
"""Bytes of the schemas that are kept."""
_MOST_TIMES = 2
"""How often an id may be given up. After that it is asked for again once: else its messages would hold up others."""
_MISSING_SECONDS = 30.0
"""How long an id that the registry lacks is not asked for again."""
_MOST_MISSING = 10_000
_NEWEST_SECONDS = 60.0
"""How old the newest schema of the subject may be before it is asked for again."""

SchemaId = int | str | None
"""The number or the GUID of a schema; None for the newest one of the subject."""

log = logging.getLogger(__name__)


def writer_schemas(stream: StreamSettings, *, is_patient: bool = True) -> "WriterSchemas | None":
    """Return what finds the writer schemas of a stream's messages; None where it has no registry.

    `is_patient` is that of `WriterSchemas`.

    Raises:
        SettingsError: requests is not installed, or the file of authorities cannot be read.
    """
    if stream.registry is None:
        return None
    with needs("stream.registry", "requests", "registry"):
        from anabranch.ingest.schema_registry.client import RegistryClient
    client = RegistryClient(stream.registry, are_serialized=stream.format == "protobuf")
    return WriterSchemas(stream.registry, client, is_patient=is_patient)


class WriterSchemas:
    """Finds writer schemas. Used by one thread; its own background thread sends the requests."""

    def __init__(
        self,
        settings: RegistrySettings,
        client: "RegistryClient",
        *,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_patient: bool = True,
    ) -> None:
        """Send nothing yet; the `subject` of the settings must be set.

        If `is_patient`, ids that the registry lacks are asked for over several seconds, otherwise twice.
        """
        self.settings = settings
        self._is_patient = is_patient
        self._client = client
        self._backoff = backoff or Backoff(timedelta(seconds=0.5), timedelta(seconds=10))
        self._clock = clock
        self._wait_seconds = min(settings.timeout.total_seconds(), _LONGEST_WAIT_SECONDS)
        self._thread = JobThread("registry")
        self._lock = threading.Lock()
        self._schemas = SizedCache[SchemaId, WriterSchema](_MOST_BYTES)
        self._missing: dict[SchemaId, _MissingSchema] = {}
        self._awaited: dict[SchemaId, None] = {}
        """Ids that were looked up and not found yet, in the order in which the registry is asked for them."""
        self._unsure: dict[SchemaId, tuple[float, float]] = {}
        """Awaited ids that the registry lacked, and when it was first asked for them by the clock, and last in fact."""
        self._failing: set[SchemaId] = set()
        """Awaited ids for which the registry has given no answer: they keep no others back."""
        self._missing_in_a_row = 0
        self._next_at = 0.0
        """When the next id is asked for while all are missing."""
        self._closing = threading.Event()
        self._newest_until = 0.0
        self._retry_at = 0.0
        self.problem: str | None = None
        """Why the registry does not answer, since the last request."""
        self.has_subject = True
        """Whether the registry has the subject, as far as it was asked; with `fallback`, it is waited for."""
        self.answers = 0
        """Grows when schemas that were awaited have arrived."""

    def find(self, ids: Iterable[SchemaId]) -> dict[SchemaId, WriterSchema | str | None]:
        """Return for each id its schema, or why the registry has none, or None while the registry is away.

        Waits two seconds at most, and not at all for a registry that has just not answered. Of ids that were never
        looked up, most are rejected without a request while the registry lacks one after the other.
        """
        if self._clock() >= self._newest_until and None in self._schemas:
            self._await([None])  # the one of before is used meanwhile
        found = {schema_id: self._found(schema_id) for schema_id in ids}
        found |= self._await([schema_id for schema_id, schema in found.items() if schema is None])
        self.fetch_if_due()
        if None in found.values() and self.problem is None:
            self._thread.wait(self._wait_seconds)
            found |= {schema_id: self._found(schema_id) for schema_id, schema in found.items() if schema is None}
        return found

    def fetch_if_due(self) -> None:
        """Ask the registry again for what is awaited, in the background, unless the back-off is not over."""
        if self._awaited and not self._thread.busy and self._clock() >= self._retry_at:
            self._thread.submit(self._fetch)

    def close(self) -> None:
        """End the background thread, and disconnect."""
        self._closing.set()
        self._thread.close()
        self._client.close()

    def _found(self, schema_id: SchemaId) -> WriterSchema | str | None:
        with self._lock:
            missing = self._missing.get(schema_id, _NEVER)
            return self._schemas.get(schema_id) or (missing.sentence if self._clock() < missing.until else None)

    def _await(self, ids: Iterable[SchemaId]) -> dict[SchemaId, str]:
        """Let the registry be asked for ids; return those that it is not to be asked for, and why."""
        refused: dict[SchemaId, str] = {}
        with self._lock:
            for schema_id in ids:
                is_full = len(self._awaited) - len(self._failing) >= _MOST_AWAITED
                if schema_id in self._awaited or (schema_id is not None and is_full):
                    continue
                if schema_id is not None and self._missing_in_a_row >= _MOST_IN_A_ROW:
                    if self._clock() < self._next_at:
                        refused[schema_id] = (
                            f"the registry at {self.settings.url} lacked the last {self._missing_in_a_row} schemas "
                            "that it was asked for, and is asked for few others"
                        )
                        continue
                    self._next_at = self._clock() + _NEXT_SECONDS
                self._awaited[schema_id] = None
        return refused

    def _fetch(self) -> None:
        """Ask for awaited schemas for a few seconds; runs in the background thread.

        The others are asked for next: messages go on meanwhile with what has arrived.
        """
        until = self._clock() + min(self.settings.timeout.total_seconds(), _LONGEST_FETCH_SECONDS)
        problem, answered = None, False
        with self._lock:
            awaited = list(self._awaited)
        for schema_id in awaited:
            again = schema_id in self._unsure
            try:
                if self._fetch_one(schema_id):
                    answered = True
                elif not again:  # later than that, in the next round: new ids come first
                    awaited.append(schema_id)
            except Exception as exc:
                problem = str(exc)
                if not isinstance(exc, RegistryError):
                    # A message of this schema waits, as while the registry is away; all others go on.
                    log.exception("a bug in reading the schema %s", schema_id)
                    problem = f"a bug in reading the schema {schema_id} of the registry: {type(exc).__name__}: {exc}"
                with self._lock:  # the others come before it next time
                    self._failing.add(schema_id)
                    del self._awaited[schema_id]
                    self._awaited[schema_id] = None
            if self._clock() >= until:
                break
        with self._lock:  # what was found missing counts from now: it has to be used before it is asked for again
            for schema_id in awaited:
                missing = self._missing.get(schema_id, _NEVER)
                if missing.until == math.inf:
                    self._missing[schema_id] = missing._replace(until=self._clock() + _MISSING_SECONDS)
        if problem is None or answered:
            self._backoff.reset()
        if problem is not None:
            self._retry_at = self._clock() + self._backoff.next()
        if problem != self.problem:
            log.log(logging.INFO if problem is None else logging.WARNING, "%s", problem or "the registry answers again")
        self.problem = problem
        self.answers += answered

    def _fetch_one(self, schema_id: SchemaId) -> bool:
        """Ask for a schema; return whether the answer counts, or the id has to be asked for again."""
        if schema_id in self._unsure:
            self._closing.wait(self._unsure[schema_id][1] + _AGAIN_SECONDS - time.monotonic())
        schema: WriterSchema | str
        if schema_id is None:
            try:
                schema = self._newest()
            except MissingSchemaError as exc:
                self.has_subject = False
                if self.settings.fallback:  # then there is none to read messages with
                    raise RegistryError(f"{exc}: check stream.registry.subject") from exc
                with self._lock:
                    self._remove_awaited(schema_id)
                return True
            self.has_subject = True
        else:
            try:
                schema = self._client.schema(schema_id)
            except MissingSchemaError as exc:
                if self._may_be_new(schema_id):
                    return False
                schema = str(exc)
            except OversizedSchemaError as exc:
                schema = str(exc)
        self._unsure.pop(schema_id, None)
        with self._lock:
            self._remove_awaited(schema_id)
            if isinstance(schema, WriterSchema):
                self._schemas.put(schema_id, schema, schema.size)
                self._missing_in_a_row = 0
                return True
            self._missing_in_a_row += 1
            if len(self._missing) >= _MOST_MISSING:
                self._missing.clear()
            times = self._missing.get(schema_id, _NEVER).times + 1
            self._missing[schema_id] = _MissingSchema(schema, math.inf, times)
            return True

    def _remove_awaited(self, schema_id: SchemaId) -> None:
        del self._awaited[schema_id]
        self._failing.discard(schema_id)

    def _may_be_new(self, schema_id: SchemaId) -> bool:
        """Return whether to ask again for a schema that the registry lacks; with `fallback`, never.

        A GUID is asked for twice at most: registries without GUIDs have none, however long they are asked.
        """
        if self.settings.fallback:
            return False
        now, again = self._clock(), schema_id in self._unsure
        first, _ = self._unsure.get(schema_id, (now, 0.0))
        self._unsure[schema_id] = first, time.monotonic()
        with self._lock:
            given_up = sum(now < missing.until for missing in self._missing.values())
            times = self._missing.get(schema_id, _NEVER).times
        if given_up >= _MANY_MISSING or len(self._unsure) > _MANY_MISSING:
            return False
        may_lag = self._is_patient and isinstance(schema_id, int) and given_up < _FEW_MISSING and times < _MOST_TIMES
        return not again or (may_lag and now < first + _LAGGING_SECONDS)

    def _newest(self) -> WriterSchema:
        """Return the newest schema of the subject; raises MissingSchemaError where the registry has no such subject."""
        assert self.settings.subject is not None
        try:
            schema = self._client.newest(self.settings.subject)
        except OversizedSchemaError as exc:
            raise RegistryError(f"{exc}: check stream.registry.subject") from exc
        self._newest_until = self._clock() + _NEWEST_SECONDS
        return schema


class _MissingSchema(NamedTuple):
    """A schema that the registry lacks."""

    sentence: str
    until: float
    """When it is asked for again; infinity while the round lasts that found it missing."""
    times: int
    """How often it was given up."""


_NEVER = _MissingSchema("", 0.0, 0)
