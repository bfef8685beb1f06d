"""The deadline of an exchange against peers that always send in time."""

import socket
import threading

import pytest

from anabranch.core.socket_deadline import SocketDeadline


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_peer_that_always_sends_in_time_is_cut_off_at_the_deadline(pair):
    ours, theirs = pair
    deadline = SocketDeadline()
    deadline.watch(ours)
    ended = threading.Event()

    def drip():
        while not ended.wait(0.005):
            try:
                theirs.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            except OSError:
                return

    thread = threading.Thread(target=drip)
    thread.start()
    try:
        with deadline.ends_within(0.05):
            while ours.recv(65536):
                pass
    finally:
        ended.set()
        thread.join()
    assert deadline.expired
    deadline.close()


def test_an_exchange_that_ends_in_time_leaves_the_connection_as_it_is(pair):
    ours, theirs = pair
    deadline = SocketDeadline()
    deadline.watch(ours)
    with deadline.ends_within(60):
        theirs.send(b"x")
        assert ours.recv(1) == b"x"
    assert not deadline.expired
    deadline.close()
    theirs.send(b"y")
    assert ours.recv(1) == b"y"


def test_a_connection_that_is_opened_after_the_deadline_ends_at_once(pair):
    ours, _ = pair
    deadline = SocketDeadline()
    with deadline.ends_within(0):
        while not deadline.expired:
            pass
        deadline.watch(ours)
        assert ours.recv(1) == b""
    deadline.close()
