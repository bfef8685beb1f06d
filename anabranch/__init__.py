"""A PyTorch model that learns from a stream, against forgetting: the Python API, and the command line.

`import anabranch` loads neither torch nor numpy: a name is imported when it is first used.

    schema = anabranch.Schema.infer(frame, label="fraud")
    buffer = anabranch.ReplayBuffer(10_000, schema, admission="class-balanced")

These names are the API, and follow semantic versioning; all other modules may change between two releases.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.api.backtest import backtest as backtest
    from anabranch.api.client import Client as Client
    from anabranch.api.learner import Learner as Learner
    from anabranch.api.model import Model as Model
    from anabranch.api.model import load as load
    from anabranch.api.pipeline import Pipeline as Pipeline
    from anabranch.api.replay_buffer import ReplayBuffer as ReplayBuffer
    from anabranch.api.schema import Schema as Schema
    from anabranch.core.errors import AnabranchError as AnabranchError

_MODULES = {
    "AnabranchError": "core.errors",
    "Client": "api.client",
    "Learner": "api.learner",
    "Model": "api.model",
    "Pipeline": "api.pipeline",
    "ReplayBuffer": "api.replay_buffer",
    "Schema": "api.schema",
    "backtest": "api.backtest",
    "load": "api.model",
}
__all__ = ["AnabranchError", "Client", "Learner", "Model", "Pipeline", "ReplayBuffer", "Schema", "backtest", "load"]


def __getattr__(name: str) -> Any:
    """Import a name of the API (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"anabranch.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
