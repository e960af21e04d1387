"""Ports for the servers that tests start: free now, and nobody else's until they are used.

A port that the system hands out for port 0 may be given to any other connection between the probe
and the server's start. So these lie below the range from which the system chooses
(``net.ipv4.ip_local_port_range`` begins at 32,768), each process of pytest-xdist draws from ports
of its own, and a process gives none out again before it has given out all.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack

FIRST = 10_000
LAST = 19_999
BUS_OFFSET = 10_000
"""Distance from a Redis Cluster node's port to its bus port, which is probed as well."""
ROWS_FIRST = 30_000
ROWS_LAST = 32_767
"""Last port for rows of several ports, above all bus ports."""
ROW = 20
"""Ports in a row: the front door of a node and its 16 shards."""


def _candidates(places: range) -> Iterator[int]:
    """Yield the ports of this process, over and over."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    size = len(places) // count
    own = list(places[number % count * size :][:size])  # in a row: some want the next one as well
    random.Random().shuffle(own)  # not by the tests' seed, because concurrent runs draw as well
    while True:
        yield from own


_PORTS = _candidates(range(FIRST, LAST + 1))
_ROWS = _candidates(range(ROWS_FIRST, ROWS_LAST + 2 - ROW, ROW))


def free_port() -> int:
    """Return a free port of 127.0.0.1 whose bus port is free as well."""
    while True:
        port = next(_PORTS)
        with socket.socket() as probe, socket.socket() as bus:
            try:
                probe.bind(("127.0.0.1", port))
                bus.bind(("127.0.0.1", port + BUS_OFFSET))
            except OSError:
                continue
            return port


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    assert count <= ROW, f"a row has {ROW} ports"
    while True:
        first = next(_ROWS)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
