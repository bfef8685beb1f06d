"""Markers and hooks of all tests. Their fixtures are in tests/support/.

A test that takes a broker is marked `kafka` and `services` for that reason. One that takes a Valkey server, or that has
the mark `any_broker`, is marked `services` alone. Where none can be started it is skipped, or fails under CI.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

_PLUGINS = {
    "tests.support.ports": "",
    "tests.support.processes": "",
    "tests.support.gpu": "",
    "tests.support.tls": "cryptography",
    "tests.support.kafka": "kafka",
    "tests.support.topics": "kafka",
    "tests.support.redis": "",
    "tests.support.browser": "",
    "tests.support.nvml": "",
}
"""Plugins, and the package that each requires: without Kafka's client, `pytest -m gpu` is still possible.

Each is after the plugins that it imports: pytest rewrites the assertions of a module when it is first imported.
"""
pytest_plugins = [name for name, package in _PLUGINS.items() if not package or find_spec(package)]

PROCESS_FIXTURES = {"holder", "make_index", "nursery", "play", "spawn", "standby", "start"}
"""Fixtures that start a Python, besides those of services: a test that takes one is marked `process`."""
_BROKER_FIXTURES = {"kafka", "sasl_kafka", "guarded_kafka", "mortal_kafka"}
_REDIS_FIXTURES = {"mortal_redis", "shared_redis"}
_WITHOUT_QUICK_LIMIT = {"process", "services", "slow", "browser", "gpu", "timeout"}
_QUICK_SECONDS = 15
"""Time limit of a test that has none of these marks, on an idle machine."""

# The time that an example takes depends on the machine.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


_python_starts: list[str] = []
"""Command lines of the Python processes that the current test has started."""


def _record_python_start(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen" and sys.executable in [os.fspath(argument) for argument in arguments[1][:1]]:
        _python_starts.append(" ".join(map(str, arguments[1][:6])))


sys.addaudithook(_record_python_start)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Clear the processes that earlier tests have started; limit the time of a quick test in proportion to the load."""
    _python_starts.clear()
    if not _WITHOUT_QUICK_LIMIT & {marker.name for marker in item.iter_markers()}:
        item.add_marker(pytest.mark.timeout(_QUICK_SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test without the mark `process` that starts a Python, where `make test-fast` leaves out that mark."""
    yield
    if _python_starts and "not process" in item.config.option.markexpr:
        pytest.fail(f"it starts a process, and is not marked `process`: {_python_starts[0]}", pytrace=False)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the reasons for which tests were skipped, with the number of tests for each."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())
    )
    if reasons:
        terminalreporter.section("not run")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:4} {'tests' if count > 1 else 'test '}: {reason}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by the fixtures that they take."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if PROCESS_FIXTURES & fixtures:
            item.add_marker(pytest.mark.process)
        if (_BROKER_FIXTURES | _REDIS_FIXTURES) & fixtures:
            item.add_marker(pytest.mark.services)
        if _BROKER_FIXTURES & fixtures and not item.get_closest_marker("any_broker"):
            item.add_marker(pytest.mark.kafka)
        if "browser" in fixtures:
            item.add_marker(pytest.mark.browser)
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, collect only modules with such tests: others may import packages that a GPU machine lacks."""
    if config.option.markexpr.strip() != "gpu" or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text(encoding="utf-8") if collection_path.is_file() else "mark.gpu"
    return None if "mark.gpu" in text or "cuda: torch.device" in text else True


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
