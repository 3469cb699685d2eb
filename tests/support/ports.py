"""Ports for programs that get their port as an argument."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000


def free_port() -> int:
    """Return an unused port that the system does not assign to other connections."""
    # Until the program listens, other tests may make hundreds of connections, and the system may assign a
    # port again. Ports below its range are never assigned.
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
