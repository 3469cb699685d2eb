"""Ports for programs that are told where to listen."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000


def free_port() -> int:
    """Return a port that nobody listens on, and that the system gives to no connection meanwhile.

    Until the program listens, hundreds of connections of other tests may be made: a port that the system has
    just given out may be given out again. Those below the range that it takes them from are nobody's.
    """
    try:
        first_of_system = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError):
        first_of_system = 32_768  # Linux's own choice
    draw = random.SystemRandom()  # tests seed the other one
    for _ in range(100 if first_of_system > 2 * _LOWEST else 0):
        port = draw.randrange(_LOWEST, first_of_system)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
