"""From a request's bytes to a reply's: decode, choose the version, wait for it if asked, predict, encode."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import ParamSpec, TypeVar

from anabranch.ingest.events.schema import Schema
from anabranch.learner.versions.format import RegistryState
from anabranch.serving.errors import (
    BadRequestError,
    DeadlineExceededError,
    NotFoundError,
    TooManyRequestsError,
    UnavailableError,
    shorten,
)
from anabranch.serving.inference.batcher import Batcher
from anabranch.serving.inference.shadow import Shadow
from anabranch.serving.inference.skew import RequestSkew
from anabranch.serving.metrics import ServingMetrics
from anabranch.serving.model.deployment import Deployment
from anabranch.serving.model.loaded_version import ServedVersion
from anabranch.serving.protocol.codec import Request, Signature
from anabranch.serving.protocol.tensors import Array
from anabranch.serving.reporting.worker_pool import PoolWorker
from anabranch.serving.rollout.commands import COMMANDS
from anabranch.serving.rollout.hot_swap import VersionSwapper
from anabranch.serving.settings import AnswerLogSettings, ServingSettings

log = logging.getLogger("anabranch.serving")

_LONGEST_NUMBER = 15
"""Digits."""
_LARGE_ELEMENTS = 65_536
"""A larger reply is encoded in a thread."""

_MOST_COUNTED = 1000
"""Versions whose requests are counted."""

LogAnswer = Callable[[Signature, str, ServedVersion, Request, Mapping[str, Array]], None]
"""Takes the signature, the request's id, the version, the request and its answers."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Service:
    """Answers inference requests and applies rollout commands. Belongs to the event loop's thread."""

    def __init__(
        self,
        deployment: Deployment,
        settings: ServingSettings,
        swap: VersionSwapper,
        batcher: Batcher,
        metrics: ServingMetrics,
        bugs: list[BaseException],
        worker: PoolWorker | None = None,
    ) -> None:
        """`worker` is this process, if it is one of several; `bugs` gets the errors that end the process."""
        self.name = deployment.name
        self.signature = Signature(
            deployment.schema,
            deployment.outputs(),
            settings.max_queue,
            deployment.embeds,
            kept=_logged_inputs(deployment.schema, settings.log),
        )
        self.log_answer: LogAnswer | None = None
        """Called with each answer to a request; of `[serving.log]`."""
        self._swap = swap
        self._batcher = batcher
        self.shadow = Shadow(
            deployment,
            settings.shadow,
            settings.max_batch,
            metrics,
            served=lambda: swap.current,
            is_idle=lambda: batcher.is_idle,
            on_error=bugs.append,
        )
        """Entering it starts its thread."""
        self.skew = RequestSkew(deployment.state_dir, deployment.schema, metrics)
        self._worker = worker
        self._bugs = bugs
        self._most_waiting_rows = settings.max_queue
        self._waiting_rows = 0
        self.answered = Counter[int]()
        """Requests that the newest versions have answered, since the start of the process."""
        self._swapped = asyncio.Event()
        self._stopping = False
        self.draining = False
        """Whether it answers requests, and says that it is not ready: the process is about to end."""

    @property
    def version(self) -> ServedVersion | None:
        """The served version; None while there is none."""
        return self._swap.current

    def swapped(self) -> None:
        """Wake the requests that wait for a newer version; called in the loop's thread after each swap."""
        swapped, self._swapped = self._swapped, asyncio.Event()
        swapped.set()

    def stop(self) -> None:
        """Answer the requests that wait for a newer version with 503, now and from now on."""
        self._stopping = True
        self.swapped()

    def check_alive(self) -> None:
        """Raise UnavailableError after an error that ends the process, such as the loss of its device."""
        if self._bugs:
            raise UnavailableError("this server is about to start again after an error; see its log")

    def check_ready(self, name: str, version: str | None = None) -> None:
        """Raise RequestError unless new requests may be sent here: as `resident`, and while the server drains."""
        self.resident(name, version)
        if self.draining:
            raise UnavailableError("the server is stopping")

    def resident(self, name: str, version: str | None = None) -> ServedVersion:
        """Return the served version if it is the requested one.

        Raises:
            NotFoundError: no such model, or no such version; the sentence names what there is.
            UnavailableError: there is no version yet, or the process is about to end.
        """
        self.check_alive()
        self.check_name(name)
        current = self.version
        if version is not None and (current is None or version != current.name):
            raise NotFoundError(
                f"version {shorten(version)} is not resident; resident: {current.name if current else 'none'}"
            )
        if current is None:
            raise UnavailableError(f"no version of {self.name} is ready yet")
        return current

    def check_name(self, name: str) -> None:
        """Raise NotFoundError unless this is the model's name."""
        if name != self.name:
            raise NotFoundError(f"there is no model {shorten(name)!r}; this server has {self.name!r}")

    async def apply(self, action: str, version: str) -> RegistryState:
        """Apply a rollout command in all workers, and return the new state.

        Raises:
            RequestError: it is not applied; the sentence gives the reason.
        """
        if action not in COMMANDS:
            raise NotFoundError(f"there is no rollout command {shorten(action)!r}; there are {', '.join(COMMANDS)}")
        if not version.isdecimal() or len(version) > _LONGEST_NUMBER:
            raise NotFoundError(f"there is no version {shorten(version)!r}")
        await asyncio.to_thread(self._swap.apply, COMMANDS[action], int(version))
        state = self._swap.state
        if self._worker is not None and not await self._worker.all_apply(state):
            log.warning(
                "a rollout command is saved, but not all workers have applied it yet: %s version %s", action, version
            )
        return state

    async def infer(
        self,
        name: str,
        version: str | None,
        body: bytes,
        header_length: int | None,
        peer: Hashable = None,
        request_id: str = "",
    ) -> tuple[bytes, int | None]:
        """Answer a request by one version; return the reply's body and the length of its JSON before binary data.

        `peer` names the connection of the request, if known, and `request_id` the request, where it has no id itself.

        Raises:
            RequestError: there is no prediction; the sentence gives the reason.
        """
        self.check_name(name)
        request = await in_thread(self.signature.is_long(len(body)), self.signature.decode, body, header_length)
        chosen, answers = await self.predict(request, version, peer)
        large = is_large(answers)
        reply = await in_thread(large, self.signature.encode, request, answers, self.name, chosen.name, chosen.progress)
        if self.log_answer is not None:
            self.log_answer(self.signature, request_id, chosen, request, answers)
        self.compare(chosen, request, answers)
        return reply

    async def predict(
        self, request: Request, version: str | None, peer: Hashable = None
    ) -> tuple[ServedVersion, dict[str, Array]]:
        """Return the answers to a request, and the one version that gave them; see `infer`."""
        chosen = await self._choose(request, version)
        return chosen, await self.predict_by(chosen, request, peer)

    async def predict_by(self, chosen: ServedVersion, request: Request, peer: Hashable = None) -> dict[str, Array]:
        """Return the answers of a version, which may have been replaced meanwhile; see `infer`."""
        self.check_alive()
        answers = await self._batcher.predict(chosen, request.features, request.rows, request.embed, peer)
        self.skew.add(request.features)
        self.answered[chosen.number] += 1
        if len(self.answered) > _MOST_COUNTED:
            del self.answered[min(self.answered)]
        return answers

    def compare(self, chosen: ServedVersion, request: Request, answers: dict[str, Array]) -> None:
        """Let the shadow's candidate answer the same request, if it is one of its fraction."""
        if self.shadow.chooses():
            # In the next turn of the loop: the reply is sent in this one.
            asyncio.get_running_loop().call_soon(self.shadow.add, chosen, request.features, answers)

    async def _choose(self, request: Request, version: str | None) -> ServedVersion:
        offsets = request.min_trained_through
        if not offsets:
            return self.resident(self.name, version)
        if version is not None:
            chosen = self.resident(self.name, version)
            if not chosen.has_trained_through(offsets):
                raise DeadlineExceededError(
                    f"version {version} will never have learned more than {chosen.trained_through}"
                )
            return chosen
        current = self.version
        if current is not None and current.has_trained_through(offsets):
            return current
        if current is not None:
            _check_topics(offsets, current)
        return await self._await_version(request, offsets)

    async def _await_version(self, request: Request, offsets: Mapping[str, int]) -> ServedVersion:
        if self._waiting_rows + request.rows > self._most_waiting_rows:
            raise TooManyRequestsError(f"{self._waiting_rows} rows wait for newer versions already")
        self._waiting_rows += request.rows
        seconds = None if request.timeout_ms is None else request.timeout_ms / 1000
        try:
            async with asyncio.timeout(seconds):
                while True:
                    swapped, current = self._swapped, self.version
                    if self._stopping:
                        raise UnavailableError("the server is stopping")
                    if current is not None and current.has_trained_through(offsets):
                        return current
                    await swapped.wait()
        except TimeoutError as exc:
            raise DeadlineExceededError(self._lateness()) from exc
        finally:
            self._waiting_rows -= request.rows

    def _lateness(self) -> str:
        """Return the sentence for a request that waited in vain: how far the served version has learned."""
        current = self.version
        return f"the time is over; the served version has learned {current.trained_through if current else 'nothing'}"


def _logged_inputs(schema: Schema, log: AnswerLogSettings | None) -> frozenset[str]:
    if log is None:
        return frozenset()
    features = (feature.name for feature in schema.features) if log.features else ()
    return frozenset((*features, *([schema.key] if schema.key is not None else ())))


def is_large(answers: Mapping[str, Array]) -> bool:
    """Return whether answers are encoded in a thread."""
    return sum(answer.size for answer in answers.values()) > _LARGE_ELEMENTS


async def in_thread(needed: bool, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return the result of `work`, called in a thread if it would block the event loop for long."""
    if needed:
        return await asyncio.to_thread(work, *args, **kwargs)
    return work(*args, **kwargs)


def _check_topics(offsets: Mapping[str, int], version: ServedVersion) -> None:
    """Raise BadRequestError for a topic that no version will learn; a new partition may still come."""
    known = {name.rpartition(":")[0] for name in version.manifest.trained_through}
    for name in offsets:
        if name.rpartition(":")[0] not in known:
            raise BadRequestError(
                f"min_trained_through: {name} is of no topic that is learned ({', '.join(sorted(known))})"
            )
