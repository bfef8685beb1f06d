"""Functions for `stream.token`: they return tokens as Apache Kafka takes them for tests, without a signature."""

import base64
import json
import threading
import time

released = threading.Event()
"""Ends calls of `hang`."""
state = {"mode": "good", "calls": 0, "seconds": 3.0}


def token(_):
    """Return a token, or what `mode` says, once the call is counted."""
    state["calls"] += 1
    match state["mode"]:
        case "fail":
            raise OSError("the issuer is away")
        case "hang":
            released.wait(100)
        case "expired":
            return issued("kafka", -60.0), state["seconds"]
        case "stranger":
            return issued("other", state["seconds"]), state["seconds"]
    return issued("kafka", state["seconds"]), state["seconds"]


def issued(scope, seconds):
    """Return a JSON web token of the algorithm none, which ends `seconds` from now."""
    now = time.time()
    parts = ({"alg": "none"}, {"sub": "alice", "iat": now - 1, "exp": now + seconds, "scope": scope})
    return "".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") + "." for part in parts)
