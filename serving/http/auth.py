"""Who may give orders over HTTP. Loads no web framework."""

import hmac
from urllib.parse import urlsplit

from anabranch.core.net import names_loopback
from serving.config import Tokens
from serving.errors import ForbiddenError, UnauthorizedError, shorten


def bearer(authorization: str) -> bytes:
    """Return the token of an `Authorization` header; empty where there is none."""
    scheme, _, token = authorization.partition(" ")
    return token.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""


def check_host(host: str) -> None:
    """Check that a request to a server without a read token, which only loopback has, comes from no other site's page.

    Raises:
        ForbiddenError: the header `Host` names another machine.
    """
    if not names_loopback(host):
        raise ForbiddenError(
            f"without serving.tokens.read only this machine is answered, and this request is for {shorten(host)}; "
            "ask for localhost, or set the tokens"
        )


def check_order(tokens: Tokens, authorization: str, host: str, origin: str) -> None:
    """Check that a request may change what is served; without an admin token, which only loopback has, all may.

    Args:
        tokens: of this server.
        authorization: the header; empty without one, as are the next two.
        host: the header `Host`.
        origin: the header `Origin`, which browsers send: a page of another site gives no orders.

    Raises:
        UnauthorizedError: there is no token, or one that is not known.
        ForbiddenError: the token is for reading, or the request comes from another site.
    """
    if origin and _netloc(origin) != host:
        raise ForbiddenError(f"orders from pages of another site are not taken; this one is of {shorten(origin)}")
    admin = tokens.admin.get_secret_value().encode()
    if not admin:
        return
    given, read = bearer(authorization), tokens.read.get_secret_value().encode()
    if hmac.compare_digest(given, admin):
        return
    if read and hmac.compare_digest(given, read):
        raise ForbiddenError("this token is for reading; send serving.tokens.admin")
    raise UnauthorizedError("send the header Authorization: Bearer and the admin token of this server")


def _netloc(origin: str) -> str | None:
    """Return the host and port of an `Origin`; None of what is no URL."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None
