"""A schema and stores for the tests of replay, and what docs/extend/ adds to the package."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ingest.config import SchemaSettings
from ingest.events.schema import Schema
from replay import config
from replay.build import build_store
from replay.config import ReplaySettings
from replay.snapshot import StoreSnapshot
from replay.store import Store
from replay.tiers import registry as kinds

EXTEND = Path(__file__).parent.parent.parent / "docs" / "extend"
PAGE = "\n".join((EXTEND / name).read_text(encoding="utf-8") for name in ("sampler.md", "admission.md", "tier.md"))


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """`added("replay.weekly")`: a module that docs/extend/ shows, as if it were a file of the package."""
    files = dict(re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))

    def add(name: str) -> ModuleType:
        module = ModuleType(name)
        exec(compile(files[name.replace(".", "/") + ".py"], name, "exec"), module.__dict__)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return add


@pytest.fixture
def with_host(added: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> type[ReplaySettings]:
    """`[replay]` with the tier `host` of docs/extend/tier.md, which is added as the page says."""
    (line,) = re.findall(r'^```python\n(    "host": .*?,)\n```$', PAGE, re.MULTILINE)
    (section,) = re.findall(r"^```python\n(    host: .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    namespace = {**vars(config), "HostTierFactory": added("replay.host").HostTierFactory}
    monkeypatch.setattr(kinds, "TIERS", {**eval("{" + line + "}", namespace), **kinds.TIERS})
    exec("class WithHost(ReplaySettings):\n" + section, namespace)
    settings: type[ReplaySettings] = namespace["WithHost"]
    return settings


@pytest.fixture(scope="session")
def schema() -> Schema:
    return Schema(
        SchemaSettings.model_validate(
            {
                "features": {"x": {"dtype": "float32", "shape": [2]}, "n": {"dtype": "int16"}},
                "label": {"name": "y", "classes": 4},
                "weight": {"name": "w"},
            }
        )
    )


ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "device": {},
    "disk": {"disk": {"bytes": "20MB"}},
    "disk with a small cache": {"disk": {"bytes": "20MB"}, "device_bytes": "1kB"},
    "disk alone": {"disk": {"bytes": "20MB"}, "device_bytes": "0"},
    "redis": {"redis": {"bytes": "20MB"}, "device_bytes": "0"},
    "redis with a small cache": {"redis": {"bytes": "20MB"}, "device_bytes": "1kB"},
    "disk with redis": {"disk": {"bytes": "20MB"}, "redis": {"bytes": "30kB"}, "device_bytes": "0"},
    "all": {"disk": {"bytes": "20MB"}, "redis": {"bytes": "30kB"}, "device_bytes": "1kB"},
    "the page's": {"disk": {"bytes": "20MB"}, "host": {"bytes": "10kB"}, "device_bytes": "1kB"},
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.services if "redis" in ARRANGEMENTS[name] else ()) for name in ARRANGEMENTS
    ]
)
def make_store(schema: Schema, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Store]]:
    """`make_store(capacity, seed=0, contents=None)` on the CPU, once for each arrangement of tiers."""
    stores: list[Store] = []
    keys: dict[str, str] = {}

    def make(capacity: int, seed: int = 0, contents: StoreSnapshot | None = None) -> Store:
        options = dict(ARRANGEMENTS[request.param])
        if "redis" in options:
            options["redis"] = {"url": request.getfixturevalue("shared_redis").url, **options["redis"]}
        section = request.getfixturevalue("with_host") if "host" in options else ReplaySettings
        settings = section.model_validate({"capacity": capacity, **options})
        file = contents.state.file if contents is not None else None
        mine = keys[file.id] if file is not None and file.id in keys else f"store-{len(stores)}:rank-0"
        # One folder for all: files of the disk tier never get in each other's way.
        cpu, folder = torch.device("cpu"), tmp_path / "replay"
        stores.append(build_store(settings, schema, cpu, seed, folder, contents, keys=mine))
        if (primary := stores[-1].tiers.file) is not None:
            keys[primary.id] = mine
        return stores[-1]

    yield make
    for store in stores:
        store.close()
