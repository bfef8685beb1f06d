"""Which requests may read, and which may change what is served. Loads no web framework."""

from urllib.parse import urlsplit

from anabranch.core.net import names_loopback
from anabranch.core.tokens import bearer_token, is_token
from anabranch.learner.settings.pipeline import Tokens
from anabranch.serving.errors import BadRequestError, ForbiddenError, UnauthorizedError, shorten


def asks_for_token(tokens: Tokens) -> bool:
    """Return whether a request needs a token to read: only on loopback it may need none."""
    return bool(tokens.read.get_secret_value())


def check_one_authorization(count: int) -> None:
    """Raise BadRequestError where a request has several: a proxy may have checked another one than this server."""
    if count > 1:
        raise BadRequestError(f"the request has {count} Authorization headers; send one")


def check_read(tokens: Tokens, authorization: str, host: str) -> None:
    """Check that a request may read: with the read or the admin token, or without tokens from this machine.

    Args:
        tokens: of this server.
        authorization: the header; empty without one, as is the next.
        host: the header `Host`.

    Raises:
        UnauthorizedError: the request has no token of this server.
        ForbiddenError: there is no read token, and the header `Host` names another machine.
    """
    if not asks_for_token(tokens):
        _check_host(host)
    elif not is_token(bearer_token(authorization), tokens.read.get_secret_value(), tokens.admin.get_secret_value()):
        raise UnauthorizedError("send the header Authorization: Bearer and a token of this server")


def check_admin(tokens: Tokens, authorization: str, host: str, origin: str) -> None:
    """Check that a request may change what is served; without an admin token, which only loopback has, all may.

    Args:
        tokens: of this server.
        authorization: the header; empty without one, as are the next two.
        host: the header `Host`.
        origin: the header `Origin`, which browsers send: pages of other sites may not send rollout commands.

    Raises:
        UnauthorizedError: the request has no token of this server.
        ForbiddenError: the token is for reading, or the request comes from another site.
    """
    if origin and _netloc(origin) != host:
        raise ForbiddenError(
            f"rollout commands from pages of another site are not accepted; this one is from {shorten(origin)}"
        )
    admin = tokens.admin.get_secret_value()
    if not admin:
        return
    given = bearer_token(authorization)
    if is_token(given, admin):
        return
    if is_token(given, tokens.read.get_secret_value()):
        raise ForbiddenError("this token is for reading; send serving.tokens.admin")
    raise UnauthorizedError("send the header Authorization: Bearer and the admin token of this server")


def _check_host(host: str) -> None:
    """Refuse pages of other sites whose name was made to resolve to this machine (DNS rebinding)."""
    if not names_loopback(host):
        raise ForbiddenError(
            f"without serving.tokens.read only this machine is answered, and this request is for {shorten(host)}; "
            "ask for localhost, or set the tokens"
        )


def _netloc(origin: str) -> str | None:
    """Return the host and port of an `Origin`; None if it is no URL."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None
