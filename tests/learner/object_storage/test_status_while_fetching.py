"""The status address answers while a learner fetches its checkpoint."""

import contextlib
import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from learner import run
from learner.errors import StoppedEarlyError
from learner.run import Learner
from tests.support.ports import first_free_port


@pytest.mark.process
def test_healthz_is_a_problem_while_a_checkpoint_is_fetched_and_metrics_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    address, found = f"127.0.0.1:{first_free_port()}", list[tuple[int, Any]]()
    deployment: Any = SimpleNamespace(
        storage=SimpleNamespace(url="s3://b/p"),
        state_dir=tmp_path,
        learner=SimpleNamespace(status=address, mesh=None, replicas=1),
        read_token="",
        admin_token="",
    )

    def fetch(*_: object) -> None:
        try:
            urllib.request.urlopen(f"http://{address}/healthz")
        except urllib.error.HTTPError as reply:
            found.append((reply.code, json.load(reply)))
        with urllib.request.urlopen(f"http://{address}/metrics") as metrics:
            found.append((metrics.status, None))
        raise StoppedEarlyError

    monkeypatch.setattr(run, "resume_point", fetch)
    with contextlib.ExitStack() as stack:
        learner = Learner(deployment, threading.Event(), None, stack)
        schema = SimpleNamespace(digest="d")
        vars(learner).update(_setup=SimpleNamespace(schema=schema), _generation=1, _storage=None, _base=None)
        with pytest.raises(StoppedEarlyError):
            learner._build_store()
    sentence = "starting: fetching and restoring the newest checkpoint of s3://b/p"
    assert found == [(503, {"ok": False, "problems": [sentence]}), (200, None)]
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{address}/healthz")
