"""Ring of connections between ranks, whose end says on any machine that a process has ended.

A folder that all ranks share says less: not every job has one, and a lock in it speaks of processes of one
machine alone. Rank r holds a connection to rank r + 1. The kernel closes it with the process, whatever has
ended that, and its probes end it where the machine is gone. A process that is frozen or busy keeps it. What a
rank has learnt it tells rank r - 1, which tells the one before: the word reaches all that live.

Both ends say the job's name first. Whoever else connects, as those do who look for open ports, and whoever
else has the port by now, is no rank: such a connection means nothing when it ends.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds of silence, seconds between probes, and probes: a machine that is gone is missed after 25 s."""
_REACHED_WITHIN_S = 5.0
_TRIES = 9
"""In about five seconds, since the first follow each other quickly."""
_LEAVES = b"leaves"
_CALLERS = 8
"""Connections that have not said yet whose they are; of more, the oldest is closed."""
_LONGEST = 256
"""Bytes of what a caller says, at most."""


class Ring:
    """Connections of one rank, to the next and from the one before.

    Args:
        store: of the job.
        job: name of the job.
        rank, ranks: this one, and how many there are.
        host, pid: where it runs, for the words of others.
    """

    def __init__(self, store: Any, job: str, rank: int, ranks: int, host: str, pid: int) -> None:
        self._next = (rank + 1) % ranks
        self._key = f"mindspeed_dsa/ring/{job}"
        self._greeting = f"{job} from {rank}\n".encode()
        self._awaited = f"{job} from {(rank - 1) % ranks}\n".encode()
        self._welcome = f"{job} welcomes its rank".encode()
        self._door = _open_door()
        self._callers: dict[socket.socket, bytes] = {}
        self._before: socket.socket | None = None
        self._behind: socket.socket | None = None
        self._is_met = False
        self._heard = b""
        self._about = ""
        self._told: dict[str, str] = {}
        self._host, self._store, self._tries = host, store, _TRIES
        where = {"host": host, "boot": boot(), "pid": pid, "address": _address_towards(store)}
        where["port"] = self._door.getsockname()[1]
        store.set(f"{self._key}/{rank}", json.dumps(where))

    def connect(self) -> None:
        """Connect to the next rank, once it has made its first group.

        Raises:
            OSError: it cannot be reached from here, the last time that this is tried.
        """
        key = f"{self._key}/{self._next}"
        # Waiting would keep the store from the main thread.
        if self._store is None or self._behind is not None or not self._store.check([key]):
            return
        where = json.loads(self._store.get(key))
        is_here = (where["host"], where["boot"]) == (self._host, boot())
        address = "127.0.0.1" if is_here else where["address"]
        self._tries -= 1  # an earlier session of its process may have left that address
        if not self._tries:
            self._store = None
        try:
            behind = socket.create_connection((address, where["port"]), timeout=_REACHED_WITHIN_S)
        except OSError:
            if self._tries:
                return
            raise
        self._behind, self._heard = behind, b""
        self._about = f"process {where['pid']} on {where['host']}"
        behind.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if hasattr(socket, name):
                behind.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        behind.setblocking(False)
        with contextlib.suppress(OSError):  # it has ended already, which is read
            behind.sendall(self._greeting)

    def waited_for(self) -> list[Any]:
        """Return what a ``select`` is to wait for."""
        return [each for each in (self._door, self._behind, *self._callers) if each is not None]

    def listen(self, ready: Iterable[Any]) -> dict[str, str]:
        """Return what became of ranks that ended unasked, in words, by rank, as far as it is news."""
        for caller in [each for each in self._callers if each in ready]:
            self._hear_caller(caller)
        if self._door in ready:
            self._let_in()
        if self._behind is None or self._behind not in ready:
            return {}
        try:
            data = self._behind.recv(65536)
        except BlockingIOError:
            return {}
        except OSError:
            data = b""
        if not data or (not self._is_met and len(self._heard) > _LONGEST):
            self._behind.close()
            self._behind = None
            # One that was never welcome belongs to another process, or the rank was about to leave.
            if not self._is_met or self._heard.endswith(_LEAVES + b"\n"):
                return {}
            return {str(self._next): f"{self._about} has ended, or cannot be reached any more"}
        self._heard += data
        *lines, rest = self._heard.split(b"\n")
        news: dict[str, str] = {}
        for line in lines:
            if line == self._welcome:
                self._is_met, self._store = True, None
            elif self._is_met and line not in (b"", _LEAVES):
                news.update(json.loads(line))
        self._heard = _LEAVES + b"\n" if lines and lines[-1] == _LEAVES else rest
        return news

    def _let_in(self) -> None:
        with contextlib.suppress(OSError):  # who was there has gone
            caller = self._door.accept()[0]
            caller.setblocking(False)
            self._callers[caller] = b""
        if len(self._callers) > _CALLERS:
            self._turn_away(next(iter(self._callers)))

    def _hear_caller(self, caller: socket.socket) -> None:
        """Welcome the rank before, and turn away whoever is another, or has ended."""
        try:
            data = caller.recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        said = self._callers[caller] + data
        if data and len(said) < len(self._awaited) and self._awaited.startswith(said):
            self._callers[caller] = said
        elif said == self._awaited and self._before is None:
            del self._callers[caller]
            self._before = caller
            with contextlib.suppress(OSError):
                caller.sendall(self._welcome + b"\n")
            self._tell()
        else:
            self._turn_away(caller)

    def _turn_away(self, caller: socket.socket) -> None:
        del self._callers[caller]
        caller.close()

    def tell(self, lost: Mapping[str, str]) -> None:
        """Tell the rank before, and through it all others."""
        self._told = dict(lost)
        self._tell()

    def _tell(self) -> None:
        if self._told and self._before is not None:
            with contextlib.suppress(OSError):  # it is gone itself
                self._before.sendall(json.dumps(self._told).encode() + b"\n")

    def leave(self) -> None:
        """Close the connections: this rank leaves of its own accord."""
        if self._before is not None:
            with contextlib.suppress(OSError):
                self._before.sendall(_LEAVES + b"\n")
        self.close()

    def close(self) -> None:
        """Close the connections without a word, as in a forked child, whose parent goes on."""
        for each in (self._door, self._before, self._behind, *self._callers):
            if each is not None:
                each.close()
        self._before = self._behind = None
        self._callers.clear()


def boot() -> str:
    """Return what tells this machine from others of its name, such as ``localhost``; nothing but on Linux."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
    return ""


def _open_door() -> socket.socket:
    """Return a socket that listens on all addresses of this machine, IPv6 among them where it has that."""
    with contextlib.suppress(OSError):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0), family=socket.AF_INET)


def _address_towards(store: Any) -> str:
    """Return an address of this machine that others reach: the one on the way to who serves the store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    with contextlib.suppress(OSError):
        host = getattr(store, "host", "localhost")
        for family, kind, *_, where in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(where)  # sends nothing
                address = str(probe.getsockname()[0])
                found = ipaddress.ip_address(address.partition("%")[0])
                if not (found.is_loopback or found.is_link_local):
                    return address
    return socket.gethostname()
