"""From a request's bytes to a reply's: decode, choose the version, wait for it if asked, predict, encode."""

import asyncio
import logging
from collections.abc import Callable, Hashable, Mapping
from typing import ParamSpec, TypeVar

from learner.state_dir.version import RegistryState
from serving.config import ServingSettings
from serving.errors import (
    BadRequestError,
    DeadlineExceededError,
    NotFoundError,
    TooManyRequestsError,
    UnavailableError,
    shorten,
)
from serving.inference.batcher import Batcher
from serving.inference.shadow import Shadow
from serving.model.deployment import Deployment
from serving.model.loaded_version import ServedVersion
from serving.protocol.codec import Request, Signature
from serving.reporting.worker_pool import PoolWorker
from serving.rollout.commands import ORDERS
from serving.rollout.hot_swap import VersionSwapper

log = logging.getLogger("anabranch.serving")

_LONGEST_NUMBER = 15
"""Digits."""
_LARGE_BYTES = 262_144
"""Of a body: what is longer is decoded in a thread."""
_LARGE_ELEMENTS = 65_536
"""Of a reply: what is more is encoded in a thread."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Service:
    """What HTTP asks of serving. Belongs to the event loop's thread."""

    def __init__(
        self,
        deployment: Deployment,
        settings: ServingSettings,
        swap: VersionSwapper,
        batcher: Batcher,
        shadow: Shadow,
        worker: PoolWorker | None = None,
    ) -> None:
        """`worker` is this process's place among several."""
        self.name = deployment.name
        self.signature = Signature(deployment.schema, deployment.outputs(), settings.max_queue, deployment.embeds)
        self._swap = swap
        self._batcher = batcher
        self._shadow = shadow
        self._worker = worker
        self._most_waiting_rows = settings.max_queue
        self._waiting_rows = 0
        self._swapped = asyncio.Event()
        self._stopping = False

    @property
    def version(self) -> ServedVersion | None:
        """The served version; None while there is none."""
        return self._swap.current

    def swapped(self) -> None:
        """Wake the requests that wait for a newer version; to be called in the loop's thread after each swap."""
        swapped, self._swapped = self._swapped, asyncio.Event()
        swapped.set()

    def stop(self) -> None:
        """Answer the requests that wait for a newer version with 503, now and from now on."""
        self._stopping = True
        self.swapped()

    def resident(self, name: str, version: str | None = None) -> ServedVersion:
        """Return the served version if it is the one that was asked for.

        Raises:
            NotFoundError: no such model, or no such version; the sentence names what is there.
            UnavailableError: there is no version yet.
        """
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

    async def order(self, action: str, version: str) -> RegistryState:
        """Do what a person ordered about a version, in all workers; return what is served then.

        Raises:
            RequestError: it is not done; the sentence says why.
        """
        if action not in ORDERS:
            raise NotFoundError(f"there is no order {shorten(action)!r}; there are {', '.join(ORDERS)}")
        if not version.isdecimal() or len(version) > _LONGEST_NUMBER:
            raise NotFoundError(f"there is no version {shorten(version)!r}")
        await asyncio.to_thread(self._swap.order, ORDERS[action], int(version))
        state = self._swap.state
        if self._worker is not None and not await self._worker.obeyed(state):
            log.warning(
                "an order is written down, and not all workers have obeyed it yet: %s version %s", action, version
            )
        return state

    async def infer(
        self, name: str, version: str | None, body: bytes, header_length: int | None, peer: Hashable = None
    ) -> tuple[bytes, int | None]:
        """Answer a request whole by one version; return the reply's body and the length of its JSON before binary data.

        `peer` names the connection that it came on, where there is one.

        Raises:
            RequestError: it gets no prediction; the sentence says why.
        """
        self.check_name(name)
        request = await _run(len(body) > _LARGE_BYTES, self.signature.decode, body, header_length)
        chosen = await self._choose(request, version)
        answers = await self._batcher.predict(chosen, request.features, request.rows, request.embed, peer)
        large = sum(answer.size for answer in answers.values()) > _LARGE_ELEMENTS
        reply = await _run(
            large, self.signature.encode, request, answers, self.name, chosen.name, chosen.trained_through
        )
        if self._shadow.chooses():
            # In the loop's next turn, after this one's in which the reply is sent.
            asyncio.get_running_loop().call_soon(self._shadow.offer, chosen, request.features, answers)
        return reply

    async def _choose(self, request: Request, version: str | None) -> ServedVersion:
        offsets = request.min_trained_through
        if not offsets:
            return self.resident(self.name, version)
        if version is not None:
            chosen = self.resident(self.name, version)
            if not chosen.has_learned(offsets):
                raise DeadlineExceededError(
                    f"version {version} will never have learned more than {chosen.trained_through}"
                )
            return chosen
        current = self.version
        if current is not None and current.has_learned(offsets):
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
                    if current is not None and current.has_learned(offsets):
                        return current
                    await swapped.wait()
        except TimeoutError as exc:
            raise DeadlineExceededError(self.lateness()) from exc
        finally:
            self._waiting_rows -= request.rows

    def lateness(self) -> str:
        """Say how far the served version has learned, for a request that waited for more in vain."""
        current = self.version
        return f"the time is over; the served version has learned {current.trained_through if current else 'nothing'}"


async def _run(in_thread: bool, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return what `work` returns, done in a thread where it would keep the event loop from others."""
    if in_thread:
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
