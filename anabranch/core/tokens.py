"""Bearer tokens of HTTP requests: one check for all servers."""

import hmac

_SCHEME = b"bearer"


def bearer_token(authorization: str) -> bytes:
    """Return the token of an `Authorization` header; empty without one. The scheme's name may be in any case.

    The header is decoded as Latin-1, as ASGI and WSGI servers do it.
    """
    scheme, _, token = authorization.encode("latin-1", "replace").partition(b" ")
    return token.strip() if scheme.lower() == _SCHEME else b""


def is_token(given: bytes, *accepted: str) -> bool:
    """Return whether `given` is one of the `accepted` tokens. An empty token is never accepted.

    Compares in constant time with each of them.
    """
    matches = [hmac.compare_digest(given, token.encode()) for token in accepted if token]
    return any(matches)
