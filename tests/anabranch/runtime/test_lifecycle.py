"""What every daemon does when it starts, signals as an event, and its log lines."""

import logging
import resource
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from anabranch.core.errors import SettingsError
from anabranch.core.logs import _PrintableFormatter, configure_logging
from anabranch.runtime.daemon import set_allocator
from anabranch.runtime.lifecycle import Exit, raise_descriptor_limit, run, stop_on_signals
from tests.support.waiting import PATIENCE_SECONDS


@pytest.fixture
def limits():
    """The limits of file descriptors, which are restored."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_daemon_takes_the_descriptors_that_the_system_allows_it(limits):
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    raise_descriptor_limit()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == limits[1]
    assert soft == (65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536))


@pytest.fixture
def caught():
    """The signals that reach the handlers which were there before."""
    numbers: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    for number in before:
        signal.signal(number, lambda number, _: numbers.append(number))
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_sets_the_event_and_the_second_is_not_caught(caught, number):
    with stop_on_signals() as stop:
        assert not stop.is_set()
        signal.raise_signal(number)
        assert stop.wait(PATIENCE_SECONDS)
        assert caught == []
        signal.raise_signal(signal.SIGTERM)
        assert caught == [signal.SIGTERM]


def test_a_handler_takes_no_lock_that_the_main_thread_may_hold(caught, monkeypatch):
    setters = []
    with stop_on_signals() as stop:
        actually = stop.set

        def recorded_set():
            setters.append(threading.current_thread())
            actually()

        monkeypatch.setattr(stop, "set", recorded_set)
        signal.raise_signal(signal.SIGTERM)
        assert stop.wait(PATIENCE_SECONDS)
    assert [setter is threading.main_thread() for setter in setters] == [False]


def test_a_signal_that_is_ignored_stays_ignored(caught):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not stop.is_set()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_nothing_is_left_of_it(caught):
    process = psutil.Process()
    threads, files = threading.active_count(), process.num_fds()
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as stop:
        pass
    assert not stop.is_set()
    assert (threading.active_count(), process.num_fds()) == (threads, files)
    assert signal.getsignal(signal.SIGTERM) is before


def test_errors_and_log_lines_give_no_orders_to_the_terminal(capsys):
    handlers, level = logging.root.handlers[:], logging.root.level

    def main():
        configure_logging()
        logging.getLogger("anabranch").warning("a version is refused: %s", "\x1b]0;owned\x07")
        raise SettingsError("it is of \x1b[2J")

    try:
        assert run(main) is Exit.SETTINGS
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    shown = capsys.readouterr().err
    assert not set(shown) & {"\x1b", "\x07"}
    assert "refused: \N{REPLACEMENT CHARACTER}]0;owned" in shown
    assert "it is of \N{REPLACEMENT CHARACTER}[2J" in shown


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_that_is_configured_stays_as_it_is(name):
    environment = {name: "max_split_size_mb:128"}
    set_allocator(environment)
    assert environment == {name: "max_split_size_mb:128"}


@pytest.mark.process
def test_the_allocator_is_configured_before_torch_is_imported():
    code = (
        "import os, sys; from anabranch.runtime import daemon; usual = daemon.set_allocator;"
        "daemon.set_allocator = lambda it: (usual(it), print(it.get('PYTORCH_ALLOC_CONF'), 'torch' in sys.modules));"
        "daemon.enter('test', '', None, ['-c', 'none.toml'])"
    )
    environment = {"PATH": "", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "expandable_segments:True False\n", done.stderr


def test_a_text_with_line_breaks_makes_no_line_that_passes_for_another_message():
    forged = "a\n2026-01-01 00:00:00,000 INFO learner.run all is well\r\x1b[2J"
    record = logging.LogRecord("ingest", logging.WARNING, "", 0, "the file %s is missing", (forged,), None)
    first, second = _PrintableFormatter("%(levelname)s %(name)s %(message)s").format(record).split("\n")
    assert first == "WARNING ingest the file a"
    assert second.startswith("    2026-01-01 00:00:00,000 INFO")
    assert "\x1b" not in second
