"""Markers and hooks of all tests. Their fixtures are in tests/support/.

A test that takes a broker is marked `kafka` and `services` for that reason. One that takes a Valkey or an S3 server, or
that has the mark `any_broker`, is marked `services` alone. Where none can be started it is skipped, or fails under CI.
"""

import atexit
import gc
import logging
import os
import sys
from collections import Counter
from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, settings

from tests import forkserver
from tests.support.waiting import slowness

_PLUGINS = {
    "tests.support.ports": "",
    "tests.support.processes": "",
    "tests.support.gpu": "",
    "tests.support.tls": "cryptography",
    "tests.support.kafka": "kafka",
    "tests.support.topics": "kafka",
    "tests.support.redis": "",
    "tests.support.s3": "",
    "tests.support.browser": "",
    "tests.support.nvml": "",
    "tests.support.registry_server": "",
    "tests.support.collector": "",
    "tests.support.mlflow_server": "",
}
"""Plugins, and the package that each requires: without Kafka's client, `pytest -m gpu` is still possible.

Each is after the plugins that it imports: pytest rewrites the assertions of a module when it is first imported.
"""
pytest_plugins = [name for name, package in _PLUGINS.items() if not package or find_spec(package)]

PROCESS_FIXTURES = {"holder", "make_index", "nursery", "play", "spawn", "standby", "start"}
"""Fixtures that start a Python, besides those of services: a test that takes one is marked `process`."""
_BROKER_FIXTURES = {"kafka", "sasl_kafka", "guarded_kafka", "mortal_kafka", "token_kafka"}
_REDIS_FIXTURES = {"mortal_redis", "shared_redis"}
_S3_FIXTURES = {"mortal_s3", "s3"}
_WITHOUT_QUICK_LIMIT = {"process", "services", "slow", "browser", "gpu", "timeout"}
_QUICK_SECONDS = 15
"""Time limit of a test that has none of these marks, on an idle machine."""
_QUICK_EXAMPLES = 20
"""Most examples of a property in `make test-fast`; `make test` tries as many as it asks for, 100 by default."""
_GARBAGE = 7_000
"""Objects after which the youngest are collected: ten times as many as by default, whose collections take 3% of CPU."""
_HYPOTHESIS_SETTINGS = "_hypothesis_internal_use_settings"
"""The attribute in which `@settings` of Hypothesis leaves its settings."""

# Imports and collection make no garbage, and all that they make lives until the end: see `pytest_collection_finish`.
gc.disable()
# Runs after pytest's own last collections, which look for what tests have left: the interpreter's takes a second.
atexit.register(gc.freeze)

# The time that an example takes depends on the machine.
_ANY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("any-machine", _ANY_MACHINE)
settings.register_profile("quick", _ANY_MACHINE, max_examples=_QUICK_EXAMPLES)


_python_starts: list[str] = []
"""Command lines of the Python processes that the current test has started."""


def _record_python_start(event, arguments):
    if event == "subprocess.Popen" and sys.executable in [os.fspath(argument) for argument in arguments[1][:1]]:
        _python_starts.append(" ".join(map(str, arguments[1][:6])))


sys.addaudithook(_record_python_start)


def pytest_configure(config):
    """Load Hypothesis's profile; have our own modules forked, in workers by the server of all of them."""
    settings.load_profile("quick" if _leaves_out_processes(config) else "any-machine")
    forkserver.fork_modules()
    if given := getattr(config, "workerinput", None):
        forkserver.use(given["forkserver"])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Give a worker of pytest-xdist the server that forks processes for all of them."""
    node.workerinput["forkserver"] = forkserver.address()


def _leaves_out_processes(config):
    return "not process" in config.option.markexpr


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Clear the processes that earlier tests have started; limit the time of a test in proportion to the load."""
    _python_starts.clear()
    own = item.get_closest_marker("timeout")
    if own is not None:
        seconds = own.args[0]
    elif _WITHOUT_QUICK_LIMIT & {marker.name for marker in item.iter_markers()}:
        seconds = float(item.config.getini("timeout"))
    else:
        seconds = _QUICK_SECONDS
    item.add_marker(pytest.mark.timeout(seconds * slowness()), append=False)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail a test that lowers the priority of this process and thereby that of all later tests, which cannot be undone.

    Fail a test without the mark `process` that starts a Python, where `make test-fast` leaves out that mark.
    """
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    if os.getpriority(os.PRIO_PROCESS, 0) != nice:
        pytest.fail("it lowers the priority of the process of the tests: start another process for it", pytrace=False)
    if _python_starts and _leaves_out_processes(item.config):
        pytest.fail(f"it starts a process, and is not marked `process`: {_python_starts[0]}", pytrace=False)


def pytest_terminal_summary(terminalreporter):
    """Print the reasons for which tests were skipped, with the number of tests for each."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())
    )
    if reasons:
        terminalreporter.section("not run")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:4} {'tests' if count > 1 else 'test '}: {reason}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark tests by the fixtures that they take; limit the examples of properties in `make test-fast`."""
    quick = _leaves_out_processes(config)
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if PROCESS_FIXTURES & fixtures:
            item.add_marker(pytest.mark.process)
        if (_BROKER_FIXTURES | _REDIS_FIXTURES | _S3_FIXTURES) & fixtures:
            item.add_marker(pytest.mark.services)
        if _BROKER_FIXTURES & fixtures and not item.get_closest_marker("any_broker"):
            item.add_marker(pytest.mark.kafka)
        if "browser" in fixtures:
            item.add_marker(pytest.mark.browser)
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
        if quick:
            _limit_examples(item)


def _limit_examples(item):
    """Limit the examples of a property, or of a state machine, that asks for more than `_QUICK_EXAMPLES`."""
    test = getattr(item, "obj", None)
    owners = ((getattr(test, "__func__", test), _HYPOTHESIS_SETTINGS), (getattr(item, "cls", None), "settings"))
    for owner, name in owners:
        asked = getattr(owner, name, None)
        if isinstance(asked, settings) and asked.max_examples > _QUICK_EXAMPLES:
            setattr(owner, name, settings(asked, max_examples=_QUICK_EXAMPLES))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Leave modules and items out of the collections during tests: each would take a third of a second."""
    _let_logs_of_torch_propagate()
    gc.freeze()
    gc.set_threshold(_GARBAGE)
    gc.enable()


def _let_logs_of_torch_propagate():
    """Let loggers of torch pass their lines to the one named `torch`, which prints them.

    To each logger that does not, pytest adds two handlers and removes them, thrice a test. Torch has 80, and one of
    them makes it write a trace of all that it compiles or exports once it has a handler.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.propagate = True


@pytest.fixture(autouse=True)
def _restored_logging():
    """Remove the handlers that a command of the test's has added: they write to what pytest closes after it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def pytest_ignore_collect(collection_path, config):
    """With `-m gpu`, collect only modules with such tests: others may import packages that a GPU machine lacks."""
    if config.option.markexpr.strip() != "gpu" or not collection_path.name.startswith("test_"):
        return None
    text = collection_path.read_text(encoding="utf-8") if collection_path.is_file() else "mark.gpu"
    return None if "mark.gpu" in text or "cuda: torch.device" in text else True


def _has_cuda():
    import torch

    return torch.cuda.is_available()
