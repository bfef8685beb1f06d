"""The status address answers while a learner fetches its checkpoint."""

import contextlib
import json
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.learner import assembly
from anabranch.learner.assembly import Assembly, StoppedEarlyError
from tests.support.ports import first_free_port


@pytest.mark.process
def test_healthz_is_a_problem_while_a_checkpoint_is_fetched_and_metrics_answer(monkeypatch, tmp_path):
    address, found = f"127.0.0.1:{first_free_port()}", list[tuple[int, Any]]()
    deployment: Any = SimpleNamespace(
        storage=SimpleNamespace(url="s3://b/p"),
        state_dir=tmp_path,
        learner=SimpleNamespace(status=address, mesh=None, replicas=1),
        serving=SimpleNamespace(tokens=SimpleNamespace(values=("", ""))),
    )

    def fetch(*_):
        try:
            urllib.request.urlopen(f"http://{address}/healthz")
        except urllib.error.HTTPError as reply:
            found.append((reply.code, json.load(reply)))
        with urllib.request.urlopen(f"http://{address}/metrics") as metrics:
            found.append((metrics.status, None))
        raise StoppedEarlyError

    monkeypatch.setattr(assembly, "resume_point", fetch)
    with contextlib.ExitStack() as stack:
        learner = Assembly(deployment, threading.Event(), None, stack)
        schema = SimpleNamespace(digest="d")
        vars(learner).update(setup=SimpleNamespace(schema=schema), _generation=1, _storage=None, base=None)
        with pytest.raises(StoppedEarlyError):
            learner._build_store()
    sentence = "starting: fetching and restoring the newest checkpoint of s3://b/p"
    assert found == [(503, {"ok": False, "problems": [sentence]}), (200, None)]
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{address}/healthz")
