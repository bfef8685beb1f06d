"""A session of requests for the exporter of spans over HTTP: a collector's answers are bounded in bytes and time.

The exporter reads an answer whole, unpacked, and only each read of it has a time-out.
"""

from typing import Any

import requests
from requests.adapters import HTTPAdapter
from typing_extensions import override
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from anabranch.core.socket_deadline import SocketDeadline

_MOST_BYTES = 65536
_SECONDS = 10.0
"""Where the exporter sets no time-out."""


class BoundedSession(requests.Session):
    """A session whose answers are read as they are sent, up to 64 kB, within the time-out of the request as a whole.

    Used by one thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._deadline = SocketDeadline()
        self.headers["Accept-Encoding"] = "identity"
        for scheme in ("http://", "https://"):
            self.mount(scheme, _WatchedAdapter(self._deadline))

    @override
    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Send a request; raises requests.ConnectionError where the answer is too long or too late."""
        seconds = options.get("timeout")
        with self._deadline.ends_within(seconds if isinstance(seconds, int | float) else _SECONDS):
            response = super().send(request, **{**options, "stream": True, "allow_redirects": False})
            content = response.raw.read(_MOST_BYTES + 1, decode_content=False)
        if self._deadline.expired or len(content) > _MOST_BYTES:
            response.close()
            why = f"longer than {_MOST_BYTES} bytes" if len(content) > _MOST_BYTES else "late"
            raise requests.ConnectionError(f"the answer of the collector is {why}", request=request)
        response._content = content  # what `content` and `text` return
        response.raw.release_conn()
        return response

    @override
    def close(self) -> None:
        super().close()
        self._deadline.close()


class _WatchedAdapter(HTTPAdapter):
    """Lets a deadline watch each connection, from the moment when it is open: before TLS begins."""

    def __init__(self, deadline: SocketDeadline) -> None:
        self._deadline = deadline
        super().__init__()

    @override
    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        super().init_poolmanager(*args, **options)
        deadline = self._deadline

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

        self.poolmanager.pool_classes_by_scheme = {
            "http": type("Pool", (HTTPConnectionPool,), {"ConnectionCls": Http}),
            "https": type("TLSPool", (HTTPSConnectionPool,), {"ConnectionCls": Https}),
        }
