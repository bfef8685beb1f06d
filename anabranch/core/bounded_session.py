"""A session of requests whose answers are bounded in bytes and time.

Requests reads an answer whole, unpacked, and only each read of it has a time-out. It comes with extras: import this
module only where one of them is needed.
"""

from typing import Any

import requests
from requests.adapters import HTTPAdapter
from requests.utils import prepend_scheme_if_needed, select_proxy
from typing_extensions import override
from urllib3 import PoolManager, ProxyManager
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError

from anabranch.core.socket_deadline import SocketDeadline

_SECONDS = 10.0
"""Where a request sets no time-out."""


class LongAnswerError(requests.ConnectionError):
    """The answer, `response`, has more bytes than are read."""


class LateAnswerError(requests.ConnectionError, requests.Timeout):
    """The answer has not ended within the time-out."""


class BoundedSession(requests.Session):
    """A session whose answers are read as they are sent, within the time-out of the request as a whole.

    Redirects are not followed. Used by one thread.
    """

    def __init__(self, most_bytes: int = 65536) -> None:
        """`most_bytes`: of the longest answer that is read."""
        super().__init__()
        self._most_bytes = most_bytes
        self._deadline = SocketDeadline()
        self.headers["Accept-Encoding"] = "identity"
        self._adapter = _WatchedAdapter(self._deadline)
        for scheme in ("http://", "https://"):
            self.mount(scheme, self._adapter)

    def check_proxy(self, url: str) -> None:
        """Raise ValueError where the proxy of the environment for a URL, if there is one, cannot be used."""
        proxy = select_proxy(url, self.merge_environment_settings(url, {}, None, None, None)["proxies"])
        try:
            if proxy:
                self._adapter.proxy_manager_for(prepend_scheme_if_needed(proxy, "http"))
        except (requests.RequestException, HTTPError) as exc:
            raise ValueError("the proxy cannot be used") from exc

    @override
    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Send a request.

        Raises:
            LongAnswerError: the answer has too many bytes.
            LateAnswerError: it has not ended within the time-out.
            requests.RequestException: there is none.
        """
        timeout = options.get("timeout")
        seconds = timeout if isinstance(timeout, int | float) else _SECONDS
        options |= {"timeout": seconds, "stream": True, "allow_redirects": False}
        with self._deadline.ends_within(seconds):
            try:
                response = super().send(request, **options)
                content = response.raw.read(self._most_bytes + 1, decode_content=False)
            except (requests.RequestException, HTTPError) as exc:  # requests translates only what it reads itself
                if self._deadline.expired or isinstance(exc, requests.Timeout):
                    raise self._late(seconds, request) from exc
                if isinstance(exc, requests.RequestException):
                    raise
                raise requests.ConnectionError(f"the answer broke off: {exc}", request=request) from exc
        if self._deadline.expired:  # the end of its connection may have seemed to be that of the answer
            response.close()
            raise self._late(seconds, request)
        if len(content) > self._most_bytes:
            response.close()
            raise LongAnswerError(f"the answer is longer than {self._most_bytes} bytes", response=response)
        response._content = content  # what `content` and `text` return
        response.raw.release_conn()
        return response

    @override
    def get_redirect_target(self, resp: requests.Response) -> None:
        """Return none: requests would read the whole answer to look for it."""

    @override
    def close(self) -> None:
        super().close()
        self._deadline.close()

    @staticmethod
    def _late(seconds: float, request: requests.PreparedRequest) -> LateAnswerError:
        return LateAnswerError(f"the answer has not ended within {seconds:g} s", request=request)


class _WatchedAdapter(HTTPAdapter):
    """Lets a deadline watch each connection, from the moment when it is open: before TLS begins."""

    def __init__(self, deadline: SocketDeadline) -> None:
        class Http(HTTPConnection):
            @override
            def _new_conn(self) -> Any:
                connection = super()._new_conn()
                deadline.watch(connection)
                return connection

        class Https(HTTPSConnection):
            @override
            def _new_conn(self) -> Any:
                connection = super()._new_conn()
                deadline.watch(connection)
                return connection

        self._pools = {
            "http": type("Pool", (HTTPConnectionPool,), {"ConnectionCls": Http}),
            "https": type("TLSPool", (HTTPSConnectionPool,), {"ConnectionCls": Https}),
        }
        super().__init__()

    @override
    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options)
        self.poolmanager.pool_classes_by_scheme = self._pools

    @override
    def proxy_manager_for(self, *args: Any, **options: Any) -> PoolManager:
        manager: PoolManager = super().proxy_manager_for(*args, **options)
        if isinstance(manager, ProxyManager):  # one of SOCKS has other pools
            manager.pool_classes_by_scheme = self._pools
        return manager
