"""Hosts as network namespaces of Linux, each with an address, on one bridge. Needs root and the program `ip`."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forkserver import enter_network
from tests.support.processes import skip_or_fail

_PROGRAM = "ip"


class NetworkOfHosts:
    """Hosts 0, 1 and so on; those that are cut off neither send nor receive, without an error."""

    def __init__(self, stack, hosts):
        self._prefix = f"ab{os.getpid()}"
        self.addresses = [f"10.77.0.{host + 1}" for host in range(hosts)]
        self._switch = f"{self._prefix}-switch"
        for name in (self._switch, *map(self._name, range(hosts))):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for host, address in enumerate(self.addresses):
            own = self._name(host)
            _ip("-n", own, "link", "add", "eth0", "type", "veth", "peer", "name", f"port{host}", "netns", self._switch)
            _ip("-n", own, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", own, "link", "set", "eth0", "up")
            _ip("-n", self._switch, "link", "set", f"port{host}", "master", "bridge")
            self.restore(host)

    def cut_off(self, host):
        """Take the cable of a host off the bridge."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "down")

    def restore(self, host):
        """Undo `cut_off`."""
        _ip("-n", self._switch, "link", "set", f"port{host}", "up")

    @contextlib.contextmanager
    def inside(self, host):
        """Be on a host: for sockets, threads and processes that this thread makes in the block."""
        with Path("/proc/thread-self/ns/net").open() as before:
            with Path(f"/var/run/netns/{self._name(host)}").open() as there:
                enter_network(there.fileno())
            try:
                yield
            finally:
                enter_network(before.fileno())

    def _name(self, host):
        return f"{self._prefix}-{host}"


def network_of_hosts(stack, hosts):
    """Return so many hosts; skip the test for users other than root, and elsewhere as `skip_or_fail`."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("network namespaces need Linux and root; .ci/run runs this test by sudo too")
    try:
        return NetworkOfHosts(stack, hosts)
    except (OSError, subprocess.CalledProcessError) as exc:
        said = exc.stderr.strip() if isinstance(exc, subprocess.CalledProcessError) else exc
        skip_or_fail(f"root cannot make network namespaces here; they need CAP_SYS_ADMIN and the program ip: {said}")


def _ip(*arguments):
    subprocess.run([_PROGRAM, *arguments], check=True, capture_output=True, text=True)
